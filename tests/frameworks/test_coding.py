"""Trainings whose device encodes and decodes: as the processor does, bit for bit, and each part behind the other.

The CPU stands in for the device, and does everything late in a thread of its own.
"""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from toy import batch, fill, loss_of, weights

from host_copier import HostCopier, Lagging
from remade import Remade
from syncline import registry
from syncline.codecs._device import SWITCH
from syncline.frameworks.torch import prepare
from syncline.session.session import Session

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter, which is off where there is a GPU", allow_module_level=True)

LIMIT_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return fill(torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).to(dtype))


def trained(session: Session, copier: HostCopier | None, steps: int = 2) -> dict[str, torch.Tensor]:
    """The weights after some steps, of a model on the stand-in if there is one."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = prepare(session, model, optimizer, copier=copier if session.is_worker else None)
    if made is None:
        return {}
    try:
        assert made.replica.exchange.coded_on_device == (copier is not None and copier.codes)
        for step in range(steps):
            made.optimizer.zero_grad()
            loss_of(made.model(batch(2 * step + session.rank).float())).backward()
            made.optimizer.step()
        return weights(made.model)
    finally:
        made.replica.detach()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "ring codec=feedback(bf16(sum=fp32))",
        pytest.param("ring codec=adaptive(threshold(ratio=0.3), small=64B) schedule=wait_free", marks=pytest.mark.slow),
        "direct codec=topk(ratio=0.3) schedule=priority(slice=1KiB)",
        pytest.param("ps(servers=1, update=worker) codec=int4", marks=pytest.mark.slow),
        "ps(servers=2) codec=int8",
        pytest.param("ring codec=int8 sync=local(steps=2)", marks=pytest.mark.slow),
        "ring codec=fp16 schedule=delayed",
    ],
)
def test_a_training_has_the_bits_of_one_on_the_processor(group: Any, strategy: str) -> None:
    here = group(strategy, 2, lambda session: trained(session, None))[:2]
    there = group(strategy, 2, lambda session: trained(session, HostCopier(codes=True)))[:2]
    for one, other in zip(there, here, strict=True):
        equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ring", "ps(servers=1)"])
def test_buckets_are_replaced_there(group: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A tensor each, then two in a bucket: from the third step on, on both."""
    registry.names("schedules")
    monkeypatch.setitem(registry._entries, "schedules", dict(registry._entries["schedules"]))
    registry.register("schedules", "remade")(Remade)
    strategy = f"{place} codec=int8 schedule=remade"
    here = group(strategy, 2, lambda session: trained(session, None, 4))[:2]
    there = group(strategy, 2, lambda session: trained(session, HostCopier(codes=True), 4))[:2]
    for one, other in zip(there, here, strict=True):
        equal(one, other)


def test_ranks_on_a_device_and_on_the_processor_understand_each_other(group: Any) -> None:
    one, other = group("ring codec=int8", 2, lambda here: trained(here, None if here.rank else HostCopier(codes=True)))
    for found in group("ring codec=int8", 2, lambda session: trained(session, None)):
        equal(one, found)
        equal(other, found)


@pytest.mark.slow
def test_weights_that_a_script_changes_are_the_ones_that_owners_add_to(group: Any) -> None:
    def body(session: Session, codes: bool) -> dict[str, torch.Tensor]:
        model = model_of()
        made = prepare(
            session, model, torch.optim.SGD(model.parameters(), lr=0.1),
            copier=HostCopier(codes=True) if codes and session.is_worker else None,
        )  # fmt: skip
        if made is None:
            return {}
        first = weights(made.model)
        for step in range(3):
            if step == 1:
                made.model.load_state_dict(first)
            made.optimizer.zero_grad()
            loss_of(made.model(batch(2 * step + session.rank).float())).backward()
            made.optimizer.step()
        found = weights(made.model)
        made.replica.detach()
        return found

    here, there = (
        group("ps(servers=1) codec=int8", 2, lambda session, codes=codes: body(session, codes))
        for codes in (False, True)
    )
    for one, other in zip(there[:2], here[:2], strict=True):
        equal(one, other)


