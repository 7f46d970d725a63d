"""TensorFlow: what layers and optimizers ask for beyond plain steps, callbacks, threads, refusals and faults."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from array_ranks import are_refused, is_told_of, ranks, train_digits_without

for package in ("tensorflow", "keras"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS = 2
LIKE_ONE = ["embedding", "global_clipnorm", "clipnorm", "ema", "accumulated", "constraint", "unused"]


@pytest.mark.deep
def test_layers_and_optimizers_do_what_they_do_on_one_worker(tmp_path: Path) -> None:
    """Rows of embeddings, clipping by norms of the mean, means of weights, accumulation, constraints."""
    one, other = ranks(tmp_path, "tensorflow_cases.like_one", WORKERS, LIKE_ONE).found()
    for name, (mine, wanted), (theirs, _) in zip(LIKE_ONE, one, other, strict=True):
        for found, same, single in zip(mine, theirs, wanted, strict=True):
            assert np.array_equal(found, same), name
            np.testing.assert_allclose(found, single, rtol=1e-9, atol=1e-12, err_msg=name)


def test_what_is_beside_the_weights_is_alike_on_all_ranks(tmp_path: Path) -> None:
    """Moving means, scales of losses; of models that were prepared again, or with a group."""
    one, other = ranks(tmp_path, "tensorflow_cases.alike", WORKERS).found()
    assert one.keys() == other.keys()
    for name, mine in one.items():
        assert all(np.array_equal(a, b) for a, b in zip(mine, other[name], strict=True)), name
        assert all(np.isfinite(a).all() for a in mine), name


@pytest.mark.deep
@pytest.mark.parametrize("threads", [1, 2])
def test_few_threads_are_enough(tmp_path: Path, threads: int) -> None:
    """On one core: two models in one graph, in a loop whose gradients wait for nothing."""
    one, other = ranks(tmp_path, "tensorflow_cases.few_threads", WORKERS, threads, x64=False).found()
    assert one == other
    means = [0.4] * 4 + [0.1] * 4  # of Adam, which moves by its rate, and of SGD by the mean of 1 and 2
    np.testing.assert_allclose(np.array(one) / (500 * 300), means * 2 + means[:4], rtol=1e-3)


def test_callbacks_decide_alike_and_resume(tmp_path: Path) -> None:
    """Early stopping by metrics of all, and a file that two workers leave and one goes on from."""
    name, path = "tensorflow_cases.callbacks", str(tmp_path / "run.npz")
    one, other = ranks(tmp_path / "two", name, WORKERS, path, 2, "ring").found()
    assert one[:3] == other[:3]
    assert one[:2] == (0, [0, 1])
    again, theirs = ranks(tmp_path / "again", name, WORKERS, path, 9, "ring").found()
    assert again[:2] == (2, [2, 3, 4])  # the first, and two that are no better by a thousand million
    assert again[:3] == theirs[:3]
    assert all(map(np.array_equal, again[3], theirs[3]))
    ((first, epochs, _, _),) = ranks(tmp_path / "one", name, 1, path, 9, "ring").found()
    assert (first, epochs) == (5, [5, 6, 7])


SLICES = "gives other weights for slices of the variables"
RING = {
    ("ring sync=local(steps=2)", "average"): "use syncline.tensorflow.prepare(model, optimizer)",
    ("ring sync=gossip", "average"): "use syncline.tensorflow.prepare(model, optimizer)",
    ("ring schedule=merged", "sgd"): "does not support with TensorFlow yet: use schedule=fixed",
    ("ring", "not built"): "has no variables yet: give it an Input",
    ("ring", "not compiled"): "call prepare(model, optimizer), or compile() the model before",
    ("ring", "no optimizer"): "give an optimizer of Keras, such as keras.optimizers.Adam(1e-3)",
    ("ring", "another's optimizer"): "the optimizer was not built for the model's present trainable variables",
    ("ring", "scope"): "outside of strategy.scope()",
    ("ring", "frozen"): "this model has no variables to train",
    ("ring", "bfloat16"): "is bfloat16: Syncline trains float16, float32, float64",
    ("ring", "integers"): "is int32: Syncline trains",
    ("ring", "no model"): "the model is int: give a model of Keras",
    ("ring", "weight"): "weight=2 is for models of PyTorch",
    ("ring", "jit fit"): "use compile(..., jit_compile=False)",
    ("ring", "jit loop"): "is compiled by XLA (jit_compile=True)",
    ("ring", "compiled anew"): "give compile() the same optimizer",
    ("ring", "unused"): "there is no gradient of 'unused/",
    ("ring", "many unused"): " and 1 more: the loss does not depend on the variable",
    ("ring", "device"): "lies on a device of kind GPU: syncline.tensorflow supports the CPU",
    ("ring", "half"): "there is no gradient of 'dense/kernel (2)'",
    ("ring", "shapes"): "but its variable has shape (5, 7) and type float64",
    ("ring", "not prepared"): "has not been prepared in this run",
    ("ring", "elastic average"): "works with syncline.tensorflow.prepare(model, optimizer), not with average()",
    ("ring", "no such root"): "broadcast() from rank 2 of 2: choose one of 0 to 1",
    ("ring", "no state"): "this is not a result of syncline.tensorflow.state_dict()",
    ("ring", "no epochs"): "a checkpoint every 0 epochs: choose 1 or more",
    ("ring", "cut file"): "run.npz is not a complete checkpoint of syncline.tensorflow.Checkpoint",
}
OF_SERVERS = {
    ("ps(servers=1)", "average"): "use syncline.tensorflow.prepare(model, optimizer)",
    ("ps(servers=1)", "clipnorm"): SLICES,
    ("ps(servers=1)", "global_clipnorm"): SLICES,
    ("ps(servers=1)", "lamb"): SLICES,
    ("ps(servers=1)", "adafactor"): SLICES,
    ("ps(servers=1)", "ema"): "keeps means of weights (use_ema)",
    ("ps(servers=1)", "accumulated"): "gradient_accumulation_steps",
    ("ps(servers=1)", "scaled"): "LossScaleOptimizer",
    ("ps(servers=1)", "excluding"): "excludes variables from weight decay",
    ("ps(servers=1)", "constraint"): "constraints of variables",
    ("ps(servers=1)", "stepped"): "has made 1 steps already",
    ("ps(servers=1)", "written"): "since the last step, which owners of the weights do not see",
    ("ps(servers=1) sync=asp(momentum=dana)", "sgd"): "momentum=dana",
}


@pytest.mark.parametrize(("cases", "servers"), [(RING, 0), (OF_SERVERS, 1)])
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, cases: dict[tuple[str, str], str], servers: int) -> None:
    """On workers and servers, before anybody waits for another."""
    are_refused(tmp_path, "tensorflow_cases.refused", WORKERS + servers, cases)


@pytest.mark.beyond(6)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_models", "rank 1 (*) has another model than rank 0"),
        ("other_variables", "rank 1 (*) broadcasts other variables than rank 0"),
        (
            "other_optimizers",
            "rank 1 (*) has the optimizer SGD with {'momentum': 0.5}, but rank 0 (*) has SGD",
        ),
        ("other_metrics", "report different metrics of an epoch, and only one has 'mae'"),
        ("shared_variables", "has been prepared again: use the result of the last syncline.prepare()"),
        ("traced_before", "the optimizer counts 1 steps that were made without the other ranks"),
        ("other_shapes", "rank 1 (*): the gradient of 'Variable' has shape (1, 3)"),
        ("dies", "rank 1 (*) died"),
        ("killed_in_a_graph", "rank 1 (*) died"),
        ("raises", "the loss : Tensor had NaN"),
        ("raises_at_the_start", "ValueError: the data of this rank are spoilt"),
        ("fewer_batches", "do all ranks have the same number of batches"),
    ],
)
def test_faults_are_named_on_all_ranks(tmp_path: Path, name: str, says: str) -> None:
    dead = [1] if name in ("dies", "killed_in_a_graph") else []
    ranks(tmp_path, f"tensorflow_cases.{name}", WORKERS).all_named(says, dead=dead)


@pytest.mark.deep
def test_a_run_loads_no_other_framework(tmp_path: Path) -> None:
    train_digits_without(tmp_path, ["torch", "jax", "optax"], "tensorflow_digits.py", CUDA_VISIBLE_DEVICES="-1")


TENSORFLOW, KERAS = "__version__ = '2.21.0'", "__version__ = '3.15.1'"


@pytest.mark.parametrize(
    ("tensorflow", "keras", "says"),
    [
        ("raise ImportError('none')", KERAS, "needs tensorflow, which cannot be imported .none.: pip install"),
        ("__version__ = '2.15.0'", KERAS, "needs tensorflow 2.16 or newer, but 2.15.0 is installed: pip install"),
        (TENSORFLOW, "raise ImportError('none')", "needs keras, which cannot be imported .none.: pip install"),
        (TENSORFLOW, "__version__ = '2.15.0'", "needs keras 3.0 or newer, but 2.15.0 is installed: pip install"),
        (
            TENSORFLOW,
            f"{KERAS}\nclass backend:\n    backend = staticmethod(lambda: 'jax')",
            "needs Keras with the backend tensorflow, and this one has the backend jax: set KERAS_BACKEND=tensorflow",
        ),
    ],
)
def test_packages_that_are_missing_old_or_set_otherwise_are_named(
    tmp_path: Path, tensorflow: str, keras: str, says: str
) -> None:
    is_told_of(tmp_path, {"tensorflow": tensorflow, "keras": keras}, "syncline.tensorflow", says)
