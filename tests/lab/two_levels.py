"""A rank of two hosts that trains under each strategy of its arguments; prints digests and the bytes its host got."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

import syncline

RECEIVED = Path("/sys/class/net", os.environ["SYNCLINE_INTERFACE"], "statistics/rx_bytes")
STEPS = 3

torch.set_num_threads(1)
for strategy in sys.argv[1:]:
    syncline.init(strategy)
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512, bias=False)
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    draw = torch.Generator().manual_seed(syncline.rank())
    syncline.barrier()
    before = int(RECEIVED.read_text())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 1024, generator=draw)).square().sum().backward()
        optimizer.step()
    syncline.barrier()
    received = int(RECEIVED.read_text()) - before
    digest = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    print("RAN", json.dumps([strategy, digest, received, syncline.stats().strategy]), flush=True)
    syncline.shutdown()
