"""Elastic runs in real processes: survivors go on, and end with the weights of a run without losses."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from multiprocessing import connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import elastic_bodies as bodies
import numpy as np
import pytest

import syncline
from pool import Group, Pool
from syncline.global_batches import read_log
from syncline.launch.environment import REPEATS
from syncline.launch.local import LocalRun
from syncline.launch.relay import Relay
from syncline.sampling import SampleOrder

LIMIT_S = 60.0
OWNERS = "ps(servers=3, on=workers, update=worker)"
REPLICAS = "ps(servers=2, on=workers, replicas=1) schedule=fixed(bucket=40)"
SERVERS = "ps(servers=2, replicas=1) schedule=fixed(bucket=40)"


@contextmanager
def started(pool: Pool, address: str, processes: int, least: int = 1, **plan: Any) -> Iterator[tuple[Group, Relay]]:
    """The processes of a run, and the launcher's relay, which a thread serves."""
    relay, over = Relay(processes, least, plan.get("most"), plan.get("servers", 0)), threading.Event()

    def serve() -> None:
        while not over.is_set():
            lines = {sock: number for number, sock in relay.sockets().items()}
            for sock in select.select(lines, [], [], 0.1)[0]:
                relay.read(lines[sock])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    case = [[index, processes, address, least, {"strategy": "ring", **plan}] for index in range(processes)]
    with pool.start(bodies.train, case) as group:
        for rank in group.ranks:
            send_handle(rank.line, relay.inherited(rank.index), rank.pid)
        yield group, relay
        over.set()
        thread.join()
    relay.close()


def replace(group: Group, relay: Relay, first: int, address: str, processes: int, least: int = 1, **plan: Any) -> None:
    """Start a process for a lost one, as a launcher does, once the ``first`` member waits for it."""
    group.hear(1, among=[first], timeout_s=LIMIT_S)
    assert group.ranks[first].said.pop() == "waits"
    number = relay.replace(0.0)
    how = {"strategy": "ring", **plan, "serves": relay.serves(number)}
    rank = group.add(bodies.train, [number, processes, address, least, how])
    send_handle(rank.line, relay.inherited(number), rank.pid)


def lose(group: Group, relay: Relay, rank: int) -> None:
    """Wait for the end of a process, as a launcher does."""
    (ended,) = [status for index, status in enumerate(group.end(LIMIT_S, among=[rank])) if index == rank]
    assert ended
    relay.note_end(rank, ended)


def expected() -> tuple[np.ndarray[Any, Any], float]:
    """The weights and the learning rate after the same steps in this process."""
    x, y, model, optimizer, scheduler = bodies.problem()
    order = SampleOrder(bodies.SAMPLES, seed=4, global_batch=bodies.BATCH)
    for epoch in range(bodies.EPOCHS):
        indices = order.indices(epoch)
        for start in range(0, bodies.SAMPLES, bodies.BATCH):
            batch = indices[start : start + bodies.BATCH]
            bodies.learn(x[batch], y[batch], model, optimizer, scheduler)
    weights = np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in model.parameters()])
    return weights, float(optimizer.param_groups[0]["lr"])


def repeated(log: Path) -> list[float]:
    """The weights after the steps of the log in this process. The log must have each sample of an epoch once, in the
    order of a run without losses."""
    order, counted = SampleOrder(bodies.SAMPLES, seed=4, global_batch=bodies.BATCH), read_log(str(log))
    assert sorted(counted) == list(product(range(bodies.EPOCHS), range(bodies.STEPS)))
    for epoch in range(bodies.EPOCHS):
        used = [index for step in range(bodies.STEPS) for index in counted[epoch, step]["samples"]]
        assert used == order.indices(epoch).tolist()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "SYNCLINE_LAUNCHER", "SYNCLINE_STRATEGY", "SYNCLINE_SERVERS"):
            patch.delenv(name, raising=False)
        patch.setenv(REPEATS, str(log))
        syncline.init()
        try:
            return bodies.learn_all()[0]
        finally:
            syncline.shutdown()


def check(group: Group, survivors: list[int], calls: int | list[int], log: Path) -> None:
    """The survivors have trained on, in one view, to the weights of a run without losses, and bit for bit to those of
    the log. ``calls`` of the training function are those of each, or of all."""
    group.hear(1, among=survivors, timeout_s=LIMIT_S)
    weights, rate = expected()
    again = repeated(log)
    for rank, index in enumerate(survivors):
        found, lr, called, new_rank, members, *_ = group.ranks[index].said[-1]
        assert found == again
        np.testing.assert_allclose(found, weights, rtol=1e-9, atol=1e-12)
        made = calls if isinstance(calls, int) else calls[rank]
        assert (lr, called, new_rank, members) == (pytest.approx(rate, rel=1e-12), made, rank, survivors)
    group.end(LIMIT_S, among=survivors)
    assert [group.ranks[index].status for index in survivors] == [0] * len(survivors)


