"""The strategy grammar: text and value are two forms of one thing, and mistakes name their remedy.

Error feedback under elastic averaging, where workers stay apart from the centre: it ends there or is refused.
``auto(budget=...)``: how it is written, and beside which words it can stand.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline import registry
from syncline.codecs import Floats, Rounds, State, Wraps
from syncline.errors import StrategyError, UsageError
from syncline.frameworks._supported import check_schedule
from syncline.nouns import Group, Rate, Seconds, Size, Spec
from syncline.plans.check import check
from syncline.strategy import words
from syncline.strategy.grammar import Part, read_part, read_value, write_value
from syncline.strategy.strategy import Strategy, check_asked
from syncline.strategy.words import WORDS, kind_of, vocabulary

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(10**12), 10**12),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.from_regex(r"[\w.:/+-]+", fullmatch=True),
    Size: st.one_of(st.integers(0, 2**70), st.sampled_from([1 << 20, 25_000_000, 1024_000, 0])),
    Rate: st.one_of(st.floats(0, allow_nan=False, allow_infinity=False), st.sampled_from([1e9, 2.5e9, 0.1])),
    Seconds: st.one_of(st.floats(0, 1e12), st.sampled_from([0.005, 1e-9, 90.0, 0.0015])),
    Literal["plain", "fancy", 3]: st.sampled_from(["plain", "fancy", 3]),
    int | None: st.one_of(st.none(), st.integers()),
    Rate | None: st.one_of(st.none(), st.floats(0, allow_nan=False, allow_infinity=False), st.sampled_from([1e9, 1e6])),
}


@pytest.mark.parametrize("annotation", VALUES, ids=str)
@given(data=st.data())
def test_every_value_survives_its_text(annotation: Any, data: st.DataObject) -> None:
    value = data.draw(VALUES[annotation])
    text = write_value(value, annotation)
    back = read_value(text, annotation, "it")
    assert back == value
    assert type(back) is type(value)
    assert write_value(back, annotation) == text


@pytest.mark.parametrize(
    ("text", "annotation", "value", "canonical"),
    [
        ("4mib", Size, 4 << 20, "4MiB"),
        ("0.5GIB", Size, 512 << 20, "512MiB"),
        ("25MB", Size, 25_000_000, "25MB"),
        ("4096", Size, 4096, "4KiB"),
        ("1GBIT", Rate, 1e9, "1Gbit"),
        ("2.5gbit", Rate, 2.5e9, "2500Mbit"),
        ("5MS", Seconds, 0.005, "5ms"),
        ("1.5ms", Seconds, 0.0015, "1500us"),
        ("2", Seconds, 2.0, "2s"),
        ("ON", bool, True, "true"),
    ],
)
def test_units_in_any_case_become_the_largest_exact_one(
    text: str, annotation: Any, value: object, canonical: str
) -> None:
    assert read_value(text, annotation, "it") == value
    assert write_value(value, annotation) == canonical


@pytest.mark.parametrize(
    ("text", "annotation", "says"),
    [
        ("0.3B", Size, "whole number of bytes"),
        ("-4MiB", Size, "negative"),
        ("4MiX", Size, "'MiX'.*MiB"),
        ("many", Size, "number with a unit"),
        ("1e999999999", Size, "number with a unit"),
        ("1e999Gbit", Rate, "finite"),
        ("nan", float, "finite"),
        ("2.5", int, "whole number"),
        ("maybe", bool, "true or false"),
        ("fanzy", Literal["plain", "fancy"], "did you mean 'fancy'"),
        ("1", dict, "cannot be given in a text"),
    ],
)
def test_a_wrong_value_says_what_is_right(text: str, annotation: Any, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        read_value(text, annotation, "it")


def some_parts(word: str) -> st.SearchStrategy[Part]:
    """Any built part of a word with any arguments, in and out of their ranges."""
    auto = [Part("auto")] if any(item.word == word and item.name == "auto" for item in vocabulary()) else []
    found: list[st.SearchStrategy[Part]] = [st.sampled_from(auto)] if auto else []
    for item in vocabulary():
        if item.word == word == "codec" and item.name != "auto":
            texts = registry.get("codecs", item.name).capabilities.get("examples", (item.name,))
            found.append(st.sampled_from([read_part(text) for text in texts]))
        elif item.word == word and item.name != "auto":
            given_args = {
                parameter.name: small(parameter.annotation)
                for parameter in registry.get(kind_of(word, item.name), item.name).parameters
            }
            arguments = st.fixed_dictionaries({}, optional=given_args)
            found.append(st.builds(lambda args, name=item.name: Part(name, tuple(args.items())), arguments))
    return st.one_of(found)


def small(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of which many are in range."""
    if typing.get_origin(annotation) is Literal:
        return st.sampled_from(typing.get_args(annotation))
    return st.integers(0, 9) if annotation is int else VALUES[annotation]


