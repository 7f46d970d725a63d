"""The public calls in a world of one, where every collective is the identity, and their refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import syncline
from syncline.errors import ClosedError, NotBuiltError, UsageError
from syncline.session.session import Session


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_LAUNCHER", "SYNCLINE_STRATEGY", "SYNCLINE_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    syncline.shutdown()


@pytest.mark.parametrize("name", [name for name in syncline.__all__ if name != "__version__"])
def test_every_public_call_is_documented(name: str) -> None:
    assert getattr(syncline, name).__doc__


def test_one_alone_is_told_that_servers_need_workers() -> None:
    with pytest.raises(
        UsageError,
        match=r"ps\(servers=1\) needs 1 server processes and at least one worker, but there is 1 process: start",
    ):
        syncline.init("ps(servers=1)")


@pytest.mark.parametrize(
    "call",
    [syncline.rank, syncline.world_size, syncline.barrier, syncline.stats, syncline.state_dict, syncline.no_sync],
    ids=lambda call: call.__name__,
)
def test_before_init_and_after_shutdown_calls_say_what_is_missing(call: Callable[[], Any]) -> None:
    with pytest.raises(ClosedError, match=r"call syncline.init\(\) first"):
        call()
    syncline.init()
    call()
    syncline.shutdown()
    with pytest.raises(ClosedError, match=r"call syncline.init\(\) first"):
        call()


@pytest.mark.parametrize(
    "call",
    [syncline.state_dict, lambda: syncline.load_state_dict({}), syncline.no_sync, lambda: syncline.join().__enter__()],
    ids=["state_dict", "load_state_dict", "no_sync", "join"],
)
def test_calls_do_not_pass_over_a_model_of_another_framework(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    syncline.init()
    weights, _ = syncline.prepare({"a": np.zeros(3)}, Descent())
    monkeypatch.setattr(Session, "models", [weights])  # as where there are several workers
    with pytest.raises(NotBuiltError, match=rf"{request.node.callspec.id}\(\) supports only models of PyTorch"):
        call()


class Descent:
    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:  # noqa: ARG002
        weights -= gradient


def test_a_world_of_one() -> None:
    assert not syncline.is_initialized()
    syncline.init()
    assert syncline.is_initialized()
    assert (syncline.rank(), syncline.local_rank(), syncline.world_size()) == (0, 0, 1)
    array = np.arange(5.0)
    assert syncline.allreduce(array) is array
    np.testing.assert_array_equal(syncline.broadcast(array), np.arange(5.0))
    tensor = torch.arange(6).reshape(2, 3).t()
    assert syncline.allreduce(tensor, op="sum").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert syncline.gather(b"mine") == [b"mine"]
    syncline.barrier(timeout=1)
    assert dict(syncline.stats().bytes_sent) == {}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert syncline.prepare(model, optimizer) == (model, optimizer)
    assert syncline.prepare(model) is model
    with syncline.no_sync(), syncline.join():
        pass


def test_init_again_needs_shutdown_first() -> None:
    syncline.init()
    with pytest.raises(UsageError, match="was called already"):
        syncline.init()
    syncline.shutdown()
    syncline.shutdown()
    syncline.init()


def test_an_init_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(UsageError, match="belong together"):
        syncline.init(rank=0)
    assert not syncline.is_initialized()
    with pytest.raises(UsageError):
        syncline.init("no such thing")
    syncline.init()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: syncline.allreduce(np.zeros(2), op="max"), "choose 'mean' or 'sum'"),
        (lambda: syncline.allreduce([1, 2]), "expected a torch tensor or a numpy array, got list"),
        (lambda: syncline.allreduce(np.zeros(2, bool), op="sum"), "cannot sum elements of type bool"),
        (lambda: syncline.allreduce(np.zeros(2, np.complex64), op="sum"), "cannot sum elements of type complex64"),
        (lambda: syncline.allreduce(np.zeros(2, np.int64)), "use op='sum'"),
        (lambda: syncline.broadcast(np.zeros(2), root=1), "there is no rank 1 in a world of 1"),
        (lambda: syncline.broadcast(np.zeros(2), root=-1), "there is no rank -1"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], Any], text: str) -> None:
    syncline.init()
    with pytest.raises(UsageError, match=text):
        call()


@pytest.mark.parametrize("call", [syncline.allreduce, syncline.broadcast], ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    "view",
    [lambda base: base, lambda base: base[1], lambda base: base.t(), lambda base: base[:, ::2], lambda base: base[:0]],
    ids=["whole", "row", "transposed", "strided", "empty"],
)
def test_autograd_knows_of_the_write_as_of_torchs_own(call: Callable[[Any], Any], view: Callable[[Any], Any]) -> None:
    """A backward pass that needs the old values is an error, not a wrong gradient."""
    syncline.init()
    base = torch.ones(4, 6)
    weight = torch.ones((), requires_grad=True)
    loss = (base * weight).sum()
    call(view(base))
    assert base._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_have_no_version_and_lazily_conjugated_ones_have_the_right_values() -> None:
    syncline.init()
    with torch.inference_mode():
        assert syncline.allreduce(torch.ones(3)).tolist() == [1, 1, 1]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert syncline.broadcast(conjugate).tolist() == [1 - 2j]
    assert syncline.allreduce(conjugate.imag).tolist() == [-2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(1).expand(3), r"expanded.*\.clone\(\)"),
        (lambda: torch.zeros(3, device="meta"), "only dense tensors"),
        (lambda: torch.eye(2).to_sparse(), "only dense tensors"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused_before_anything_travels(
    make: Callable[[], torch.Tensor], text: str
) -> None:
    syncline.init()
    with pytest.raises(UsageError, match=text):
        syncline.broadcast(make())


def test_a_state_of_another_strategy_is_refused() -> None:
    syncline.init("ring")
    state = syncline.state_dict()
    syncline.load_state_dict(state)
    with pytest.raises(UsageError, match="'direct'"):
        syncline.load_state_dict({**state, "strategy": "direct"})