def members_of_steps(log: Path) -> list[list[int]]:
    """The members at each step."""
    return [line["members"] for line in read_log(str(log)).values()]


def test_three_workers_then_two_then_one(pool: Pool, address: str, tmp_path: Path) -> None:
    """The second loss is that of the coordinator, and one of two workers goes on."""
    log = tmp_path / "samples.jsonl"
    with started(pool, address, 3, samples=str(log), **{"2": ("before", 2), "0": ("after", 6)}) as (group, relay):
        lose(group, relay, 2)
        lose(group, relay, 0)
        check(group, [1], 3, log)
    members = members_of_steps(log)
    assert members[:2] == [[0, 1, 2]] * 2
    assert members[2:6] == [[0, 1]] * 4
    assert members[7:] == [[1]] * 5


def dies(pool: Pool, address: str, log: Path, rank: int, point: str, strategy: str = "ring") -> dict[int, list[str]]:
    """Lose the last of four workers, and another one, or a server, at a point meanwhile. The others must end with the
    weights of the log. Returns the points that each of them has passed."""
    log.unlink(missing_ok=True)
    servers = 2 if strategy.startswith(SERVERS) else 0
    plan: dict[str, Any] = {"3": ("before", 5), "die": {str(rank): point}, "servers": servers}
    with started(pool, address, 4 + servers, samples=str(log), strategy=strategy, **plan) as (group, relay):
        waiting, survivors = {0, 1, 2, 3}, []
        if rank >= 4:
            lose(group, relay, 3)
            waiting.remove(3)
            lose(group, relay, rank)
        while waiting:
            ready = connection.wait([group.ranks[index].line for index in waiting], LIMIT_S)
            assert ready, point
            for index in sorted(waiting):
                if (line := group.ranks[index].line) in ready:
                    waiting.remove(index)
                    try:
                        group.ranks[index].said.append(line.recv())
                        survivors.append(index)
                    except EOFError:
                        lose(group, relay, index)
                        assert index in (3, rank), f"{point}: {group.ranks[index]}"
        again = repeated(log)
        for index in survivors:
            assert group.ranks[index].said[-1][0] == again, point
        group.end(LIMIT_S)
        if not point.startswith("after receive"):  # another time it may have looked before it received
            assert (rank in survivors) == (not point)
        assert survivors
        return {index: group.ranks[index].said[-1][-1] for index in survivors}


@pytest.mark.parametrize(("rank", "point"), [(0, "before send Accept 1"), (1, "after begin_again 1")])
def test_a_second_loss_during_the_agreement(pool: Pool, address: str, tmp_path: Path, rank: int, point: str) -> None:
    dies(pool, address, tmp_path / "samples.jsonl", rank, point)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "point"),
    [
        (4, "before go_on 1"),
        (5, "before lose 1"),
        (4, "before send Promise 1"),
        (5, "before begin_again 1"),
        (4, "after begin_again 1"),
    ],
)
def test_a_server_is_lost_during_the_agreement(
    pool: Pool, address: str, tmp_path: Path, server: int, point: str
) -> None:
    dies(pool, address, tmp_path / "samples.jsonl", server, point, SERVERS)


