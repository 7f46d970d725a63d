"""What is particular to the transport over UCX: its networks, strangers at its door, and what it asks of ucxx."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.errors import GroupError, HandshakeError, UsageError
from syncline.testing.network import Ends, numbers
from syncline.transports import MemoryStore, Place
from syncline.transports import ucx as transport

pytest.importorskip("libucx")  # ucxx itself would change the environment

LIMIT_S = 30.0
SIZES = (10, 5_000, 60_000, 3_000_001)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def ends(store: MemoryStore, secrets: tuple[bytes, ...], timeout_s: float = 20.0) -> list[transport.Ucx]:
    places = [
        Place(rank, len(secrets), store, secret=secret, timeout_s=timeout_s) for rank, secret in enumerate(secrets)
    ]
    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(transport.Ucx, places))


@pytest.fixture
def pair(store: MemoryStore) -> Iterator[list[transport.Ucx]]:
    both = ends(store, (b"a secret", b"a secret"))
    yield both
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(transport.Ucx.close, both))


def exchange(both: list[transport.Ucx]) -> None:
    """Messages of all sizes both ways, unharmed."""
    net = Ends(both)
    for size in SIZES:
        into = [np.zeros(size, np.uint8) for _ in both]
        received = [both[rank].recv(1 - rank, size, into[rank]) for rank in (0, 1)]
        sent = [both[rank].send(1 - rank, size, numbers(size, rank)) for rank in (0, 1)]
        net.wait(*received, *sent)
        for rank in (0, 1):
            assert np.array_equal(into[rank], numbers(size, 1 - rank))


def stranger_of(store: MemoryStore) -> tuple[Any, Any]:
    """Another process's worker of UCX, and its endpoint to rank 0, whose address it has learnt."""
    library = transport.load()
    stranger, told = transport._opened(library), store.get("transport/0")
    assert told is not None
    address = library.lib.UCXAddress.create_from_buffer(told.partition(b" ")[2])
    return stranger, stranger.worker.create_endpoint_from_worker_address(address, False)


def test_a_stranger_who_knows_the_address_reaches_no_receive(store: MemoryStore, pair: list[transport.Ucx]) -> None:
    """It sends what a frame and a body look like under every tag that ranks use, with keys of a secret it guesses."""
    pending = pair[0].recv(1, 5, np.zeros(SIZES[1], np.uint8))
    library, (stranger, endpoint) = transport.load(), stranger_of(store)
    guessed = Place(1, 2, secret=b"another secret")
    frames = [np.frombuffer(bytes([kind]) + bytes(23), np.uint8) for kind in range(1, 8)]
    assert transport._key(guessed, 0) != pair[0]._keys[0]
    for key in (0, transport._key(guessed, 0)):
        for slot in (0, 1, transport._HELLO, transport._BYE):
            requests = [endpoint.tag_send(library.Array(frame), library.Tag(key | 1 << 16 | slot)) for frame in frames]
            while not all(request.completed for request in requests):
                stranger.worker.progress()
                pair[0].poll(0.0)
    exchange(pair)
    assert not pending.done
    assert not pair[0]._answered
    del requests, endpoint, stranger


