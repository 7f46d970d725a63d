"""A decoder-only transformer: blocks of causal attention and a perceptron, each after a layer normalization.

Vaswani et al., "Attention is all you need", NeurIPS 2017; normalization first and GELU as in Radford et al., "Language
models are unsupervised multitask learners" (GPT-2), 2019. The output layer shares the embedding's weights (Press and
Wolf, EACL 2017), so that this parameter's gradient is complete only at the end of the backward pass.
"""

from __future__ import annotations

from torch import Tensor, arange, nn
from torch.nn.functional import scaled_dot_product_attention

_STD = 0.02


class Transformer(nn.Module):
    """(n, length) int64 symbols to (n, symbols, length) scores of the next ones."""

    def __init__(self, symbols: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(length, width)
        blocks = [_Block(width, heads) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols, bias=False)
        self.apply(_fill)
        for block in blocks:  # the sum over the residuals keeps its scale
            for last in (block.merge, block.narrow):
                nn.init.normal_(last.weight, std=_STD / (2 * layers) ** 0.5)
        self.output.weight = self.embedding.weight

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores in the layout of ``cross_entropy``."""
        hidden = self.embedding(symbols) + self.positions(arange(symbols.shape[1], device=symbols.device))
        scores: Tensor = self.output(self.norm(self.blocks(hidden)))
        return scores.transpose(1, 2)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        count, length, width = hidden.shape
        split = self.project(self.first_norm(hidden)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(found.transpose(1, 2).reshape(count, length, width))
        wide = nn.functional.gelu(self.widen(self.second_norm(hidden)))
        return hidden + self.narrow(wide)  # type: ignore[no-any-return]


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
