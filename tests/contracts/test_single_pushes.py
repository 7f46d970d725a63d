"""Every worker's push as an update by itself: over every transport, for owners on ranks of their own and on workers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from ends import KINDS
from pushes import LR, Sgd, Training, expected, joined, on_group

from syncline import registry
from syncline.errors import MismatchError, PeerTimeout, ProtocolError, StrategyError, SynclineError, UsageError
from syncline.nouns import Group
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

WORKERS, STEPS = 3, 5
PLACES = ["ps(servers=1)", "ps(servers=2)", "ps(servers=5)", "ps(servers=1, on=workers)", "ps(servers=3, on=workers)"]
FEW = ["ps(servers=2)", "ps(servers=2, on=workers)"]
NEAR = ["inproc", "shm", "tcp"]
LIMIT_S = 60.0
CODECS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
CODECS = [text for text in CODECS if "warmup" not in text]

Run = Callable[..., list[Any]]


@pytest.fixture
def on(run_on: Run) -> Run:
    """``on_group`` of so many workers."""
    return lambda kind, strategy, body, **options: on_group(run_on, kind, strategy, WORKERS, body, **options)


def train(session: Session) -> Any:
    """Some steps; by owner, how often it updated and what it owns, and by step the weights and their versions."""
    training, seen = Training(session), []
    worker = training.start()
    for step in range(STEPS if worker else 0):
        weights = training.step(worker, step)
        seen.append((weights, list(worker.owners._versions)))
    if worker is not None:
        worker.consolidate()
        seen.append((np.concatenate(training.weights), list(worker.owners._versions)))
    session.shutdown()
    return training, seen


def check(found: list[Any]) -> None:
    """Every push was applied once by every owner, and what workers pulled is what some version of the owners was."""
    owners = [training for training, _ in found if training.owner is not None]
    assert {len(training.owner.history) - 1 for training in owners} == {WORKERS * STEPS}
    np.testing.assert_array_equal(joined([training.owned() for training in owners]), expected([STEPS] * WORKERS))
    for _, seen in found[:WORKERS]:
        for weights, versions in seen:
            parts = [training.owned(version) for training, version in zip(owners, versions, strict=True)]
            np.testing.assert_array_equal(weights, joined(parts))


@pytest.mark.parametrize(
    ("kind", "strategy"), [*zip(KINDS, cycle([f"{FEW[0]} sync=asp", f"{FEW[1]} sync=ssp(staleness=1)"]))]
)
def test_every_push_is_applied_once_over_every_transport(on: Run, kind: str, strategy: str) -> None:
    check(on(kind, strategy, train))


@pytest.mark.parametrize(("place", "mode"), [*zip(PLACES, cycle(["asp", "ssp(staleness=0)", "ssp(staleness=1)"]))])
def test_every_push_is_applied_once_wherever_owners_are(on: Run, place: str, mode: str) -> None:
    check(on("inproc", f"{place} sync={mode}", train))


@pytest.mark.parametrize(
    ("kind", "place"), [*zip(NEAR, cycle(["ps(servers=1)", "ps(servers=3)", "ps(servers=3, on=workers)"]))]
)
def test_payloads_of_one_worker_are_its_push(on: Run, kind: str, place: str) -> None:
    """Of a codec that loses nothing here: it sends as they are all that are not 0."""
    check(on(kind, f"{place} sync=asp codec=topk(ratio=1)", train))


@pytest.mark.every(2)
@pytest.mark.parametrize("text", CODECS)
def test_every_codec_under_which_owners_update_goes_with_single_pushes(on: Run, text: str) -> None:
    """Or is refused by name: workers that were sent the same versions have the same bits, as all do in the end."""
    strategy = f"ps(servers=2, on=workers) sync=ssp(staleness=1) codec={text}"
    try:
        Strategy.parse(f"ps(servers=2, on=workers) codec={text}")
    except StrategyError:
        with pytest.raises(StrategyError, match="the nearest that works is"):
            Strategy.parse(strategy)
        return
    found = on("inproc", strategy, train)
    assert {len(training.owner.history) - 1 for training, _ in found[:2]} == {WORKERS * STEPS}
    by_versions: dict[tuple[int, ...], Any] = {}
    for _, seen in found[:WORKERS]:
        for weights, versions in seen:
            np.testing.assert_array_equal(weights, by_versions.setdefault(tuple(versions), weights))
        np.testing.assert_array_equal(seen[-1][0], found[0][1][-1][0])


@pytest.mark.parametrize(
    ("kind", "place", "mode"),
    [
        ("inproc", "ps(servers=2, replicas=1)", "asp"),
        ("shm", "ps(servers=3, replicas=1)", "ssp(staleness=1)"),
        ("tcp", "ps(servers=2, on=workers, replicas=1)", "asp(compensate=0.5)"),
        ("inproc", "ps(servers=3, on=workers, replicas=1)", "asp"),
        ("tcp", "ps(servers=1, on=workers, replicas=1)", "ssp(staleness=1)"),
    ],
)
def test_followers_make_the_same_updates_in_the_same_order(on: Run, kind: str, place: str, mode: str) -> None:
    """The momentum depends on the order, and so does the compensation: all bits are those of the owner."""
    strategy = f"{place} sync={mode}"

    def body(session: Session) -> list[Sgd]:
        training, made = Training(session), list[Sgd]()

        def build(holdings: Any) -> Sgd:
            made.append(Sgd(holdings))
            return made[-1]

        training.build = build  # type: ignore[method-assign]
        worker = training.start()
        for step in range(STEPS if worker else 0):
            training.step(worker, step, momentum=0.5)
        session.shutdown()
        return made

    found = on(kind, strategy, body)
    roles, group = Strategy.parse(strategy).roles, Group(WORKERS, Strategy.parse(strategy).servers)
    assert roles is not None
    for owner, follower in zip(roles.places(group), roles.followers(group), strict=True):
        (own, *_), (*_, follows) = found[owner], found[follower]
        assert len(own.history) == WORKERS * STEPS + 1
        for one, other in zip(own.history, follows.history, strict=True):
            assert [weights.tolist() for weights in one] == [weights.tolist() for weights in other]


def took_in(on: Run, strategy: str, first: int) -> list[list[Any]]:
    """By owner, the gradients that every update had, in steps from ``first`` on; updates change no weights."""

    def body(session: Session) -> list[Any]:
        training, seen = Training(session), list[Any]()
        build = training.build

        def noting(holdings: Any) -> Any:
            owner = build(holdings)
            apply = owner.apply

            def noted(groups: Any, scale: float) -> None:
                seen.append(np.concatenate([np.empty(0), *(held.gradient for held in owner.holdings)]))
                apply(groups, scale)

            owner.apply = noted  # type: ignore[method-assign]
            return owner

        training.build = noting  # type: ignore[method-assign]
        worker = training.start()
        if worker is not None and first and worker.exchange.compression is not None:
            worker.exchange.compression.resume_at(first)
            worker.resume(first, [])
        for step in range(2 if worker else 0):
            training.push(worker, step)
            training.tell(worker, [{"lr": 0.0}])
            training.pull(worker)
        session.shutdown()
        return seen

    return [seen for seen in on("inproc", strategy, body) if seen]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "place", "first"),
    [(row, *other) for row, other in zip(CODECS, cycle([("ps(servers=2)", 7), ("ps(servers=2, on=workers)", 0)]))],
)
def test_what_is_decoded_by_itself_adds_up_to_what_is_merged(on: Run, place: str, first: int, text: str) -> None:
    """The same payloads, also in a run that is resumed: those of one worker alone are its share."""
    try:
        Strategy.parse(f"{place} sync=ssp(staleness=0) codec={text}")
    except StrategyError:
        return  # by name, as another test has it
    merged, single = (took_in(on, f"{place} {sync}codec={text}", first) for sync in ("", "sync=ssp(staleness=0) "))
    assert len(merged) == len(single) > 0
    for together, apart in zip(merged, single, strict=True):
        assert len(apart) == WORKERS * len(together)
        for step, wanted in enumerate(together):
            found = np.sum(apart[WORKERS * step : WORKERS * (step + 1)], axis=0)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_codecs_that_begin_later_are_refused_and_so_is_the_fastest() -> None:
    with pytest.raises(StrategyError, match=r"still warms up.*nearest .*codec=feedback\(onebit\)") as refused:
        Strategy.parse("ps(servers=1) sync=asp codec=feedback(onebit, warmup=5)")
    assert "sync=asp" in str(refused.value)
    with pytest.raises(StrategyError, match=r"codec=auto measures .*nearest that works is 'ps\(servers=1\) sync=asp'"):
        Strategy.parse("ps(servers=1) sync=asp codec=auto")


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("place", FEW)
def test_with_no_staleness_it_is_bulk_synchronous(on: Run, kind: str, place: str) -> None:
    """To the bit, in every step of every worker: the sums are exact."""
    merged = on(kind, place, train_merged)
    for (_, seen), wanted in zip(
        on(kind, f"{place} sync=ssp(staleness=0)", train)[:WORKERS], merged[:WORKERS], strict=True
    ):
        for (weights, _), other in zip(seen, [*wanted, wanted[-1]], strict=True):
            np.testing.assert_array_equal(weights, other)


def train_merged(session: Session, **values: Any) -> list[Any]:
    """With the share of the learning rate that a push by itself is applied with."""
    training = Training(session)
    worker = training.start()
    return [training.step(worker, step, LR / WORKERS, **values) for step in range(STEPS if worker else 0)]


@pytest.mark.parametrize("momentum", ["own", "dana"])
@pytest.mark.parametrize("place", FEW)
def test_momenta_of_each_worker_add_up_to_that_of_one(on: Run, place: str, momentum: str) -> None:
    """Where nobody is ahead: to the bit, since the sums are exact. One momentum of all pushes forgets sooner."""
    values: dict[str, Any] = {"momentum": 0.5, "nesterov": False}

    def body(session: Session) -> list[Any]:
        training = Training(session)
        worker = training.start()
        seen = [training.step(worker, step, **values) for step in range(STEPS if worker else 0)]
        if worker is not None:
            worker.consolidate()
        session.shutdown()
        return [*seen, np.concatenate(training.weights)]

    merged = on("inproc", place, partial(train_merged, **values | {"nesterov": momentum == "dana"}))
    for seen in on("inproc", f"{place} sync=ssp(staleness=0, momentum={momentum})", body)[:WORKERS]:
        np.testing.assert_array_equal(seen[-1], merged[0][-1])
    for seen in on("inproc", f"{place} sync=ssp(staleness=0)", body)[:WORKERS]:
        assert not np.array_equal(seen[-1], merged[0][-1])


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("place", FEW)
def test_a_slow_worker_stops_nobody_without_a_bound(on: Run, kind: str, place: str) -> None:
    """The first one, which may own a part, begins when the others have made all their steps."""
    done = threading.Barrier(WORKERS)

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return training, []
        if session.rank == 0:
            done.wait(LIMIT_S)
        for step in range(STEPS):
            training.step(worker, step)
        if session.rank > 0:
            done.wait(LIMIT_S)
        session.shutdown()
        return training, []

    check(on(kind, f"{place} sync=asp", body))


@pytest.mark.every(2)
@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("place", FEW)
def test_a_slow_worker_stops_the_others_at_the_bound(on: Run, kind: str, place: str, by: int) -> None:
    """They make ``by`` steps without it, push one more, and have no further one before it has pushed."""
    ahead, waiting, begun = threading.Barrier(WORKERS), threading.Event(), [0]

    def applied(updates: int) -> None:
        if updates == (WORKERS - 1) * (by + 1):
            waiting.set()

    def body(session: Session) -> Any:
        training = Training(session)
        training.applied = applied
        worker = training.start()
        for step in range(STEPS if worker else 0):
            if session.rank == 0 and step == 0:
                ahead.wait(LIMIT_S)
                assert waiting.wait(LIMIT_S)
            if session.rank == 0:
                begun[0] += 1
            training.step(worker, step)
            assert step + 1 <= begun[0] + by
            if session.rank > 0 and step + 1 == by:
                ahead.wait(LIMIT_S)
        session.shutdown()
        return training, []

    check(on(kind, f"{place} sync=ssp(staleness={by})", body))


@pytest.mark.parametrize(
    ("kind", "strategy", "steps"),
    [
        (row, *other)
        for row, other in zip(
            NEAR,
            cycle(
                [
                    (f"{FEW[0]} sync=ssp(staleness=0)", 0),
                    (f"{FEW[1]} sync=ssp(staleness=0)", 0),
                    (f"{FEW[1]} sync=asp", 1),
                ]
            ),
        )
    ],
)
def test_who_does_not_come_is_named_when_nothing_has_moved_for_too_long(
    on: Run, kind: str, strategy: str, steps: int
) -> None:
    """In a step, and at the end, when owners on workers wait for the last push of all."""
    over = threading.Semaphore(0)

    def body(session: Session) -> None:
        training = Training(session)
        worker = training.start()
        for step in range((steps if session.rank == 1 else 1) if worker else 0):
            training.step(worker, step)
        if worker is not None and session.rank == 1:
            for _ in range(WORKERS - 1):
                assert over.acquire(timeout=LIMIT_S)

    def end(session: Session) -> Exception | None:
        try:
            return end_of(body, session)
        finally:
            if session.is_worker:
                over.release()

    found = on(kind, strategy, end, limit_s=1.0)
    named = [error for error in found if isinstance(error, PeerTimeout)]
    assert named, found
    assert {error.rank for error in named} == {1}


def end_of(body: Callable[[Session], None], session: Session) -> Exception | None:
    """What a process ends with. Here nothing tells the others, who see that it is gone."""
    try:
        body(session)
        return session.shutdown()
    except SynclineError as error:
        return error


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("place", FEW)
@pytest.mark.parametrize("mode", ["asp", "ssp(staleness=1)"])
def test_who_leaves_early_is_not_missed(on: Run, kind: str, place: str, mode: str) -> None:
    """Nor is what it owns: the others go on, and the slowest is one of them."""
    steps = [STEPS, 1, 3]

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        for step in range(steps[session.rank] if worker else 0):
            training.step(worker, step)
        session.shutdown()
        return training.owned()

    np.testing.assert_array_equal(joined(on(kind, f"{place} sync={mode}", body)), expected(steps))


def wrong(how: str, session: Session) -> None:
    """Rank 1 pushes something wrong."""
    training = Training(session, longer={"longer": 5, "shorter": -5}.get(how, 0) if session.rank == 1 else 0)
    worker = training.start()
    if worker is not None and session.rank == 1 and how == "version":
        worker.owners._versions[0] = 7
    if worker is not None and session.rank == 1 and how == "clock":
        worker.steps = 3
    for step in range(2 if worker else 0):
        if session.rank == 1 and how == "old" and step == 1:
            worker.steps = 0
        if session.rank == 1 and how in ("no groups", "no rate"):
            training.push(worker, step)
            training.tell(worker, [] if how == "no groups" else [{"lr": "none"}])
        elif session.rank == 1 and how in ("scale", "descent", "weight"):
            training.push(worker, step)
            worker.scale = {"scale": 1e300, "descent": -1.0}.get(how, 1.0)
            worker.trained.weight = 1e300 if how == "weight" else 1.0
            training.tell(worker, [{"lr": 0.1}])
        else:
            training.step(worker, step)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)"])
@pytest.mark.parametrize(
    ("how", "fault", "says"),
    [
        ("longer", ProtocolError, "bucket 0 of rank 1|rank 1's push"),
        ("shorter", ProtocolError, "bucket 0 of rank 1|rank 1's push"),
        (
            "version",
            ProtocolError,
            "a request of rank 1 .*it belongs to version 7 of the weights, but version 0 was sent",
        ),
        ("no groups", ProtocolError, "the update with the values that .*rank 1.* has pushed fails .IndexError"),
        ("no rate", UsageError, "the optimizer's group 0 has no number as 'lr': use ssp.rate=own"),
        ("scale", ProtocolError, "a request of rank 1 .*its scale is 1e.300"),
        ("descent", ProtocolError, "a request of rank 1 .*its scale is -1.0"),
        ("weight", ProtocolError, "a request of rank 1 .*its weight is 1e.300"),
        ("clock", MismatchError, "rank 1 sent a push for step 4, but its next step is 1"),
        ("old", MismatchError, "rank 1 sent a push for step 1, but its next step is 2"),
    ],
)
def test_a_push_that_is_wrong_names_its_worker(
    on: Run, kind: str, place: str, how: str, fault: type[Exception], says: str
) -> None:
    """At its owner; in shared memory, where both see a wrong length, perhaps at the worker itself."""
    found = on(kind, f"{place} sync=ssp(staleness=0)", partial(end_of, partial(wrong, how)))
    named = [error for error in found if isinstance(error, fault) and re.search(says, str(error))]
    assert named, found
    if kind != "shm" or how == "version":
        assert getattr(named[0], "rank", 1) == 1