def resident_bytes() -> int:
    """Of this process, what lies in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("nbytes", "messages"), [(0, 2_000), (6_000, 20_000), (2_000_000, 500)], ids=["empty", "eager", "rendezvous"]
)
def test_strangers_cannot_fill_memory(
    store: MemoryStore, pair: list[transport.Ucx], nbytes: int, messages: int
) -> None:
    """Of keys that are near to the right one in every bit; and the run loses none of its messages meanwhile."""
    library, (stranger, endpoint) = transport.load(), stranger_of(store)
    message, key = library.Array(np.ones(nbytes, np.uint8)), pair[0]._keys[0]
    early = pair[1].send(0, 7, numbers(5_000_000))  # it lies there, untaken, all the while
    most, before = 0, resident_bytes()
    requests: list[object] = []
    while len(requests) < messages:
        for bit in range(transport._key_at(2), 64):
            tag = library.Tag(key ^ 1 << bit | 1 << 16 | bit % 2)
            requests.append(endpoint.tag_send(message, tag))
        while stranger.worker.progress_once():
            pass
        for end in pair:
            end.poll(0.0)
        most = max(most, resident_bytes() - before)
    exchange(pair)
    into = np.zeros(5_000_000, np.uint8)
    Ends(pair).wait(early, pair[0].recv(1, 7, into))
    assert np.array_equal(into, numbers(5_000_000))
    assert most < 60_000_000
    deadline = time.monotonic() + LIMIT_S
    while pair[0]._library.worker.tag_probe(library.Tag(0), library.TagMask(0)).matched:
        assert time.monotonic() < deadline, "what strangers have sent is kept"
        pair[0].poll(0.0)
    del requests, endpoint, stranger


@pytest.mark.parametrize("world", [2, 3, 1000, 65_536])
def test_a_tag_is_the_keys_wherever_it_is_not_a_ranks_or_a_slots(world: int) -> None:
    """And the highest rank and slot leave the key as it is."""
    found = [transport._key(Place(0, world, secret=bytes([secret])), 0) for secret in range(200)]
    lowest = transport._key_at(world)
    assert (world - 1) << 16 | transport._BYE < 1 << lowest <= world << 17
    ones = sum(key >> bit & 1 for key in found for bit in range(lowest, 64))
    assert 0.45 < ones / 200 / (64 - lowest) < 0.55
    assert not any(key & (1 << lowest) - 1 for key in found)


def test_strangers_that_could_guess_the_key_are_logged_and_end_the_run(
    store: MemoryStore, pair: list[transport.Ucx], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "_MOST_STRANGE", 500)
    library, (stranger, endpoint) = transport.load(), stranger_of(store)
    message, wrong = library.Array(np.ones(10, np.uint8)), pair[0]._keys[0] ^ 1 << 63
    requests = [endpoint.tag_send(message, library.Tag(wrong | 1 << 16 | slot)) for slot in range(499)]
    deadline = time.monotonic() + LIMIT_S
    while pair[0]._strange < 499:
        assert time.monotonic() < deadline
        stranger.worker.progress()
        pair[0].poll(0.0)
    exchange(pair)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 discards messages that strangers to the run send to its UCX address"
    ]
    requests.append(endpoint.tag_send(message, library.Tag(wrong)))
    said = ""
    while not said and time.monotonic() < deadline:
        stranger.worker.progress()
        try:
            pair[0].poll(0.0)
        except HandshakeError as error:
            said = str(error)
    assert said.startswith("strangers to the run have sent 500 messages to the UCX address of rank 0")
    del requests, endpoint, stranger


def doors() -> list[tuple[str, int]]:
    """Where this process listens for TCP."""
    mine = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in found]


def test_garbage_at_the_door_harms_nobody(pair: list[transport.Ucx]) -> None:
    places = doors()
    assert places
    for place in places:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), numbers(100_000).tobytes()):
            with socket.create_connection(place, 5.0) as caller:
                try:
                    caller.sendall(garbage)
                except OSError:
                    continue  # it has hung up already
                for end in pair:
                    end.poll(0.0)
    exchange(pair)


def test_ranks_with_different_secrets_do_not_meet(store: MemoryStore) -> None:
    with pytest.raises(GroupError, match="does not answer over UCX within 1 s"):
        ends(store, (b"one", b"another"), timeout_s=1.0)


def test_an_address_that_is_none_names_its_rank_and_both_versions(store: MemoryStore) -> None:
    store.set("transport/1", b"9.9.9 " + bytes(40))
    with pytest.raises(GroupError, match=r"UCX \S+ here cannot reach rank 1 \(UCX 9\.9\.9\)"):
        transport.Ucx(Place(0, 2, store, timeout_s=5.0))


@pytest.mark.parametrize(
    ("tls", "says"), [("tcp,self", ""), ("nothing_of_the_sort", "UCX_TLS=nothing_of_the_sort")], ids=["tcp", "none"]
)
def test_the_user_chooses_the_networks(tls: str, says: str) -> None:
    """In a process of its own: UCX reads its variables once."""
    script = (
        "import json, test_ucx_end as here\n"
        "from syncline.errors import UsageError\n"
        "from syncline.transports import MemoryStore\n"
        "try:\n"
        "    both = here.ends(MemoryStore(), (b'', b''))\n"
        "except UsageError as error:\n"
        "    print(json.dumps(str(error)))\n"
        "else:\n"
        "    here.exchange(both)\n"
        "    used = both[0]._library.context.info\n"
        "    with here.ThreadPoolExecutor(2) as threads: list(threads.map(here.transport.Ucx.close, both))\n"
        "    print(json.dumps([word for word in ('sysv/', 'posix/', 'cma/', 'tcp/lo') if f'-- {word}' in used]))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"UCX_TLS": tls, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # and UCX has printed nothing
    if says:
        assert says in found
        assert "pip install 'syncline[ucx]'" in found
    else:
        assert found == ["tcp/lo"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda patch: patch.setattr(sys, "version_info", (3, 10, 12)), "needs Python 3.11 or newer, but this is 3.10"),
        (lambda patch: patch.setitem(sys.modules, "ucxx", None), "needs ucxx with UCX"),
        (
            lambda patch: patch.setattr("ucxx.__version__", "0.40.00"),
            "needs ucxx 0.52 or newer, but 0.40.00 is installed",
        ),
    ],
    ids=["python", "missing", "old"],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, change: object, says: str) -> None:
    assert callable(change)
    change(monkeypatch)
    with pytest.raises(UsageError, match=says):
        transport.load()


def test_another_ucx_in_the_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the one that Open MPI brings: the second finds the first one's symbols."""

    def load_library() -> None:
        raise OSError("libuct.so: undefined symbol: ucs_ifname_to_ndev_index")

    monkeypatch.delitem(sys.modules, "ucxx", raising=False)
    monkeypatch.setattr("libucx.load_library", load_library)
    monkeypatch.setattr("libucxx.load_library", load_library)
    with pytest.raises(UsageError, match=r"beside another one \(libuct.so: undefined .* set MASTER_ADDR"):
        transport.load()


def test_the_environment_stays_the_users() -> None:
    """Neither what ucxx sets for GPUs nor what keeps UCX quiet is left there."""
    script = (
        "import os\n"
        "from syncline.transports import ucx\n"
        "ucx._opened(ucx.load())\n"
        "print(sorted(name for name in os.environ if name.startswith('UCX')))\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_ends_that_are_made_at_once_leave_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread finds what keeps UCX quiet, and none takes back what another one has set."""
    for name in [name for name in os.environ if name.startswith("UCX")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)

    def load(thread: int) -> set[str | None]:
        found = set()
        for turn in range(100):
            with transport._quietly():
                os.environ["UCX_MEMTYPE_CACHE"] = f"{thread} {turn}"  # as ucxx does
                os.sched_yield()
                found |= {os.environ.get("UCX_LOG_LEVEL"), os.environ["UCX_MEMTYPE_CACHE"].partition(" ")[0]}
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(load, range(4))) == [{"fatal", str(thread)} for thread in range(4)]
    assert dict(os.environ) == before
