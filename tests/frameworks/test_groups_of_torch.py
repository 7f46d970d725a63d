"""What torch calls a group, given in place of one of ours: made once, whoever comes first, and gone when torch's is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from syncline import process as module
from syncline.errors import UsageError
from syncline.frameworks.torch import options
from syncline.process import Process
from syncline.session.groups import WorkerGroup, found_group
from syncline.session.session import Session


class OfTorch:
    """What torch has for a group, as far as it is asked where it comes from."""

    __module__ = "torch.somewhere"


def test_two_threads_that_give_a_group_first_make_one(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {rank: threading.Barrier(2) for rank in (0, 1)}

    def together(world: Session, ranks: Sequence[int]) -> WorkerGroup:
        with contextlib.suppress(threading.BrokenBarrierError):  # where nobody else makes it
            both[world.rank].wait(0.2)
        return found_group(world, ranks)

    monkeypatch.setattr(module, "found_group", together)
    monkeypatch.setattr(options, "ranks_of", lambda *_: (0, 1))

    def body(session: Session) -> Any:
        here, given = Process(), OfTorch()
        here.joined = session
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(here.within, [given, given])
        assert first is second
        return len(session.family)

    assert group("ring", 2, body) == [2, 2]


@pytest.mark.parametrize("everything", [False, True])
def test_a_process_group_that_was_destroyed_is_refused(group: Any, everything: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = dist.new_group([0])
        assert group("ring", 1, lambda session: options.ranks_of(session, made)) == [(0,)]
        dist.destroy_process_group(None if everything else made)
        with pytest.raises(UsageError, match=r"a ProcessGroup that was destroyed: give syncline.new_group\(ranks\)"):
            group("ring", 1, lambda session: options.ranks_of(session, made))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
