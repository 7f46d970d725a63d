"""How evenly the weights of real networks lie on their owners."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.nouns import Group
from syncline.serving.shard import planned
from syncline.strategy.strategy import Strategy

pytest.importorskip("torch")

from syncline.workloads import layers, load


@pytest.mark.parametrize("schedule", ["fixed", "wait_free", "priority", "fifo"])
@pytest.mark.parametrize("network", ["googlenet", "resnet50"])
def test_owners_share_the_weights_evenly(network: str, schedule: str) -> None:
    """Within 2 % of each other, and nothing is left out, for 65 of them too."""
    found = layers(load(f"synthetic:{network}").model(0))
    made = Strategy.parse(f"ps schedule={schedule}").schedule_object()
    buckets = list(made.buckets(found))
    arrays = [np.broadcast_to(np.float32(0), bucket.elements) for bucket in buckets]
    for servers in (1, 2, 3, 8, 65):
        for on, own in (("ranks", servers), ("workers", 0)):
            strategy = Strategy.parse(f"ps(servers={servers}, on={on})")
            push, _ = strategy.halves(Group(max(4, servers), own))
            shares = [
                sum(held.slice.elements for held in planned(buckets, arrays, arrays, push, owner))
                for owner in push.owners
            ]
            assert sum(shares) == sum(layer.spec.elements for layer in found)
            assert max(shares) <= 1.02 * min(shares)
