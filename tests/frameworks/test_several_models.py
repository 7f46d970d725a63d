"""Several models in one run, each with its own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Here, alone, batch, close, fill, loss_of, mlp, sgd, train, weights

from syncline.errors import GradientError, MismatchError, UsageError
from syncline.frameworks.torch import prepare, release
from syncline.session.groups import new_group
from syncline.session.session import MODEL_KEYS, Session
from syncline.session.tickets import BUCKET_KEYS

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


class Prototypes(torch.nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.centre).square().sum(1).mean()


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", ["ring", "direct schedule=wait_free", "ps(servers=1, on=workers, update=worker)"])
@pytest.mark.parametrize("given", ["both", "first", "neither", "list"])
def test_one_optimizer_may_train_several_models(group: Any, strategy: str, given: str) -> None:
    """Actor and critic, or a model and a loss with parameters."""

    def train(session: Session | None) -> dict[str, torch.Tensor]:
        model, loss = mlp(), Prototypes()
        both = torch.nn.ModuleList([model, loss])
        optimizer = torch.optim.Adam(both.parameters(), lr=0.05)
        here = Here(model, optimizer)
        if session is not None:
            here.rank, here.world = session.rank, session.world_size
            if given == "list":
                assert prepare(session, both, optimizer) is not None
            else:
                assert prepare(session, model, optimizer if given != "neither" else None) is not None
                assert prepare(session, loss, optimizer if given == "both" else None) is not None
        for step in range(3):
            optimizer.zero_grad()
            loss(model(here.share(batch(step)))).backward()
            optimizer.step()
        return weights(both)

    wanted = train(None)
    for found in group(strategy, 2, train):
        close(found, wanted)


def test_what_an_optimizer_trains_and_nobody_prepares_is_an_error(group: Any) -> None:
    """Its gradient would be each rank's own, and the ranks' weights would drift apart without a word."""

    def body(session: Session) -> None:
        model, loss = mlp(), Prototypes()
        prepare(session, model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))
        loss(model(batch(0))).backward()

    with pytest.raises(GradientError, match=r"of shape \(3,\).*not a parameter of any prepared model.*a loss with"):
        group("ring", 2, body)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_servers_that_hold_the_weights_take_one_model_with_its_optimizer(group: Any, strategy: str) -> None:
    def shared(session: Session) -> None:
        model, loss = mlp(), Prototypes()
        prepare(session, model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1))

    with pytest.raises(UsageError, match=r"of shape \(3,\).*put all models into one torch.nn.ModuleList"):
        group(strategy, 2, shared)
    with pytest.raises(UsageError, match=r"give syncline.prepare\(\) the model and its optimizer"):
        group(strategy, 2, lambda session: prepare(session, mlp()))


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", KEPT)
@pytest.mark.parametrize("kept", [True, False])
def test_a_model_may_be_prepared_again(group: Any, strategy: str, kept: bool) -> None:
    """When layers are unfrozen, with the same optimizer or another; its state and the steps so far stay."""

    def train(session: Session | None) -> dict[str, torch.Tensor]:
        model = mlp()
        model[0].requires_grad_(False)  # type: ignore[index]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        here, made = Here(model, optimizer), None
        for step in range(6):
            if step in (2, 4):
                model[0].requires_grad_(step == 2)  # type: ignore[index]
                model.zero_grad()
                if not kept:
                    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            if session is not None and step % 2 == 0:
                here.rank, here.world = session.rank, session.world_size
                if step == 0:
                    prepare(session, other := mlp(), torch.optim.SGD(other.parameters(), lr=0.1))
                made = prepare(session, model, optimizer)
                assert made is not None
                assert made.replica.first_key == MODEL_KEYS
                assert made.replica.steps == step
            loss_of(model(here.share(batch(step)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    wanted = train(None)
    for found in group(strategy, 2, train):
        close(found, wanted)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, update=worker)"])
def test_a_model_is_not_prepared_again_where_server_processes_serve_it(group: Any, strategy: str) -> None:
    def body(session: Session) -> None:
        model, optimizer = sgd()
        if prepare(session, model, optimizer) is not None:
            prepare(session, model, optimizer)

    with pytest.raises(UsageError, match=r"as it was first prepared.*ps\(on=workers\)"):
        group(strategy, 2, body)


def test_a_rank_that_prepares_another_model_of_the_run_is_named(group: Any) -> None:
    def body(session: Session) -> None:
        made = [sgd(), sgd()]
        for model, optimizer in made:
            prepare(session, model, optimizer)
        prepare(session, *made[session.rank])

    with pytest.raises(MismatchError, match=r"rank 1 prepares its model 1, and rank 0 prepares its model 0"):
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


@pytest.mark.parametrize("strategy", ["ring schedule=priority", "ring codec=int8", "ps(servers=2, on=workers)"])
def test_a_run_trains_as_many_models_as_it_releases(group: Any, strategy: str) -> None:
    """One past what a run can have at a time; one is kept all the time, and the numbers of others are used again."""
    most = BUCKET_KEYS // MODEL_KEYS

    def train(session: Session | None) -> list[dict[str, torch.Tensor]]:
        kept, found = sgd(), []
        here = Here(*kept)
        if session is not None:
            here.rank, here.world = session.rank, session.world_size
            prepare(session, *kept)
        for number in range(most + 1):
            model, optimizer = sgd()
            if session is not None:
                prepare(session, model, optimizer)
            for one, its in (kept, (model, optimizer)):
                its.zero_grad()
                loss_of(one(here.share(batch(number)))).backward()
                its.step()
            if session is not None:
                release(session, model)
                assert len(session.prepared) == 1
            loss_of(model(batch(1))).backward()  # its own
            found.append(weights(model))
        return [*found, weights(kept[0])]

    wanted = train(None)
    for one in group(strategy, 2, train):
        for a, b in zip(one, wanted, strict=True):
            close(a, b, 0.05 if "int8" in strategy else 1e-12)


def test_a_model_too_many_is_refused_with_the_remedy(group: Any) -> None:
    def body(session: Session) -> None:
        made = [sgd() for _ in range(BUCKET_KEYS // MODEL_KEYS + 1)]
        for model, optimizer in made[:-1]:
            prepare(session, model, optimizer)
        with pytest.raises(UsageError, match=r"up to 16 prepared models at a time: .*syncline.release\(model\)"):
            prepare(session, *made[-1])
        release(session, made[3][0])
        with pytest.raises(UsageError, match="not released yet"):
            release(session, made[3][0])
        prepare(session, *made[-1])

    group("ring", 2, body)


def test_servers_keep_their_model_until_the_end(group: Any) -> None:
    def body(session: Session) -> None:
        model, optimizer = sgd()
        if prepare(session, model, optimizer) is not None:
            with pytest.raises(UsageError, match="until the run ends"):
                release(session, model)

    group("ps(servers=1)", 2, body)


@pytest.mark.parametrize("strategy", ["ring sync=local(steps=3)", "ring sync=easgd(steps=3)"])
def test_a_released_model_has_one_set_of_weights(group: Any, strategy: str) -> None:
    def train(session: Session) -> dict[str, torch.Tensor]:
        model, optimizer = sgd()
        prepare(session, model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model(batch(2 * step + session.rank))).backward()
            optimizer.step()
        release(session, model)
        return weights(model)

    one, other = group(strategy, 2, train)
    close(one, other, 0.0)


@pytest.mark.parametrize("released", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_model_that_goes_on_in_another_group_leaves_its_place_to_others(group: Any, released: bool) -> None:
    """One past what a run can have at a time, each begun by all and finished by pairs; then all are begun once more."""
    most = BUCKET_KEYS // MODEL_KEYS

    def body(session: Session) -> list[dict[str, torch.Tensor]]:
        pairs = [new_group(session, ranks) for ranks in ([0, 1], [2, 3])]
        mine = pairs[session.rank // 2].session
        found, kept = [], []
        for number in range(most + 1):
            model, optimizer = sgd()
            for of in (session, mine):
                assert prepare(of, model, optimizer) is not None
                here = Here(model, optimizer, of.rank, of.world_size)
                train(here, range(number, number + 1))
            release(session, model)
            if not released:
                assert prepare(mine, model, optimizer) is not None
                assert prepare(session, model, optimizer) is not None
                train(Here(model, optimizer, session.rank, session.world_size), range(1))
                assert prepare(mine, model, optimizer) is not None
                release(session, model)
            kept.append(model)
            found.append(weights(model))
        return found

    def wanted(number: int) -> dict[str, torch.Tensor]:
        model, optimizer = sgd()
        here = Here(model, optimizer)
        for _ in range(2):
            train(here, range(number, number + 1))
        if not released:
            train(here, range(1))
        return weights(model)

    for found in group("ring", 4, body):
        for number, one in enumerate(found):
            close(one, wanted(number), 1e-12)


def test_a_model_that_some_workers_take_to_another_group_keeps_the_others_places_in_step(group: Any) -> None:
    """Those that stay behind have it still: the next model has a place that is free on all, and it may come back."""

    def body(session: Session) -> list[int]:
        pair = new_group(session, [0, 1])
        (first, its), (second, other) = sgd(), sgd()
        keys = []
        prepare(session, first, its)
        if session.rank < 2:
            prepare(pair.session, first, its)
        for model, optimizer in ((second, other), (first, its)):
            made = prepare(session, model, optimizer)
            assert made is not None
            train(Here(model, optimizer, session.rank, session.world_size), range(1))
            keys.append(made.replica.first_key)
        return keys

    assert group("ring", 3, body) == [[MODEL_KEYS, 0]] * 3
