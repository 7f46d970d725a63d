"""A script for launchers that has a process group of torch's beside Syncline's servers."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import syncline

syncline.init("ps(servers=1)")
model = torch.nn.Linear(2, 1)
syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
found = f"a group of {int(ones)} in a world of {os.environ['WORLD_SIZE']} of {syncline.world_size()} workers\n"
os.write(1, found.encode())  # in one piece: ranks print at once
dist.destroy_process_group()
