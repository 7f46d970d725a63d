"""Two levels under real training, hosts being told: equal replicas, layouts that are replaced, servers."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from toy import STAGED, Here, adam, alone, close, on_group, sgd, train, weights

from remade import Remade
from syncline import registry
from syncline.frameworks.torch.prepare import shadow_until_all_joined

NODES = [(0, 0, 1, 1), (0, 1, 1)]
CODECS = ["int8", "onebit", "fp16", "topk(ratio=0.4)", "powersgd(rank=1)", "gtopk(ratio=0.4)"]


def some_steps(here: Here) -> dict[str, torch.Tensor]:
    train(here, range(6))
    return weights(here.model)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("codec", "nodes"),
    [*zip([*CODECS, "adaptive(topk(ratio=0.4), small=64B)", "feedback(onebit, warmup=2)"], cycle(NODES))],
    ids=str,
)
def test_replicas_learn_the_same_in_every_run(group: Any, codec: str, nodes: tuple[int, ...]) -> None:
    strategy = f"hierarchical codec={codec} schedule=wait_free"
    first, again = (on_group(group, strategy, len(nodes), adam, some_steps, nodes) for _ in range(2))
    for found in (*first, *again):
        close(found, first[0], 0.0)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_what_is_summed_inside_hosts_is_not_compressed(group: Any, nodes: tuple[int, ...]) -> None:
    """Where nothing is lost between hosts either, training is that of the plan of two levels."""
    lossless = on_group(group, "hierarchical codec=topk(ratio=1.0) feedback=off", len(nodes), sgd, some_steps, nodes)
    for found, wanted in zip(
        lossless, on_group(group, "hierarchical", len(nodes), sgd, some_steps, nodes), strict=True
    ):
        close(found, wanted, 1e-5)  # payloads are float32


def test_a_model_on_a_device_is_staged_on_two_levels_too(group: Any) -> None:
    strategy = "hierarchical codec=int8 schedule=wait_free"
    plain = on_group(group, strategy, 4, sgd, some_steps, NODES[0])
    staged = on_group(group, strategy + STAGED, 4, sgd, some_steps, NODES[0])
    for found in staged:
        close(found, plain[0], 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        *zip((f"hierarchical codec={codec}" for codec in CODECS), cycle(NODES)),
        ("ps(servers=2, local=on) codec=int8", NODES[1]),
        ("ps(servers=2, on=workers, update=worker, local=on) codec=onebit", NODES[0]),
    ],
    ids=str,
)
def test_replaced_layouts_forget_nothing(
    group: Any, strategy: str, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks of a host encode a tensor in other buckets, and take over what was kept back of it."""
    registry.names("schedules")
    monkeypatch.setitem(registry._entries, "schedules", dict(registry._entries["schedules"]))
    registry.register("schedules", "remade")(Remade)

    plain, again = (
        on_group(group, f"{strategy} schedule={schedule}", len(nodes), sgd, some_steps, nodes)
        for schedule in ("wait_free", "remade")
    )
    for found, wanted in zip(again, plain, strict=True):
        close(found, wanted, 0.0)


def test_ranks_without_batches_give_zeros(group: Any) -> None:
    """Ranks are weighed before their host sums."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        train(here, range(1 if here.rank == 3 else 3))
        shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    coded, plain = (
        on_group(group, text, 4, sgd, body, NODES[0])
        for text in ("hierarchical codec=topk(ratio=1.0) feedback=off", "hierarchical")
    )
    for found in coded:
        close(found, coded[0], 0.0)
        close(found, plain[0], 1e-5)


PUSHED = [
    "ps(servers=1, local=on)",
    "ps(servers=2, local=on) schedule=wait_free",
    "ps(servers=2, local=on, update=worker)",
]
PUSHED += ["ps(servers=2, on=workers, local=on)", "ps(servers=1, on=workers, update=worker, local=on) schedule=split"]
PUSHED += ["ps(servers=1, local=on)" + STAGED]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("servers", "words", "nodes"),
    [
        ("servers=1", "", (0, 0, 0)),
        ("servers=1", STAGED, NODES[0]),
        ("servers=2", " schedule=wait_free", NODES[0]),
        ("servers=2, update=worker", "", NODES[1]),
        ("servers=2, on=workers", " schedule=priority(slice=64B)", NODES[1]),
        ("servers=1, on=workers, update=worker", "", NODES[0]),
    ],
)
def test_what_hosts_push_is_compressed_between_them(
    group: Any, servers: str, words: str, nodes: tuple[int, ...]
) -> None:
    """Where nothing is lost, training is as without a codec; where something is, all workers have the same bits."""
    strategy, wanted = f"ps({servers}, local=on) codec=", alone(sgd, some_steps)
    lossless = on_group(group, f"{strategy}topk(ratio=1.0) feedback=off{words}", len(nodes), sgd, some_steps, nodes)
    for found in lossless:
        close(found, wanted, 1e-5)  # payloads are float32
    first, *others = on_group(group, f"{strategy}int8{words}", len(nodes), sgd, some_steps, nodes)
    for found in others:
        close(found, first, 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [*zip(PUSHED, cycle(NODES)), *zip(PUSHED, cycle([(0, 0, 0), (0, 1, 2), NODES[0]]))],
    ids=str,
)
def test_hosts_that_push_for_their_workers_train_as_one(group: Any, strategy: str, nodes: tuple[int, ...]) -> None:
    wanted, (first, *others) = alone(adam, some_steps), on_group(group, strategy, len(nodes), adam, some_steps, nodes)
    close(first, wanted)
    for found in others:
        close(found, first, 0.0)
