"""Models that live on a device: copies beside the computation, in the right order, and what a failing one does.

The CPU stands in for the device. That a whole run gives the same numbers is held by the other tests of this folder,
which run their strategies with staged models too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from toy import Here, batch, close, fill, gradients, loss_of, mlp, sgd, weights

from host_copier import HostCopier, Lagging
from syncline.codecs._device import SWITCH
from syncline.errors import NotBuiltError, SynclineError, UsageError
from syncline.frameworks.torch import prepare
from syncline.frameworks.torch.staging import CudaCopier, Staged, device_of, staging_for
from syncline.frameworks.torch.storage import Pair
from syncline.session.session import Session
from syncline.training.memory import Staging

LIMIT_S = 30.0


def test_the_backward_pass_goes_on_while_a_bucket_is_copied(group: Any) -> None:
    """The first copy down does not begin before the last gradient is there: a pass that waited would never end."""

    def body(session: Session) -> dict[str, torch.Tensor]:
        last = threading.Event()
        model = mlp()
        model[0].weight.register_hook(lambda _: last.set())
        copier = HostCopier(before=lambda _: wait_for(last))
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1), copier=copier)
        assert made is not None
        loss_of(model(batch(session.rank))).backward()
        made.replica.detach()
        return gradients(model)

    wanted = mlp()
    loss_of(wanted(torch.cat([batch(0), batch(1)]))).backward()
    for found in group("ring schedule=wait_free", 2, body):
        close(found, gradients(wanted))


def wait_for(event: threading.Event) -> None:
    if not event.wait(LIMIT_S):
        raise TimeoutError


def test_a_bucket_is_exchanged_while_another_is_still_copied(group: Any) -> None:
    """The second copy down waits until a copy up has been ordered, which is after an exchange."""

    class Watching(HostCopier):
        def __init__(self) -> None:
            self.rose = threading.Event()
            self.downs = 0
            super().__init__(self.watch)

        def watch(self, direction: str) -> None:
            if direction == "down":
                self.downs += 1
                if self.downs == 2:
                    wait_for(self.rose)

        def to_device(self, pair: Pair, behind: Any) -> None:
            self.rose.set()
            super().to_device(pair, behind)

    def body(session: Session) -> int:
        model = mlp()
        copier = Watching()
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1), copier=copier)
        assert made is not None
        loss_of(model(batch(session.rank))).backward()
        made.replica.detach()
        return copier.downs

    assert group("ring schedule=wait_free", 2, body) == [4, 4]


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_weights_come_up_behind_what_still_reads_the_old_ones(group: Any, strategy: str) -> None:
    """A forward pass that was ordered before ``step()`` runs on the device after the new weights have come."""

    def body(session: Session) -> None:
        copier = Lagging()
        made = prepare(session, *sgd(), copier=copier if session.is_worker else None)
        if made is None:
            return
        loss_of(made.model(batch(session.rank))).backward()
        old = weights(made.model)
        seen: list[dict[str, torch.Tensor]] = []
        copier.ordered.append(lambda: seen.append(weights(made.model)))
        made.optimizer.step()
        made.replica.detach()
        (read,) = seen
        assert all(torch.equal(read[name], tensor) for name, tensor in old.items())
        assert not any(torch.equal(tensor, old[name]) for name, tensor in weights(made.model).items())

    group(strategy, 2, body)


class Broken:
    """A device whose copies down fail."""

    device = torch.device("cpu")

    def pin(self, host: torch.Tensor) -> None: ...

    def unpin(self, host: torch.Tensor) -> None: ...

    def to_host(self, pair: Pair) -> Any:  # noqa: ARG002
        return self

    def mark(self) -> None: ...

    def to_device(self, pair: Pair, behind: None) -> None: ...

    def join(self) -> None: ...

    def synchronize(self) -> None:
        raise RuntimeError("the device has fallen off the bus")

    def close(self) -> None: ...


def test_a_copy_that_fails_ends_the_backward_pass_of_all_with_its_error(group: Any) -> None:
    def body(session: Session) -> None:
        copier = Broken() if session.rank == 1 else HostCopier()
        made = prepare(session, *sgd(), copier=copier)
        assert made is not None
        try:
            loss_of(made.model(batch(0))).backward()
        finally:
            made.replica.detach()

    with pytest.raises(RuntimeError, match="fallen off the bus"):
        group("ring", 2, body)


def test_mirrors_have_pages_of_their_own(group: Any) -> None:
    """``HostCopier`` refuses others; two blocks never share one."""

    def body(session: Session) -> list[tuple[int, int]]:
        staging = staging_for(torch.device("cpu"), session.engine, session.fail, HostCopier())
        arrays = [staging.allocate(nbytes, np.dtype(np.float32)) for nbytes in (0, 4, 4096, 40_000)]
        assert [array.nbytes for array in arrays] == [0, 4, 4096, 40_000]
        assert all((array == 0).all() for array in arrays)
        staging.close()
        return [(array.ctypes.data // 4096, -(-max(1, array.nbytes) // 4096)) for array in arrays]

    for places in group("ring", 2, body):
        pages = [page for first, count in places for page in range(first, first + count)]
        assert len(pages) == len(set(pages))


def test_memory_that_is_not_whole_pages_is_refused_by_the_stand_in_as_by_a_device() -> None:
    copier = HostCopier()
    with pytest.raises(SynclineError, match="not whole pages"):
        copier.pin(torch.zeros(5000, dtype=torch.uint8))
    copier.close()


def test_nothing_is_left_when_a_staged_model_is_detached(group: Any) -> None:
    def body(session: Session) -> None:
        made = prepare(session, *sgd(), copier=HostCopier())
        assert made is not None
        loss_of(made.model(batch(0))).backward()
        made.replica.detach()
        made.replica.detach()

    def staging_threads() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name in ("syncline-staging", "syncline-copier")]

    before = staging_threads()
    group("ring", 2, body)
    assert staging_threads() == before


def test_a_model_on_the_cpu_needs_no_copies(group: Any) -> None:
    def body(session: Session) -> bool:
        made = prepare(session, *sgd())
        assert made is not None
        storage = made.replica.storage
        assert type(made.replica.exchange.staging) is Staging
        return storage.pair(0).device.data_ptr() == storage.pair(0).host.data_ptr() == storage.arrays[0].ctypes.data

    assert group("ring", 2, body) == [True, True]


def test_a_model_on_two_devices_or_on_an_unknown_one_is_refused_by_name() -> None:
    def named(*devices: str) -> list[tuple[str, torch.nn.Parameter]]:
        return [(f"p{i}", torch.nn.Parameter(torch.empty(2, device=device))) for i, device in enumerate(devices)]

    assert device_of(named("cpu", "cpu")) == torch.device("cpu")
    with pytest.raises(UsageError, match="'p1' is on meta, 'p0' on cpu"):
        device_of(named("cpu", "meta"))
    with pytest.raises(NotBuiltError, match="'p0' is on meta: models on the CPU or on CUDA devices"):
        device_of(named("meta"))


class Streams:
    """Stands in for ``torch.cuda``: writes down what is asked of it; copies are those of the CPU."""

    def __init__(self, refuse: bool = False) -> None:
        self.said: list[str] = []
        self._made = 0
        self._refuse = refuse

    def Stream(self, device: torch.device) -> Any:  # noqa: ARG002
        self._made += 1
        return self._stream(("down", "up")[self._made - 1])

    def current_stream(self, device: torch.device) -> Any:  # noqa: ARG002
        return self._stream("training")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.said.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.said.append(f"{name} waits for the event on {event.stream}"),
            synchronize=lambda: self.said.append(f"host waits for {name}"),
        )

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        self.said.append(f"on {stream.name}")
        return contextlib.nullcontext()

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()

    def Event(self, blocking: bool = False) -> Any:
        event = SimpleNamespace(stream=None)

        def record(stream: Any) -> None:
            event.stream = stream.name
            self.said.append(f"event on {stream.name}{' to sleep for' * blocking}")

        event.record = record
        return event

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda _, nbytes, *__: self.said.append(f"pin {nbytes}") or int(self._refuse),
            cudaHostUnregister=lambda _: self.said.append("unpin"),
            cudaGetErrorString=lambda code: f"error {code}",
        )


def test_a_gpu_is_asked_to_copy_behind_the_gradient_and_before_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Streams()
    monkeypatch.setattr(torch, "cuda", asked)
    copier = CudaCopier(torch.device("cpu"))
    pair = Pair(torch.ones(4), torch.zeros(4))
    copier.pin(pair.host)
    copier.to_host(pair)
    assert torch.equal(pair.host, torch.ones(4))
    pair.host[:] = 2
    copier.to_device(pair, copier.mark())
    assert torch.equal(pair.device, pair.host)
    copier.join()
    copier.synchronize()
    copier.unpin(pair.host)
    assert asked.said == [
        "pin 16",
        *("down waits for training", "on down", "event on down to sleep for"),
        *("event on training", "up waits for the event on training", "on up"),
        "training waits for up",
        *("host waits for down", "host waits for up"),
        "unpin",
    ]


def test_a_gpu_is_asked_to_encode_behind_the_gradient_and_to_decode_before_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Streams()
    monkeypatch.setattr(torch, "cuda", asked)
    copier = CudaCopier(torch.device("cpu"))
    copier.run("down", lambda: asked.said.append("encode"), copier.mark())
    copier.run("down", lambda: asked.said.append("copy the payload"))
    copier.reached("down")
    copier.run("up", lambda: asked.said.append("decode"))
    copier.reached("up")
    copier.join()
    assert asked.said == [
        *("event on training", "down waits for the event on training", "on down", "encode"),
        *("on down", "copy the payload", "event on down to sleep for"),
        *("on up", "decode", "event on up to sleep for"),
        "training waits for up",
    ]


def test_memory_that_a_gpu_does_not_pin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Streams(refuse=True))
    with pytest.raises(SynclineError, match="cannot pin 8 bytes of host memory for cpu: error 1"):
        CudaCopier(torch.device("cpu")).pin(torch.zeros(2))


# With a GPU. Ranks may share one.

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def on_gpu(session: Session) -> Here:
    model = fill(torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3)))
    model = model.double().cuda()
    made = prepare(session, model, torch.optim.Adam(model.parameters(), lr=0.02))
    if made is None:
        return Here(model, torch.optim.SGD(model.parameters()))
    return Here(made.model, made.optimizer, session.rank, session.world_size, session, made.replica, made.client)


@cuda
@pytest.mark.parametrize(
    "strategy", ["ring", "direct schedule=wait_free", "ps(servers=1)", "ps(servers=2, on=workers)"]
)
def test_ranks_on_a_gpu_end_equal_and_as_on_the_cpu(group: Any, strategy: str) -> None:
    def body(session: Session) -> dict[str, torch.Tensor]:
        here = on_gpu(session)
        if here.replica is None:
            return {}
        assert isinstance(here.replica.exchange.staging, Staged)
        for step in range(4):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step).cuda())).backward()
            here.optimizer.step()
        here.replica.detach()
        return {name: tensor.cpu() for name, tensor in weights(here.model).items()}

    one, two = group(strategy, 2, body)[:2]
    assert all(torch.equal(one[name], two[name]) for name in one)
    model = fill(torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3)))
    model = model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model(batch(step))).backward()
        optimizer.step()
    close(one, weights(model), 1e-7)


@cuda
@pytest.mark.parametrize("codec", ["int8", "topk(ratio=0.3)", "bf16", "bf16(sum=fp32)"])
def test_codecs_on_a_gpu_give_a_training_the_bits_of_those_on_the_processor(
    group: Any, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    def body(session: Session) -> list[torch.Tensor]:
        here = on_gpu(session)
        assert here.replica is not None
        assert here.replica.exchange.coded_on_device == (os.environ[SWITCH] == "on")
        for step in range(4):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step).cuda())).backward()
            here.optimizer.step()
        here.replica.detach()
        return [tensor.cpu() for tensor in weights(here.model).values()]

    found = []
    for said in ("on", "off"):
        monkeypatch.setenv(SWITCH, said)
        found.append(group(f"ring codec={codec}", 2, body))
    for there, here in zip(*found, strict=True):
        assert all(map(torch.equal, there, here))


@cuda
def test_pinned_memory_is_seen_as_such(group: Any) -> None:
    def body(session: Session) -> bool:
        staging = staging_for(
            torch.device("cuda", 0), session.engine, session.fail, CudaCopier(torch.device("cuda", 0))
        )
        array = staging.allocate(1 << 20, np.dtype(np.float32))
        pinned = torch.from_numpy(array).is_pinned()
        staging.close()
        return pinned

    assert all(group("ring", 2, body))
