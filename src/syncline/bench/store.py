"""torch's own store between the processes of a bench, which peers connect over: nothing of a run's start uses it."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

from ..errors import GroupError
from ..launch.environment import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def open_store(environment: Environment, timeout: float, port: int | None = None) -> TCPStore:
    """The store of this run's processes, at MASTER_PORT or ``port`` of rank 0's address, which rank 0 serves.

    Raises GroupError when the port is taken or rank 0 is not there within ``timeout`` seconds.
    """
    from torch._C._distributed_c10d import TCPStore

    at = int(os.environ["MASTER_PORT"]) if port is None else port
    try:
        return TCPStore(
            environment.address,
            at,
            is_master=environment.rank == 0,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise GroupError(
            f"rank {environment.rank} cannot reach torch's store of rank 0 at {environment.address}:{at} within"
            f" {timeout:.0f} s: {str(error).splitlines()[0]}"
        ) from error
