"""Ranks with different numbers of batches: who has run out is the others' shadow until all have.

A shadow shows what the others show at every collective call of a step, but for its ticket, which says that it has no
batches. It takes part in their exchanges with zeros and weight 0, and in what workers that own weights do together.
Where weights are exchanged, its own count as long as it has made steps since the last time, and are the others' in the
end.
"""

from __future__ import annotations

import torch

from ...session.tickets import AVERAGE, JOINED, STEP, step_of
from .agreement import copy_from_worker
from .passes import TrainedReplica
from .served import Client


def shadow_until_all_joined(replica: TrainedReplica, client: Client | None = None) -> None:
    """Take part in the others' steps with weight 0 until every rank has run out of batches.

    All ranks then have the model of the rank that trained longest, or the mean of all where weights are exchanged; the
    optimizer's state is the affair of whoever listens (``Listeners.joined``), or that of the owners, with whom
    ``client`` deals. Where every push is an update by itself nobody needs a shadow.
    """
    if client is not None and not client.together:
        client.join()
        return
    session = replica.session
    replica.settle()
    while True:
        if replica.exchange.replaces:
            replica.replace_layout()
        over = False
        while not over:
            weight = 0.0 if replica.averaging is None else replica.averaging.weight
            meeting = session.meet(JOINED, weight=weight, flags=replica.steps)
            if meeting.work is None:
                return
            session.engine.wait(meeting.work)
            tickets = meeting.tickets()
            kinds = [ticket.kind for ticket in tickets]
            others = [rank for rank, kind in enumerate(kinds) if kind != JOINED]
            if not others:
                _end(replica, [ticket.flags for ticket in tickets], held=client is not None)
                return
            if STEP in kinds:
                replica.shadow(meeting, step_of(tickets[kinds.index(STEP)]))  # not all of their steps are exchanged
            if AVERAGE in kinds and replica.averaging is not None:
                replica.trained.shadow(AVERAGE, meeting, step_of(tickets[kinds.index(AVERAGE)]))
            over = client is None or client.shadow(kinds[others[0]], others[0])


def _end(replica: TrainedReplica, steps: list[int], held: bool) -> None:
    """Nobody has batches any more, after so many steps of each rank; others may hold the weights, which all have."""
    longest = steps.index(max(steps))
    if replica.averaging is not None:
        replica.steps = max(steps)
        replica.trained.consolidate()
        replica.listeners.joined(longest)
        return
    if min(steps) < max(steps) or replica.made_local_steps:
        weights = {id(tensor) for _, tensor in replica.named} if held else set[int]()
        with torch.no_grad():
            tensors = [tensor.detach() for _, tensor in replica.selection.tensors() if id(tensor) not in weights]
            copy_from_worker(replica.session, tensors, root=longest, everyone=False)
        replica.listeners.joined(longest)
    replica.steps = max(steps)