def test_new_weights_are_decoded_behind_what_still_reads_the_old_ones(group: Any) -> None:
    def body(session: Session) -> None:
        model, copier = model_of(), Lagging(codes=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = prepare(session, model, optimizer, copier=copier if session.is_worker else None)
        if made is None:
            copier.close()
            return
        loss_of(made.model(batch(session.rank).float())).backward()
        old, seen = weights(made.model), list[dict[str, torch.Tensor]]()
        copier.ordered.append(lambda: seen.append(weights(made.model)))
        made.optimizer.step()
        made.replica.detach()
        equal(seen[0], old)
        assert not any(torch.equal(tensor, old[name]) for name, tensor in weights(made.model).items())

    group("ps(servers=1) codec=int8", 2, body)


def test_a_worker_that_pushes_alone_encodes_there_too(group: Any) -> None:
    strategy = "ps(servers=1) codec=int8 sync=asp"
    here, there = (
        group(strategy, 1, lambda session, codes=codes: trained(session, HostCopier(codes=True) if codes else None))[0]
        for codes in (False, True)
    )
    equal(there, here)


def test_the_switch_leaves_codecs_to_the_processor(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")

    def body(session: Session) -> bool:
        model = model_of()
        made = prepare(session, model, torch.optim.SGD(model.parameters()), copier=HostCopier(codes=True))
        assert made is not None
        found = made.replica.exchange.coded_on_device
        made.replica.detach()
        return found

    assert group("ring codec=int8", 2, body) == [False, False]


class Late(HostCopier):
    """A device that is slow in one direction."""

    def __init__(self, slow: str) -> None:
        self.slow, self.pause = slow, threading.Event()
        super().__init__(self.wait, codes=True)

    def wait(self, direction: str) -> None:
        if direction == self.slow:
            self.pause.wait(0.01)


@pytest.mark.parametrize("slow", ["down", "up"])
def test_nothing_is_sent_or_used_before_a_slow_device_has_it(group: Any, slow: str) -> None:
    """Buffers of four buckets are used again in the next step."""
    strategy = "ring codec=int8 schedule=wait_free"
    here = group(strategy, 2, lambda session: trained(session, None))
    for one, other in zip(group(strategy, 2, lambda session: trained(session, Late(slow))), here, strict=True):
        equal(one, other)


class Behind(HostCopier):
    """A device whose training stream may lag behind the processor: it then reaches its marks when ``catch_up`` says."""

    def __init__(self) -> None:
        self.lags = False
        self.marks: list[Any] = []
        self.asked = threading.Event()
        self.behind: Any = None  # what the first work down is behind that is asked for meanwhile
        super().__init__(codes=True)

    def mark(self) -> Any:
        mark = super().mark()
        if self.lags:
            mark.clear()
            self.marks.append(mark)
        return mark

    def run(self, direction: str, act: Any, behind: Any = None) -> None:
        def checked() -> None:
            assert all(mark.is_set() for mark in self.marks[:1])
            act()

        super().run(direction, checked, behind)
        if direction == "down" and self.lags and not self.asked.is_set():
            self.behind = behind
            self.asked.set()

    def catch_up(self) -> None:
        self.lags = False
        for mark in self.marks:
            mark.set()


def test_a_gradient_is_encoded_behind_its_computation_while_backward_goes_on(group: Any) -> None:
    def body(session: Session) -> dict[str, torch.Tensor]:
        model, copier = model_of(), Behind()
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1), copier=copier)
        assert made is not None
        loss_of(model(batch(0).float())).backward()  # the first pass starts no exchange before its end
        model.zero_grad()

        def last(gradient: torch.Tensor) -> torch.Tensor:
            assert copier.marks  # the bucket of a layer behind this one is complete
            assert copier.asked.wait(LIMIT_S)
            assert copier.behind is copier.marks[0]
            copier.catch_up()
            return gradient

        copier.lags = True
        next(iter(model.parameters())).register_hook(last)
        loss_of(model(batch(session.rank).float())).backward()
        made.replica.detach()
        return {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}

    one, other = group("ring codec=int8 schedule=wait_free", 2, body)
    equal(one, other)


def test_a_payload_that_cannot_be_decoded_ends_the_training(group: Any) -> None:
    class Broken(HostCopier):
        def run(self, direction: str, act: Any, behind: Any = None) -> None:
            def fail() -> None:
                raise RuntimeError("the device has fallen off the bus")

            super().run(direction, fail if direction == "down" and behind is None else act, behind)

    def body(session: Session) -> None:
        trained(session, Broken(codes=True) if session.rank else HostCopier(codes=True))

    with pytest.raises(RuntimeError, match="fallen off the bus"):
        group("ring codec=int8", 2, body)
