"""The checks that ``init`` offers: replicas are compared, and gradients that are not finite are named, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import STAGED, batch, loss_of, sgd, weights

from host_copier import HostCopier
from syncline.errors import GradientError, MismatchError, SynclineError, UsageError
from syncline.frameworks._supported import SILENT, check_no_replicas
from syncline.frameworks.numpy import adapt
from syncline.frameworks.torch import Options, prepare
from syncline.frameworks.torch.prepare import shadow_until_all_joined
from syncline.launch.connecting import in_process
from syncline.nouns import numpy_dtype
from syncline.session.checks import FINITE, REPLICAS, Checks, asked_for, is_finite
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

ALL = Checks(1, True)
STRATEGIES = [
    "ring",
    "direct schedule=wait_free" + STAGED,
    "ring schedule=priority(slice=16B)",
    "ring schedule=split(slice=16B)",
    "ring schedule=delayed(local=off)",
    "ring codec=feedback(int8)",
    "ps(servers=1)",
    "ps(servers=2, on=workers) schedule=priority",
    "ps(servers=1, update=worker) codec=onebit",
]

Step = Callable[[int, int, torch.nn.Module], None]
"""Called after each optimizer's step, with the rank and the number of the step."""


def nothing(rank: int, step: int, model: torch.nn.Module) -> None: ...


def trained(
    group: Any,
    strategy: str,
    checks: Checks,
    *,
    workers: int = 3,
    after: Step = nothing,
    factor: Callable[[int, int], float] = lambda *_: 1.0,
    steps: Callable[[int], int] = lambda _: 4,
    scaler: bool = False,
    raises: bool = False,
) -> list[Any]:
    """What each worker ends with: its weights and its scale, or the error that it has got. Or the first is raised."""

    def run(session: Session) -> Any:
        session.checks = checks
        copier = HostCopier() if strategy.endswith(STAGED) and session.is_worker else None
        grad_scaler, made = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler), None
        try:
            made = prepare(session, *sgd(), Options(weight="batch"), copier=copier)
            if made is None:
                return None
            model, optimizer, rank = made.model, made.optimizer, session.rank
            assert optimizer is not None
            for step in range(steps(rank)):
                optimizer.zero_grad()
                loss = loss_of(model(batch(step)[rank::workers])) * factor(rank, step)
                grad_scaler.scale(loss).backward()
                grad_scaler.step(optimizer)
                grad_scaler.update()
                after(rank, step, model)
            shadow_until_all_joined(made.replica, made.client)
            return weights(model), grad_scaler.get_scale()
        except SynclineError as error:
            if raises:
                raise
            return error
        finally:
            if made is not None:
                made.replica.detach()

    return group(strategy.removesuffix(STAGED), workers, run)[:workers]


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sound_training_has_the_same_bits_with_checks(group: Any, strategy: str) -> None:
    without, with_checks = (trained(group, strategy, checks, workers=2) for checks in (Checks(), ALL))
    for (before, _), (now, _) in zip(without, with_checks, strict=True):
        assert before.keys() == now.keys()
        assert all(torch.equal(before[name], now[name]) for name in before)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_ranks_without_batches_take_part_in_checks(group: Any, strategy: str) -> None:
    found = trained(group, strategy, ALL, steps=lambda rank: 2 + 2 * rank)
    assert not [one for one in found if isinstance(one, Exception)]


def write_on_rank_1(rank: int, step: int, model: torch.nn.Module) -> None:
    if (rank, step) == (1, 1):
        with torch.no_grad():
            model.get_parameter("2.weight")[0, 1] += 1
            model.get_parameter("2.bias")[0] += 1


def the_same(errors: list[Any], kind: type[Exception]) -> str:
    """The text of the error that all ranks have got."""
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    (text,) = {str(error) for error in errors}
    return text


def test_a_replica_that_has_parted_is_named_on_all_ranks(group: Any) -> None:
    text = the_same(trained(group, "ring", Checks(2), after=write_on_rank_1), MismatchError)
    assert text.startswith("replicas differ before step 2: rank 1 has other values of '2.weight', the first of 2")
    assert "than rank 0, rank 2 (they were equal before step 0)" in text


def test_a_replica_that_parts_between_two_checks_is_found_by_the_next(group: Any) -> None:
    found = trained(group, "ring", Checks(3), after=write_on_rank_1)
    assert the_same(found, MismatchError).startswith("replicas differ before step 3: rank 1 ")
    assert not [one for one in trained(group, "ring", Checks(9), after=write_on_rank_1) if isinstance(one, Exception)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "value"),
    [*((one, float("nan")) for one in STRATEGIES), ("ring", float("inf")), ("ring", -float("inf"))],
)
def test_the_first_gradient_that_is_not_finite_is_named_on_all_ranks(group: Any, strategy: str, value: float) -> None:
    found = trained(group, strategy, Checks(0, True), factor=lambda rank, step: value if rank and step == 2 else 1.0)
    text = the_same(found, GradientError)
    assert text.startswith("in step 2 the gradient of '2.")  # the last layer's is the first of the backward pass
    assert " on rank 1 is not finite before the exchange: of " in text
    assert "the same step has such gradients on rank 2" in text


