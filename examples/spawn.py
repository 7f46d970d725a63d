"""A script that starts its own processes, here with torch.multiprocessing, and passes their ranks to ``init``.

    python examples/spawn.py

Use the start method spawn, because a forked child cannot use the connections of its parent.
"""

import secrets
import socket

import torch
import torch.multiprocessing

import syncline

WORKERS = 2


def work(rank: int, address: str, secret: str) -> None:
    syncline.init(rank=rank, world_size=WORKERS, address=address, secret=secret)
    total = syncline.allreduce(torch.full((5,), rank + 1.0), op="sum")
    if syncline.rank() == 0:
        print(f"the sum over {syncline.world_size()} workers is {total.tolist()}")
    syncline.shutdown()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a port that is free now
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    torch.multiprocessing.spawn(work, (address, secrets.token_hex(16)), nprocs=WORKERS)


if __name__ == "__main__":
    main()
