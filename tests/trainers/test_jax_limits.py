"""JAX: what is refused, faults, what may leave a step out, few threads, forked children, and what is imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from array_ranks import are_refused, check_near, is_told_of, ranks, train_digits_without

for package in ("jax", "optax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS = 2


def test_a_step_that_fails_and_that_nobody_reads_is_told_at_the_end(tmp_path: Path) -> None:
    """One rank makes a step more than the other."""
    made = ranks(tmp_path, "jax_bodies.unread", 2, [3, 2], "first")
    assert made.statuses[0] != 0
    assert "syncline: ended: " in made.printed[0]
    assert "rank 1" in made.printed[0]


def test_gradients_that_are_not_finite_are_named_and_weights_are_not_compared(tmp_path: Path) -> None:
    made = ranks(tmp_path, "jax_bodies.not_finite", WORKERS, 4, SYNCLINE_CHECK_FINITE="on")
    made.all_named("in step 2 the gradient of * on rank 1 (* is not finite before the exchange")
    made = ranks(tmp_path, "jax_bodies.not_finite", WORKERS, 1, SYNCLINE_CHECK_REPLICAS="5")
    made.all_named("check_replicas compares weights, which Syncline does not see with JAX")


def test_workers_that_join_with_other_optimizers_or_weights_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their join compares this text, as a run that begins compares the optimizers."""
    import jax.numpy as jnp
    import optax

    import syncline
    import syncline.jax

    def described(inner: optax.GradientTransformation, **options: str) -> str:
        params = {"w": jnp.ones((3, 2))}
        optimizer = syncline.jax.distributed(inner, **options)
        return syncline.jax.keep((params, optimizer.init(params))).described

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    syncline.init()
    try:
        first = described(optax.adam(0.1))
        assert described(optax.adam(0.1)) == first
        others = [described(one) for one in (optax.adam(0.2), optax.adam(0.1, b1=0.8), optax.sgd(0.1))]
        assert len({first, *others, described(optax.adam(0.1), weight="batch")}) == 5
    finally:
        syncline.shutdown()


def test_a_child_that_is_forked_ends(tmp_path: Path) -> None:
    assert all(ranks(tmp_path, "jax_bodies.forked", 2, 2).found())


SLICES = "gives other weights for slices of the parameters"
RING = {
    ("ps(servers=1, on=workers)", "no client"): "cannot give owners of weights on workers their own device",
    ("ps(servers=1, on=workers)", "coupled"): SLICES,
    ("ring sync=local(steps=2)", "average"): "use syncline.jax.distributed(optimizer)",
    ("ring sync=gossip", "average"): "use syncline.jax.distributed(optimizer)",
    ("ring schedule=merged", "distributed"): "does not support with JAX yet: use schedule=fixed",
    ("ring", "integers"): "the parameter ['w'] is int32: Syncline trains float16, float32, float64",
    ("ring", "bfloat16"): "the parameter ['w'] is bfloat16: Syncline trains float16, float32, float64; keep parameters",
    (
        "ring",
        "gpu",
    ): "['w'] lies on a device of kind gpu: syncline.jax supports CPU devices; run with JAX_PLATFORMS=cpu",
    ("ring", "gpu broadcast"): "['w'] lies on a device of kind gpu",
    ("ring", "none"): "this tree has no parameters",
    ("ring", "no optimizer"): "the optimizer is int: give a transformation of optax",
    ("ring", "traced"): "init() of this transformation was only traced",
    ("ring", "another state"): "the state is tuple: give the result of this transformation's init(params)",
    ("ring", "other weight"): "weight=0.5 is for models of PyTorch; here it is 1, or 'batch' with global batches",
    ("ring", "nothing of ours"): "this optimizer state has 0 parts of Syncline",
    ("ring", "donated"): "from which the run goes on if a step breaks: leave donate_argnums and donate_argnames",
    ("ring", "keys"): "give jax.random.key_data(key) instead",
}


OF_SERVERS = {
    ("ps(servers=1)", "average"): "use syncline.jax.distributed(optimizer)",
    ("ps(servers=1)", "coupled"): SLICES,
    ("ps(servers=1)", "masked"): SLICES,
    ("ps(servers=1) sync=asp(momentum=dana)", "distributed"): "momentum=dana",
}


