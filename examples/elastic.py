"""Training that goes on when workers are lost.

    syncline run -n 3 --elastic 1:3 examples/elastic.py

Kill a worker meanwhile: the others go on at the step that broke, and each image is used once per epoch. A new worker
takes its place if enough of the training is left.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline

EPOCHS = 8


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = syncline.prepare(model, optimizer, weight="batch")

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1440], labels[:1440])
    sampler = syncline.sampler(train, global_batch=60)

    def training() -> None:
        """It is called again after a loss or when a worker joins, and goes on at the sampler's position."""
        while sampler.epoch < EPOCHS:
            print(f"process {os.getpid()}: rank {syncline.rank()} of {syncline.world_size()}, epoch {sampler.epoch}")
            for x, y in DataLoader(train, batch_sampler=sampler):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                sampler.commit()

    syncline.elastic(training)
    if syncline.rank() == 0:
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean()
        print(f"{syncline.world_size()} workers at the end: {right:.1%} of the test images right")


if __name__ == "__main__":
    main()
