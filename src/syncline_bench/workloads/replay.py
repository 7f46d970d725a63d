"""``replay:NETWORK`` and ``trace:FILE.csv``: layers that take recorded times, with real parameters and gradients.

How a network communicates can be measured without the accelerator that it was made for: gradients of the real sizes
become ready at the real times, and everything between is sleep. The times are for one batch, so each worker has a batch
of that size, whatever the number of workers (weak scaling).

The networks' times are published totals of whole passes, shared out among the layers by operations (``models.flops``):

* AlexNet with 256 images and ResNet-50 with 32, on one GPU: ``fw_time`` and ``bw_time`` of the job files
  (``job_configs``) in github.com/HKBU-HPML/dl-scheduling. This is the code of Wang, Shi, Wang and Chu, "Communication
  contention aware scheduling of multiple deep learning training jobs" (arXiv 2002.10105).
* GoogLeNet with its auxiliary classifiers: github.com/hclhkbu/B-Caffe, the code of Shi, Chu and Li, "MG-WFBP:
  efficient data communication for distributed synchronous SGD algorithms" (INFOCOM 2019): on one K80 and 64 images an
  iteration takes 391.8 ms (163.36 images/s in ``scripts/gmwfbp.py``), of which 205.3 ms are the logged backward times;
  the rest counts as forward.

GPT-2 (124M), BERT-base and ViT-B/16 were recorded, layer by layer: ``syncline record benchmarks/replays NAME``. The
files are in ``replays/``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from syncline.errors import UsageError
from syncline.registry import register

from ._trace import COLUMNS, Trace, read_trace
from ._workload import Images, Workload

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

EPOCH_BATCHES = 80
"""Batches per epoch of all workers together: twenty iterations of four workers."""
DATA_SEED = 20190429
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class _Published:
    """Seconds of whole passes of a network over ``batch`` images of a side of ``side`` pixels, on one GPU."""

    network: str
    side: int
    batch: int
    forward_s: float
    backward_s: float


_PUBLISHED = {
    "alexnet": _Published("alexnet", 227, 256, 0.045, 0.085),
    "googlenet": _Published("googlenet_aux", 224, 64, 0.3918 - 0.2053, 0.2053),
    "resnet50": _Published("resnet50", 224, 32, 0.076, 0.135),
}


_RECORDED = {"gpt2": 1, "bert_base": 1, "vit_b16": 1}
"""The batches of recorded networks: sequences of 128 symbols, or images."""

NETWORKS = (*_PUBLISHED, *_RECORDED)
"""The networks that can be replayed."""


@register("workloads", "replay")
def replay(argument: str = "") -> Workload:
    """AlexNet, GoogLeNet (with auxiliary heads), ResNet-50, GPT-2 (124M), BERT-base or ViT-B/16 in recorded times; the
    batch per worker is fixed.
    """
    if argument not in NETWORKS:
        near = get_close_matches(argument, NETWORKS, n=1)
        hint = f"did you mean 'replay:{near[0]}'?" if near else f"choose one of {', '.join(NETWORKS)}"
        raise UsageError(f"replay has no network {argument!r}: {hint}; for other layers write 'trace:FILE.csv'")
    if argument in _RECORDED:
        with resources.as_file(resources.files(__package__) / "replays" / f"{argument}.csv") as path:
            recorded = replace(read_trace(path), name=argument, batch=_RECORDED[argument])
        return replayed(f"replay:{argument}", recorded)
    published = _PUBLISHED[argument]
    from .models.flops import trace_of
    from .models.networks import IMAGENET

    image = (3, published.side, published.side)
    times = published.batch, published.forward_s, published.backward_s
    trace = trace_of(argument, IMAGENET[published.network], image, *times)
    return replayed(f"replay:{argument}", replace(trace, device="cuda"))


@register("workloads", "trace")
def trace(argument: str = "") -> Workload:
    """Layers of a CSV file (name,elements,forward_s,backward_s) in their times; the batch per worker is fixed."""
    if not argument:
        raise UsageError(f"trace needs a file with the columns {','.join(COLUMNS)}: write 'trace:FILE.csv'")
    return replayed(f"trace:{argument}", read_trace(argument))


def replayed(name: str, trace: Trace) -> Workload:
    """The workload that plays a trace."""
    batch = trace.batch or 1
    return Workload(
        name=name,
        batch=batch,
        global_batch=False,
        epochs=1,
        train=_samples(batch * EPOCH_BATCHES),
        test=None,
        build=lambda: _build(trace),
        loss=_loss,
        optimizer=_optimizer,
        schedule=lambda _, __: None,
        trace=trace,
    )


def _samples(count: int) -> Images:
    """One number from 0.5 to 1.5 per sample: small, never 0, with a different mean on every rank."""
    pixels = np.random.default_rng(DATA_SEED).uniform(0.5, 1.5, (count, 1, 1, 1)).astype(np.float32)
    return Images(pixels, np.zeros(count, np.int64), np.zeros((1, 1, 1), np.float32))


def _build(trace: Trace) -> nn.Module:
    from .models.replayed import Replayed

    return Replayed(trace)


def _loss(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001 - it learns nothing
    """Half the mean square, whose gradients sum up to the mean of the batch."""
    return output.square().mean() / 2


def _optimizer(model: nn.Module) -> Optimizer:
    """Plain SGD; its pass over the weights is real work in addition to the trace's time."""
    from torch.optim import SGD

    return SGD(model.parameters(), lr=LEARNING_RATE)