@given(st.fixed_dictionaries({}, optional={word: some_parts(word) for word in WORDS}))
def test_parse_undoes_print(words: dict[str, Part]) -> None:
    try:
        strategy = Strategy(**words)
    except UsageError:
        assume(False)
    text = str(strategy)
    assert Strategy.parse(text) == strategy
    assert str(Strategy.parse(text)) == text
    assert hash(Strategy.parse(text)) == hash(strategy)


@given(st.text(alphabet="ringps(=),. 1x:auto%codec", max_size=40))
def test_any_text_is_a_strategy_or_a_usage_error(text: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except UsageError:
        return
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("auto", "auto"),
        (" ", "auto"),
        ("codec=none sync=bsp", "auto"),
        ("ring", "ring"),
        ("ring schedule=auto", "ring"),
        ("ps", "ps(servers=1)"),
        ("ps( update = worker , servers=2 )", "ps(servers=2, update=worker)"),
        ("transport=tcp schedule=fixed(bucket=1024KiB)", "schedule=fixed(bucket=1MiB) transport=tcp"),
        ("ring schedule=fixed(bucket=25mib)", "ring schedule=fixed"),
    ],
)
def test_one_strategy_has_one_text(text: str, canonical: str) -> None:
    assert str(Strategy.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rnig", "unknown architecture 'rnig'; did you mean 'ring'"),
        ("shm", "it is a transport, write transport=shm"),
        ("ring tcp", "write transport=tcp"),
        ("codec=none ring", "an architecture comes first"),
        ("codec=nine", "did you mean 'none'"),
        ("sched=fifo", "unknown word 'sched'; did you mean 'schedule'"),
        ("architecture=ring", "without a key: write 'ring'"),
        ("schedule=fifo schedule=fifo", "schedule is given twice"),
        ("ps(servers=1, servers=2)", "'servers' is given twice"),
        ("ps(server=2)", "did you mean 'servers'"),
        ("ps(2)", r"arguments have names, as in ps\(servers=2\)"),
        ("ps(servers=two)", "servers of ps must be a whole number"),
        ("ps(servers=ring(a=1))", "takes no arguments of its own"),
        ("ps(on=worker)", "did you mean 'workers'"),
        ("ps(servers=0)", r"the nearest that works is 'ps\(servers=1\)'"),
        ("schedule=fixed(bucket=4MiX)", "the units are"),
        ("ring(pieces=2)", "ring takes no arguments"),
        ("schedule=fixed(bucket=0)", "wait_free"),
        ("schedule=priority(slice=0B)", r"priority\(slice=\.\.\.\) must be at least 1B"),
        ("schedule=split(slice=0)", r"split\(slice=\.\.\.\) must be at least 1B"),
        ("schedule=delayed(bucket=0)", r"delayed\(bucket=\.\.\.\) must be at least 1B"),
        ("auto(x=1)", "auto takes budget"),
        ("ring(", r"the text ends \(column 6"),
        ("ring)", r"there is '\)'"),
        ("ring %", "unexpected '%' .column 6"),
        ("broadcast", "unknown architecture"),
        ("feedback=maybe", "on or off"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("transport=tcp(delay=5ms, rate=1gbit)", "transport=tcp(rate=1Gbit, delay=5ms)"),
        ("transport=tcp(rate=0.5Gbit)", "transport=tcp(rate=500Mbit)"),
        ("transport=tcp(rate=none, delay=0)", "transport=tcp"),
    ],
)
def test_a_line_is_described_by_its_rate_and_delay(text: str, canonical: str) -> None:
    assert str(Strategy.parse(text)) == canonical


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("rate=0", "rate of 0 bit/s cannot be shaped: give one from 1Kbit"),
        ("rate=3bit", "from 1Kbit to 1Tbit"),
        ("rate=-1Gbit", "negative"),
        ("delay=-5ms", "negative"),
        ("delay=5h", "delay of 18000 s cannot be shaped"),
        ("rate=fast", "number with a unit"),
        ("rate=5ms", "'ms'.*the units are bit"),
        ("loss=1", "no argument 'loss'"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_before_there_are_sockets(arguments: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy.parse(f"transport=tcp({arguments})")


def test_parts_given_by_a_program_are_held_to_their_types() -> None:
    assert Strategy(schedule=Part("fixed", (("bucket", "1MiB"),))) == Strategy.parse("schedule=fixed(bucket=1MiB)")
    assert Strategy(schedule=Part("fixed", (("bucket", 1 << 20),))) == Strategy.parse("schedule=fixed(bucket=1MiB)")
    with pytest.raises(StrategyError, match=r"must be a size such as 4MiB, got 1\.5"):
        Strategy(schedule=Part("fixed", (("bucket", 1.5),)))


@pytest.mark.parametrize(
    ("text", "servers", "holds"),
    [("ring", 0, False), ("ps", 1, True), ("ps(servers=3, update=worker)", 3, False), ("ps(on=workers)", 0, True)],
)
def test_servers_are_counted(text: str, servers: int, holds: bool) -> None:
    strategy = Strategy.parse(text)
    assert strategy.servers == servers
    assert strategy.server_holds_weights is holds


@pytest.mark.parametrize(
    ("text", "hosts", "resolved"),
    [
        ("auto", 1, "direct schedule=fixed transport=shm"),
        ("auto", 4, "ring schedule=fixed transport=tcp"),
        ("auto", 2, "hierarchical schedule=fixed"),
        ("transport=tcp", 1, "ring schedule=fixed transport=tcp"),
        ("transport=tcp", 2, "ring schedule=fixed transport=tcp"),
        ("transport=inproc", 1, "ring schedule=fixed transport=inproc"),
        ("tree schedule=fifo", 4, "tree schedule=fifo transport=tcp"),
        ("ring", 3, "ring schedule=fixed"),
        ("ps(servers=2)", 1, "ps(servers=2) schedule=fixed transport=shm"),
        ("ps(servers=2)", 4, "ps(servers=2) schedule=fixed"),
        ("ps(servers=2)", 6, "ps(servers=2) schedule=fixed transport=tcp"),
    ],
)
def test_auto_becomes_what_fits_the_group(text: str, hosts: int, resolved: str) -> None:
    strategy = Strategy.parse(text).resolve(Group(4), hosts=hosts)
    assert str(strategy) == resolved
    assert strategy.resolve(Group(4), hosts=hosts) == strategy


@pytest.mark.parametrize(
    ("text", "nodes", "resolved"),
    [
        ("hierarchical codec=int8", (0, 0, 1, 1), "hierarchical codec=feedback(int8)"),
        ("hierarchical codec=topk(ratio=0.1)", (0, 1, 1), "hierarchical codec=feedback(topk(ratio=0.1))"),
        ("hierarchical codec=fp16", (0, 0, 1), "hierarchical codec=fp16"),
        ("auto codec=int8", (0, 0, 1, 1), "hierarchical codec=feedback(int8)"),
        ("hierarchical codec=int8", (0, 1, 2), "direct codec=feedback(int8)"),
        ("hierarchical codec=gtopk(ratio=0.1)", (0, 1, 2), "tree codec=feedback(gtopk(ratio=0.1))"),
        ("hierarchical codec=fp16", (0, 1, 2), "ring codec=fp16"),
        ("hierarchical", (0, 1, 2), "hierarchical"),
        ("hierarchical codec=int8", (0, 0, 0), "hierarchical"),
        ("hierarchical codec=fp16", (0, 0), "hierarchical"),
        ("auto codec=int8", (0, 0), "direct codec=feedback(int8)"),
        ("ring codec=int8", (0, 0, 1, 1), "direct codec=feedback(int8)"),
        ("ps(servers=1, local=on) codec=int8", (0, 0, 1), "ps(servers=1, local=true) codec=feedback(int8)"),
        ("ps(servers=1, local=on) codec=fp16", (0, 0), "ps(servers=1, local=true) codec=fp16"),
        ("ps(servers=1, on=workers, local=on) codec=fp16", (0, 0), "ps(servers=1, on=workers, local=true)"),
        ("ps(servers=1, update=worker, local=on) codec=fp16", (0, 0), "ps(servers=1, update=worker, local=true)"),
    ],
)
def test_two_levels_compress_between_hosts_that_have_several_ranks(
    text: str, nodes: tuple[int, ...], resolved: str
) -> None:
    group = Group(len(nodes), nodes=nodes)
    strategy = Strategy.parse(text).resolve(group, hosts=len(set(nodes)))
    assert str(replace(strategy, schedule=Part("auto"), transport=Part("auto"))) == resolved
    assert strategy.resolve(group, hosts=len(set(nodes))) == strategy
    levels = " codec" in resolved and ("hierarchical" in resolved or "local" in resolved)
    assert strategy.hosts(group) == (group.members_by_node() if levels else ())
    assert strategy.exchange.startswith("gradients are summed uncompressed inside hosts; between") == levels


def test_a_codec_without_a_host_of_several_ranks_leaves_nccl() -> None:
    """Its plan is messages with tags, which Gloo carries; on hosts of several ranks NCCL sums inside them."""
    strategy = Strategy.parse("hierarchical(inside=native) transport=torch(backend=nccl) codec=int8 schedule=fixed")
    apart, together = (
        strategy.resolve(Group(4, nodes=nodes), hosts=len({*nodes})) for nodes in ((0, 1, 2, 3), (0, 0, 1, 1))
    )
    assert str(apart) == "direct codec=feedback(int8) schedule=fixed transport=torch"
    assert together == strategy


def test_threads_of_one_process_get_inproc() -> None:
    assert Strategy().resolve(Group(2), inproc=True).transport == Part("inproc")


def test_resolving_refuses_a_group_that_does_not_fit() -> None:
    with pytest.raises(StrategyError, match="use transport=auto or tcp"):
        Strategy.parse("transport=shm").resolve(Group(4), hosts=4)
    with pytest.raises(UsageError, match="start it with --servers 2"):
        Strategy.parse("ps(servers=2)").resolve(Group(4, servers=1))
    with pytest.raises(UsageError, match="servers=2"):
        Strategy.parse("ps(servers=3, on=workers)").resolve(Group(2))


def test_a_strategy_hands_out_its_parts() -> None:
    strategy = Strategy.parse("ps(servers=2) schedule=wait_free")
    group = Group(3, servers=2)
    check(strategy.plan(group))
    assert strategy.plan(group) is strategy.plan(Group(3, servers=2))
    assert strategy.schedule_object().release == "ready"
    assert strategy.sync_mode().due(0)
    assert strategy.codec_object().combine == "sum"
    for ask in (Strategy().schedule_object, lambda: Strategy().plan(group)):
        with pytest.raises(UsageError, match=r"call resolve\(\) first"):
            ask()


def test_what_a_part_may_be_told_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may ask for ``stats()``, which name the strategy, in every step."""
    text = "direct codec=feedback(topk(ratio=0.5)) schedule=fixed(bucket=2MiB) transport=tcp(rate=1Gbit)"
    before = Strategy.parse(text)
    shown = str(before), before.exchange

    def again(*_: object, **__: object) -> None:
        raise AssertionError("annotations are read a second time")

    monkeypatch.setattr(typing, "get_type_hints", again)
    monkeypatch.setattr(registry, "parameters_of", again)
    assert (str(Strategy.parse(text)), Strategy.parse(text).exchange) == shown
    monkeypatch.setattr(registry, "get", again)
    assert (str(before), before.exchange) == shown


def test_the_vocabulary_shows_arguments() -> None:
    words = vocabulary()
    texts = {item.text for item in words}
    server = "ps(servers=1, on=ranks, update=server, local=false, replicas=0)"
    assert {"auto", "ring", server, "fixed(bucket=25MiB)"} <= texts
    assert all(item.summary for item in words)
    assert [item.word for item in words] == sorted((item.word for item in words), key=list(WORDS).index)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sync=async", r"did you mean 'asp' or 'bsp'\?"),
        ("sync=synchronous", r"did you mean 'bsp'\?"),
        ("reduce-scatter", "it is a plan for reduce-scatter, but gradients need an allreduce, such as ring"),
        ("all_gather", "syncline bench --collective all-gather measures it"),
        ("nccl", r"did you mean 'native transport=torch\(backend=nccl\)'\?"),
        ("codec=float16", r"did you mean 'fp16'\?"),
        ("codec=signsgd", r"did you mean 'sign' or 'sign\(vote=on\)'\?"),
        ("async", r"did you mean 'sync=asp' or 'sync=bsp'\?"),
        ("transport=gloo", r"did you mean 'torch'\?"),
    ],
)
def test_what_others_call_it_is_understood(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        Strategy.parse(text)


def test_what_others_call_it_leads_to_words_of_the_grammar() -> None:
    for word, names in words._ELSEWHERE.items():
        for found in (each for all_found in names.values() for each in all_found):
            assert found.partition("(")[0].split()[0] in (*words.built_names(word), "auto")
        assert not set(names) & set(words.built_names(word))


TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
SHAPE, EXCHANGES, BETA = (64, 64), 100, 0.9


def told(codec: Any, difference: Floats, state: State) -> Floats:
    """What one worker's exchange says of a difference."""
    found = difference.copy()
    inner = codec.codec
    if isinstance(inner, Rounds):
        for _ in inner.average(found, state, 1):
            pass
    else:
        payload = np.zeros(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
        encoded = codec.encode(difference, payload, state)
        codec.decode(payload[: encoded.words], found, state)
    state.step += 1
    return found


def far(codec: Any) -> float:
    """The share of its first distance from a worker that stands still at which a centre ends."""
    worker = np.random.default_rng(0).standard_normal(SHAPE[0] * SHAPE[1]).astype(np.float32)
    centre, state = np.zeros_like(worker), codec.init(Spec("tensor", SHAPE), 0, True)
    for _ in range(EXCHANGES):
        centre += np.float32(BETA) * told(codec, worker - centre, state)
    return float(np.linalg.norm(worker - centre) / np.linalg.norm(worker))


def refused(text: str) -> bool:
    """Whether the rule that this is about refuses a codec."""
    try:
        Strategy.parse(f"ring sync=easgd(steps=4) codec={text}")
    except StrategyError as error:
        return "keep a distance from the agreed weights" in str(error)
    return False


@pytest.mark.parametrize("text", TEXTS)
def test_a_centre_comes_to_a_worker_that_stands_still_unless_the_codec_is_refused(text: str) -> None:
    """What feedback keeps of a difference that is still there comes once more, and then too much of it."""
    codec: Any = Strategy.parse(f"ring codec={text}").codec_object()
    if not isinstance(codec, Wraps):
        return  # without feedback
    if refused(text):
        assert far(codec) > 1
    else:
        assert far(codec) < 0.01


@pytest.mark.parametrize("text", ["auto(budget=60s)", "auto(budget=5min) transport=tcp", "auto(budget=250ms)"])
def test_it_is_printed_as_it_is_read(text: str) -> None:
    found = Strategy.parse(text)
    assert Strategy.parse(str(found)) == found
    assert found.budget_s > 0
    assert str(found).startswith("auto(budget=")
    assert str(Strategy.parse("auto(budget=60s)")) == "auto(budget=1min)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("auto(budget=0s)", "more than 0 seconds"),
        ("auto(budgt=60s)", "did you mean 'budget'"),
        ("auto(60s)", "auto\\(budget=60s\\)"),
        ("auto(budget=1s, budget=2s)", "twice"),
        ("auto(budget=soon)", "budget of auto"),
        ("auto(budget=60s) codec=int8", "Leave the budget out.*syncline tune"),
        ("auto(budget=60s) codec=auto", "codec=auto"),
        ("auto(budget=60s) sync=local(steps=4)", "sync=local"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Strategy.parse(text)


def test_a_schedule_beside_the_budget_is_refused_when_it_is_asked_for_and_printed_when_it_runs() -> None:
    running = Strategy.parse("auto(budget=60s) schedule=priority")
    assert Strategy.parse(str(running)) == running
    with pytest.raises(StrategyError, match="leave one of them out"):
        check_asked(running)
    check_asked(Strategy.parse("auto(budget=60s)"))
    check_asked(Strategy.parse("ring schedule=fixed"))


def test_a_framework_that_replaces_no_layouts_refuses_it() -> None:
    with pytest.raises(UsageError, match=r"leave the budget out.*syncline tune --framework jax"):
        check_schedule(Strategy.parse("auto(budget=60s)").resolve(Group(2)), "JAX")


def test_fewer_workers_have_fewer_owners() -> None:
    asked = Strategy.parse("ps(servers=3, on=workers, update=worker) schedule=merged")
    assert asked.with_owners_among(3) is asked
    assert str(asked.with_owners_among(2)) == "ps(servers=2, on=workers, update=worker) schedule=merged"
    assert Strategy.parse("ring").with_owners_among(1) == Strategy.parse("ring")
    servers = Strategy.parse("ps(servers=3, replicas=1)")
    assert servers.with_owners_among(1, servers=3) is servers
    assert str(servers.with_owners_among(3, servers=1)) == "ps(servers=1, replicas=1)"
