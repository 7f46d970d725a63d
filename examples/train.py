"""A plain training script with three lines of Syncline. The training loop is that of a single process.

    syncline run -n 4 examples/train.py                                  # architecture=auto
    syncline run -n 4 --servers 2 examples/train.py                      # two parameter servers
    syncline run -n 4 --strategy "ring transport=tcp" examples/train.py
    torchrun --nproc-per-node 4 examples/train.py

The data are the handwritten digits of scikit-learn. Each worker trains on its share of the images.
"""

import torch
from sklearn.datasets import load_digits

import syncline


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = syncline.prepare(model, optimizer)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    mine = slice(syncline.rank(), 1440, syncline.world_size())  # every rank trains on its share
    for _ in range(10):
        for x, y in zip(images[mine].split(30), labels[mine].split(30), strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()  # ends with averaged gradients
            optimizer.step()

    if syncline.rank() == 0:
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean()
        print(f"{syncline.stats().strategy}: {right:.1%} of the test images right")


if __name__ == "__main__":
    main()