EVERY = "SYNCLINE_EVERY_POINT" in os.environ
"""``make faults`` sets it: some hundred runs."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", f"{REPLICAS} transport=tcp", f"{SERVERS} transport=tcp"])
def test_a_second_loss_at_any_point(pool: Pool, addresses: Callable[[], str], tmp_path: Path, strategy: str) -> None:
    log = tmp_path / "samples.jsonl"
    passed = dies(pool, addresses(), log, 0, "", strategy)
    assert any("before send Accept 1" in points for points in passed.values())
    for rank, points in passed.items():
        for point in points if EVERY else points[rank::53]:
            dies(pool, addresses(), log, rank, point, strategy)


def test_three_workers_then_two_then_three(pool: Pool, address: str, tmp_path: Path) -> None:
    """A worker is lost and another one joins, then the same with rank 0."""
    log = tmp_path / "samples.jsonl"
    happens = {"1": ("before", 2), "0": [("join", 4), ("before", 7)], "2": ("join", 9)}
    plan = {"samples": str(log), "most": 3, "asks": (1, 3), **happens}
    with started(pool, address, 3, **plan) as (group, relay):
        lose(group, relay, 1)
        replace(group, relay, 0, address, 3, **plan)
        lose(group, relay, 0)
        replace(group, relay, 2, address, 3, **plan)
        check(group, [2, 3, 4], [5, 3, 1], log)
        assert [group.ranks[index].said[-1][5] for index in (2, 3, 4)] == [2, 2, 2]  # losses repaired
    members = members_of_steps(log)
    assert members[:2] == [[0, 1, 2]] * 2
    assert members[2:5] == [[0, 2]] * 3
    assert members[5:7] == [[0, 2, 3]] * 2
    assert members[7:10] == [[2, 3]] * 3
    assert members[10:] == [[2, 3, 4]] * 2


def test_a_worker_joins_one_that_is_alone_after_another_has_died_while_joining(
    pool: Pool, address: str, tmp_path: Path
) -> None:
    log = tmp_path / "samples.jsonl"
    plan = {"samples": str(log), "most": 2, "0": ("before", 2), "1": [("join", 4), ("join", 6)], "2": ("restoring", -1)}
    with started(pool, address, 2, **plan) as (group, relay):
        lose(group, relay, 0)
        replace(group, relay, 1, address, 2, **plan)
        lose(group, relay, 2)
        replace(group, relay, 1, address, 2, **plan)
        check(group, [1, 3], [4, 1], log)


def test_who_has_another_model_is_refused_and_who_dies_while_joining_is_left_out(
    pool: Pool, address: str, tmp_path: Path
) -> None:
    log = tmp_path / "samples.jsonl"
    plan = {
        "samples": str(log),
        "most": 3,
        "0": [("join", 4), ("join", 6)],
        "2": ("before", 2),
        "3": ("other", -1),
        "4": ("restoring", -1),
    }
    with started(pool, address, 3, **plan) as (group, relay):
        lose(group, relay, 2)
        replace(group, relay, 0, address, 3, **plan)
        lose(group, relay, 3)
        assert "RollCallError: this worker cannot join the run: this run has model" in group.ranks[3].printed()
        group.ranks[0].said.append("waits")  # still
        replace(group, relay, 0, address, 3, **plan)
        lose(group, relay, 4)
        replace(group, relay, 0, address, 3, **plan)
        check(group, [0, 1, 5], [4, 4, 1], log)


@pytest.mark.slow
def test_a_worker_that_dies_before_it_connects_is_left_out(pool: Pool, address: str, tmp_path: Path) -> None:
    log = tmp_path / "samples.jsonl"
    plan = {
        "samples": str(log),
        "most": 3,
        "0": ("join", 4),
        "2": ("before", 2),
        "3": ("beginning", -1),
        "connect_s": 2.0,
    }
    with started(pool, address, 3, **plan) as (group, relay):
        lose(group, relay, 2)
        replace(group, relay, 0, address, 3, **plan)
        lose(group, relay, 3)
        check(group, [0, 1], 3, log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "what", "when"),
    [
        ("direct transport=tcp", "before", 0),
        ("tree", "after", 11),
        ("auto", "raise", 5),
        (OWNERS, "before", 0),
        (OWNERS, "raise", 5),
    ],
)
def test_a_loss_at_any_step(pool: Pool, address: str, tmp_path: Path, strategy: str, what: str, when: int) -> None:
    """At the first step, after the last one, and by an error of one worker's script."""
    log = tmp_path / "samples.jsonl"
    with started(pool, address, 3, samples=str(log), strategy=strategy, **{"1": (what, when)}) as (group, relay):
        lose(group, relay, 1)
        check(group, [0, 2], 2, log)


def test_an_owner_is_lost_with_an_update_that_others_lack(pool: Pool, address: str, tmp_path: Path) -> None:
    """Owner 0 is killed when it has updated one of two buckets, at the first step; then owner 1, and one goes on."""
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {"0": ("updated", 0), "1": ("before", 5), "samples": str(log)}
    with started(pool, address, 3, strategy=REPLICAS, **plan) as (group, relay):
        lose(group, relay, 0)
        lose(group, relay, 1)
        check(group, [2], 3, log)


