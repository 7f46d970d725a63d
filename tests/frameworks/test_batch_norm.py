"""SyncBatchNorm normalises over the batches of all ranks: N workers compute what one does on the union."""

from __future__ import annotations

import copy
import io
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import STRATEGIES, Here, alone, batch, close, fill, loss_of, on_group, weights

from syncline import api
from syncline.errors import GradientError, NotBuiltError, UsageError
from syncline.process import process


class Normalised(torch.nn.Module):
    """Normalises vectors, then images made of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6, **options)
        self.images = torch.nn.BatchNorm2d(2, affine=False, momentum=None)
        self.last = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        x = self.images(x.view(-1, 2, 3, 1)).flatten(1)
        out: torch.Tensor = self.last(x)
        return out


def plain(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    """What one worker has: ordinary batch normalisation."""
    model = fill(Normalised().double())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def converted(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = plain(index)
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(here: Here) -> dict[str, torch.Tensor]:
    for step in range(3):
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
    return weights(here.model)


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "workers"), [*zip([*STRATEGIES, "ring schedule=wait_free"], cycle([2, 3]))])
def test_n_workers_normalise_as_one_does(group: Any, strategy: str, workers: int) -> None:
    """Weights, and running means and variances."""
    wanted = alone(plain, train)
    for found in on_group(group, strategy, workers, converted, train, weight=1):
        close(found, wanted)


def test_ranks_may_have_unequal_and_empty_batches(group: Any) -> None:
    """The statistics are those of all samples; a summed loss makes the gradients so, too."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0)
        mine = x if here.replica is None else [x[:0], x[:5], x[5:]][here.rank]
        out = here.model(mine)
        (out.square().sum() * (1 if here.replica is None else 3)).backward()
        here.optimizer.step()
        return weights(here.model)

    wanted = alone(plain, body)
    for found in on_group(group, "ring", 3, converted, body, weight=1):
        close(found, wanted)


def test_evaluation_uses_running_statistics_and_exchanges_nothing(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here)
        here.model.eval()
        if here.rank == 0:  # the others would have to take part in an exchange
            assert here.model(batch(9)[:1]).shape == (1, 3)
        return weights(here.model)

    on_group(group, "ring", 2, converted, body, weight=1)


def test_half_precision_is_computed_in_single(group: Any) -> None:
    def body(here: Here) -> torch.Tensor:
        out: torch.Tensor = here.model(here.share(batch(0).bfloat16()))
        assert out.dtype == torch.bfloat16
        return out.float()

    def make(index: int) -> Any:  # noqa: ARG001
        model = torch.nn.Sequential(torch.nn.SyncBatchNorm(4)).bfloat16()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    found = torch.cat(on_group(group, "ring", 2, make, body, weight=1))
    wanted = torch.nn.functional.batch_norm(batch(0).bfloat16().float(), None, None, training=True)
    assert (found - wanted).abs().max() < 0.02


def test_too_few_values_are_refused_as_by_torch(group: Any) -> None:
    first, none = batch(0)[:1], batch(0)[:0]
    with pytest.raises(ValueError, match="more than 1 value per channel over all ranks"):
        on_group(group, "ring", 2, converted, lambda here: here.model(none if here.rank else first), weight=1)


def test_copies_and_what_is_left_afterwards_are_torchs_own(group: Any) -> None:
    def body(here: Here) -> None:
        module = here.model.norm
        assert isinstance(module, torch.nn.SyncBatchNorm)
        assert type(copy.deepcopy(module)) is torch.nn.SyncBatchNorm
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert type(loaded) is torch.nn.SyncBatchNorm
        close(loaded.state_dict(), module.state_dict())
        assert here.replica is not None
        here.replica.detach()
        assert type(module) is torch.nn.SyncBatchNorm

    on_group(group, "ring", 2, converted, body, weight=1)


def test_conversion_after_prepare_is_refused(group: Any) -> None:
    """Its modules would normalise by the rank's own batch."""

    def body(here: Here) -> None:
        here.model.norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(here.model.norm)  # type: ignore[arg-type]
        here.model(batch(0))

    with pytest.raises(GradientError, match=r"converted to SyncBatchNorm after syncline\.prepare\(\)"):
        on_group(group, "ring", 2, plain, body)


def test_what_is_not_torchs_own_is_refused(group: Any) -> None:
    class Special(torch.nn.SyncBatchNorm):
        pass

    def make(module: torch.nn.Module) -> Any:
        return lambda _: (module, torch.optim.SGD(module.parameters(), lr=0.1))

    with pytest.raises(UsageError, match="Special, derived from SyncBatchNorm"):
        on_group(group, "ring", 2, make(torch.nn.Sequential(Special(4))), train)
    grouped = torch.nn.SyncBatchNorm(4)
    grouped.process_group = object()
    with pytest.raises(NotBuiltError, match="process group of its own"):
        on_group(group, "ring", 2, make(torch.nn.Sequential(grouped)), train)


def test_accumulation_normalises_every_pass_over_all_ranks(group: Any) -> None:
    """Two passes per step, each normalised by itself, on all ranks."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for half in range(2):
            mine = here.share(batch(half))
            if half == 0:
                with here.no_sync():
                    (loss_of(here.model(mine)) / 2).backward()
            else:
                (loss_of(here.model(mine)) / 2).backward()
        here.optimizer.step()
        return weights(here.model)

    wanted = alone(plain, body)
    for found in on_group(group, "ring", 2, converted, body, weight=1):
        close(found, wanted)


def test_weights_that_are_known_at_the_end_only_are_refused(group: Any) -> None:
    """What backward adds up over the ranks would count them alike."""
    with pytest.raises(UsageError, match=r"SyncBatchNorm.*a number as weight="):
        on_group(group, "ring", 2, converted, train, weight="batch")


def test_join_refuses_models_that_normalise_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without batches would leave the others waiting for its statistics."""
    replica = SimpleNamespace(normalises_over_ranks=True, synchronous_at_first=False)
    monkeypatch.setattr(api, "session", lambda: SimpleNamespace(alone=False, models=[]))
    monkeypatch.setattr(process, "prepared", [SimpleNamespace(client=None, optimizer=object(), replica=replica)])
    with pytest.raises(UsageError, match=r"join\(\) with SyncBatchNorm"), api.join():
        pass
