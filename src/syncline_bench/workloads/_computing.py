"""How a workload's model computes: the device, the memory layout of images, the choice of algorithms.

Shi and Chu (arXiv 1711.05979) find that the layout (NCHW or NHWC) and autotuning of convolution algorithms determine
the speed of forward and backward on GPUs. Imports torch only when needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from syncline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Computing:
    """The device of a workload's model and two options of computing on it. The defaults change nothing.

    ``channels_last`` stores weights and images as NHWC, on any device. ``autotune`` lets cuDNN try its algorithms for
    every new shape and keep the fastest. Raises UsageError for options that this machine does not support.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    channels_last: Literal["off", "on"] = "off"
    autotune: Literal["off", "on"] = "off"

    def __post_init__(self) -> None:
        if self.autotune == "on" and self.device != "cuda":
            raise UsageError(
                "autotune=on chooses among cuDNN's algorithms, which run on GPUs only: add device=cuda, or leave it out"
            )
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise UsageError("device=cuda needs a GPU and a PyTorch that can use it: leave it out to use the CPU")

    def placed(self, model: nn.Module, process: int) -> nn.Module:
        """The model on its device. With several GPUs each process takes its own, as far as they suffice."""
        import torch

        if self.channels_last == "on":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.device == "cuda":
            torch.cuda.set_device(process % torch.cuda.device_count())
            torch.backends.cudnn.benchmark = self.autotune == "on"
            model.to(self.device)
        return model

    def laid_out(self, images: Tensor) -> Tensor:
        """A batch in the model's memory layout."""
        if self.channels_last == "off":
            return images
        import torch

        return images.contiguous(memory_format=torch.channels_last)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the device."""
        return tensor.to(self.device)

    def now(self) -> float:
        """A clock in seconds that first waits until the device has finished all its work."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


PLAIN = Computing()
"""On the CPU, with the model unchanged."""