def test_a_server_is_lost_and_its_part_goes_on_at_its_follower(pool: Pool, address: str, tmp_path: Path) -> None:
    """Server 3 is killed when it has updated one of two buckets, then a worker. The loss of a server changes no bit."""
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {"3": ("updated", 5), "1": ("before", 8), "samples": str(log), "servers": 2}
    with started(pool, address, 5, strategy=SERVERS, **plan) as (group, relay):
        lose(group, relay, 3)
        lose(group, relay, 1)
        check(group, [0, 2], 3, log)
        assert group.end(LIMIT_S, among=[4])[4] == 0
        assert "this server has parts of 0 steps before" in group.ranks[4].printed()
    text = log.read_text()
    assert "ps(servers=1, replicas=1)" in text
    log.write_text(text.replace("ps(servers=1,", "ps(servers=2,"))
    assert group.ranks[0].said[-1][0] == repeated(log)


def test_a_new_worker_gets_the_parts_that_it_owns_and_follows(pool: Pool, address: str, tmp_path: Path) -> None:
    """One of two owners is lost, a new worker joins the one that has everything, and then goes on alone with that."""
    log = tmp_path / "samples.jsonl"
    happens = {"1": ("before", 2), "0": [("join", 4), ("before", 7)]}
    plan: dict[str, Any] = {"strategy": REPLICAS, "samples": str(log), "most": 2, **happens}
    with started(pool, address, 2, **plan) as (group, relay):
        lose(group, relay, 1)
        replace(group, relay, 0, address, 2, **plan)
        lose(group, relay, 0)
        check(group, [2], 2, log)
    assert members_of_steps(log) == [[0, 1]] * 2 + [[0]] * 3 + [[0, 2]] * 2 + [[2]] * 5


@pytest.mark.slow
@pytest.mark.parametrize("owners", [2, 3])
def test_parts_are_divided_anew_when_a_worker_joins(pool: Pool, address: str, tmp_path: Path, owners: int) -> None:
    """With two owners the new worker holds nothing."""
    log, strategy = tmp_path / "samples.jsonl", REPLICAS.replace("servers=2", f"servers={owners}")
    happens = {"1": ("before", 2), "0": ("join", 4), "2": ("updated", 3)}  # of its last view
    plan: dict[str, Any] = {"strategy": f"{strategy} transport=tcp", "samples": str(log), "most": 3, **happens}
    with started(pool, address, 3, **plan) as (group, relay):
        lose(group, relay, 1)
        replace(group, relay, 0, address, 3, **plan)
        lose(group, relay, 2)
        check(group, [0, 3], [4, 2], log)


def test_a_worker_joins_a_run_with_servers(pool: Pool, address: str, tmp_path: Path) -> None:
    """It goes on with the servers alone in the end."""
    log = tmp_path / "samples.jsonl"
    happens = {"1": ("before", 2), "0": [("join", 4), ("before", 7)]}
    plan: dict[str, Any] = {"strategy": SERVERS, "samples": str(log), "most": 2, "servers": 2, **happens}
    with started(pool, address, 4, **plan) as (group, relay):
        lose(group, relay, 1)
        replace(group, relay, 0, address, 4, **plan)
        lose(group, relay, 0)
        check(group, [4], 2, log)
        assert group.end(LIMIT_S, among=[2, 3])[2:4] == [0, 0]


def test_a_server_takes_the_place_of_a_lost_one(pool: Pool, address: str, tmp_path: Path) -> None:
    """Then the other of the first servers is lost: the new one has its part, and its state."""
    log = tmp_path / "samples.jsonl"
    happens = {"2": ("updated", 2), "0": ("join", 5), "3": ("updated", 4)}  # of its last view
    plan: dict[str, Any] = {"strategy": SERVERS, "samples": str(log), "most": 2, "servers": 2, **happens}
    with started(pool, address, 4, **plan) as (group, relay):
        lose(group, relay, 2)
        replace(group, relay, 0, address, 4, **plan)
        lose(group, relay, 3)
        check(group, [0, 1], 4, log)
        assert group.end(LIMIT_S, among=[4])[4] == 0


