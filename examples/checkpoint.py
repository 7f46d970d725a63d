"""Save a run and resume it bit for bit, including the codec's residuals.

    syncline run -n 2 examples/checkpoint.py checkpoints
    syncline run -n 2 examples/checkpoint.py checkpoints

Each epoch writes a file to the folder, and a run resumes from the newest one. Stop the first run with Ctrl-C, or delete
the newest files: the second run ends with the same weights. A run with another number of workers uses the same samples
in each step.
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
    sampler = syncline.sampler(1440, global_batch=60)
    load(folder, model, optimizer, sampler)

    first = sampler.epoch
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    while sampler.epoch < EPOCHS:
        for chosen in sampler:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            sampler.commit()
        save(folder, model, optimizer, sampler)

    if syncline.rank() == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"from epoch {first} to {EPOCHS}: weights {hashlib.sha256(weights).hexdigest()[:16]}")


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: Any) -> None:
    own = syncline.state_dict()  # collective: it gathers the residuals of all ranks
    if syncline.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"syncline": own, "sampler": sampler.state_dict()}, folder / "new.pt")
        # Atomic: an interrupt leaves no partial file.
        (folder / "new.pt").rename(folder / f"epoch-{sampler.epoch - 1}.pt")


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sampler: Any) -> None:
    """Restore the newest checkpoint, the same on all ranks, with the position in the samples."""
    found = max(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]), default=None)
    syncline.barrier()  # all ranks must list the folder before any rank writes to it
    if found is None:
        return
    state: dict[str, Any] = torch.load(found, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    syncline.load_state_dict(state["syncline"])
    sampler.load_state_dict(state["sampler"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
