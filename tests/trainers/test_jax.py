"""JAX: workers train as one does on the union of their batches, inside of ``jit``, whatever the strategy."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_ranks import is_told_of, ranks, resume, train_digits_without

for package in ("jax", "optax"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it", allow_module_level=True)

WORKERS, STEPS = 2, 5
REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ring schedule=fixed(bucket=64B)"]
REDUCED += ["ring schedule=priority(slice=64B)", "ring schedule=split(slice=64B)"]
SERVED = ["ps(servers=1)", "ps(servers=1, update=worker)", "ps(servers=1) schedule=wait_free"]
SHARED = ["ps(servers=2, on=workers, update=worker)", "ps(servers=2, on=workers)"]
SHARED += ["ps(servers=1, on=workers) schedule=wait_free transport=tcp"]


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [tree]


def check_near(found: Any, wanted: Any, what: str) -> None:
    for one, other in zip(leaves(found), leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=what)


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(leaves(one), leaves(other), strict=True))


def cases(strategies: list[str]) -> list[tuple[str, str]]:
    """Every strategy with Adam, the first one with the other optimizers too."""
    return [(text, "adam") for text in strategies] + [(strategies[0], name) for name in ("sgd", "momentum", "adamw")]


@pytest.mark.parametrize(("strategies", "servers"), [(REDUCED + SHARED, 0), (SERVED, 1)])
def test_workers_train_as_one_on_the_union_of_their_batches(
    tmp_path: Path, strategies: list[str], servers: int
) -> None:
    """In float64; all have the same weights bit for bit."""
    each = cases(strategies)
    first, *others = ranks(tmp_path, "jax_bodies.train", WORKERS + servers, each, STEPS).found()[:WORKERS]
    for case, (params, steps, wanted) in zip(each, first, strict=True):
        check_near(params, wanted, " ".join(case))
        assert steps == STEPS
    for other in others:
        assert all(equal(one[0], mine[0]) for one, mine in zip(other, first, strict=True))


def test_steps_that_no_rank_waits_for_are_made_before_the_end(tmp_path: Path) -> None:
    made = ranks(tmp_path, "jax_bodies.unwaited", WORKERS, STEPS)
    assert any(under_way for under_way, _, _ in made.found())
    for _, params, wanted in made.results:
        check_near(params, wanted, "after the end")
    assert made.printed == [f"steps {STEPS}\n"] * WORKERS


@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_steps_whose_results_nobody_has_are_made_on_any_device(tmp_path: Path, where: str) -> None:
    made = ranks(tmp_path, "jax_bodies.unread", 2, [4, 4], where, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    made.found()
    assert made.printed == ["steps 4\n"] * 2


def test_a_step_that_fails_and_that_nobody_reads_is_told_at_the_end(tmp_path: Path) -> None:
    """One rank makes a step more than the other."""
    made = ranks(tmp_path, "jax_bodies.unread", 2, [3, 2], "first")
    assert made.statuses[0] != 0
    assert "syncline: ended: " in made.printed[0]
    assert "rank 1" in made.printed[0]


def test_a_child_that_is_forked_ends(tmp_path: Path) -> None:
    assert all(ranks(tmp_path, "jax_bodies.forked", 2, 2).found())


def test_the_mean_goes_to_an_optimizer_of_the_script_in_one_computation(tmp_path: Path) -> None:
    for params, wanted in ranks(tmp_path, "jax_bodies.chained", WORKERS, STEPS).found():
        check_near(params, wanted, "chained")


@pytest.mark.parametrize(
    ("strategies", "servers"),
    [
        (["ring codec=int8", "ring codec=topk(ratio=0.3)", "ring sync=local(steps=3)"], 0),
        (["ps(servers=1)", "ps(servers=1) codec=int8"], 1),
        (["ps(servers=2, on=workers)", "ps(servers=1, on=workers) codec=int8"], 0),
    ],
)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path, strategies: list[str], servers: int) -> None:
    """Also what codecs keep back, in the middle of a period; and it resumes under another number of workers."""
    resume(tmp_path, "jax_bodies.resumed", WORKERS, strategies, servers, equal, check_near)


@pytest.mark.parametrize(("strategy", "servers"), [("ring", 0), ("ps(servers=1)", 1), ("ps(servers=1, on=workers)", 0)])
def test_a_checkpoint_of_one_worker_resumes_under_two(tmp_path: Path, strategy: str, servers: int) -> None:
    name = "jax_bodies.resumed"
    (saved, _) = ranks(tmp_path / "one", name, 1 + servers, [strategy], [], 0, 4).found()[0][0]
    (_, wanted) = ranks(tmp_path / "all", name, 1, ["ring"], [], 0, 7).found()[0][0]
    for ((_, found),) in ranks(tmp_path / "two", name, 2 + servers, [strategy], [saved], 4, 7).found()[:2]:
        check_near(found, wanted, strategy)


def test_workers_that_train_by_themselves_meet(tmp_path: Path) -> None:
    """After whole periods all have the same, but for the last bit; in the end, bit for bit."""
    strategies = ["ring sync=local(steps=2)", "ring sync=post_local(after=2, steps=2)", "ring sync=diloco(steps=2)"]
    strategies += ["ring sync=easgd(steps=2)", "ring sync=local(steps=3) codec=int8", "ring sync=gossip(steps=2)"]
    one, other = ranks(tmp_path, "jax_bodies.periodic", WORKERS, strategies, 4).found()
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        assert equal(mine[1], theirs[1]), text
        near = all(np.allclose(a, b, rtol=1e-12) for a, b in zip(leaves(mine[0]), leaves(theirs[0]), strict=True))
        assert near == ("steps=2" in text and "easgd" not in text), text


@pytest.mark.parametrize(("owners", "servers"), [("servers=1", 1), ("servers=2, on=workers", 0)])
def test_pushes_are_updates_by_themselves(tmp_path: Path, owners: str, servers: int) -> None:
    """With a share of the learning rate, or all of it: nothing that was pushed is lost."""
    strategies = [f"ps({owners}) sync={text}" for text in ("asp", "ssp(staleness=2)", "asp(rate=own)")]
    for found in ranks(tmp_path, "jax_bodies.by_themselves", WORKERS + servers, strategies, 4).found()[:WORKERS]:
        for text, params in zip(strategies, found, strict=True):
            np.testing.assert_allclose(params["w"], 1 - 0.25 * 4 * (2 if "own" in text else 1), err_msg=text)


def test_a_model_of_jax_can_be_prepared(tmp_path: Path) -> None:
    for found in ranks(tmp_path, "jax_bodies.prepared", WORKERS).found():
        assert all(np.allclose(leaf, -0.05) for leaf in leaves(found["layer"]))


SLICES = "gives other weights for slices of the parameters"
REFUSED = {
    ("ps(servers=1, on=workers)", "no client"): "does not give owners of weights on workers a device of their own",
    ("ps(servers=1, on=workers)", "coupled"): SLICES,
    ("ring sync=local(steps=2)", "average"): "use syncline.jax.distributed(optimizer)",
    ("ring sync=gossip", "average"): "use syncline.jax.distributed(optimizer)",
    ("ring schedule=merged", "distributed"): "does not do with JAX yet: use schedule=fixed",
    ("ring", "integers"): "the parameter ['w'] is int32: Syncline trains float16, float32, float64",
    ("ring", "bfloat16"): "the parameter ['w'] is bfloat16: Syncline trains float16, float32, float64; keep parameters",
    ("ring", "gpu"): "['w'] lies on a device of kind gpu: syncline.jax serves CPU devices; run with JAX_PLATFORMS=cpu",
    ("ring", "gpu broadcast"): "['w'] lies on a device of kind gpu",
    ("ring", "none"): "there are no parameters in this tree",
    ("ring", "no optimizer"): "the optimizer is int: give a transformation of optax",
    ("ring", "traced"): "init() of this transformation was traced only",
    ("ring", "another state"): "the state is tuple: give that of this transformation's init(params)",
    ("ring", "keys"): "give jax.random.key_data(key), which is numbers",
}


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for found in ranks(tmp_path, "jax_bodies.refused", WORKERS, list(REFUSED)).found():
        for (case, says), said in zip(REFUSED.items(), found, strict=True):
            assert says in said, (case, said)


OF_SERVERS = {
    ("ps(servers=1)", "average"): "use syncline.jax.distributed(optimizer)",
    ("ps(servers=1)", "coupled"): SLICES,
    ("ps(servers=1)", "masked"): SLICES,
    ("ps(servers=1) sync=asp(momentum=dana)", "distributed"): "momentum=dana",
}


def test_what_servers_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    """On workers and servers, before anybody waits for another."""
    for found in ranks(tmp_path, "jax_bodies.refused", WORKERS + 1, list(OF_SERVERS)).found():
        for (case, says), said in zip(OF_SERVERS.items(), found, strict=True):
            assert says in said, (case, said)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_parameters", "rank 1 (*) begins with other parameters than rank 0"),
        ("other_trees", "rank 1 (*) broadcasts another tree than rank 0"),
        ("other_shapes", "rank 1 (*): update() is traced with gradients that have"),
        (
            "other_types",
            "rank 1 (*): update() is traced with gradients that have * and type bfloat16, where init() had",
        ),
        ("other_rate", "the optimizer of rank 1 (*) makes other updates of the same gradients than that of rank 0 ("),
        ("other_state", "the optimizer of rank 1 (*) keeps other state than that of rank 0 ("),
        ("dies", "rank 1 (*) died"),
        ("forgets", "a computation makes step 0 where the run is at step 1"),
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


def test_devices_of_a_host_share_a_worker(tmp_path: Path) -> None:
    strategies = ["ring", "ps(servers=1, on=workers, update=worker)", "ring sync=local(steps=5)"]
    strategies += ["ps(servers=2, on=workers)"]
    flags = "--xla_force_host_platform_device_count=2"
    one, other = ranks(tmp_path, "jax_bodies.sharded", WORKERS, strategies, STEPS, XLA_FLAGS=flags).found()
    ((wanted, _, _),) = ranks(tmp_path, "jax_bodies.train", 1, [("ring", "adam")], STEPS).found()[0]
    for text, mine, theirs in zip(strategies, one, other, strict=True):
        if "local" in text:
            check_near(mine, theirs, text)
        else:
            assert equal(mine, theirs), text
            check_near(mine, wanted, text)


def test_few_threads_are_enough(tmp_path: Path) -> None:
    """On one core, with arrays that JAX would hand to other threads, also where owners compute beside workers."""
    strategies = ["ring", "ring sync=local(steps=2)", "ps(servers=2, on=workers)", "ps(servers=1, on=workers)"]
    strategies += ["ps(servers=2, on=workers) sync=asp"]
    one, other = ranks(tmp_path, "jax_bodies.large", WORKERS, strategies, x64=False).found()
    assert one == other


def test_a_run_loads_no_other_framework(tmp_path: Path) -> None:
    train_digits_without(tmp_path, ["torch", "tensorflow"], "jax_digits.py", JAX_PLATFORMS="cpu")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise ImportError('no jax')", "syncline.jax needs jax, which cannot be imported .no jax.: pip install"),
        ("__version__ = '0.4.35'", "syncline.jax needs jax 0.10 or newer, and 0.4.35 is installed: pip install"),
    ],
)
def test_a_jax_that_is_missing_or_too_old_is_named(tmp_path: Path, module: str, says: str) -> None:
    is_told_of(tmp_path, {"jax": module}, "syncline.jax", says)


@pytest.mark.parametrize("name", ["apply_if_finite", "MultiSteps", "conditionally_transform"])
def test_what_skips_steps_belongs_inside(tmp_path: Path, name: str) -> None:
    """Around an exchange, a rank that skips would pair its gradients with others' of another step."""
    for said in ranks(tmp_path, "jax_bodies.wrapped_around", WORKERS, name).found():
        for text in said:
            assert "is traced inside of a branch" in text
            assert f"{name}" in text
            assert "belong inside" in text
    for params, wanted in ranks(tmp_path, "jax_bodies.wrapped_inside", WORKERS, name).found():
        check_near(params, wanted, name)


