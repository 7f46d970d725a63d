"""The training of ``with_keras.py`` as Keras' guide has it: DistributedDataParallel in a loop of one's own."""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
import torch.distributed as dist


def main(backend: str, folder: Path) -> None:
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    points = torch.randn(320, 20)
    labels = points[:, :4].argmax(1)
    layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((20,)), *layers])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        for x, y in zip(points[rank::world].split(8), labels[rank::world].split(8), strict=True):
            wrapped.zero_grad()
            loss_of(y, wrapped(x)).backward()
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in model.trainable_weights], model.trainable_weights)
    torch.save(model.state_dict(), folder / f"{backend}-in-ddp-{rank}.pt")
    if backend == "gloo":
        dist.barrier()
        os._exit(0)  # torch may end Gloo's group under DDP for ever: it joins a thread that waits for the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
