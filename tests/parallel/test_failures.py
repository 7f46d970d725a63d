"""A process that dies, stops or raises in mid-step: every other one names it and ends with a status other than 0."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_bodies
import pytest

from pool import Pool
from syncline.wire.watch import LIVENESS_S

PROMISED_S, TRIES, BUSY_S = 10.0, 4, 5.0
"""From the failure to the end of every other process, as the README has it; runs that may show it; what a busy machine
may take beside the nine seconds until a stopped process is found, which leave it one."""

LIMIT_S = 60.0
"""The same where only what is said matters, on a machine that may be busy."""

WORKERS = 2
SERVED = "ps(servers=1)"


def group_of(processes: int, address: str, *case: Any) -> list[list[Any]]:
    return [[[index, processes, address], *case] for index in range(processes)]


CASES = [
    (f"{strategy} transport={transport}", victim, number)
    for strategy, victims in (("ring", [1]), (SERVED, [1, WORKERS]))
    for victim in victims
    for transport, number in (("shm", signal.SIGKILL), ("tcp", signal.SIGSTOP))
] + [
    (f"{SERVED} codec=int8 transport=tcp", 1, signal.SIGKILL),
    pytest.param(f"{SERVED} transport=tcp", WORKERS, signal.SIGKILL, marks=pytest.mark.slow),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "victim", "number"), CASES)
def test_everyone_names_who_fails_in_mid_step(
    pool: Pool, address: str, strategy: str, victim: int, number: signal.Signals
) -> None:
    """Three processes, so that somebody other than the victim's neighbours learns of it too."""
    case = group_of(3, address, strategy, victim, number, 1.0)
    with pool.start(fault_bodies.train_until, case) as group:
        group.hear(2, among=range(WORKERS))
        if victim >= WORKERS:  # a server does not come by a place in the script
            os.kill(group.ranks[victim].pid, number)
        else:
            group.ranks[victim].line.send("all are there")
        others = [rank for rank in group.ranks if rank.index != victim]
        group.end(LIMIT_S, among=[rank.index for rank in others])
        if number == signal.SIGKILL:
            group.end(LIMIT_S)
            assert group.ranks[victim].status == -signal.SIGKILL
        role = "server " if victim >= WORKERS else ""
        for rank in others:
            assert rank.status == 1, rank
            assert f"{role}rank {victim} (" in rank.printed() or f"rank {victim} (" in rank.printed(), rank
            assert f"pid {group.ranks[victim].pid})" in rank.printed(), rank
            blamed = "stopped" if number == signal.SIGSTOP else "died"
            assert blamed in rank.printed(), rank


