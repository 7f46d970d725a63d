"""consolidate() where workers train by themselves, with several models, and ranks that do not call it together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from periodic import consolidate, equal, shares, under
from toy import STAGED, Here, batch, close, loss_of, mlp, on_group, sgd, weights

from syncline.frameworks.torch import prepare
from syncline.session.session import Session


@pytest.mark.parametrize("strategy", ["ring codec=topk(ratio=0.1)", "ps(servers=1, update=worker)", "ring" + STAGED])
def test_all_have_the_mean_of_what_they_had_and_go_on_as_if_nothing_had_been(group: Any, strategy: str) -> None:
    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        shares(here, range(3))
        before = weights(here.model)
        consolidate(here)
        once = weights(here.model)
        consolidate(here)
        return [before, once, weights(here.model)]

    found = on_group(group, under(strategy, "diloco(steps=4)"), 2, sgd, body, weight=1)
    before = [mine[0] for mine in found]
    assert not torch.equal(before[0]["0.weight"], before[1]["0.weight"])
    for mine in found:
        close(mine[1], {name: (before[0][name] + before[1][name]) / 2 for name in before[0]})
        close(mine[2], mine[1])
    equal([mine[2] for mine in found])


def test_where_all_have_the_same_weights_to_consolidate_changes_no_bit(group: Any) -> None:
    """Before anything, in synchronous steps, and when a period has just ended: with three workers, who round."""

    def body(here: Here) -> None:
        for steps in (0, 2, 2):
            shares(here, range(steps))
            before = weights(here.model)
            consolidate(here)
            equal([before, weights(here.model)])

    on_group(group, "ring sync=post_local(after=2, steps=2)", 3, sgd, body, weight=1)


def test_two_models_with_one_optimizer_each_exchange_their_weights(group: Any) -> None:
    def both(session: Session | None, rank: int) -> dict[str, torch.Tensor]:
        first, second = mlp(3), mlp(4)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for model in (first, second) if session is not None else ():
            assert session is not None
            prepare(session, model, optimizer)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(second(torch.nn.functional.pad(first(batch(10 * step + rank)), (0, 1)))).backward()
            optimizer.step()
        found = {f"first {name}": tensor for name, tensor in weights(first).items()}
        return found | {f"second {name}": tensor for name, tensor in weights(second).items()}

    own = [both(None, rank) for rank in range(2)]
    for found in group("ring sync=local(steps=2)", 2, lambda session: both(session, session.rank)):
        close(found, {name: (own[0][name] + own[1][name]) / 2 for name in found})


def test_a_model_that_is_prepared_again_begins_anew(group: Any) -> None:
    def run(session: Session) -> dict[str, torch.Tensor]:
        model, optimizer = sgd()
        for _ in range(2):
            made = prepare(session, model, optimizer)
            assert made is not None
            here = Here(model, optimizer, session.rank, 2, session, made.replica)
            shares(here, range(3))
        assert made is not None
        assert made.replica.steps == 6
        return weights(model)

    equal(group("ring sync=local(steps=2)", 2, run))


def test_ranks_that_do_not_consolidate_together_are_named(group: Any) -> None:
    def body(here: Here) -> None:
        shares(here, range(1))
        if here.rank == 0:
            consolidate(here)
        else:
            shares(here, range(1))

    with pytest.raises(Exception, match=r"rank [01] .*consolidate"):
        on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)


def test_ranks_that_consolidate_after_different_numbers_of_steps_are_told_these(group: Any) -> None:
    def body(here: Here) -> None:
        shares(here, range(1 + here.rank))
        consolidate(here)

    says = r"consolidate \(call \d+, step [12]\) .* consolidate \(call \d+, step [12]\); .*join\(\)"
    with pytest.raises(Exception, match=says):
        on_group(group, "ring sync=local(steps=4)", 2, sgd, body, weight=1)


@pytest.mark.parametrize(
    ("steps", "together", "said"),
    [
        (3, False, ["rank 0: replicas differ: 1 step since the last exchange of weights, under sync=local(steps=2)"]),
        (3, True, []),
        (2, False, []),
    ],
)
def test_replicas_that_differ_at_the_end_are_told_once(
    group: Any, caplog: pytest.LogCaptureFixture, steps: int, together: bool, said: list[str]
) -> None:
    def body(here: Here) -> None:
        shares(here, range(steps))
        if together:
            consolidate(here)

    on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)
    assert [one.getMessage().partition(";")[0] for one in caplog.records] == said
