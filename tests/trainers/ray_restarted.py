"""A training under Ray that loses a worker, is started again by Ray, and goes on at its checkpoint.

Argument: a folder. Each step of rank 0 is a line in its file ``steps``. ``refused`` is what an elastic run is told.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import syncline
from syncline.errors import UsageError

STEPS, LOST = 5, 2


def train(config: dict[str, str]) -> None:
    folder, rank = Path(config["folder"]), dist.get_rank()
    try:
        syncline.init(elastic=2)
    except UsageError as error:
        (folder / "refused").write_text(str(error))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1)
    state: Any = torch.load(folder / "newest.pt") if (folder / "newest.pt").exists() else {"step": 0}
    if "layer" in state:
        layer.load_state_dict(state["layer"])
    model, optimizer = prepare_model(layer), torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(state["step"], STEPS):
        if rank == 1 and step == LOST and not (folder / "lost").exists():
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + step / 10)).pow(2).mean().backward()
        optimizer.step()
        if rank == 0:
            with (folder / "steps").open("a") as file:
                print(step, dist.get_backend(), file=file)
            torch.save({"step": step + 1, "layer": layer.state_dict()}, folder / "next.pt")
            (folder / "next.pt").replace(folder / "newest.pt")  # complete, or not there


def main(folder: str) -> None:
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
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="syncline", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
