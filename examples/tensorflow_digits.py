"""Keras on scikit-learn's handwritten digits: a small convolutional network, by ``fit``.

syncline run -n 4 examples/tensorflow_digits.py
syncline run -n 4 --servers 1 examples/tensorflow_digits.py "ps(servers=1)"
syncline run -n 4 examples/tensorflow_digits.py "ring codec=int8"
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from sklearn.datasets import load_digits

import syncline
import syncline.tensorflow

BATCH, EPOCHS = 64, 12  # the global batch: the result does not depend on the number of workers

syncline.init(sys.argv[1] if len(sys.argv) > 1 else None)
keras.utils.set_random_seed(syncline.rank())  # prepare gives all workers rank 0's weights
digits = load_digits()
images, labels = (digits.images[..., None] / 8 - 1).astype(np.float32), digits.target
order = np.random.default_rng(1797).permutation(len(labels))
train, test = order[360:], order[:360]

layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu", kernel_initializer="he_normal"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, padding="same", activation="relu", kernel_initializer="he_normal"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
steps = len(train) // BATCH
warmup = EPOCHS * steps // 10
rate = keras.optimizers.schedules.CosineDecay(0.0, EPOCHS * steps - warmup, warmup_target=0.05, warmup_steps=warmup)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(rate, momentum=0.9, weight_decay=1e-3), loss, metrics=["accuracy"])
syncline.tensorflow.prepare(model)  # collective; a server serves here until all workers have left

share = BATCH // syncline.world_size()
for epoch in range(EPOCHS):
    shuffled = np.random.default_rng(epoch).permutation(train)[: steps * BATCH]
    mine = shuffled.reshape(steps, syncline.world_size(), share)[:, syncline.rank()].reshape(-1)
    model.fit(images[mine], labels[mine], batch_size=share, shuffle=False, verbose=0)

syncline.consolidate()
right = int((model.predict(images[test], batch_size=360, verbose=0).argmax(1) == labels[test]).sum())
equal = len(set(syncline.gather(b"".join(one.tobytes() for one in model.get_weights())))) == 1
if syncline.rank() == 0:
    name = syncline.stats().chosen
    print(f"{name}: {right} of {len(test)} test images right, replicas {'equal' if equal else 'differ'}")
