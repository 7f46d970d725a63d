"""What a worker of a joined run does: ``elastic_bodies.learn_all``, with waits for others and deaths at given steps.

    joined_script.py PLAN

PLAN is JSON: ``wanted`` has pairs of a step and the number of workers for which rank 0 waits from there on, before the
step ``until``; ``die`` and ``hold`` have pairs of a process's number and the step before which it kills itself, or
holds still. ``other`` has the numbers of processes with another model, ``init`` the arguments of ``syncline.init``.
``updated`` has the number of a server, and the step whose update is its last; rank 0 waits for another one before the
step ``serves``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import elastic_bodies as bodies
import torch

import syncline
from syncline.process import process
from syncline.recovery import agreement

HOLD_S = 60.0


def say(line: str) -> None:
    """Print a line by one call, because other workers print to the same pipe."""
    os.write(1, f"{line}\n".encode())


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    number = int(os.environ["SYNCLINE_ELASTIC"].split(":")[1])
    agreement.LOOK_S = 0.0

    def happen(now: str, step: int) -> None:
        if now == "join" and syncline.rank() == 0:
            wanted = max(
                (workers for at, workers in plan.get("wanted", []) if at <= step < plan.get("until", 99)), default=0
            )
            served = len(plan.get("updated", [])) > process.session.group.servers and step >= plan["serves"]
            if syncline.world_size() < wanted or served:
                say(f"waits at {step}")
                bodies.await_a_join()
        if now == "before" and [number, step] in plan.get("die", []):
            os.kill(os.getpid(), signal.SIGKILL)
        if now == "before" and [number, step] in plan.get("hold", []):
            say(f"{number} holds")
            time.sleep(HOLD_S)

    def made() -> Any:
        x, y, model, *rest = bodies.problem()
        return x, y, torch.nn.Sequential(model) if number in plan.get("other", []) else model, *rest

    if [number] == plan.get("updated", [])[:1]:
        bodies.in_step("updated", plan["updated"][1])
    torch.set_num_threads(1)
    syncline.init(**plan.get("init", {}))
    learnt = bodies.learn_all(happen, made)
    places = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    members = list(syncline.stats().members)
    say("learnt " + json.dumps([number, syncline.rank(), members, places, *learnt]))
    syncline.shutdown()


if __name__ == "__main__":
    main()