STOPPED_S = LIVENESS_S + 1.0  # it is looked for once a second
LOSSES = [
    (fault_bodies.train_until, 2, "ring transport=shm", signal.SIGKILL, "died"),
    (fault_bodies.train_until, 2, f"{SERVED} transport=tcp", signal.SIGKILL, "died"),
    (fault_bodies.sits_elsewhere, 1, "ring transport=tcp", signal.SIGKILL, "the script did not return to Syncline"),
    pytest.param(fault_bodies.train_until, 2, "ring", signal.SIGSTOP, "is stopped for", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("body", "says", "strategy", "number", "said"), LOSSES)
def test_the_others_end_in_the_time_that_is_promised(
    pool: Pool, address: str, body: Callable[..., None], says: int, strategy: str, number: signal.Signals, said: str
) -> None:
    """With the limits that hold by default. A machine may be busy, but who is late by design is late in every try."""
    assert STOPPED_S < PROMISED_S
    case = group_of(3, address, strategy, 1, number, LIVENESS_S)

    def in_time() -> bool:
        with pool.start(body, case) as group:
            group.hear(says, among=[0, 1])
            group.ranks[1].line.send("all are there")
            try:
                group.end(PROMISED_S + (BUSY_S if number == signal.SIGSTOP else 0.0), among=[0, 2])
            except TimeoutError:
                return False
            for rank in (group.ranks[0], group.ranks[2]):
                assert rank.status == 1
                assert "rank 1 (" in rank.printed(), rank
                assert said in rank.printed(), rank
            return True

    assert any(in_time() for _ in range(TRIES))


@pytest.mark.every(2)
@pytest.mark.parametrize(("victim", "at"), [(0, "control"), (2, "control"), (1, "data"), (2, "through")])
def test_a_process_that_is_stopped_while_the_group_connects_is_named(
    pool: Pool, address: str, victim: int, at: str
) -> None:
    """Within the liveness limit, long before the time for connecting is over."""
    with pool.start(fault_bodies.stops_while_connecting, group_of(3, address, victim, at)) as group:
        others = [index for index in range(3) if index != victim]
        group.hear(1, among=others)
        group.ranks[victim].line.send("stop")
        group.end(LIMIT_S, among=others)
        for rank in (group.ranks[index] for index in others):
            assert rank.status == 1
            assert f"rank {victim} (" in rank.printed(), rank
            assert "is stopped for" in rank.printed(), rank
            assert BLAMED.findall(rank.printed()).count(str(victim)) == len(BLAMED.findall(rank.printed())), rank


def test_nobody_is_blamed_after_all_were_stopped_and_continued(pool: Pool, address: str) -> None:
    """As by a batch system: for longer than nothing may move, while two wait for one that comes then."""
    progress_s = 3.0
    with pool.start(fault_bodies.waits_for_one, group_of(3, address, progress_s)) as group:
        group.hear(1)
        for number, lasts_s in ((0, progress_s / 5), (signal.SIGSTOP, 1.2 * progress_s)):
            for rank in group.ranks:
                os.kill(rank.pid, number)
            with pytest.raises(TimeoutError, match="have not come far enough"):
                group.hear(2, timeout_s=lasts_s)
        group.ranks[1].line.send("come")
        for rank in group.ranks:
            os.kill(rank.pid, signal.SIGCONT)
        assert group.results() == ["met"] * 3
        assert [rank.printed() for rank in group.ranks] == [""] * 3


@pytest.mark.parametrize("strategy", ["ring transport=tcp", "ps(servers=1) transport=shm"])
def test_an_exception_of_one_rank_reaches_all_with_its_text(pool: Pool, address: str, strategy: str) -> None:
    processes = 4 if "ps" in strategy else 3
    with pool.start(fault_bodies.raises, group_of(processes, address, strategy)) as group:
        group.end(LIMIT_S)
        for rank in group.ranks:
            assert rank.status == 1, rank
            assert "the data of this rank are spoilt: caf\\udce9.jpg" in rank.printed()
        assert "Traceback" in group.ranks[1].printed()
        for rank in (group.ranks[0], *group.ranks[2:]):
            assert "rank 1 (" in rank.printed()
            assert "failed: ValueError" in rank.printed()
            assert "Traceback" not in rank.printed()  # whose fault it is, not where one waited


def test_a_script_can_catch_the_failure_of_another(pool: Pool, address: str) -> None:
    with pool.start(fault_bodies.survives, group_of(3, address)) as group:
        group.end(LIMIT_S)
        assert [rank.status for rank in group.ranks] == [0, 3, 0]
        group.hear(1, among=[0, 2])
        assert group.ranks[0].said[0][0] == group.ranks[2].said[0][0] == 1


def test_an_interrupted_rank_ends_the_others(pool: Pool, address: str) -> None:
    with pool.start(fault_bodies.interrupted, group_of(3, address)) as group:
        group.hear(1)
        os.kill(group.ranks[2].pid, signal.SIGINT)
        group.end(LIMIT_S)
        for rank in group.ranks:
            assert rank.status != 0
            assert "rank 2 (" in rank.printed()
            assert "Traceback" not in rank.printed()


@pytest.mark.parametrize("fault", ["raises", "none"])
def test_after_a_failure_nobody_takes_the_interpreter_apart(
    pool: Pool, address: str, tmp_path: Path, fault: str
) -> None:
    """With some frameworks that takes so long that others wait; what was written to files is in them all the same."""
    paths = [tmp_path / "0", tmp_path / "1"]
    case = [[[index, 2, address], str(path), fault] for index, path in enumerate(paths)]
    with pool.start(fault_bodies.ends_quickly, case) as group:
        assert group.end(LIMIT_S) == [int(fault == "raises")] * 2
        for rank, path in zip(group.ranks, paths, strict=True):
            assert f"frozen: {fault == 'raises'}" in rank.printed()
            assert path.read_text() == "written" * (fault == "raises")  # else it is the interpreter's to write


FAULTS = {
    "raises": "ValueError: the data of this rank are spoilt",
    "gradient": "GradientError: ",
    "other call": "MismatchError: ",
    "exits": "died: its connection to rank",
    "is killed": "died: its connection to rank",
}
"""What can befall a rank in a step, and what is said of it."""

STRATEGIES = ("ring", "ps(servers=1)", "ps(servers=1, on=workers)", "ps(servers=1) sync=asp")
FAILURES = [
    (strategy, fault, (row + column) % 3)
    for row, strategy in enumerate(STRATEGIES)
    for column, fault in enumerate(FAULTS)
    if (strategy == "ring" or (row + column) % 2 == 0)
    and ("asp" not in strategy or fault != "other call")  # whose workers need not be at the same call
]
"""Every fault under the first strategy, and half of them under each other one; every rank fails somewhere."""

BLAMED = re.compile(r"rank (\d+) \([^)]*\) (?:died|failed|left the run|is stopped|has given no sign|is to blame)")


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "fault", "victim"), FAILURES)
def test_nobody_blames_anybody_else(pool: Pool, address: str, strategy: str, fault: str, victim: int) -> None:
    """The culprit says its own error only; what each other one says last names the culprit and that error."""
    processes = 3 + ("(servers=1)" in strategy)
    with pool.start(fault_bodies.fails, group_of(processes, address, strategy, victim, fault)) as group:
        assert all(group.end(LIMIT_S))
        printed = [rank.printed() for rank in group.ranks]
    says, silent = FAULTS[fault], fault in ("exits", "is killed")
    assert (printed[victim] == "") is silent
    assert says in "".join(printed)
    for rank, text in enumerate(printed):
        last, blamed = text.rstrip().rpartition("\n")[2], set(BLAMED.findall(text))
        assert (silent and rank == victim) or says.partition(":")[0] in last, text
        if fault == "other call":  # any of them may have noticed it first
            assert "died" not in text
            assert len(blamed - {str(rank)}) <= 1, text
        else:
            assert blamed == (set() if rank == victim else {str(victim)}), text


