"""What the state machine of a step says is carried out, with no framework, engine or array: every schedule and mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from syncline.engine.order import Work
from syncline.engine.step import Action, Agree, Apply, Average, BucketPhase, Steps, Submit, Wait
from syncline.nouns import Layer, Spec
from syncline.schedules import Schedule
from syncline.session.checks import Checks
from syncline.session.stats import Pace
from syncline.session.tickets import AVERAGE, STEP, Meeting, Ticket, step_of
from syncline.sync import Averages, SyncMode
from syncline.sync.post_local import PostLocal
from syncline.testing.schedules import MODES, SLICED, Averaged, Bound, Every, Laid, Sliced, go_together
from syncline.training.model import Framework, TrainedModel

TENSORS, KEY, STEPS = 3, 7, 5
BOTH = PostLocal(after=2, steps=2)


class Rank:
    """A model with a session and buckets of which nothing is there but what is ``heard`` of them, in order."""

    def __init__(self, schedule: Schedule, mode: SyncMode) -> None:
        layers = [Layer(Spec(f"w{index}", (4,))) for index in range(TENSORS)]
        buckets = schedule.buckets(layers)
        self.layout = Laid(buckets, [schedule.priority(bucket) for bucket in buckets])
        self.schedule, self.mode, self.key, self.flags, self.renews = schedule, mode, KEY, 0b10, 0
        self.staging, self.world_size = SimpleNamespace(device=None), 1
        self.paces: dict[int, Pace] = {}
        self.process = SimpleNamespace(flight=None)
        self.checks, self.error_every, self.measure_error = Checks(), 0, lambda *_: None
        self.engine, self.strategy = self, SimpleNamespace(server_holds_weights=False)
        self.heard: list[tuple[Any, ...]] = []
        self.operations: dict[int, BucketPhase] = {}  # by the identity of their works
        self.kept: list[Work] = []
        self.counts = 0.0  # by which weights differ
        framework = Framework(
            check=self._hear("check"),
            begin=self._hear("begin"),
            weight=self._weigh,
            met=self._hear("met"),
            apply=self._hear("apply"),
            averaged=self._hear("averaged"),
        )
        self.trained = TrainedModel(cast("Any", self), cast("Any", self), TENSORS, framework)
        if isinstance(mode, Averages):
            self.trained.weights = cast("Any", self)
        self.twin = self._machine()

    def _machine(self, begun: int = 0) -> Steps:
        return Steps(TENSORS, self.layout, self.schedule, self.mode, begun=begun)

    def _hear(self, what: str) -> Callable[..., None]:
        def hear(*given: Any) -> None:
            self.heard.append((what, *given, self.trained.weight if what == "begin" else self.trained.meeting))

        return hear

    def _weigh(self) -> float:
        self.counts += 1.0
        self.heard.append(("weight",))
        return self.counts

    # As what exchanges weights.

    fingerprint = 0b11

    def weight(self, counted: Callable[[], float]) -> float:
        return counted()

    def put(self) -> None:
        self.heard.append(("put",))

    def take(self, meeting: Any, step: int) -> None:
        self.heard.append(("average", step, meeting))

    # As the session, its engine and the exchange of buckets.

    def of_weights(self, step: int) -> bool:
        return isinstance(self.mode, Averages) and self.mode.averages(step)

    def meet(self, kind: int, argument: int, *, weight: float, flags: int) -> Meeting:
        ticket = Ticket(kind, 0, argument, weight, flags)
        self.heard.append(("meet", ticket))
        return cast("Meeting", ticket)

    def exchanged(self, meeting: Any) -> None:
        assert meeting is self.trained.meeting

    def start(self, operation: BucketPhase, meeting: Any, priority: float, after: Work | None) -> Work:
        behind = None if after is None else self.operations[id(after)]
        self.heard.append(("start", Submit(operation, priority, behind), meeting))
        work = Work("")
        self.kept.append(work)
        self.operations[id(work)] = operation
        return work

    def wait(self, *works: Work) -> None:
        self.heard.append(("wait", Wait(tuple(self.operations[id(work)] for work in works))))

    # What happens to the model.

    def tell(self, event: Callable[[Steps], list[Action]]) -> list[Action]:
        """Tell the machine, and a twin that says what is to be done."""
        wanted = event(self.twin)
        self.trained.do(event(self.trained.machine))
        return wanted

    def train(self) -> list[Action]:
        """Some steps; what the twin has said."""
        wanted: list[Action] = []
        for _ in range(STEPS):
            for tensor in range(TENSORS):
                wanted += self.tell(lambda steps, tensor=tensor: steps.needed(tensor))
            for tensor in reversed(range(TENSORS)):
                wanted += self.tell(lambda steps, tensor=tensor: steps.produced(tensor))
            wanted += self.tell(Steps.backward_ended)
            self.trained.forget()
            wanted += self.tell(Steps.stepped)
            wanted += self.tell(Steps.updated)
            assert (self.trained.meeting, self.trained.begun) == (None, False)
        return wanted + self.tell(Steps.flush)

    @property
    def done(self) -> list[Action]:
        """What was heard, as the machine would say it."""
        found: list[Action] = []
        for what, *given in self.heard:
            if what == "meet":
                found.append(Agree(step_of(given[0])))
            elif what in ("start", "wait", "apply"):
                found.append(given[0])
            elif what == "average":
                found.append(Average(given[0]))
        return found


PAIRS = [(schedule, mode) for schedule in SLICED for mode in (*MODES, BOTH) if go_together(schedule, mode)]


@pytest.mark.parametrize(("schedule", "mode"), PAIRS, ids=str)
def test_what_the_machine_says_is_done_in_its_order(schedule: Schedule, mode: SyncMode) -> None:
    """Nothing is left out, waited for twice, or waited for by another's work."""
    rank = Rank(schedule, mode)
    wanted = rank.train()
    assert rank.done == wanted
    assert not rank.trained._works
    assert any(isinstance(action, (Submit, Apply)) for action in wanted)