def test_a_worker_is_lost_before_the_server_that_is_left_has_its_state(
    pool: Pool, address: str, tmp_path: Path
) -> None:
    """Rank 0, which would tell the server the state of the optimizer in the view after the loss of the other server."""
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {"3": ("updated", 5), "0": ("loading", 2), "samples": str(log), "servers": 2}
    with started(pool, address, 5, strategy=SERVERS, **plan) as (group, relay):
        lose(group, relay, 3)
        lose(group, relay, 0)
        check(group, [1, 2], 2, log)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "when", "servers", "transport"),
    [("updates", 0, 2, "tcp"), ("updated", 0, 3, "auto"), ("updates", 5, 3, "auto"), ("updated", 11, 2, "tcp")],
)
def test_a_server_is_lost_at_any_step(
    pool: Pool, address: str, tmp_path: Path, what: str, when: int, transport: str, servers: int
) -> None:
    log = tmp_path / "samples.jsonl"
    strategy = f"{SERVERS} transport={transport}".replace("servers=2", f"servers={servers}")
    plan: dict[str, Any] = {"2": (what, when), "samples": str(log), "servers": servers}
    with started(pool, address, 2 + servers, strategy=strategy, **plan) as (group, relay):
        lose(group, relay, 2)
        check(group, [0, 1], 2, log)


def test_all_servers_are_lost(pool: Pool, address: str) -> None:
    """One after the other: the second has nobody who follows it."""
    plan: dict[str, Any] = {"2": ("updated", 2), "3": ("updated", 5), "servers": 2}
    with started(pool, address, 4, strategy=SERVERS, **plan) as (group, relay):
        lose(group, relay, 2)
        lose(group, relay, 3)
        assert relay.is_over is False
        group.end(LIMIT_S)
        assert all("all servers are lost: start again" in group.ranks[index].printed() for index in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "near"),
    [("direct codec=int8", 2e-3), ("ring codec=onebit transport=tcp", 0.15), ("ring codec=topk(ratio=0.3)", 0.15)],
)
def test_a_loss_under_a_codec(pool: Pool, address: str, strategy: str, near: float) -> None:
    """The survivors begin without residuals, and agree on weights near those of a run without a codec."""
    with started(pool, address, 3, strategy=strategy, **{"1": ("before", 5)}) as (group, relay):
        lose(group, relay, 1)
        group.hear(1, among=[0, 2], timeout_s=LIMIT_S)
        first, second = (group.ranks[index].said[-1] for index in (0, 2))
        np.testing.assert_allclose(first[0], expected()[0], atol=near)
        assert second[0] == first[0]
        assert [first[2:5], second[2:5]] == [[2, 0, [0, 2]], [2, 1, [0, 2]]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "what", "when"),
    [
        (0, "before", 0),
        (1, "updates", 5),
        (0, "updated", 11),
        (1, "after", 11),
        (2, "before", 0),
        (2, "updates", 5),
    ],
)
def test_an_owner_is_lost_at_any_step(
    pool: Pool, address: str, tmp_path: Path, victim: int, what: str, when: int
) -> None:
    """At the first step, at the last one, and after it; worker 2 owns nothing, and so makes no updates."""
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {str(victim): (what, when), "samples": str(log)}
    with started(pool, address, 3, strategy=f"{REPLICAS} transport=tcp", **plan) as (group, relay):
        survives = victim == 2 and what.startswith("update")
        if not survives:
            lose(group, relay, victim)
        check(group, [rank for rank in range(3) if survives or rank != victim], 2 - survives, log)


@pytest.mark.slow
def test_a_step_that_only_some_have_finished_is_repeated_by_all(pool: Pool, address: str, tmp_path: Path) -> None:
    """Owner 0 has finished the step, and goes back: worker 2 was late and cannot get its weights any more."""
    log = tmp_path / "samples.jsonl"
    plan: dict[str, Any] = {"1": ("rested", 5), "2": ("late", 4), "samples": str(log)}
    with started(pool, address, 3, strategy=f"{REPLICAS} transport=tcp", **plan) as (group, relay):
        lose(group, relay, 1)
        check(group, [0, 2], 2, log)
    lines = map(json.loads, log.read_text().splitlines())
    assert [line["members"] for line in lines if (line["epoch"], line["step"]) == (1, 0)] == [[0, 1, 2], [0, 2]]


@pytest.mark.slow
def test_owner_and_follower_are_lost_at_once(pool: Pool, address: str) -> None:
    plan: dict[str, Any] = {"0": ("before", 3), "1": ("before", 3)}
    with started(pool, address, 5, strategy=REPLICAS, **plan) as (group, relay):
        lose(group, relay, 0)
        lose(group, relay, 1)
        group.end(LIMIT_S)
        for rank in group.ranks[2:]:
            assert "both workers with the optimizer's state of part 0 are lost" in rank.printed()