@pytest.mark.parametrize(("cases", "servers"), [(RING, 0), (OF_SERVERS, 1)])
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, cases: dict[tuple[str, str], str], servers: int) -> None:
    """On workers and servers, before anybody waits for another."""
    are_refused(tmp_path, "jax_bodies.refused", WORKERS + servers, cases)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_parameters", "rank 1 (*) starts with other parameters than rank 0"),
        ("other_trees", "rank 1 (*) broadcasts another tree than rank 0"),
        ("other_shapes", "rank 1 (*): update() is traced with gradients that have"),
        (
            "other_types",
            "rank 1 (*): update() is traced with gradients that have * and type bfloat16, but init() had",
        ),
        (
            "other_rate",
            "the optimizer of rank 1 (*) makes other updates from the same gradients than the optimizer of rank 0 (",
        ),
        ("other_state", "the optimizer of rank 1 (*) keeps other state than the optimizer of rank 0 ("),
        ("dies", "rank 1 (*) died"),
        ("not_kept", "weight='batch' needs syncline.jax.keep(), whose update() waits for a step"),
        ("forgets", "a computation makes step 0, but the run is at step 1"),
    ],
)
def test_faults_are_named_on_all_ranks(tmp_path: Path, name: str, says: str) -> None:
    found = ranks(tmp_path, f"jax_bodies.{name}", WORKERS)
    found.all_named(says, dead=[1] if name == "dies" else [])
    if name == "forgets":  # the text comes before the stack
        assert any("Traceback" in printed for printed in found.printed)
        assert any(re.search("syncline: GradientError: rank .*Traceback", one, re.DOTALL) for one in found.printed)


@pytest.mark.parametrize(
    ("name", "call", "says"),
    [
        ("bfloat16", "init", "the parameter ['w'] is bfloat16"),
        ("gpu", "init", "['w'] lies on a device of kind gpu"),
        ("gpu", "broadcast", "['w'] lies on a device of kind gpu"),
        ("text", "broadcast", "broadcasts another tree than rank 0"),
    ],
)
def test_what_one_rank_has_wrong_is_named_on_all(tmp_path: Path, name: str, call: str, says: str) -> None:
    found = ranks(tmp_path, "jax_bodies.on_one_rank", WORKERS, name, call)
    assert all(found.statuses)
    for printed in found.printed:
        assert any("rank 1 (" in line and says in line for line in printed.splitlines()), printed


@pytest.mark.deep
def test_few_threads_are_enough(tmp_path: Path) -> None:
    """On one core, with arrays that JAX would hand to other threads, also where owners compute beside workers."""
    strategies = ["ring", "ring sync=local(steps=2)", "ps(servers=2, on=workers)", "ps(servers=1, on=workers)"]
    strategies += ["ps(servers=2, on=workers) sync=asp"]
    one, other = ranks(tmp_path, "jax_bodies.large", WORKERS, strategies, x64=False).found()
    assert one == other


@pytest.mark.deep
def test_a_run_loads_no_other_framework(tmp_path: Path) -> None:
    train_digits_without(tmp_path, ["torch", "tensorflow"], "jax_digits.py", JAX_PLATFORMS="cpu")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ImportError('no jax')", "Syncline needs jax, which cannot be imported .no jax.: pip install"),
        ("__version__ = '0.4.35'", "Syncline needs jax 0.10 or newer, but 0.4.35 is installed: pip install"),
    ],
)
def test_a_jax_that_is_missing_or_too_old_is_named(tmp_path: Path, module: str, says: str) -> None:
    is_told_of(tmp_path, {"jax": module}, "syncline.jax", says)


@pytest.mark.beyond(1)
@pytest.mark.parametrize("name", ["apply_if_finite", "MultiSteps", "conditionally_transform"])
def test_what_skips_steps_belongs_inside(tmp_path: Path, name: str) -> None:
    """Around an exchange, a rank that skips would pair its gradients with others' of another step."""
    for said in ranks(tmp_path, "jax_bodies.wrapped_around", WORKERS, name).found():
        for text in said:
            assert "is traced inside a branch" in text
            assert f"{name}" in text
            assert "belong inside" in text
    for params, wanted in ranks(tmp_path, "jax_bodies.wrapped_inside", WORKERS, name).found():
        check_near(params, wanted, name)


@pytest.mark.deep
def test_a_step_that_was_traced_before_is_refused_where_a_rank_may_leave_it_out(tmp_path: Path) -> None:
    """No number tells of it at run time: a rank that has left a step out makes the next one under the same number."""
    for found in ranks(tmp_path, "jax_bodies.hidden", WORKERS).found():
        assert set(found) == {"cond", "switch", "while_loop", "fori_loop", "vmap"}
        for name, said in found.items():
            where = {"cond": "branch", "switch": "branch", "vmap": "jax.vmap"}.get(name, "loop")
            for text in said[:1] if name == "fori_loop" else said:  # whose length is known where nothing is traced
                assert re.search(rf"update\(\) is traced (inside|under) .*{where}", text), (name, text)


def test_what_refuses_branches_leaves_nothing_in_what_is_compiled(tmp_path: Path) -> None:
    assert ranks(tmp_path, "jax_bodies.costs", WORKERS).found() == [(0, True)] * WORKERS
