"""Run by ``test_lab_hosts`` on every host: an allreduce by Syncline and one by torch.distributed, in one process."""

from __future__ import annotations

import socket

import numpy as np
import torch
import torch.distributed as dist

import syncline

syncline.init()
ours = syncline.allreduce(np.full(1000, syncline.rank() + 1.0, np.float32), "sum")
dist.init_process_group("gloo")
theirs = torch.full((1000,), syncline.rank() + 1.0)
dist.all_reduce(theirs)
dist.destroy_process_group()
print(socket.gethostname(), ours[-1], theirs[-1].item(), f"local {syncline.local_rank()}", flush=True)
syncline.shutdown()
