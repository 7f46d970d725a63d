"""Exceptions anywhere reach the user's thread, with what they were about; a caught one does not spoil the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import STRATEGIES, Here, batch, loss_of, on_group, same_as_alone, sgd, weights

from syncline.errors import GradientError, PeerLost, SynclineError
from syncline.transports import Handle
from syncline.transports.inproc import InProc


class Broken(Exception):
    """A user's own exception."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exception_in_a_users_hook_comes_out_of_backward(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        if here.rank == 1:
            here.model[0].weight.register_hook(lambda _: (_ for _ in ()).throw(Broken("in a hook")))  # type: ignore[index, union-attr]
        loss_of(here.model(here.share(batch(0)))).backward()

    with pytest.raises(Broken, match="in a hook"):
        on_group(group, strategy, 2, sgd, body)


def test_a_backward_that_fails_before_its_exchange_may_be_caught(group: Any) -> None:
    """All ranks skip the same batch; its samples do not count."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        out = here.model(here.share(batch(7, 40)))
        out.register_hook(lambda _: (_ for _ in ()).throw(Broken("in a hook")))
        with pytest.raises(Broken):
            loss_of(out).backward()
        here.optimizer.zero_grad()
        x = batch(0) if here.replica is None else (batch(0)[:5] if here.rank == 0 else batch(0)[5:])
        loss_of(here.model(x)).backward()
        here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


def test_a_backward_that_fails_after_its_exchange_began_cannot_be_caught(group: Any) -> None:
    """The other ranks wait for buckets that never come; going on would train on half an exchange."""

    def body(here: Here) -> None:
        loss_of(here.model(here.share(batch(0)))).backward()  # nothing of the first one is sent before its end
        if here.rank == 1:
            here.model[0].weight.register_hook(lambda _: (_ for _ in ()).throw(Broken("in a hook")))  # type: ignore[index, union-attr]
            with pytest.raises(Broken):
                loss_of(here.model(here.share(batch(0)))).backward()
        loss_of(here.model(here.share(batch(0)))).backward()

    with pytest.raises(GradientError, match="rank 1: the last backward pass ended with an exception"):
        on_group(group, "ring schedule=wait_free", 2, sgd, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ps(servers=1, on=workers)"])
def test_a_fault_in_the_progress_thread_names_rank_bucket_and_operation(
    group: Any, strategy: str, monkeypatch: Any
) -> None:
    """Sending fails on rank 1: its training thread learns of it in backward."""
    plain = InProc.send

    def send(self: InProc, dst: int, tag: int, data: Any, priority: float = 0.0, owner: Any = None) -> Any:
        if self.rank == 1 and isinstance(owner, tuple) and owner[0].run.label.startswith("bucket"):
            handle = Handle("send", dst, tag, data.nbytes, owner)
            self._operations.finish(handle, PeerLost(f"the cable to rank {dst} is cut", rank=dst))
            return handle
        return plain(self, dst, tag, data, priority, owner)

    monkeypatch.setattr(InProc, "send", send)
    seen: list[Exception] = []

    def body(here: Here) -> None:
        try:
            loss_of(here.model(here.share(batch(0)))).backward()
            here.optimizer.step()
        except Exception as error:
            if here.rank == 1:
                seen.append(error)
            raise

    with pytest.raises(SynclineError):
        on_group(group, strategy, 2, sgd, body)
    (error,) = seen
    text = str(error)
    assert "bucket 0" in text
    assert "rank" in text
    assert any(verb in text for verb in ("sending to", "receiving from", "reducing from")), text


def test_a_fault_stays_for_every_later_step(group: Any) -> None:
    def body(here: Here) -> None:
        assert here.replica is not None
        assert here.session is not None
        here.session.barrier()
        here.replica.fault("found elsewhere")
        for _ in range(2):
            with pytest.raises(GradientError, match="found elsewhere"):
                loss_of(here.model(here.share(batch(0)))).backward()
        with pytest.raises(GradientError, match="found elsewhere"):
            here.session.barrier()

    on_group(group, "ring", 2, sgd, body)
