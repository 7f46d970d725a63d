"""Save a run and resume it bit for bit, including the codec's residuals.

    syncline run -n 2 examples/checkpoint.py checkpoints
    syncline run -n 2 examples/checkpoint.py checkpoints

Each epoch writes a checkpoint to the folder, and a run resumes from the newest one. Stop the first run with Ctrl-C, or
delete the newest checkpoints: the second run ends with the same weights. A run with another number of workers uses the
same samples in each step.
"""

import hashlib
import sys
from pathlib import Path

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
    store = syncline.checkpoints(folder, keep=EPOCHS)
    found = store.load()  # the newest complete checkpoint, on all ranks, or None
    if found is not None:
        _, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        syncline.load_state_dict(state["syncline"])
        sampler.load_state_dict(state["sampler"])

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
        # Written in the background, by all ranks together. syncline.state_dict() has the residuals of all ranks.
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        store.save(sampler.epoch, state | {"syncline": syncline.state_dict(), "sampler": sampler.state_dict()})
    store.wait()

    if syncline.rank() == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"from epoch {first} to {EPOCHS}: weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
