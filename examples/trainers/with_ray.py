"""Ray Train over Syncline: pass the backend's name to TorchConfig. Ray starts the two workers.

    python examples/trainers/with_ray.py
    SYNCLINE_STRATEGY="tree transport=tcp" python examples/trainers/with_ray.py

The optional first argument is another backend, such as gloo, which gives the same weights. The optional second argument
is a folder to which each rank writes its weights.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    points = torch.randn(320, 20)
    labels = points[:, :4].argmax(1)
    layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    model = prepare_model(layers)  # DistributedDataParallel
    loader = prepare_data_loader(DataLoader(TensorDataset(points, labels), batch_size=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    dist.all_reduce(loss := loss.detach())
    rank, world = get_context().get_world_rank(), get_context().get_world_size()
    if rank == 0:
        Path(config["folder"], "said").write_text(f"{world} ranks over {dist.get_backend()}: loss {loss / world:.3f}")
    torch.save(layers.state_dict(), Path(config["folder"], f"{config['backend']}-{rank}.pt"))


def main(backend: str = "syncline", folder: str = "") -> None:
    with tempfile.TemporaryDirectory() as own:
        here = folder or own
        variables = {name: value for name, value in os.environ.items() if name.startswith("SYNCLINE_")}
        ray.init(
            num_cpus=2,
            object_store_memory=100_000_000,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        TorchTrainer(
            train,
            train_loop_config={"backend": backend, "folder": here},
            torch_config=TorchConfig(backend=backend, timeout_s=60),  # Ray's own limit is half an hour
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=own),
        ).fit()
        ray.shutdown()
        print(Path(here, "said").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
