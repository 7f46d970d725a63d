"""Several models in one run, each with its own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Here, alone, batch, close, fill, loss_of, mlp, sgd, weights

from syncline.errors import MismatchError, UsageError
from syncline.frameworks.torch import prepare
from syncline.session import Session

KEPT = ["ring", "direct schedule=wait_free", "ps(servers=2, on=workers)", "ps(servers=1, on=workers, update=worker)"]


def encoder_and_decoder() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    models = [mlp(), fill(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)).double().eval())]
    return models, [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]


@pytest.mark.parametrize("strategy", KEPT)
def test_two_models_in_one_backward_pass(group: Any, strategy: str) -> None:
    """The buckets of both are in flight at once."""

    def train(session: Session | None) -> dict[str, torch.Tensor]:
        models, optimizers = encoder_and_decoder()
        here = Here(models[0], optimizers[0])
        if session is not None:
            here.rank, here.world = session.rank, session.world_size
            for model, optimizer in zip(models, optimizers, strict=True):
                assert prepare(session, model, optimizer) is not None
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(models[1](models[0](here.share(batch(step))))).backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights(torch.nn.ModuleList(models))

    wanted = train(None)
    for found in group(strategy, 3, train):
        close(found, wanted)


@pytest.mark.parametrize("strategy", KEPT)
def test_two_models_in_turns(group: Any, strategy: str) -> None:
    def train(session: Session | None) -> dict[str, torch.Tensor]:
        made = [sgd(), sgd()]
        here = Here(*made[0])
        if session is not None:
            here.rank, here.world = session.rank, session.world_size
            for model, optimizer in made:
                assert prepare(session, model, optimizer) is not None
        for step in range(4):
            model, optimizer = made[step % 2]
            optimizer.zero_grad()
            loss_of(model(here.share(batch(step)))).backward()
            optimizer.step()
        return weights(torch.nn.ModuleList([model for model, _ in made]))

    wanted = alone(sgd, lambda _: train(None))
    for found in group(strategy, 2, train):
        close(found, wanted)


def test_models_taken_in_another_order_on_one_rank_are_an_error(group: Any) -> None:
    """Their exchanges would otherwise be taken for each other's."""

    def body(session: Session) -> None:
        made = [sgd(), sgd()]
        for model, optimizer in made:
            prepare(session, model, optimizer)
        for model, _ in made[:: -1 if session.rank == 1 else 1]:
            loss_of(model(batch(0))).backward()

    with pytest.raises(MismatchError, match="a training step"):
        group("ring", 2, body)


def test_a_model_prepared_twice_is_refused(group: Any) -> None:
    def body(session: Session) -> None:
        model, optimizer = sgd()
        prepare(session, model, optimizer)
        prepare(session, model, optimizer)

    with pytest.raises(UsageError, match="has been prepared before"):
        group("ring", 2, body)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, update=worker)"])
def test_a_second_model_is_refused_where_servers_serve_one(group: Any, strategy: str) -> None:
    """The servers are busy with the first; without this check the ranks would wait for them."""

    def body(session: Session) -> None:
        for model, optimizer in (sgd(), sgd()):
            if prepare(session, model, optimizer) is None:
                return

    with pytest.raises(UsageError, match=r"serve one model.*ModuleList"):
        group(strategy, 2, body)
