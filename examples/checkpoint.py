"""Save a run and go on with it later, bit for bit, with what a codec has not sent yet.

    syncline run -n 2 examples/checkpoint.py checkpoints
    syncline run -n 2 examples/checkpoint.py checkpoints

Every epoch leaves a file in the folder. A run that finds some goes on behind the newest: stop the first one with
Ctrl-C, or delete the last files, and the second one ends with the same weights.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import syncline

EPOCHS = 4


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init("ring codec=int8")  # prints as direct codec=feedback(int8): every rank has residuals
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    first = load(folder, model, optimizer)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    for epoch in range(first, EPOCHS):
        order = torch.randperm(1440, generator=torch.Generator().manual_seed(epoch))  # the same on resuming
        for chosen in order[syncline.rank() :: syncline.world_size()].split(30):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        save(folder, model, optimizer, epoch)

    if syncline.rank() == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"from epoch {first} to {EPOCHS}: weights {hashlib.sha256(weights).hexdigest()[:16]}")


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    own = syncline.state_dict()  # on all ranks: it gathers what each of them keeps
    if syncline.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncline": own, "epoch": epoch}
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").rename(folder / f"epoch-{epoch}.pt")  # never half a file


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The first epoch that is left to do; all ranks read the same file."""
    found = max(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]), default=None)
    syncline.barrier()  # nobody writes before all have looked
    if found is None:
        return 0
    state: dict[str, Any] = torch.load(found, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    syncline.load_state_dict(state["syncline"])
    return int(state["epoch"]) + 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
