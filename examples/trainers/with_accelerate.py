"""Accelerate over Syncline: create the process group before the Accelerator, which uses an existing one.

    torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py
    SYNCLINE_STRATEGY="tree transport=tcp" torchrun --nproc-per-node 2 examples/trainers/with_accelerate.py

The optional first argument is another backend, such as gloo, which gives the same weights. The optional second argument
is a folder to which each rank writes its weights.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main(backend: str = "syncline", folder: str = "") -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    points = torch.randn(320, 20)
    labels = points[:, :4].argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(points, labels), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    losses = accelerator.gather_for_metrics(loss.detach())
    accelerator.print(f"{accelerator.num_processes} ranks over {dist.get_backend()}: loss {losses.mean():.3f}")
    if folder:
        weights = accelerator.unwrap_model(model).state_dict()
        torch.save(weights, Path(folder, f"{backend}-{accelerator.process_index}.pt"))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
