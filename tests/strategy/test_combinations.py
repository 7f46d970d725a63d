"""What goes together and what does not: each impossible combination names the nearest that works."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from syncline import registry
from syncline.errors import NotBuiltError, StrategyError, UsageError
from syncline.nouns import Group
from syncline.schedules.fixed import Fixed
from syncline.strategy.grammar import Part
from syncline.strategy.strategy import Strategy, check_elastic
from syncline.sync.bsp import Bsp
from syncline.testing.schedules import Bound, Free


@pytest.fixture
def later_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for parts of the grammar, in a registry of this test's own."""
    for kind in registry.KINDS:
        if kind != "workloads":
            registry.names(kind)
        monkeypatch.setitem(registry._entries, kind, dict(registry._entries[kind]))

    monkeypatch.setitem(registry._entries, "codecs", {"none": registry._entries["codecs"]["none"]})

    @registry.register("codecs", "topk")
    @dataclass(frozen=True)
    class TopK:
        biased: ClassVar[bool] = True
        contraction: ClassVar[bool] = True
        ratio: float

    @registry.register("codecs", "qsgd")
    @dataclass(frozen=True)
    class Qsgd:
        biased: ClassVar[bool] = False
        contraction: ClassVar[bool] = False
        levels: int = 256

    @registry.register("codecs", "feedback", wraps="codec")
    @dataclass(frozen=True)
    class Feedback:
        codec: Any
        decay: float = 1.0
        biased: ClassVar[bool] = False
        combine: ClassVar[str] = "owner"


