"""Run by ``test_lab_mpi`` as an MPI job: an allreduce of so many bytes, checked in every element."""

from __future__ import annotations

import socket
import sys

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
values = np.arange(int(sys.argv[1]) // 4, dtype=np.float32) % 1024
total = np.empty_like(values)
world.Allreduce(values + world.rank, total)
if not np.array_equal(total, world.size * values + sum(range(world.size))):
    world.Abort(3)
print(f"{socket.gethostname()} rank {world.rank} of {world.size}", flush=True)