def test_a_step_that_was_traced_before_is_refused_where_a_rank_may_leave_it_out(tmp_path: Path) -> None:
    """No number tells of it at run time: a rank that has left a step out makes the next one under the same number."""
    for found in ranks(tmp_path, "jax_bodies.hidden", WORKERS).found():
        assert set(found) == {"cond", "switch", "while_loop", "fori_loop", "vmap"}
        for name, said in found.items():
            where = {"cond": "branch", "switch": "branch", "vmap": "jax.vmap"}.get(name, "loop")
            for text in said[:1] if name == "fori_loop" else said:  # whose length is known where nothing is traced
                assert re.search(rf"update\(\) is traced (inside of|under) .*{where}", text), (name, text)


def test_steps_may_be_made_in_a_loop_of_known_length(tmp_path: Path) -> None:
    strategies = ["ring", "ps(servers=1, on=workers)", "ring sync=local(steps=2)"]
    for found in ranks(tmp_path, "jax_bodies.scanned", WORKERS, strategies).found():
        for strategy, (looped, single) in zip(strategies, found, strict=True):
            check_near(looped, single, strategy)


def test_what_refuses_branches_leaves_nothing_in_what_is_compiled(tmp_path: Path) -> None:
    assert ranks(tmp_path, "jax_bodies.costs", WORKERS).found() == [(0, True)] * WORKERS


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, on=workers)"])
def test_parameters_may_be_in_boxes_where_gradients_are_not(tmp_path: Path, strategy: str) -> None:
    for params, wanted in ranks(tmp_path, "jax_bodies.boxed", WORKERS, strategy).found():
        check_near(params, wanted, strategy)
