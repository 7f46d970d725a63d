"""``syncline bench`` treats its peers as a plain script of their own library does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from syncline import registry
from syncline_bench.collectives.collective_bench import RANK
from syncline_bench.collectives.request import Work
from syncline_bench.ranks import Ranks

pytest.importorskip("torch")
CONTENDERS = ("gloo:native", "openmpi:native", "mpich:native", "intelmpi:native")
ROUNDS = 12


@pytest.mark.deep
@pytest.mark.parametrize("contender", CONTENDERS)
def test_a_peer_is_as_fast_as_a_plain_script_of_its_library_and_has_as_many_threads(
    contender: str, program: Callable[[str], ModuleType]
) -> None:
    """In one of some rounds at least, by the fastest repetitions: other work makes either slow, a handicap always one.

    Two ranks of 1 KB are what shared processes, a second group or threads that look for work cost most.
    """
    peers = program("peers")
    assert set(peers.SCRIPTS) == set(CONTENDERS)
    assert "syncline" not in peers.SCRIPTS[contender]
    if isinstance(place := peers.place_of(contender), str):
        pytest.skip(place)
    with Ranks(Work("allreduce", contender, 1000).to_json(), 2, place, RANK) as peer:
        threads: list[int] = []
        peer.order(lambda message: threads.append(message["threads"]), nbytes=1000, seeds=[0])
        ratios = []
        for one in islice(peers.rounds(peer, place, contender, 2, 1000), ROUNDS):
            assert threads == [one.threads]
            ratios.append(min(one.bench_s) / min(one.plain_s))
            if ratios[-1] <= peers.MOST:
                break
        peer.end()
    assert min(ratios) <= peers.MOST, ratios


def test_the_peers_have_one_group_and_the_threads_of_their_script_or_of_a_setting() -> None:
    """The code of a peer makes no other group or communicator, and sets no thread level or number of threads.

    Variables of a setting can: Gloo's numbers of threads do, and one way of MPICH that needs a single thread.
    """
    folder = Path(__file__).resolve().parents[2] / "src/syncline_bench"
    files = [*(folder / "peers").glob("*.py"), *(folder / "collectives").glob("*.py")]
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        for word in ("new_group(", ".Dup()", "thread_level =", "set_num_threads("):
            assert word not in text, (path.name, word)
    found = {
        (entry.name, setting): {
            word: value for word, value in variables.items() if "THREAD" in word and "YIELD" not in word
        }
        for entry in registry.entries("peers")
        for library, settings in entry.capabilities.get("settings", {}).items()
        if entry.name.partition(":")[0] in (library, "gloo")
        for setting, variables in settings.items()
    }
    assert {name: words for name, words in found.items() if words} == {
        ("gloo:native", "threads=1"): {"OMP_NUM_THREADS": "1"},
        ("gloo:native", "threads=2"): {"OMP_NUM_THREADS": "2"},
        ("mpich:native", "release_gather"): {"MPI4PY_RC_THREAD_LEVEL": "single"},
    }


STAND_IN = """\
#!/bin/sh
# Makes an environment, and installs what pip is asked for there unless a file "offline" is there. $4 is its folder.
bin=$4/bin
[ "$2" = venv ] && { mkdir -p "$bin" && cp "$0" "$bin/python" && echo "#!$PWD/$bin/python" >"$bin/program"; exit; }
[ ! -e offline ] && for last; do :; done && touch "$bin/$last"
"""


def test_environments_of_peers_are_kept_until_the_next_one_is_complete(tmp_path: Path) -> None:
    """And a change of pyproject.toml, from which only .venv is made, makes none anew."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(Path(__file__).resolve().parents[2] / name, tmp_path)
    interpreter, own = tmp_path / ".venv/bin/python", tmp_path / ".peers/mpich"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(STAND_IN)
    interpreter.chmod(0o755)

    def made() -> int:
        command = ["make", ".peers/mpich/.installed"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=20, check=False).returncode

    (stamp := tmp_path / ".venv/.installed").touch()
    assert made() == 0
    assert {path.name for path in own.iterdir()} == {"bin", ".installed"}
    assert {path.name for path in (own / "bin").iterdir()} == {"python", "program", "mpich"}
    assert (own / "bin/program").read_text() == f"#!{own}/bin/python\n"
    (tmp_path / "offline").touch()
    later = (own / ".installed").stat().st_mtime + 5
    os.utime(stamp, (later, later))
    assert made() == 0  # nothing was to be done
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert made() != 0  # no package can be had
    assert {path.name for path in own.iterdir()} == {"bin", ".installed"}
    (tmp_path / "offline").unlink()
    (own / "bin/impi").touch()
    assert made() == 0
    assert not (own / "bin/impi").exists()
    assert [path.name for path in own.parent.iterdir()] == ["mpich"]
