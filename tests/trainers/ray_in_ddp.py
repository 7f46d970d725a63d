"""The training of ``with_ray.py`` in processes that Ray has not started: DistributedDataParallel, and its sampler."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "trainers"))

import torch.distributed as dist
import with_ray
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main(backend: str, folder: str) -> None:
    dist.init_process_group(backend)
    with_ray.prepare_model = DistributedDataParallel
    with_ray.prepare_data_loader = lambda loader: DataLoader(
        loader.dataset, loader.batch_size, sampler=DistributedSampler(loader.dataset, shuffle=False)
    )
    with_ray.get_context = lambda: SimpleNamespace(get_world_rank=dist.get_rank, get_world_size=dist.get_world_size)
    with_ray.train({"backend": backend, "folder": folder})
    dist.barrier()
    os._exit(0)  # torch may end Gloo's group under DDP for ever: it joins a thread that waits for the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
