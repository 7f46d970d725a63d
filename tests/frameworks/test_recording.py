"""A script's model is found and measured without a line of the script, and left as it was."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from syncline.errors import UsageError
from syncline.frameworks.torch.timing import Recorded, Recording, write_trace
from syncline_bench.workloads._trace import read_trace


class Gan(torch.nn.Module):
    """Its outermost module is called, and another one that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square()


def train(steps: int, *models: torch.nn.Module, passes: int = 1, device: str = "cpu") -> None:
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], lr=0.1)
    other = torch.nn.Linear(4, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            batch = torch.ones(3, 4)
            batch.to(device)
            torch.sum(torch.stack([model(other(batch)).sum() for model in models])).backward()
        optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
def test_every_tensor_has_its_times_and_the_trace_can_be_read(tmp_path: Path, passes: int) -> None:
    """With gradients that are accumulated every backward pass is one of its own."""
    model = Gan()
    before = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    with Recording(4, 2) as recording, pytest.raises(Recorded) as ended:
        train(100, model, passes=passes)
    assert ended.value.code == 0
    assert recording.made <= 7
    assert [layer.spec.name for layer in recording.layers] == [name for name, _ in model.named_parameters()]
    assert recording.layers[0].forward_s > 0
    assert all(layer.backward_s > 0 for layer in recording.layers)
    assert sum(layer.backward_s for layer in recording.layers) < 1
    assert [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()] == before
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    file = tmp_path / "trace.csv"
    with file.open("w") as opened:
        recording.h2d_s = 0.5
        write_trace(recording, opened)
    trace = read_trace(file)
    assert [layer.name for layer in trace.layers] == [layer.spec.name for layer in recording.layers]
    assert trace.elements == sum(parameter.numel() for parameter in model.parameters())
    assert trace.total_s == pytest.approx(sum(one.forward_s + one.backward_s for one in recording.layers), abs=1e-7)
    assert file.read_text().splitlines()[0] == "name,elements,forward_s,backward_s,h2d_s,device,shape,rows"
    assert trace.device == "cpu"
    assert [line.split(",")[4] for line in file.read_text().splitlines()[1:]] == ["0.500000000", "", "", ""]
    assert [layer.tensors[0].shape for layer in trace.layers] == [layer.spec.shape for layer in recording.layers]


def test_copies_to_a_device_are_timed_while_it_records() -> None:
    plain = torch.Tensor.to
    with Recording(3, 1, away=lambda device: device.type == "meta") as recording, pytest.raises(Recorded):
        train(100, Gan(), device="meta")
    assert recording.h2d_s > 0
    assert torch.Tensor.to is plain
    with Recording(3, 1) as recording, pytest.raises(Recorded):
        train(100, Gan())
    assert recording.h2d_s == 0


def test_what_is_no_single_model_is_refused() -> None:
    with (
        Recording(3, 1),
        pytest.raises(UsageError, match=r"the parameters of SGD belong to Gan, Linear of the modules"),
    ):
        train(9, Gan(), torch.nn.Linear(4, 3))
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with Recording(3, 1), pytest.raises(UsageError, match=r"the parameters of SGD belong to none of the modules"):
        optimizer.step()


def test_a_script_that_ends_early_has_made_so_many_steps() -> None:
    with Recording(3, 2) as recording:
        train(3, Gan())
    assert (recording.made, [layer.backward_s for layer in recording.layers]) == (3, [0.0] * 4)
    train(2, Gan())
    assert recording.made == 3
    with Recording(1, 1) as recording:
        written = io.StringIO()
        write_trace(recording, written)
    assert written.getvalue().count("\n") == 1
