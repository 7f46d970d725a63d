"""A server's part in the training of a model whose gradients come as arrays: it holds the weights, or adds up."""

from __future__ import annotations

from collections.abc import Sequence

from ..nouns import Spec
from ..serving.server import serve
from ..serving.shard import Build
from ..serving.summing import Summing
from ..serving.traffic import Model
from ..session.session import Session
from ..training.memory import Blocks, agree_on_model, copy_from_rank_0
from ._weights import Weights


def serve_model(
    session: Session, specs: Sequence[Spec], weights: Weights, build: Build, owner: object, rule: str = ""
) -> None:
    """Take part until all workers have left."""
    layout = agree_on_model(session, session.enter_model(owner), specs, rule)
    gradients, held = (Blocks(layout.layers, layout.buckets, session.engine.allocate) for _ in range(2))
    weights.read(held.flat)
    copy_from_rank_0(session, held.arrays)
    compression = session.compression(layout.layers, layout.buckets, gradients.arrays)
    if session.strategy.server_holds_weights:
        serve(session, Model(layout, gradients.arrays, held.arrays, compression), build, [])
    else:
        Summing(session, layout, gradients.arrays, compression).serve()
