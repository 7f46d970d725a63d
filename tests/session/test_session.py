"""A process's place in a run: collectives, tickets, barrier, messages, statistics and the end."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest

from syncline.errors import ClosedError, MismatchError, PeerTimeout, ProtocolError, UsageError
from syncline.launch.connecting import in_process
from syncline.nouns import numpy_dtype
from syncline.session.session import Session
from syncline.session.tickets import BARRIER, BUCKET_KEYS, JOINED, NORM, STEP

STRATEGIES = ["ring", "direct", "tree", "ps(servers=2)", "ps(servers=1, update=worker)", "ps(servers=1, on=workers)"]


def workers_only(body: Any) -> Any:
    """Servers wait for the workers to leave, as they do while serving."""

    def run(session: Session) -> Any:
        if session.is_worker:
            return body(session)
        session.engine.wait_any([], until=session.process.workers_left)
        return "served"

    return run


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_and_servers_know_their_places(group: Any, strategy: str, workers: int) -> None:
    def body(session: Session) -> Any:
        return session.rank, session.world_size, session.is_worker, session.name(session.index)

    results = group(strategy, workers, body)
    servers = len(results) - workers
    assert results[:workers] == [(rank, workers, True, f"rank {rank}") for rank in range(workers)]
    assert results[workers:] == [(workers - 1, workers, False, f"server rank {workers + k}") for k in range(servers)]


@pytest.mark.parametrize(
    ("dtype", "strategy"), [*zip(["float32", "float64", "float16", "bfloat16", "int64", "uint8"], cycle(STRATEGIES))]
)
def test_allreduce_sums_and_averages(group: Any, strategy: str, dtype: str) -> None:
    kind = numpy_dtype(dtype)

    def body(session: Session) -> Any:
        total, mean = np.full(5, session.rank + 1, kind), np.full(5, 2 * session.rank, kind)
        session.allreduce(total, average=False)
        if kind.kind not in "iu":
            session.allreduce(mean)
        return total, mean

    for total, mean in group(strategy, 3, workers_only(body))[:3]:
        assert (total == 6).all()
        assert kind.kind in "iu" or (mean == 2).all()


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_takes_the_roots_values(group: Any, root: int) -> None:
    def body(session: Session) -> Any:
        array = np.full(7, session.rank)
        session.broadcast(array, root)
        return array.tolist()

    assert group("ring", 3, body) == [[root] * 7] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda session: session.broadcast(np.ones(1), 3), "no rank 3 in a world of 3"),
        (lambda session: session.broadcast(np.ones(1), -1), "no rank -1"),
        (lambda session: session.allreduce(np.ones(1, bool)), "cannot sum elements of type bool"),
        (lambda session: session.allreduce(np.ones(1, np.int32)), "use op='sum'"),
    ],
)
def test_mistakes_are_refused_before_anything_travels(group: Any, call: Any, text: str) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=text):
            call(session)
        session.barrier()

    group("ring", 3, body)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gather_of_different_sizes(group: Any, workers: int) -> None:
    texts = [b"", b"x", b"longer text", bytes(100_000)][:workers]
    results = group("ring", workers, lambda session: session.gather(texts[session.rank]))
    assert results == [texts] * workers


def test_gather_of_nothing_at_all(group: Any) -> None:
    assert group("ring", 2, lambda session: session.gather(b"")) == [[b"", b""]] * 2


DIFFERENT = [
    (lambda session: session.barrier(), lambda session: session.allreduce(np.ones(3)), "barrier (call 2)", "allreduce"),
    (
        lambda session: session.gather(b""),
        lambda session: session.broadcast(np.ones(3)),
        "gather (call 2)",
        "broadcast",
    ),
    (lambda session: session.agree(NORM, 1), lambda session: session.agree(NORM, 2), "clip_grad_norm_ (call 2)", ""),
    (
        lambda session: session.allreduce(np.ones(3)),
        lambda session: session.allreduce(np.ones(4)),
        "allreduce (call 2, 3 elements of float64)",
        "allreduce (call 2, 4 elements of float64)",
    ),
    (
        lambda session: session.allreduce(np.ones(3)),
        lambda session: session.allreduce(np.ones(3, np.float32)),
        "allreduce (call 2, 3 elements of float64)",
        "allreduce (call 2, 3 elements of float32)",
    ),
    (
        lambda session: session.broadcast(np.ones(3)),
        lambda session: session.broadcast(np.ones(3), 1),
        "broadcast (call 2, 3 elements of float64)",
        "they differ in the root",
    ),
]


@pytest.mark.parametrize(("usual", "odd", "first", "second"), DIFFERENT)
def test_different_calls_name_both_ranks_and_what_they_call(
    group: Any, usual: Any, odd: Any, first: str, second: str
) -> None:
    seen: list[str] = []

    def body(session: Session) -> None:
        session.barrier()
        try:
            (odd if session.rank == 1 else usual)(session)
        except MismatchError as error:
            seen.append(str(error))
            raise

    with pytest.raises(MismatchError):
        group("ring", 3, body)
    for text in seen:
        assert "rank 1" in text
        assert first in text
        assert second in text
        assert "same calls in the same order" in text


def test_a_step_against_another_call_speaks_of_batches(group: Any) -> None:
    def body(session: Session) -> None:
        session.agree(STEP if session.rank else BARRIER)

    with pytest.raises(MismatchError, match=r"same number of batches\? .*syncline.join"):
        group("ring", 2, body)


def test_steps_and_the_end_of_batches_may_meet_and_carry_their_weights(group: Any) -> None:
    def body(session: Session) -> Any:
        meeting = session.meet(JOINED if session.rank == 1 else STEP, weight=float(session.rank), flags=session.rank)
        assert meeting.work is not None
        session.engine.wait(meeting.work)
        return [(ticket.kind, ticket.weight, ticket.flags) for ticket in meeting.tickets()]

    assert group("ring", 3, body) == [[(STEP, 0.0, 0), (JOINED, 1.0, 1), (STEP, 2.0, 2)]] * 3


def test_a_barrier_holds_everyone_until_the_last_is_there(group: Any) -> None:
    come: list[int] = []

    def body(session: Session) -> int:
        come.append(session.rank)
        session.barrier(timeout=30.0)
        return len(come)

    assert group("ring", 4, body) == [4] * 4


def test_a_barriers_time_limit_names_who_is_missing() -> None:
    """Ranks 1 and 3; rank 2 has come: what it has sent since is here."""
    sessions = in_process("ring", 4)
    sessions[2].meet(BARRIER)
    sessions[2].send(0, b"rank 2 has come", "text")
    sessions[0].engine.wait(sessions[0].recv(2, "text"), timeout=30.0)
    with pytest.raises(PeerTimeout, match=r"barrier: not reached within 0.3 s by .*rank 1, rank 3$") as caught:
        sessions[0].barrier(timeout=0.3)
    assert caught.value.rank == 1
    for session in sessions:
        session.fail(caught.value)
        session.shutdown()


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_several_that_outlast_the_limit_of_progress_are_all_named(timeout: float | None) -> None:
    sessions = in_process("ring", 3)
    sessions[0].engine.watchdog.limit(0.2)
    with pytest.raises(PeerTimeout, match=r"nothing has moved .* rank 1 \(barrier\), rank 2 \(barrier\)"):
        sessions[0].barrier(timeout)
    for session in sessions:
        session.shutdown()


def test_messages_between_any_two_processes_keep_their_order(group: Any) -> None:
    def body(session: Session) -> Any:
        peers = [index for index in range(session.group.processes) if index != session.index]
        received = {peer: [session.recv(peer, "text") for _ in range(3)] for peer in peers}
        for peer in peers:
            for number in range(3):
                session.send(peer, f"{session.index} to {peer}, {number}".encode(), "text")
        for works in received.values():
            session.engine.wait(*works)
        return {peer: [work.result.decode() for work in works] for peer, works in received.items()}

    for index, found in enumerate(group("ps(servers=2)", 2, body)):
        assert found == {peer: [f"{peer} to {index}, {number}" for number in range(3)] for peer in found}
        assert len(found) == 3


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)"])
def test_a_broadcast_to_all_reaches_servers_too(group: Any, strategy: str) -> None:
    def body(session: Session) -> list[int]:
        array = np.full(4, session.index + 7)
        session.engine.wait(session.everyone.broadcast(array, 5, "text"))
        return array.tolist()

    assert all(found == [7] * 4 for found in group(strategy, 2, body))


def test_statistics_count_bytes_per_peer_and_time(group: Any) -> None:
    def body(session: Session) -> Any:
        before = session.stats()
        session.allreduce(np.ones(1000))
        after = session.stats()
        assert after.blocked_s >= before.blocked_s
        session.barrier()
        return after

    stats = group("ring", 2, body)
    for rank, found in enumerate(stats):
        peer = 1 - rank
        assert found.strategy.startswith("ring")
        assert found.bytes_sent.keys() == {peer}
        # A ring of two sends half of the array twice; tickets come on top.
        assert 8000 <= found.bytes_sent[peer] <= 8000 + 1000
        assert 8000 <= found.bytes_received[peer] <= 8000 + 1000


def test_servers_see_all_workers_leave(group: Any) -> None:
    results = group("ps(servers=2)", 3, workers_only(lambda session: session.barrier()))
    assert results == [None, None, None, "served", "served"]


def test_a_world_of_one_needs_no_engine_and_every_collective_is_the_identity() -> None:
    (session,) = in_process("ring", 1)
    assert session.alone
    array = np.arange(3.0)
    session.allreduce(array)
    session.broadcast(array)
    session.barrier()
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert session.gather(b"text") == [b"text"]
    assert session.stats().bytes_sent == {}
    with pytest.raises(ClosedError, match="no engine"):
        _ = session.engine
    session.shutdown()
    with pytest.raises(ClosedError, match="shut down"):
        session.barrier()


def test_after_the_end_calls_are_refused_and_shutdown_may_be_called_again(group: Any) -> None:
    def body(session: Session) -> None:
        session.barrier()
        session.shutdown()
        for call in (session.barrier, lambda: session.gather(b""), lambda: session.allreduce(np.ones(1))):
            with pytest.raises(ClosedError, match="has been shut down"):
                call()
        session.shutdown()

    group("ring", 2, body)


def test_a_failed_session_raises_its_error_in_every_later_call(group: Any) -> None:
    def body(session: Session) -> None:
        session.barrier()
        session.fail(UsageError("found elsewhere"))
        for _ in range(2):
            with pytest.raises(UsageError, match="found elsewhere"):
                session.barrier()

    group("ring", 2, body)


def test_an_interrupt_between_two_exchanges_of_a_call_ends_the_session(group: Any) -> None:
    """A script that catches it and goes on would take the second of them for another call's."""

    def body(session: Session) -> Any:
        broadcast = session.broadcast

        def interrupted(array: Any, root: int) -> None:
            broadcast(array, root)
            raise KeyboardInterrupt

        session.broadcast = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            session.tell_all(b"news")
        with pytest.raises(ClosedError, match="interrupted by KeyboardInterrupt"):
            session.barrier()

    assert group("ring", 2, body) == [None] * 2


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)"])
def test_some_processes_share_what_each_of_them_has(group: Any, strategy: str) -> None:
    """Whoever is none of them takes no part; nothing is also something to share."""

    def body(session: Session) -> list[list[bytes]]:
        session.everyone.meet("a test")
        found = []
        for processes in ([1, session.group.processes - 1], [1, session.group.processes - 1]):
            if session.index in processes:
                mine = bytes([session.index]) * (0 if session.index == 1 else 70_000)
                found.append(list(session.everyone.share(processes, mine, "a test")))
        return found

    found = group(strategy, 3, body)
    last = len(found) - 1
    assert found[0] == []
    assert found[1] == found[last] == [[b"", bytes([last]) * 70_000]] * 2