def test_pushes_that_are_updates_of_their_own_are_checked_by_their_rank(group: Any) -> None:
    """They do not wait for each other, so the others learn of it as of any failure."""
    factor = lambda rank, _: float("nan") if rank == 1 else 1.0  # noqa: E731
    with pytest.raises(GradientError, match=r"in step 0 the gradient of '2\.\w+' on rank 1 is not finite"):
        trained(group, "ps(servers=1) sync=asp", Checks(0, True), factor=factor, raises=True)


def test_under_a_grad_scaler_infinities_are_warned_of_and_skipped(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    factor = lambda rank, step: float("inf") if (rank, step) == (1, 1) else 1.0  # noqa: E731
    with caplog.at_level(logging.WARNING, "syncline"):
        found = trained(group, "ring", Checks(1, "warn"), factor=factor, scaler=True)
    told = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert len(told) == 1  # by one rank
    assert told[0].startswith("in step 1 the gradient of '2.")
    assert [scale for _, scale in found] == [4.0] * 3
    assert all(tensor.isfinite().all() for state, _ in found for tensor in state.values())


class Rule:
    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= 0.1 * gradient


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_arrays_are_checked_too(group: Any, strategy: str) -> None:
    def body(value: float, moved: float) -> Callable[[Session], Any]:
        def run(session: Session) -> Any:
            session.checks = ALL
            handed = adapt(session, {"w": np.ones(3), "b": np.zeros(2)}, Rule(), SILENT)
            if handed is None:
                return None
            arrays, trainer = handed.result
            try:
                for step in range(3):
                    gradient = value if session.rank == 1 and step == 1 else 1.0
                    trainer.step({"w": np.full(3, gradient), "b": np.ones(2)})
                    if moved and session.rank == 1:
                        arrays["b"][0] += moved
            except SynclineError as error:
                return error
            return float(arrays["w"][0])

        return run

    assert group(strategy, 2, body(1.0, 0.0))[:2] == [pytest.approx(0.7)] * 2
    text = the_same(group(strategy, 2, body(float("nan"), 0.0))[:2], GradientError)
    assert text.startswith("in step 1 the gradient of 'w' on rank 1 is not finite")
    if strategy == "ring":  # owners' weights are read-only
        text = the_same(group(strategy, 2, body(1.0, 0.5))[:2], MismatchError)
        assert text.startswith("replicas differ before step 1: rank 1 has other values of 'b' than rank 0")


@pytest.mark.parametrize(
    ("strategy", "checks", "said"),
    [
        ("sync=local(steps=4)", Checks(5), "consolidate"),
        ("sync=local(steps=4)", Checks(0, True), "exchanges weights"),
        ("sync=easgd(steps=4)", Checks(5), "sync=bsp"),
        ("ps sync=asp", Checks(5), "differ between ranks by design"),
        ("ring schedule=delayed", Checks(5), r"delayed\(local=off\)"),
    ],
)
def test_a_check_that_cannot_hold_is_refused(strategy: str, checks: Checks, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checks.check_fit(Strategy.parse(strategy))
    Checks().check_fit(Strategy.parse(strategy))


def test_a_framework_that_hides_its_weights_refuses_their_comparison() -> None:
    session, _ = in_process("ring", 2)
    check_no_replicas(session, "JAX")
    session.checks = Checks(5)
    with pytest.raises(UsageError, match="check_replicas compares weights, which Syncline does not see with JAX"):
        check_no_replicas(session, "JAX")
    session.shutdown()


def test_what_is_asked_comes_from_the_script_or_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_for() == Checks()
    monkeypatch.setenv(REPLICAS, "100")
    monkeypatch.setenv(FINITE, "warn")
    assert asked_for() == Checks(100, "warn")
    assert asked_for(0, True) == Checks(0, True)
    for name, text in ((REPLICAS, "-1"), (FINITE, "maybe")):
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            with pytest.raises(UsageError, match=name):
                asked_for()
    for replicas, finite in ((-1, False), (True, False), (0, "error")):
        with pytest.raises(UsageError):
            Checks(replicas, finite)  # type: ignore[arg-type]


@given(
    st.lists(st.floats(width=16), min_size=1, max_size=40),
    st.sampled_from(["float16", "float32", "float64", "bfloat16"]),
)
def test_sums_that_overflow_are_finite_all_the_same(values: list[float], dtype: str) -> None:
    array = np.array(values).astype(numpy_dtype(dtype))
    wanted = all(np.isfinite(float(value)) for value in array)
    assert is_finite(array) == wanted
    big = np.array([3e38, 3e38, *([np.inf] if not wanted else [])], np.float32)
    assert is_finite(big) == wanted
    assert is_finite(torch.tensor(values)) == all(map(np.isfinite, values))
