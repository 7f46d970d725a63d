"""What else scripts do with Accelerate: a hook, a model that syncline.prepare() has, and a backend given by name."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs

import syncline


def train(model: torch.nn.Module, accelerator: Accelerator) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 20, generator=generator)).square().mean())
        optimizer.step()


def main(how: str, folder: Path) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(20, 10)
    if how == "named":
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="syncline")])
        return
    if how == "late":
        Accelerator(cpu=True)
        print(f"it has made a group over {dist.get_backend()}")
    dist.init_process_group("syncline")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(plain)
    if how == "both":
        syncline.init()
        try:
            syncline.prepare(model)
        except syncline.errors.UsageError as error:
            print(f"UsageError: {error}")
        model = accelerator.prepare(syncline.prepare(torch.nn.Linear(20, 10)))
    if how == "hook":
        model.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)
    train(model, accelerator)
    torch.save(plain.state_dict(), folder / f"{how}-{accelerator.process_index}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