def test_servers_hear_what_they_have_been_listening_for(group: Any) -> None:
    """Twice, and after other things; one that nobody says anything to ends with the workers."""

    def body(session: Session) -> list[bytes]:
        found, heard = [], None
        for said in (b"one", b"two"):
            if session.is_worker:
                found.append(session.everyone.tell(said, "a test"))
            else:
                heard = session.everyone.listen("a test")
                session.engine.wait(heard.work)
                found.append(session.everyone.hear(heard))
        if not session.is_worker:
            session.everyone.listen("a test")
        return found

    assert group("ps(servers=2)", 2, body) == [[b"one", b"two"]] * 4


def test_a_size_that_nobody_tells_is_named(group: Any) -> None:
    def body(session: Session) -> None:
        if session.index == 0:
            session.engine.wait(session.everyone.broadcast(np.array([-1]), BUCKET_KEYS, "a test"))
            return
        with pytest.raises(ProtocolError, match=r"a test: rank 0.* announces -1 bytes"):
            session.everyone.tell(b"", "a test")

    group("ring", 2, body)


def test_a_size_that_nobody_has_to_share_names_who_says_so(group: Any) -> None:
    class Endless(bytes):
        def __len__(self) -> int:
            return 1 << 50

    def body(session: Session) -> None:
        with pytest.raises(ProtocolError, match=rf"a test: rank 1.* announces {1 << 50} bytes") as caught:
            list(session.everyone.share([0, 1], Endless() if session.rank == 1 else b"", "a test"))
        assert caught.value.rank == 1

    group("ring", 2, body)
