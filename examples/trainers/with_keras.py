"""Keras 3 on PyTorch over Syncline: prepare the model, and call ``fit`` as usual.

    syncline run -n 2 examples/trainers/with_keras.py
    syncline run -n 2 --strategy "ring codec=int8" examples/trainers/with_keras.py

The optional argument is a folder to which each rank writes its weights.
"""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import syncline


def main(folder: str = "") -> None:
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    syncline.init()
    rank, world = syncline.rank(), syncline.world_size()

    points = torch.randn(320, 20)
    labels = points[:, :4].argmax(1)
    layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((20,)), *layers])  # built, so that there are weights
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    syncline.prepare(model)  # backward, inside fit, ends with averaged gradients; Keras' optimizer stays its own
    model.fit(points[rank::world], labels[rank::world], batch_size=8, epochs=2, shuffle=False, verbose=0)

    loss = syncline.allreduce(torch.tensor(model.evaluate(points, labels, verbose=0)))
    if rank == 0:
        print(f"{world} ranks with {syncline.stats().strategy}: loss {loss:.3f}")
    if folder:
        torch.save(model.state_dict(), Path(folder, f"syncline-{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
