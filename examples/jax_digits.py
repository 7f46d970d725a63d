"""JAX and optax on scikit-learn's handwritten digits: a small convolutional network, averaged inside ``jit``.

syncline run -n 4 examples/jax_digits.py
syncline run -n 4 --servers 1 examples/jax_digits.py "ps(servers=1)"
syncline run -n 4 examples/jax_digits.py "ring codec=int8"
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import syncline
import syncline.jax

BATCH, EPOCHS = 64, 12  # the global batch: the result does not depend on the number of workers


def network(params, images):
    hidden = images[..., None]
    for layer in ("conv1", "conv2"):
        hidden = jax.lax.conv_general_dilated(
            hidden, params[layer]["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        hidden = jax.nn.relu(hidden + params[layer]["b"])
        hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hidden.reshape(len(images), -1) @ params["dense"]["w"] + params["dense"]["b"]


def loss_of(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, images), labels).mean()


def parameters(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 32), "dense": (128, 10)}
    draw = jax.nn.initializers.he_normal()
    return {
        name: {"w": draw(key, shape), "b": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


syncline.init(sys.argv[1] if len(sys.argv) > 1 else None)
digits = load_digits()
images, labels = (digits.images / 8 - 1).astype(np.float32), digits.target
order = np.random.default_rng(1797).permutation(len(labels))
train, test = order[360:], order[:360]

steps = EPOCHS * (len(train) // BATCH)
rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, steps // 10, steps)
params = syncline.jax.broadcast(parameters(seed=syncline.rank()))  # all start from rank 0's
optimizer = syncline.jax.distributed(optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(rate, momentum=0.9)))
state = optimizer.init(params)  # outside jit: collective; a server serves here until all workers have left


@jax.jit
def step(params, state, images, labels):
    gradients = jax.grad(loss_of)(params, images, labels)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


share = BATCH // syncline.world_size()
for epoch in range(EPOCHS):
    shuffled = np.random.default_rng(epoch).permutation(train)
    for start in range(0, len(train) - BATCH + 1, BATCH):
        mine = shuffled[start + syncline.rank() * share :][:share]
        params, state = step(params, state, images[mine], labels[mine])

params = syncline.jax.consolidate(params, state)
right = int((jax.jit(network)(params, images[test]).argmax(1) == labels[test]).sum())
weights = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
equal = len(set(syncline.gather(weights))) == 1
if syncline.rank() == 0:
    name = syncline.stats().chosen
    print(f"{name}: {right} of {len(test)} test images right, replicas {'equal' if equal else 'differ'}")