@pytest.mark.parametrize("mode", [Every(), Averaged(2), BOTH], ids=str)
def test_buckets_go_by_the_ticket_of_their_own_step(mode: SyncMode) -> None:
    """Which says what it is for, and shows what belongs to that: the layout's flags, or the weights' mark."""
    rank = Rank(Sliced("split"), mode)
    rank.train()
    tickets = {step_of(given[0]): given[0] for what, *given in rank.heard if what == "meet"}
    for step, ticket in tickets.items():
        averages = not mode.due(step)
        assert (ticket.kind, ticket.flags) == ((AVERAGE, 0b11) if averages else (STEP, 0b10))
        assert ("met", ticket.kind, ticket, step, ticket) in rank.heard
        assert (("average", step, ticket) in rank.heard) == averages
    for what, *given in rank.heard:
        assert what != "averaged" or (given[0] == AVERAGE and given[1] is not None)  # it knows the ticket still
    started = [(given[0].operation.step, given[1]) for what, *given in rank.heard if what == "start"]
    assert started
    assert all(meeting is tickets[step] for step, meeting in started)
    assert rank.trained.meeting is None


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (Every(), ["check", "begin", "weight", "meet", "met", "start"]),
        (Averaged(1), ["check", "weight", "meet", "met", "put", "start"]),
        (Bound(1), ["check", "weight", "begin", "start"]),
    ],
    ids=str,
)
def test_a_step_begins_when_it_may_and_with_what_it_counts(mode: SyncMode, wanted: list[str]) -> None:
    """Once in every step; owners who take pushes one by one are told what this one counts, not the last one."""
    rank = Rank(Sliced(), mode)
    for number in range(1, STEPS + 1):
        rank.heard.clear()
        for tensor in reversed(range(TENSORS)):
            rank.tell(lambda steps, tensor=tensor: steps.produced(tensor))
        rank.tell(Steps.backward_ended)
        rank.trained.forget()
        rank.tell(Steps.stepped)
        rank.tell(Steps.updated)
        heard = [what for what, *_ in rank.heard if what not in ("wait", "apply", "average", "averaged")]
        assert heard[: len(wanted)] == wanted
        assert set(heard[len(wanted) :]) == {"start"}
        if not mode.merges:
            assert ("begin", float(number)) in rank.heard


@pytest.mark.parametrize("kind", [STEP, AVERAGE])
@pytest.mark.parametrize("phases", ["whole", "split"])
def test_who_has_no_batches_hands_over_what_the_others_do(kind: int, phases: Any) -> None:
    """In the step of theirs, whatever its own number is; they have met, and nobody waits for more of this rank."""
    mode = Every(3) if kind == STEP else Averaged(3)
    rank, other = Rank(Sliced(phases), mode), Rank(Sliced(phases), mode)
    meeting = rank.meet(kind, 5, weight=0.0, flags=0)
    rank.heard.clear()
    rank.trained.shadow(kind, meeting, 5)
    other.trained.resume_at(5)
    other.twin = other._machine(5)
    for tensor in reversed(range(TENSORS)):
        other.tell(lambda steps, tensor=tensor: steps.produced(tensor))
    for event in (Steps.backward_ended, Steps.stepped, Steps.updated):
        other.tell(event)
    submitted = [action for action in other.done if isinstance(action, Submit)]
    assert submitted
    mine = [action for action in rank.done if isinstance(action, Submit)]
    assert sorted(mine, key=lambda one: one.operation) == sorted(submitted, key=lambda one: one.operation)
    assert rank.heard[0] == ("met", kind, meeting, 5, meeting)
    assert not any(isinstance(action, (Agree, Apply)) for action in rank.done)
    assert rank.trained.machine.begun == 0


def test_nothing_of_the_framework_is_held_when_it_is_over() -> None:
    """What a framework gives are as a rule its own methods: the model would hold itself."""
    rank = Rank(Sliced(), Every())
    rank.train()
    rank.heard.clear()
    rank.trained.close()
    rank.tell(lambda steps: steps.produced(0))
    assert [what for what, *_ in rank.heard] == ["meet"]
