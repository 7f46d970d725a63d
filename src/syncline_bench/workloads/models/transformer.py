"""Transformers: a decoder, whose default sizes are those of no model, and the published BERT-base and ViT-B/16.

The decoder has blocks of causal attention and a perceptron, each after a layer normalization. GPT-2 with 124,439,808
parameters is ``Transformer(50_257, 1024, 768, 12, 12)``. Parameters are registered in forward order.

Vaswani et al., "Attention is all you need", NeurIPS 2017; normalization first and GELU as in Radford et al., "Language
models are unsupervised multitask learners" (GPT-2), 2019. The output layer shares the embedding's weights (Press and
Wolf, EACL 2017), so that this parameter's gradient is complete only at the end of the backward pass.
"""

from __future__ import annotations

from torch import Tensor, arange, cat, nn, zeros, zeros_like
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


class Bert(nn.Module):
    """(n, length) int64 symbols to (n, width) features of the whole and (n, length, width) of each; BERT-base.

    109,482,240 parameters with the pooler, without heads: Devlin, Chang, Lee, Toutanova, "BERT: Pre-training of deep
    bidirectional transformers for language understanding", NAACL 2019. Normalization is last, and queries, keys and
    values have matrices of their own.
    """

    def __init__(self, symbols: int = 30_522, length: int = 512, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(_LastNormed(width, width // 64) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)
        self.apply(_fill)

    def forward(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        """The features of the first symbol after the pooler, and those of all symbols before."""
        places = arange(symbols.shape[1], device=symbols.device)
        hidden = self.embedding(symbols) + self.positions(places) + self.segments(zeros_like(symbols))
        found = self.blocks(self.norm(hidden))
        return self.pooler(found[:, 0]).tanh(), found


class VisionTransformer(nn.Module):
    """(n, 3, side, side) images to (n, classes) scores; ViT-B/16 has 86,567,656 parameters.

    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021.
    """

    def __init__(self, side: int = 224, width: int = 768, layers: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.whole = nn.Parameter(zeros(1, 1, width))
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(zeros(1, (side // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(_Block(width, width // 64, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)
        self.apply(_fill)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of the token that stands for the whole image."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = cat([self.whole.expand(len(images), -1, -1), patches], 1) + self.positions
        scores: Tensor = self.output(self.norm(self.blocks(hidden))[:, 0])
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first_norm = nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.project(self.first_norm(hidden)).chunk(3, -1)
        hidden = hidden + self.merge(_attended(query, key, value, self.heads, causal=self.causal))
        wide = nn.functional.gelu(self.widen(self.second_norm(hidden)))
        return hidden + self.narrow(wide)  # type: ignore[no-any-return]


class _LastNormed(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.merge, self.first_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.second_norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        hidden = self.first_norm(hidden + self.merge(_attended(query, key, value, self.heads, causal=False)))
        wide = nn.functional.gelu(self.widen(hidden))
        return self.second_norm(hidden + self.narrow(wide))  # type: ignore[no-any-return]


def _attended(query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool) -> Tensor:
    """Attention of all heads, from and to (n, length, width)."""
    count, length, width = query.shape

    def by_head(one: Tensor) -> Tensor:
        return one.view(count, length, heads, width // heads).transpose(1, 2)

    found: Tensor = scaled_dot_product_attention(by_head(query), by_head(key), by_head(value), is_causal=causal)
    return found.transpose(1, 2).reshape(count, length, width)


def _fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
