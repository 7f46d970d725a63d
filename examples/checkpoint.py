"""Save a run and resume it bit for bit, including the codec's residuals.

    syncline run -n 2 examples/checkpoint.py checkpoints
    syncline run -n 2 examples/checkpoint.py checkpoints

Each epoch writes a file to the folder, and a run resumes from the newest one. Stop the first run with Ctrl-C, or delete
the newest files: the second run ends with the same weights.
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
    own = syncline.state_dict()  # collective: it gathers the residuals of all ranks
    if syncline.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "syncline": own, "epoch": epoch}
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").rename(folder / f"epoch-{epoch}.pt")  # atomic: an interrupt leaves no partial file


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint, the same on all ranks, and return the first epoch that is still to be trained."""
    found = max(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]), default=None)
    syncline.barrier()  # all ranks must list the folder before any rank writes to it
    if found is None:
        return 0
    state: dict[str, Any] = torch.load(found, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    syncline.load_state_dict(state["syncline"])
    return int(state["epoch"]) + 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
