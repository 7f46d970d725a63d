"""Calls of a process group that are under way together, in any order and number, and those that do not match or end.

Messages of a process group that are not what they should be, and ranks that leave instead of sending one.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import LIMIT, WORLD, of, options
from torch.distributed.distributed_c10d import AllgatherOptions

from syncline.errors import MismatchError, PeerError, PeerTimeout, ProtocolError, UsageError
from syncline.session.session import Session
from syncline.torch_backend.group import SynclineGroup


def test_messages_are_matched_by_tag_and_from_any_rank(groups: Any) -> None:
    """Sent in one order, received in another; then from whoever sends."""

    def body(mine: SynclineGroup) -> Any:
        if mine.rank() > 0:
            works = [mine.send([torch.full((size,), mine.rank())], 0, tag) for tag, size in enumerate((4, 50_000, 6))]
            for work in works:
                work.wait()
            return None
        found = []
        for rank, tag, size in ((2, 1, 50_000), (1, 2, 6), (1, 0, 4), (2, 0, 4)):
            tensor = torch.zeros(size, dtype=torch.int64)
            mine.recv([tensor], rank, tag).wait()
            found.append((tensor == rank).all().item())
        sources = []
        for tag, size in ((2, 6), (1, 50_000)):
            tensor = torch.zeros(size, dtype=torch.int64)
            work = mine.recv_anysource([tensor], tag)
            work.wait()
            sources.append(work._source_rank())
            found.append((tensor == sources[-1]).all().item())
        return found, sources

    assert groups(body)[0] == ([True] * 6, [2, 1])


def test_a_receive_that_is_refused_takes_no_message(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor = torch.full((4,), 7.0)
        if mine.rank() == 0:
            mine.send([tensor], 1).wait()
        elif mine.rank() == 1:
            with pytest.raises(UsageError, match="recv: give a contiguous tensor"):
                mine.recv([torch.zeros(4, 4)[:, 0]], 0)
            tensor = torch.zeros(4)
            mine.recv([tensor], 0).wait()
        return tensor.tolist()

    assert groups(body) == [[7.0] * 4] * WORLD


def test_many_calls_are_under_way_and_futures_call_back(groups: Any) -> None:
    """A callback may itself wait for a collective, as PowerSGD's hook of torch does."""

    def body(mine: SynclineGroup) -> list[float]:
        def again(future: Any) -> torch.Tensor:
            tensor = future.value()[0]
            return mine.allreduce([tensor], options(dist.AllreduceOptions, wait=False)).get_future().wait()[0]

        works = [
            mine.allreduce([torch.full((size,), 1.0)], options(dist.AllreduceOptions, wait=False))
            for size in (3, 5000, 3, 5000)
        ]
        plain = [work.get_future().wait()[0] for work in works]
        twice = mine.allreduce([torch.ones(4)], options(dist.AllreduceOptions, wait=False)).get_future().then(again)
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
        return [float(tensor[0]) for tensor in (*plain, twice.wait())]

    assert groups(body) == [[3.0, 3.0, 3.0, 3.0, 9.0]] * WORLD


def test_a_future_does_not_wait_for_one_that_was_asked_for_before(groups: Any) -> None:
    def body(mine: SynclineGroup) -> list[float]:
        tensor, total = torch.zeros(3), torch.ones(3)
        slow = mine.recv([tensor], 1).get_future() if mine.rank() == 0 else None
        mine.allreduce([total], options(dist.AllreduceOptions, wait=False)).get_future().wait()
        mine.barrier().wait()  # rank 1 sends when rank 0 has the sum
        if mine.rank() == 1:
            mine.send([total], 0).wait()
        if slow is not None:
            slow.wait()
        return tensor.tolist()

    assert groups(body) == [[3.0] * 3, [0.0] * 3, [0.0] * 3]