@pytest.mark.usefixtures("later_parts")
class TestCombinations:
    @pytest.mark.parametrize(
        ("text", "canonical"),
        [
            ("ring codec=topk(ratio=0.01)", "ring codec=feedback(topk(ratio=0.01))"),
            ("codec=feedback(topk(ratio=0.01))", "codec=feedback(topk(ratio=0.01))"),
            ("codec=feedback(codec=topk(ratio=0.01), decay=0.5)", "codec=feedback(topk(ratio=0.01), decay=0.5)"),
            ("codec=topk(ratio=0.01) feedback=off", "codec=topk(ratio=0.01) feedback=off"),
            ("codec=qsgd", "codec=qsgd"),
        ],
    )
    def test_nested_codecs(self, text: str, canonical: str) -> None:
        strategy = Strategy.parse(text)
        assert str(strategy) == canonical
        assert Strategy.parse(canonical) == strategy
        built: Any = strategy.codec_object()
        if strategy.codec.name == "feedback":
            assert built.codec.ratio == 0.01

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("native transport=tcp", "the nearest that works is 'native transport=torch'"),
            ("native codec=qsgd", "cannot apply codec=qsgd; the nearest that works is 'codec=qsgd'"),
            ("ring transport=torch(backend=nccl)", "cannot run plans.*is 'native transport=torch\\(backend=nccl\\)'"),
            ("native(x=1)", "native takes no arguments"),
            ("ring sync=asp", r"owners of the weights .* ring has none; the nearest .* 'ps\(servers=1\) sync=asp'"),
            ("sync=ssp(staleness=3)", r"auto has none; .* is 'ps\(servers=1\) sync=ssp\(staleness=3\)'"),
            ("native sync=asp", r"native has none; the nearest that works is 'ps\(servers=1\) sync=asp'"),
            ("ps(servers=2, update=worker) sync=asp", r"ps has none; the nearest .* 'ps\(servers=2\) sync=asp'"),
            ("ps(servers=1) sync=asp schedule=delayed", r"two steps in flight.* is 'ps\(servers=1\) sync=asp'"),
            (
                "ps(servers=2, on=workers, replicas=1, update=worker)",
                r"all workers make them; .* is 'ps\(servers=2, on=workers, update=worker\)'",
            ),
            ("ps(on=workers, replicas=1) codec=qsgd", r"get payloads; .* is 'ps\(servers=1, on=workers, replicas=1\)'"),
            ("ps(on=workers, replicas=2)", "replicas of ps"),
            (
                "ring sync=bsp(backup=1)",
                r"owners receive .*'ps\(servers=1\) sync=bsp\(backup=1\)'",
            ),
            (
                "ps sync=bsp(backup=-1)",
                r"backup=-1: the number of workers that updates do not wait for must be 0 or more",
            ),
            (
                "ps sync=ssp(staleness=-1)",
                r"staleness=-1: the number of steps must be 0 or more; ssp\(staleness=0\) keeps",
            ),
            ("ps sync=ssp", r"ssp needs staleness, as in ssp\(staleness=..."),
            (
                "ps sync=asp(compensate=-0.5)",
                "compensate=-0.5: the lambda of delay",
            ),
            ("ps sync=asp(rate=none)", "rate of asp"),
            ("ps sync=asp(momentum=0.9)", "momentum of asp"),
            ("codec=feedback(qsgd)", "diverges.*nearest that works is 'codec=qsgd'"),
            ("codec=feedback", r"needs codec, as in feedback\(CODEC, decay=1.0\)"),
            ("codec=feedback(topk(ratio=1), codec=qsgd)", "given twice"),
            ("codec=topk", "topk needs ratio"),
            ("codec=feedback(int8)", "unknown codec 'int8'"),
            ("codec=feedback(tokp(ratio=1))", "did you mean 'topk'"),
        ],
    )
    def test_impossible_ones_name_the_nearest_that_works(self, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Strategy.parse(text)

    def test_native_brings_its_own_transport(self) -> None:
        strategy = Strategy.parse("native")
        assert strategy.transport == Part("auto")
        assert strategy.resolve(Group(3), hosts=2).transport.name == "torch"
        assert Strategy.parse("native transport=mpi").resolve(Group(3)).transport.name == "mpi"

    def test_native_is_a_collective_and_has_no_plan(self) -> None:
        for text in ("native", "native transport=mpi", "native transport=torch(backend=nccl)"):
            strategy = Strategy.parse(text)
            assert strategy.collective is not None
            assert strategy.collective.goal == "allreduce"
            with pytest.raises(UsageError, match="native has no plan"):
                strategy.plan(Group(2))
        assert Strategy.parse("ring transport=mpi").collective is None
        assert Strategy().collective is None


def own(base: type, **properties: Any) -> type:
    """A part like another one but for these properties; one that is None it does not have."""
    names = [name for name in dir(base) if not name.startswith("_") and properties.get(name, "") is not None]
    return type("Own", (), {name: getattr(base, name) for name in names} | {k: v for k, v in properties.items() if v})


AGREES = {"agree": lambda *_: None, "pull": lambda *_: 1.0, "remembers": True}


@pytest.mark.usefixtures("later_parts")
@pytest.mark.parametrize(
    ("kind", "properties", "says"),
    [
        ("schedules", {"release": "whenever"}, "release='whenever', which no engine supports: it must be 'ready' or"),
        ("schedules", {"phases": "thirds"}, "phases='thirds', which no engine supports: it must be 'whole' or 'split'"),
        ("schedules", {"apply": "never"}, "apply='never', which .* 'step' or 'layer' or 'next_step'"),
        ("schedules", {"apply": None}, "apply=None"),
        ("schedules", {"in_flight": -1}, "in_flight=-1: it must be the number of buckets in flight at once, 1 or more"),
        ("schedules", {"in_flight": "all"}, "in_flight='all'"),
        ("schedules", {"measures": -1}, "measures=-1: it must be a number of steps, 0 or more"),
        ("schedules", {"measures": None}, "measures=None"),
        ("schedules", {"priority": None}, r"has no priority\(\)"),
        (
            "schedules",
            {"local": True},
            r"local=True \(workers make steps of their own\) and apply='step': .* with apply='next_step' only",
        ),
        ("schedules", {"local": True, "apply": "layer"}, "and apply='layer': engines support local steps"),
        ("schedules", {"local": "on", "apply": "next_step"}, "has local='on': it must be True or False"),
        ("sync", {"averages": lambda *_: True}, r"exchanges weights, but has neither agree\(\), .* nor mix\(\)"),
        ("sync", AGREES | {"averages": lambda *_: True}, r"True from averages\(0\), but due\(\) is True as well"),
        ("sync", AGREES | {"averages": lambda *_: "yes"}, r"returns 'yes' from averages\(0\)"),
        ("sync", AGREES | {"averages": lambda *_: 1 // 0}, "fails at step 0 .ZeroDivisionError"),
        ("sync", {"may_proceed": lambda *_: True}, "lets workers run ahead of each other"),
        (
            "sync",
            {"may_proceed": lambda _, clock, slowest: clock <= slowest or slowest > 40},
            "run ahead of each other",
        ),
        ("sync", {"may_proceed": lambda *_: False}, "lets no worker go on after step 0"),
        ("sync", {"due": lambda _, step: 1 / (step - 3)}, r"returns -0.33.* from due\(0\)"),
        ("sync", {"due": lambda _, step: 1 // (step - 3) == 0}, "fails at step 3 .ZeroDivisionError"),
        ("sync", {"merges": None}, "merges=None: it must be True or False, and says whether all pushes form one"),
        ("sync", {"due": None}, r"has no due\(\)"),
        ("sync", {"rate": "half", "compensate": 0.5}, "has rate='half', which no owner supports.* 'shared' or 'own'"),
        ("sync", {"rate": "own", "compensate": "off"}, "has compensate='off': the lambda"),
    ],
)
def test_what_a_part_asks_for_is_done_or_refused(kind: str, properties: dict[str, Any], says: str) -> None:
    word, base = ("schedule", Fixed) if kind == "schedules" else ("sync", Bsp)
    registry.register(kind, "own")(own(base, **properties))
    with pytest.raises(StrategyError, match=f"{word}=own.*{says}.*the nearest that works is 'ring'"):
        Strategy.parse(f"ring {word}=own")


@pytest.mark.usefixtures("later_parts")
def test_a_mode_whose_pushes_are_not_merged_pushes_in_every_step() -> None:
    registry.register("sync", "own")(own(Bound, due=lambda _, step: step % 2 == 1))
    with pytest.raises(StrategyError, match=r"owners of the weights miss updates; .* works is 'ps\(servers=1\)'"):
        Strategy.parse("ps sync=own")


@pytest.mark.usefixtures("later_parts")
@pytest.mark.parametrize(
    ("text", "says", "works"),
    [
        ("native schedule=urgent", "but collectives of native cannot", "schedule=urgent"),
        ("ring schedule=urgent transport=slow", "but messages of transport=slow cannot", "ring schedule=urgent"),
    ],
)
def test_a_schedule_with_urgent_buckets_needs_parts_that_let_them_overtake(text: str, says: str, works: str) -> None:
    urgent = own(Fixed, priority=lambda _, bucket: float(bucket.slices[0].tensor))
    registry.register("schedules", "urgent")(urgent)
    registry.register("transports", "slow", priority=False)(type("Slow", (), {}))
    for fits in ("ring schedule=urgent transport=tcp", "native schedule=fixed", "ring transport=slow"):
        Strategy.parse(fits)
    with pytest.raises(StrategyError, match=f"schedule=urgent lets urgent buckets overtake.*{says}") as refused:
        Strategy.parse(text)
    assert f"the nearest that works is {works!r}" in str(refused.value)


@pytest.mark.usefixtures("later_parts")
def test_buckets_of_measured_times_need_workers_that_meet() -> None:
    registry.register("schedules", "timed")(own(Fixed, measures=3))
    registry.register("sync", "free")(Free)
    assert str(Strategy.parse("ring schedule=timed")) == "ring schedule=timed"
    with pytest.raises(StrategyError, match=r"schedule=timed changes its .* under sync=free they never meet"):
        Strategy.parse("ps(servers=1) sync=free schedule=timed")


@pytest.mark.usefixtures("later_parts")
@pytest.mark.parametrize("properties", [{"phases": "split"}, {"apply": "layer"}, {}])
def test_what_some_engine_does_is_accepted(properties: dict[str, Any]) -> None:
    registry.register("schedules", "own")(own(Fixed, **properties))
    registry.register("sync", "odd")(own(Bsp, due=lambda _, step: step % 2 == 1))
    assert str(Strategy.parse("ring schedule=own sync=odd")) == "ring sync=odd schedule=own"


@pytest.mark.usefixtures("later_parts")
def test_two_steps_in_flight_need_an_exchange_in_every_step() -> None:
    registry.register("schedules", "late")(own(Fixed, apply="next_step"))
    registry.register("sync", "odd")(own(Bsp, due=lambda _, step: step % 2 == 1))
    with pytest.raises(StrategyError, match=r"two steps in flight.*every step.*nearest that works is 'ring sch"):
        Strategy.parse("ring sync=odd schedule=late")


@pytest.mark.parametrize(
    ("text", "says", "works"),
    [
        (
            "ps(servers=1) sync=local(steps=4)",
            "owners hold the weights",
            "ps(servers=1, update=worker) sync=local(steps=4)",
        ),
        ("sync=diloco(steps=4) schedule=delayed", "end in the next iteration", "sync=diloco(steps=4)"),
        ("sync=easgd(steps=4) schedule=priority", "end in the next iteration", "sync=easgd(steps=4)"),
        ("sync=local(steps=4) schedule=merged", "measures an exchange of gradients", "sync=local(steps=4)"),
        (
            "ps(servers=1, update=worker) sync=post_local(after=2, steps=4) codec=int8",
            "residual of the gradients to the differences",
            "sync=post_local(after=2, steps=4) codec=feedback(int8)",
        ),
        (
            "sync=easgd(steps=4) codec=topk(ratio=0.1)",
            "keep a distance from the agreed weights, .*; the error feedback",
            "sync=easgd(steps=4) codec=topk(ratio=0.1) feedback=off",
        ),
        (
            "sync=easgd(steps=4) codec=powersgd(rank=2)",
            "until training diverges",
            "sync=easgd(steps=4) codec=powersgd(rank=2) feedback=off",
        ),
        (
            "sync=easgd(steps=4) codec=ternary(rounding=nearest)",
            "until training diverges",
            "sync=easgd(steps=4) codec=ternary(rounding=nearest) feedback=off",
        ),
        ("sync=easgd(steps=4) codec=adaptive", "until training diverges", "sync=easgd(steps=4)"),
        ("sync=easgd(steps=4) codec=threshold(ratio=0.1, momentum=0.9)", "diverges", "sync=easgd(steps=4)"),
    ],
)
def test_weights_that_are_exchanged_are_refused_where_they_cannot_be(text: str, says: str, works: str) -> None:
    with pytest.raises(StrategyError, match=says) as refused:
        Strategy.parse(text)
    assert f"the nearest that works is {works!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("sync", "says"),
    [
        (
            "local(steps=0)",
            r"steps=0 of local: workers exchange weights after 1 step or more, such as local\(steps=16\)",
        ),
        ("local(steps=-1)", "steps=-1 of local"),
        ("post_local(after=-1, steps=2)", "after=-1 of post_local: choose a number of steps"),
        ("post_local(after=1, steps=0)", "steps=0 of post_local"),
        ("easgd(steps=0)", "steps=0 of easgd"),
        ("easgd(steps=2, beta=0)", "beta=0.0 of easgd: choose a share above 0 and up to 1"),
        ("easgd(steps=2, beta=1.01)", "beta=1.01 of easgd"),
        ("diloco(steps=0)", "steps=0 of diloco"),
        ("diloco(steps=2, lr=0)", "lr=0.0 of diloco: choose a learning rate of the outer optimizer above 0"),
        ("diloco(steps=2, momentum=1)", "momentum=1.0 of diloco: choose a number from 0 up to below 1"),
        ("diloco(steps=2, momentum=-0.1)", "momentum=-0.1 of diloco"),
        ("local", r"local needs steps, as in local\(steps=...\)"),
    ],
)
def test_periods_and_shares_that_make_no_sense_are_refused(sync: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy.parse(f"ring sync={sync}")


@pytest.mark.parametrize(
    ("text", "says", "works"),
    [
        ("recursive_doubling schedule=split", "two phases.*cannot be split", "schedule=split"),
        ("ring codec=int8 schedule=split", r"two phases.*\(int8\) are not sums", "ring schedule=split"),
        (
            "native schedule=split transport=torch",
            "but collectives of native cannot",
            "schedule=split transport=torch",
        ),
        ("ps(servers=1, update=worker) schedule=split", "servers return", "schedule=split"),
        ("ps(servers=1) schedule=split", "push and pull are two phases", "ps(servers=1) schedule=priority"),
        ("ps(servers=1) schedule=delayed", "owners of the weights handle one step at a time", "ps(servers=1)"),
        ("ps(servers=1, update=worker) schedule=delayed", "servers that only sum", "schedule=delayed"),
    ],
)
def test_steps_that_end_later_are_refused_where_they_cannot(text: str, says: str, works: str) -> None:
    with pytest.raises(StrategyError, match=says) as refused:
        Strategy.parse(text)
    assert f"the nearest that works is {works!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("sync=asp", "adds up the gradients of a host's workers for one push, and under sync=asp every worker's push"),
        ("sync=bsp(backup=1)", r"and under sync=bsp\(backup=1\) owners receive every worker's push separately"),
        (
            "sync=ssp(staleness=2) codec=feedback(int8)",
            "and under sync=ssp every worker's push is an update of its own",
        ),
    ],
)
def test_a_host_pushes_for_all_its_workers(words: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says) as refused:
        Strategy.parse(f"ps(servers=1, local=on) {words}")
    assert f"the nearest that works is 'ps(servers=1) {words}'" in str(refused.value)


_ELASTIC = (
    (
        *("ring", "native", "direct(on=device)", "ps(servers=2)", "ps(servers=2, update=worker)"),
        "ps(servers=2, on=workers, replicas=1)",
    ),
    ("bsp", "bsp(backup=1)", "asp", "ssp(staleness=2)", "local(steps=4)"),
    ("none", "int8", "onebit"),
    ("auto", "merged", "delayed"),
    ("auto", "grpc"),
)


def test_a_strategy_that_an_elastic_run_refuses_comes_with_one_that_it_takes() -> None:
    refused = taken = 0
    for architecture, sync, codec, schedule, transport in itertools.product(*_ELASTIC):
        text = f"{architecture} sync={sync} codec={codec} schedule={schedule} transport={transport}"
        try:
            given = Strategy.parse(text)
        except StrategyError:
            continue
        try:
            check_elastic(given, 2)
            taken += 1
        except NotBuiltError as error:
            refused += 1
            asked, use = re.findall(r" '([^']+)'", str(error))
            assert asked == str(given)
            check_elastic(Strategy.parse(use), 2)
            assert (Strategy.parse(use).roles is None) == (given.roles is None)
    assert refused > 50
    assert taken > 5


def test_more_workers_must_be_left_than_are_not_waited_for() -> None:
    with pytest.raises(UsageError, match="waits for all but 1: begin --elastic with 2, or use fewer backup workers"):
        check_elastic(Strategy.parse("ps(servers=2) sync=bsp(backup=1)"), 1)
