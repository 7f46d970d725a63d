"""The parameter server's state machine: laws that hold for every order of messages and every sync mode."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import MismatchError
from syncline.serving.server import Apply, Measure, Mode, Release, Request, Server
from syncline.sync.bsp import Bsp

VALUES = {"lr": 0.1, "scale": 1.0}


@dataclass(frozen=True)
class Bounded:
    """A mode that lets workers run ahead by some steps."""

    staleness: int

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.staleness


@dataclass(frozen=True)
class Unbounded:
    """A mode that never holds anyone up."""

    def may_proceed(self, clock: int, slowest: int) -> bool:  # noqa: ARG002
        return True


modes = st.one_of(st.just(Bsp()), st.builds(Bounded, st.integers(0, 3)), st.just(Unbounded()))


def values_of(step: int) -> dict[str, float]:
    return {"lr": 1.0 / step}


def play(data: st.DataObject, workers: int, steps: int, mode: Mode, norms: bool) -> list[Any]:
    """Let Hypothesis choose who speaks next among those who may; the log of requests and actions."""
    server = Server(workers, mode)
    done, may_speak, knows_norm = [0] * workers, set(range(workers)), set[int]()
    log: list[Any] = []
    while any(count < steps for count in done):
        ready = sorted(worker for worker in may_speak if done[worker] < steps)
        assert ready, "every worker waits: a deadlock"
        worker = data.draw(st.sampled_from(ready))
        asks = norms and worker not in knows_norm
        request = Request("norm" if asks else "commit", worker, done[worker] + 1, values_of(done[worker] + 1))
        may_speak.discard(worker)
        if not asks:
            done[worker] += 1
            knows_norm.discard(worker)
        log.append(request)
        for action in server.handle(request):
            log.append(action)
            if isinstance(action, Measure):
                knows_norm.update(action.workers)
                may_speak.update(action.workers)
            elif isinstance(action, Release):
                may_speak.update(action.workers)
        if len(may_speak) == workers:
            assert not server.awaited
        else:
            assert may_speak & server.awaited.keys(), "nobody is to blame for those who wait"
    assert server.clocks == [steps] * workers
    return log


@given(st.data(), st.integers(1, 5), st.integers(1, 4), modes)
def test_every_step_is_applied_once_in_order_after_all_commits(
    data: st.DataObject, workers: int, steps: int, mode: Mode
) -> None:
    log = play(data, workers, steps, mode, norms=False)
    assert [entry.clock for entry in log if isinstance(entry, Apply)] == list(range(1, steps + 1))
    for place, entry in enumerate(log):
        if isinstance(entry, Apply):
            committed = {item.worker for item in log[:place] if isinstance(item, Request) and item.clock == entry.clock}
            assert committed == set(range(workers))
            assert entry.values == values_of(entry.clock)


@given(st.data(), st.integers(1, 5), st.integers(1, 4), modes)
def test_workers_are_released_once_per_step_and_no_further_ahead_than_the_mode_allows(
    data: st.DataObject, workers: int, steps: int, mode: Mode
) -> None:
    log = play(data, workers, steps, mode, norms=False)
    clocks, released = [0] * workers, [0] * workers
    for entry in log:
        if isinstance(entry, Request):
            clocks[entry.worker] = entry.clock
        elif isinstance(entry, Release):
            for worker in entry.workers:
                released[worker] += 1
                assert released[worker] == clocks[worker]
                assert mode.may_proceed(clocks[worker], min(clocks))


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_in_bulk_synchronous_mode_the_order_of_messages_does_not_matter(
    data: st.DataObject, workers: int, steps: int, norms: bool
) -> None:
    everyone = tuple(range(workers))
    wanted: list[Any] = []
    for step in range(1, steps + 1):
        wanted += [Measure(step, everyone)] if norms else []
        wanted += [Apply(step, values_of(step)), Release(everyone)]
    log = play(data, workers, steps, Bsp(), norms)
    assert [entry for entry in log if not isinstance(entry, Request)] == wanted


@given(st.data(), st.integers(2, 4), st.integers(0, 5), modes)
def test_a_wrong_message_raises_and_changes_nothing(
    data: st.DataObject, workers: int, correct: int, mode: Mode
) -> None:
    server = Server(workers, mode)
    may_speak = set(range(workers))
    for _ in range(correct):
        if not may_speak:
            break
        worker = data.draw(st.sampled_from(sorted(may_speak)))
        may_speak.discard(worker)
        clock = server.clocks[worker] + 1
        for action in server.handle(Request("commit", worker, clock, values_of(clock))):
            if isinstance(action, Release):
                may_speak.update(action.workers)
    before = copy.deepcopy(vars(server))
    worker = data.draw(st.integers(0, workers))
    expected = server.clocks[worker] + 1 if worker < workers else 1
    right = worker < workers and worker in may_speak
    clock = data.draw(st.integers(-1, 8).filter(lambda clock: not right or clock != expected))
    with pytest.raises(MismatchError, match=f"rank {worker} sent a commit for step {clock}"):
        server.handle(Request("commit", worker, clock, values_of(max(clock, 1))))
    assert vars(server) == before


@pytest.mark.parametrize("kind", ["norm", "commit"])
def test_values_that_differ_name_both_ranks_the_step_and_the_keys(kind: Any) -> None:
    server = Server(3, Bsp())
    server.handle(Request(kind, 2, 1, VALUES))
    before = copy.deepcopy(vars(server))
    with pytest.raises(MismatchError, match=r"rank 0 and rank 2 disagree .* step 1 \(lr\)"):
        server.handle(Request(kind, 0, 1, {**VALUES, "lr": 0.2}))
    assert vars(server) == before
    server.handle(Request(kind, 0, 1, VALUES))


@pytest.mark.parametrize("first", ["norm", "commit"])
def test_a_worker_that_clips_while_another_does_not_is_an_error_and_no_deadlock(first: Any) -> None:
    server = Server(2, Bsp())
    server.handle(Request(first, 0, 1, VALUES))
    before = copy.deepcopy(vars(server))
    second: Any = "commit" if first == "norm" else "norm"
    with pytest.raises(MismatchError, match=r"rank 1 sent a .* out of turn with rank 0.*clip_grad_norm_"):
        server.handle(Request(second, 1, 1, VALUES))
    assert vars(server) == before


def test_the_norm_may_be_asked_for_twice_in_a_step() -> None:
    server = Server(2, Bsp())
    for _ in range(2):
        assert server.handle(Request("norm", 0, 1)) == []
        assert server.handle(Request("norm", 1, 1)) == [Measure(1, (0, 1))]
    assert server.handle(Request("commit", 0, 1, VALUES)) == []
    assert server.handle(Request("commit", 1, 1, VALUES)) == [Apply(1, VALUES), Release((0, 1))]


def test_bsp_exchanges_gradients_in_every_step_and_holds_up_whoever_is_ahead() -> None:
    mode = Bsp()
    assert mode.exchanges == "gradients"
    assert all(mode.due(step) for step in range(5))
    assert mode.may_proceed(3, 3)
    assert not mode.may_proceed(4, 3)