def test_a_group_ends_though_nothing_comes_that_it_receives(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.engine.driver._FLUSH_S", 1e6)
    together = threading.Barrier(3)  # one that has gone is gone for those that begin to receive from it

    def body(mine: SynclineGroup) -> None:
        for rank in {0, 1, 2} - {mine.rank()}:
            mine.recv([torch.zeros(3)], rank)
        mine.recv_anysource([torch.zeros(3)], 4)
        together.wait(30)
        mine.shutdown()
        together.wait(30)
        mine.us.shutdown()

    groups(body)


def test_a_group_that_is_aborted_waits_for_nothing(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.engine.driver._FLUSH_S", 1e6)

    def body(mine: SynclineGroup) -> None:
        if mine.rank() != 1:
            mine.barrier().wait()
        mine.send([torch.zeros(100_000)], 0)  # nobody receives it
        mine.abort()

    with pytest.raises(PeerError, match="rank 1"):
        groups(body)


@pytest.mark.parametrize("keys", [2, 7])
def test_more_calls_are_made_than_there_are_keys(groups: Any, monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Those of rank 0 before anybody else comes."""
    monkeypatch.setattr("syncline.session.tickets.CALLS_IN_FLIGHT", keys)
    made = threading.Event()

    def body(mine: SynclineGroup) -> list[float]:
        if mine.rank() > 0:
            made.wait(60)
        works, tensors = [], [torch.full((size,), 1.0) for size in (3, 3000) * 20]
        for number, tensor in enumerate(tensors):
            if number == keys // 2:
                made.set()
            works.append(mine.allreduce([tensor], options(dist.AllreduceOptions, wait=False)))
        for work in works:
            work.wait()
        return [float(tensor[-1]) for tensor in tensors]

    assert groups(body) == [[3.0] * 40] * WORLD


def test_a_group_of_some_ranks_is_made_by_them_alone(groups: Any) -> None:
    def body(mine: SynclineGroup) -> Any:
        found = []
        for name, ranks in (("a", [0, 2]), ("b", [1, 2]), ("c", [2])):
            if mine.rank() in ranks:
                some = SynclineGroup(None, mine.us.found(ranks, name), LIMIT)
                tensor = torch.full((3000,), 10.0 ** mine.rank())
                some.allreduce([tensor], options(dist.AllreduceOptions)).wait()
                found.append((some.rank(), some.size(), float(tensor[0])))
        return found

    assert groups(body) == [
        [(0, 2, 101.0)],
        [(0, 2, 110.0)],
        [(1, 2, 101.0), (1, 2, 110.0), (0, 1, 100.0)],
    ]


def scattered(mine: SynclineGroup, *sizes: int) -> Any:
    outputs, inputs = [torch.empty(size) for size in sizes], [torch.ones(WORLD * size) for size in sizes]
    return mine.reduce_scatter_tensor_coalesced(outputs, inputs, options(dist.ReduceScatterOptions))


def gathered(mine: SynclineGroup, *sizes: int) -> Any:
    outputs, inputs = [torch.empty(WORLD * size) for size in sizes], [torch.ones(size) for size in sizes]
    return mine.allgather_into_tensor_coalesced(outputs, inputs, options(AllgatherOptions))


Calls = dict[str, Callable[[SynclineGroup], Any]]
CALLS: Calls = {
    "allreduce": lambda mine: mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions)),
    "larger": lambda mine: mine.allreduce([torch.ones(3000)], options(dist.AllreduceOptions)),
    "double": lambda mine: mine.allreduce([torch.ones(3, dtype=torch.float64)], options(dist.AllreduceOptions)),
    "maximum": lambda mine: mine.allreduce([torch.ones(3)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)),
    "broadcast": lambda mine: mine.broadcast([torch.ones(3000)], options(dist.BroadcastOptions, rootRank=0)),
    "barrier": lambda mine: mine.barrier(),
    "behind": lambda mine: mine.allreduce([torch.ones(3000)], options(dist.AllreduceOptions, wait=False)),
    "3 and 5": lambda mine: mine.allreduce_coalesced([torch.ones(3), torch.ones(5)], options(dist.AllreduceOptions)),
    "5 and 3": lambda mine: mine.allreduce_coalesced([torch.ones(5), torch.ones(3)], options(dist.AllreduceOptions)),
    "parts 3 and 5": lambda mine: scattered(mine, 3, 5),
    "parts 5 and 3": lambda mine: scattered(mine, 5, 3),
    "gathered 3 and 5": lambda mine: gathered(mine, 3, 5),
    "gathered 5 and 3": lambda mine: gathered(mine, 5, 3),
}


@pytest.mark.parametrize(
    ("ours", "theirs", "parts"),
    [
        ("allreduce", "larger", ["3000 elements of float32", "3 elements of float32"]),
        ("allreduce", "double", ["of float64", "of float32"]),
        ("allreduce", "maximum", ["at allreduce"]),
        ("larger", "broadcast", ["at allreduce", "at broadcast"]),
        ("barrier", "behind", ["at barrier", "at allreduce"]),
        ("3 and 5", "5 and 3", ["at allreduce", "8 elements of float32", "types of the tensors one by one"]),
        ("parts 3 and 5", "parts 5 and 3", ["at reduce-scatter", "types of the tensors one by one"]),
        ("gathered 3 and 5", "gathered 5 and 3", ["at all-gather", "types of the tensors one by one"]),
    ],
)
def test_calls_that_do_not_match_are_named_on_all(run_on: Any, ours: str, theirs: str, parts: Sequence[str]) -> None:
    from syncline.launch.connecting import in_process

    said: list[str] = []
    lock = threading.Lock()

    def body(session: Session) -> None:
        mine = of(session)
        try:
            CALLS[theirs if mine.rank() == 1 else ours](mine).wait()
        except MismatchError as error:
            with lock:
                said.append(str(error))
            raise

    with pytest.raises(MismatchError, match="rank"):
        run_on(in_process("direct", WORLD), body)
    assert said
    assert all(part in said[0] for part in parts), said[0]


@pytest.mark.parametrize(("limit_s", "told"), [(0.2, "0.2 s"), (0.004, "0.004 s"), (0.0, "0 s")])
def test_a_late_rank_is_named(groups: Any, limit_s: float, told: str) -> None:
    ready = threading.Event()

    def body(mine: SynclineGroup) -> None:
        if mine.rank() == 1:
            ready.wait(60)
            return
        try:
            mine.monitored_barrier(timedelta(seconds=limit_s))
        finally:
            ready.set()

    # Of ranks 0 and 2 the first may find the other one late too: with so little time, it is.
    with pytest.raises(PeerTimeout, match=rf"barrier: not reached within {told} by (rank 0, )?rank 1"):
        groups(body)


def header(tag: int, nbytes: int, number: int) -> bytes:
    return struct.pack("<qqQ", tag, nbytes, number)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (b"short", "5 bytes instead of a header of 24"),
        (header(0, 8, 1) + b"x", "1 bytes with the header of a message of 8"),
        (header(0, 8, 1) + b"xxxxxxxxx", "9 bytes with the header of a message of 8"),
        (header(0, 80_000, 1) + b"x", "1 bytes with the header of a message of 80000"),
        (header(0, -8, 1), "0 bytes with the header of a message of -8"),
        (header(0, 80_000, 1 << 62), f"message {1 << 62}, but message 1 is due"),
    ],
)
def test_what_no_rank_sends_is_an_error_that_names_who_has_sent_it(group: Any, message: bytes, what: str) -> None:
    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            session.engine.wait(session.engine.send(0, session.topic(0), message, "send"))
        else:
            mine.recv([torch.zeros(8 if b"x" in message else 80_000, dtype=torch.uint8)], 1).wait()

    with pytest.raises(ProtocolError, match=f"receive from rank 1: rank 1.* sends {what}; .* version"):
        group("direct", 2, body)


def test_what_follows_a_header_is_as_much_as_that_says(group: Any) -> None:
    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            engine = session.engine
            engine.send(0, session.topic(0), header(0, 80_000, 1), "send")
            engine.wait(engine.send(0, session.topic((1 << 49) + 1), b"x", "send"))
        else:
            mine.recv([torch.zeros(80_000, dtype=torch.uint8)], 1).wait()

    with pytest.raises(ProtocolError, match=r"rank 1.* sends 1 bytes of a message of 80000"):
        group("direct", 2, body)


@pytest.mark.parametrize(("first", "who"), [("before", "rank 1"), ("after", "(any rank|rank 1)"), ("any", "any rank")])
def test_a_rank_that_has_left_is_named_behind_a_receive_from_any(group: Any, first: str, who: str) -> None:
    """Whether it leaves before or after somebody waits for it alone, when it may be the last of all; or all leave."""
    asked = threading.Event()

    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            asked.wait(60)
            return
        if mine.rank() == 2:
            return
        works = [mine.recv_anysource([torch.zeros(2)])]
        if first == "before":
            works.append(mine.recv([torch.zeros(2)], 1, 7))
            session.engine.wait(session.engine.then("what is asked for before this", []))  # nobody has left till then
        asked.set()
        if first == "after":
            works.append(mine.recv([torch.zeros(2)], 1, 7))
        works[-1].wait()

    with pytest.raises(PeerError, match=rf"receive from {who}: rank [12] .*(gone|left|ended)"):
        group("direct", 3, body)
