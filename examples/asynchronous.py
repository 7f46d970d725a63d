"""Asynchronous training: workers take batches from a common pool, never wait, and agree on the weights at the end.

    syncline run -n 4 examples/asynchronous.py

Each image is used once per epoch. A free worker takes the next batch, so a slow worker processes fewer batches.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    syncline.init("ps(servers=1, on=workers) sync=asp")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model, optimizer = syncline.prepare(model, optimizer)

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1440], labels[:1440])
    loader = DataLoader(train, batch_sampler=syncline.sampler(train, batch_size=30))
    trained = 0
    for _ in range(12):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            trained += len(x)

    syncline.consolidate()  # before this call, each worker has the weights that it received last
    everyone = [int(data) for data in syncline.gather(str(trained).encode())]
    if syncline.rank() == 0:
        right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean()
        print(f"images by worker {everyone}, all together {sum(everyone)}: {right:.1%} of the test images right")


if __name__ == "__main__":
    main()
