"""Where and how a workload's model computes: the device, the layout of images in memory, the choice of algorithms.

Owns what of that a workload's text may say. Shi and Chu (arXiv 1711.05979) find that the layout (NCHW or NHWC) and
choosing convolution algorithms by trying them decide how fast forward and backward are on GPUs. Imports torch only for
what is asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Computing:
    """The device of a workload's model and two ways to compute on it; the defaults change nothing.

    ``channels_last`` lays weights and images out as NHWC, on any device. ``autotune`` lets cuDNN try its algorithms
    for every new shape and keep the fastest. Raises UsageError for what this machine cannot do.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    channels_last: Literal["off", "on"] = "off"
    autotune: Literal["off", "on"] = "off"

    def __post_init__(self) -> None:
        if self.autotune == "on" and self.device != "cuda":
            raise UsageError(
                "autotune=on chooses among cuDNN's algorithms, which run on GPUs only: write device=cuda beside it, or"
                " leave it out"
            )
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise UsageError("device=cuda needs a GPU and a PyTorch that can use it: leave it out to use the CPU")

    def placed(self, model: nn.Module, process: int) -> nn.Module:
        """The model where it computes; of several GPUs each process of a run takes its own, as far as they last."""
        import torch

        if self.channels_last == "on":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.device == "cuda":
            torch.cuda.set_device(process % torch.cuda.device_count())
            torch.backends.cudnn.benchmark = self.autotune == "on"
            model.to(self.device)
        return model

    def laid_out(self, images: Tensor) -> Tensor:
        """A batch in the layout that the model has."""
        if self.channels_last == "off":
            return images
        import torch

        return images.contiguous(memory_format=torch.channels_last)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the device, where it may be already."""
        return tensor.to(self.device)

    def now(self) -> float:
        """A clock in seconds that is read when all that was asked of the device is done."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


PLAIN = Computing()
"""On the CPU, as the model comes."""