# Of each kind two ends are tried, one of them in time; each end meets kinds of all sorts.
ENDS = (
    ("is killed", "call"), ("raises", "call"), ("is killed", "exit"), ("exits", "call"), ("is killed", "exception")
)  # fmt: skip
ENDINGS: list[Any] = [
    pytest.param(kind, *ENDS[(number + turn) % len(ENDS)], marks=[pytest.mark.slow] * (turn > 0))
    for number, kind in enumerate(fault_bodies.KINDS)
    for turn in (0, 2)
]
ENDINGS += [("ring schedule=split", "is stopped", "call"), ("ring schedule=delayed", "is stopped", "exit")]


@pytest.mark.parametrize(("kind", "fault", "end"), ENDINGS)
def test_a_rank_that_is_lost_at_the_end_fails_the_others(
    pool: Pool, address: str, kind: str, fault: str, end: str
) -> None:
    """However these end, and whatever parts of their end have heard of it and passed it over."""
    processes = 4 if "(servers=1)" in kind else 3
    with pool.start(fault_bodies.loses_one_at_the_end, group_of(processes, address, kind, fault, end)) as group:
        others = [index for index in range(processes) if index != 1]
        group.end(LIMIT_S, among=others)
        for rank in (group.ranks[index] for index in others):
            assert rank.status == 1, rank
            said = {"is stopped": "is stopped", "raises": "the data of this rank are spoilt"}.get(fault, "died")
            assert "rank 1 (" in rank.printed() or "Error: 'of the script" in rank.printed(), rank
            assert said in rank.printed(), rank
