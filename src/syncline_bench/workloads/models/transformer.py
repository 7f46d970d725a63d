"""A decoder: blocks of causal attention and a perceptron, each after a layer normalization.

Its sizes in ``text`` are those of no model. GPT-2 with 124,439,808
parameters is ``Transformer(50_257, 1024, 768, 12, 12)``. Parameters are registered in forward order.

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
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, symbols, bias=False)
        self.apply(fill)
        for block in blocks:  # the sum over the residuals keeps its scale
            for last in (block.merge, block.narrow):
                nn.init.normal_(last.weight, std=_STD / (2 * layers) ** 0.5)
        self.output.weight = self.embedding.weight

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores in the layout of ``cross_entropy``."""
        hidden = self.embedding(symbols) + self.positions(arange(symbols.shape[1], device=symbols.device))
        scores: Tensor = self.output(self.norm(self.blocks(hidden)))
        return scores.transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron, each on normalized values and added to them."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first_norm = nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, length, width) to the same shape."""
        query, key, value = self.project(self.first_norm(hidden)).chunk(3, -1)
        hidden = hidden + self.merge(attended(query, key, value, self.heads, causal=self.causal))
        wide = nn.functional.gelu(self.widen(self.second_norm(hidden)))
        return hidden + self.narrow(wide)  # type: ignore[no-any-return]


def attended(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Attention of all heads, from and to (n, length, width)."""
    count, length, width = query.shape

    def by_head(one: Tensor) -> Tensor:
        return one.view(count, length, heads, width // heads).transpose(1, 2)

    found: Tensor = scaled_dot_product_attention(by_head(query), by_head(key), by_head(value), is_causal=causal)
    return found.transpose(1, 2).reshape(count, length, width)


def fill(module: nn.Module) -> None:
    """Give a module's own weights their initial values."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
