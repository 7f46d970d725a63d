"""Write your own codec in NumPy: it keeps the upper half of each float32 and trains with error feedback.

    syncline run -n 2 examples/own_codec.py

A codec converts a gradient to 32-bit words and back. This one declares that it is biased (it always truncates towards
zero) and a contraction (its error is never larger than the gradient). These two declarations are enough for Syncline to
add error feedback. A package makes its codec available to every strategy by an entry point:

    [project.entry-points."syncline.codecs"]
    upper = "my_package.upper"
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits

import syncline
from syncline.codecs import Combine, Encoded, Floats, Payload, State, check_words, fresh_state
from syncline.nouns import Spec
from syncline.registry import register


@register("codecs", "upper")
@dataclass(frozen=True)
class Upper:
    """Keeps the sign, the exponent and the first seven bits of the mantissa, and truncates the rest."""

    combine: ClassVar[Combine] = "owner"  # halves cannot be added: owners decode, add and encode again
    block: ClassVar[int] = 2  # two elements share a word
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        size = 4 * words_of(spec.elements)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        residual = None if state.residual is None else state.residual[start : start + x.size]
        wanted = x.copy() if residual is None else x + residual
        words = words_of(x.size)
        halves = out[:words].view(np.uint16)
        halves[x.size :] = 0
        halves[: x.size] = wanted.view(np.uint32) >> 16
        finite = np.isfinite(wanted)
        if residual is not None:  # the encoding error is added to the next gradient
            np.subtract(wanted, self._floats(out[:words], x.size), out=residual, where=finite)
        return Encoded(words, bool(finite.all()))

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(out.size))
        found = self._floats(payload, out.size)
        np.add(out, found, out=out) if add else np.copyto(out, found)

    def _floats(self, payload: Payload, elements: int) -> Floats:
        return (payload.view(np.uint16)[:elements].astype(np.uint32) << 16).view(np.float32)


def words_of(elements: int) -> int:
    return (elements + 1) // 2


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init("codec=upper")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    mine = slice(syncline.rank(), 1440, syncline.world_size())
    for _ in range(5):
        for x, y in zip(images[mine].split(30), labels[mine].split(30), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if syncline.rank() == 0:
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean()
        print(f"{syncline.stats().strategy}: {right:.1%} of the test images right")


if __name__ == "__main__":
    main()