@pytest.mark.slow
def test_a_view_breaks_when_one_of_the_owners_has_begun_it(pool: Pool, address: str, tmp_path: Path) -> None:
    """Rank 2 dies when rank 0 has begun the new view, and rank 1 still waits: those two have all parts."""
    log, strategy = tmp_path / "samples.jsonl", REPLICAS.replace("servers=2", "servers=3")
    plan: dict[str, Any] = {"3": ("before", 5), "1": ("misses", 2), "die": {"2": "after restored 1"}}
    with started(pool, address, 4, samples=str(log), strategy=strategy, **plan) as (group, relay):
        lose(group, relay, 3)
        lose(group, relay, 2)
        check(group, [0, 1], [3, 2], log)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_loss_while_the_weights_are_restored(pool: Pool, address: str, tmp_path: Path, victim: int) -> None:
    log, plan = tmp_path / "samples.jsonl", {"1": ("before", 5), str(victim): ("restoring", -1)}
    with started(pool, address, 4, samples=str(log), **plan) as (group, relay):
        lose(group, relay, 1)
        lose(group, relay, victim)
        check(group, [2 - victim, 3], 2, log)


@pytest.mark.slow
def test_two_of_four_at_once(pool: Pool, address: str) -> None:
    with started(pool, address, 4, **{"0": ("before", 5), "2": ("before", 5)}) as (group, relay):
        lose(group, relay, 0)
        lose(group, relay, 2)
        group.hear(1, among=[1, 3], timeout_s=LIMIT_S)
        assert relay.members == {1, 3}
        weights, _ = expected()
        np.testing.assert_allclose(group.ranks[3].said[-1][0], weights, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_stopped_worker_is_left_behind_and_learns_it(pool: Pool, address: str, tmp_path: Path) -> None:
    log = tmp_path / "samples.jsonl"
    with started(pool, address, 3, samples=str(log), **{"1": ("stop", 3)}) as (group, relay):
        check(group, [0, 2], 2, log)
        for rank in (0, 2):
            relay.note_end(rank, 0)
        os.kill(group.ranks[1].pid, signal.SIGCONT)
        lose(group, relay, 1)
        assert "syncline: ended" in group.ranks[1].printed()


@pytest.mark.slow
def test_a_minority_and_too_few_workers_stop(pool: Pool, address: str) -> None:
    with started(pool, address, 3, least=3, **{"1": ("before", 3)}) as (group, relay):
        for rank in (1, 0, 2):
            lose(group, relay, rank)
        assert "2 members are left, and this run needs 3" in group.ranks[0].printed()
        assert not relay.succeeded


@pytest.mark.slow
def test_the_launcher_starts_a_server_for_a_lost_one() -> None:
    lines: list[str] = []
    plan = {"updated": [3, 2], "serves": 5}
    here = Path(__file__).parent
    command = [sys.executable, str(here / "joined_script.py"), json.dumps(plan)]
    paths = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env, relay = {"PYTHONPATH": paths, "SYNCLINE_STRATEGY": SERVERS}, Relay(4, 1, 2, 2)
    with LocalRun(command, 4, servers=2, env=env, relay=relay, on_output=lambda _, line: lines.append(line)) as run:
        outcome = run.wait(LIMIT_S)
    assert (outcome.status, outcome.text) == (0, "rank 3 (server 1) was killed by SIGKILL"), lines
    assert "server 4 (a replacement)" in {ending.name for ending in outcome.endings}
    assert any("2 workers and 1 server go on (view 2)" in line for line in lines)
    assert any("2 workers and 2 servers go on, 1 of them new, (view 3)" in line for line in lines)
    learnt = [json.loads(line.removeprefix("learnt ")) for line in lines if line.startswith("learnt ")]
    assert [one[0] for one in sorted(learnt)] == [0, 1]
    for one in learnt:
        np.testing.assert_allclose(one[4], expected()[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_example_under_its_launcher() -> None:
    lines: list[tuple[int, str]] = []
    script = Path(__file__).resolve().parents[2] / "examples" / "elastic.py"
    command = [sys.executable, str(script)]
    with LocalRun(command, 3, relay=Relay(3, 1), on_output=lambda *line: lines.append(line)) as run:
        deadline = time.monotonic() + LIMIT_S
        while not any("epoch 2" in line for _, line in lines):
            assert run.poll(1.0) is None
            assert time.monotonic() < deadline
        os.kill(run.pids[0], signal.SIGKILL)
        outcome = run.wait(LIMIT_S)
    assert outcome.status == 0, lines
    assert outcome.text == "rank 0 was killed by SIGKILL"
    assert any("2 workers go on (view 2)" in line for _, line in lines)
    assert any("2 workers at the end: 9" in line for _, line in lines)
