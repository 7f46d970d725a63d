"""Training with a large batch: gradient accumulation, linear scaling of the learning rate with warm-up, and LARS.

    syncline run -n 4 examples/large_batch.py

Each worker accumulates the gradients of four small batches and exchanges them once. The learning rate starts at the
value for one small batch. During the first epochs it rises linearly to that value times the number of small batches in
a step.
"""

import contextlib

import torch
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import LinearLR

import syncline
from syncline.optim import LARS

PARTS, EPOCHS = 4, 20


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    times = PARTS * syncline.world_size()
    groups = [
        {"params": [tensor for tensor in model.parameters() if tensor.dim() > 1]},
        {"params": [tensor for tensor in model.parameters() if tensor.dim() < 2], "adapt": False, "lr": 0.01 * times},
    ]
    optimizer = LARS(groups, lr=0.1 * times, trust=0.01, weight_decay=1e-4)
    model, optimizer = syncline.prepare(model, optimizer)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    mine = slice(syncline.rank(), 1440, syncline.world_size())
    small = list(zip(images[mine].split(15), labels[mine].split(15), strict=True))
    scheduler = LinearLR(optimizer, start_factor=1 / times, total_iters=5 * len(small) // PARTS)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(small, 1):
            exchanged = number % PARTS == 0
            with contextlib.nullcontext() if exchanged else syncline.no_sync():
                (torch.nn.functional.cross_entropy(model(x), y) / PARTS).backward()
            if exchanged:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()

    if syncline.rank() == 0:
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean()
        print(f"batches of {15 * times}: {right:.1%} of the test images right")


if __name__ == "__main__":
    main()
