"""One transformation of gradients in a run: what it does under ``jit``, and what its calls do with the session.

A step under ``jit`` is a row of calls, each of which is given the number that the one before it has handed on, so that
they keep their order on whatever threads the computation runs. One for every bucket, as soon as its gradients have
been computed, begins its exchange; one at the end waits for all and has the mean. Where others hold the weights it is
these that come back, and the updates are what leads there. Where workers train by themselves, one asks first what kind
of step it is, and the computation branches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn
from warnings import warn
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...errors import ClosedError, GradientError, MismatchError, UsageError
from ...session.session import Session
from ...sync import Averages
from .._alone import warn_of_plain_steps
from .._flat import FlatModel, Kind
from .._resumed import load, load_alone, save, save_alone
from .._schedules import check_mode, check_schedule
from .._served import serve_model
from ._buckets import PUT, TAKE, TOKEN, Buckets
from ._calls import Array, Call, calls, invoke, invoke_code
from ._devices import device_of_owners, shared
from ._ending import unseen, wait_for_steps
from ._slices import OptaxSlices, outline, probe
from ._trees import bare, devices_of, host, is_traced, named, placed, specs_of, told_to_all
from ._weights import SynclineState, TreeWeights, fresh, given, state_of

try:
    from ._branches import watched
except (ImportError, AttributeError) as error:  # what it stands on is JAX's own
    warn(
        f"JAX {jax.__version__} does not tell of exchanges inside of branches and loops ({error}): call update()"
        " outside of jax.lax.cond, switch and while_loop, where ranks that leave one out would pair gradients of"
        " different steps",
        stacklevel=1,
    )

    def watched(run: int, refuse: Callable[[str], NoReturn], values: Sequence[Any]) -> list[Any]:  # noqa: ARG001
        return list(values)


_STEP = np.zeros((), np.int32)
_KINDS: tuple[Kind, ...] = ("exchanged", "own", "averaged")
_ORDER = (
    "transformations that skip or repeat steps (optax.apply_if_finite, MultiSteps, conditionally_transform,"
    " contrib.sam) belong inside, as in syncline.jax.distributed(optax.apply_if_finite(optimizer, 5)) or"
    " optax.chain(syncline.jax.average(), optax.apply_if_finite(optimizer, 5)), where all ranks decide by the mean"
)
_numbers = count(1)
_runs: WeakValueDictionary[int, Run] = WeakValueDictionary()


class Run:
    """``optimizer`` is what shall be done with the mean, or None where that is for the script's next transformation.

    All processes of the session make it at the same place.
    """

    def __init__(self, session: Session, optimizer: Any) -> None:
        self._session = session
        self._optimizer = None if optimizer is None else optax.with_extra_args_support(optimizer)
        self._model: FlatModel | None = None
        self._ready = False
        self.number = next(_numbers)
        _runs[self.number] = self
        mode = session.strategy.sync_mode()
        self._periodic = isinstance(mode, Averages)
        self._held = session.strategy.server_holds_weights and not session.alone
        if optimizer is None and not session.alone and (self._held or self._periodic):
            raise UsageError(
                f"{session.strategy}: average() gives gradients to an optimizer of the script's, and here weights are"
                " what is exchanged: use syncline.jax.distributed(optimizer), or ring or another allreduce"
            )
        check_schedule(session.strategy, "JAX")

    # The start.

    def init(self, params: Any) -> SynclineState | None:
        """The state before the first step; None on a server that has served.

        All processes call it, outside of ``jit``; under ``eval_shape`` it gives shapes, and nobody meets.
        """
        if is_traced(params):
            return fresh(self.number, self._inner(params))
        session = self._session
        with told_to_all(session):
            self._look_at(params)
            build = self._builder(params)
        if session.alone:
            warn_of_plain_steps(session)
            return fresh(self.number, self._inner(params))
        mine = self._weights.now
        if not session.is_worker:
            serve_model(session, self._specs, self._weights, build, self)
            return None
        self._model = model = FlatModel(session, self._specs, self._weights, build, self)
        if not all(
            np.array_equal(_bits(one), _bits(other)) for one, other in zip(mine, self._weights.now, strict=True)
        ):
            error = UsageError(
                f"{session.name(session.index)} begins with other parameters than rank 0: say params ="
                " syncline.jax.broadcast(params) before init(params)"
            )
            session.fail(error)
            raise error
        self._compare(params)
        session.barrier()  # nobody goes on from parameters that are not everyone's
        self._forget()
        self._lay_out(model)
        session.member.process.before_end.append(partial(wait_for_steps, session))
        return fresh(self.number, self._inner(params))

    def _look_at(self, params: Any) -> None:
        leaves = named(params)
        self._specs, self._structure = specs_of(leaves), jax.tree.structure(params)
        self._names = [name for name, _ in leaves]
        self._weights = TreeWeights(self._names, self._specs)
        self._weights.now = [host(name, leaf) for name, leaf in leaves]
        self._devices = max(1, devices_of(params))
        self._ready = True

    def _builder(self, params: Any) -> partial[OptaxSlices]:
        """What makes the optimizer of an owner here; raises UsageError for what several processes cannot train."""
        session, device = self._session, None
        if not session.alone:
            keeps = probe(self._optimizer, params) if self._held else True
            check_mode(session.strategy, self._weights.values(), "the optimizer", keeps)
            if self._held and not (session.is_worker and session.group.servers):
                device = device_of_owners(beside=session.is_worker)  # all see whether there is one
        return partial(OptaxSlices, self._optimizer, device)

    def _compare(self, params: Any) -> None:
        """Raise MismatchError, on all, where workers' optimizers are not the same, as far as can be seen."""
        if self._optimizer is None:
            return
        session = self._session
        mine = outline(self._optimizer, params)
        theirs = [json.loads(text) for text in session.gather(json.dumps(mine).encode())]
        (keeps, numbers), rank = theirs[0], session.rank
        if (
            mine[0] == keeps
            and len(mine[1]) == len(numbers)
            and np.allclose(mine[1], numbers, rtol=1e-4, equal_nan=True)
        ):
            return
        what = "keeps other state" if mine[0] != keeps else "makes other updates of the same gradients"
        text = f"the optimizer of {session.name(rank)} {what} than that of {session.name(0)}"
        remedy = "give all workers the same transformation of optax, with the same values"
        error = MismatchError(session.titled(f"{text}: {remedy}"))
        session.fail(error)
        raise error

    def _inner(self, params: Any) -> Any:
        return () if self._optimizer is None or self._held else self._optimizer.init(params)

    def _lay_out(self, model: FlatModel) -> None:
        """The calls of a step: each bucket's with the tensors that have not gone with one before it."""
        self._starts: list[tuple[list[int], Call]] = []
        gone: set[int] = set()
        for bucket in model.layout.buckets:
            tensors = [one for one in dict.fromkeys(part.tensor for part in bucket.slices) if one not in gone]
            gone.update(tensors)
            if tensors:
                made = self._call(partial(self._start, tensors), [self._specs[one] for one in tensors], [])
                self._starts.append((tensors, made))
        every = self._specs
        self._finish = self._call(self._finished, [], every)
        self._buckets: Buckets | None = None
        if self._devices == 1:
            after = model.gradients.flat if model.held is None or not self._held else model.held.flat
            self._buckets = Buckets(model, [tensors for tensors, _ in self._starts], after)
            self._begin = calls.make(unseen(self._session, self._begun), [_STEP], [TOKEN])
            self._end = calls.make(unseen(self._session, self._ended), [TOKEN], [TOKEN])
        if self._periodic:
            self._ask = self._call(self._asked, [], [_STEP])
            self._own = self._call(self._made_alone, every, [])
            self._meet = self._call(self._averaged, [*every, *every], every)

    def _call(self, function: Callable[..., None], arguments: Sequence[Any], results: Sequence[Any]) -> Call:
        return calls.make(
            unseen(self._session, shared(function, self._devices)), [_STEP, *arguments], [_STEP, *results]
        )

    # Under jit.

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SynclineState]:
        """As optax has it."""
        if not isinstance(state, SynclineState):
            raise UsageError(f"the state is {type(state).__name__}: give that of this transformation's init(params)")
        if self._session.alone:
            if self._optimizer is not None:
                updates, inner = self._optimizer.update(updates, state.inner, params, **extra)
                state = state._replace(inner=inner)
            return updates, state._replace(step=state.step + 1)
        self._session.check_usable()
        if self._model is None:
            raise ClosedError(
                "init() of this transformation was traced only, or not called: call it with parameters, outside of jit,"
                " where all ranks meet"
            )
        gradients = self._checked(self._model, updates)
        self._structure = jax.tree.structure(updates)  # of arrays, where init() may have had Variables of flax around
        if params is None and (self._held or self._periodic):
            raise self._model.fault(f"{self._session.strategy} exchanges weights: say update(gradients, state, params)")
        if self._held and extra:
            raise self._model.fault(f"owners of the weights are not told {', '.join(extra)}: use ring or an allreduce")
        step, *gradients = watched(self.number, partial(_refuse, self.number), [state.step, *gradients])
        state = state._replace(step=step)
        if self._periodic:
            return self._by_kind(gradients, state, params, extra)
        step, found = self._exchange(state.step, gradients)
        if self._held:
            changes = jax.tree.map(jnp.subtract, self._tree(found), params)
            return changes, state._replace(step=step + 1)
        changes, inner = self._optimized(found, state.inner, params, extra)
        return changes, SynclineState(step + 1, state.run, inner)

    def _optimized(self, gradients: Any, inner: Any, params: Any, extra: Any) -> tuple[Any, Any]:
        tree = self._tree(gradients)
        return (tree, inner) if self._optimizer is None else self._optimizer.update(tree, inner, params, **extra)

    def _exchange(self, step: Any, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        if self._buckets is not None:
            return self._exchange_compiled(step, gradients)
        for tensors, call in self._starts:
            (step,) = invoke(call, step, *(gradients[one] for one in tensors))
        step, *found = invoke(self._finish, step)
        return step, found

    def _exchange_compiled(self, step: Any, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Where one device computes, which is the rule: only the first call and the last but one are Python."""
        shape = jax.ShapeDtypeStruct(TOKEN.shape, TOKEN.dtype)
        (token,) = invoke(self._begin, step)
        for number, (tensors, _) in enumerate(self._starts):
            (token,) = invoke_code(PUT, number, [token, *(gradients[one] for one in tensors)], [shape])
        (token,) = invoke(self._end, token)
        every = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in self._specs]
        token, *found = invoke_code(TAKE, 0, [token], [shape, *every])
        return token[0], found

    def _by_kind(self, gradients: list[Any], state: SynclineState, params: Any, extra: Any) -> tuple[Any, Any]:
        """What kind of step it is says the engine when the computation runs."""
        asked, kind = invoke(self._ask, state.step)

        def exchanged() -> Any:
            step, found = self._exchange(asked, gradients)
            return step, *self._optimized(found, state.inner, params, extra)

        def own() -> Any:
            changes, inner = self._optimized(gradients, state.inner, params, extra)
            (step,) = invoke(self._own, asked, *jax.tree.leaves(params))
            return step, changes, inner

        def averaged() -> Any:
            changes, inner = self._optimized(gradients, state.inner, params, extra)
            after = jax.tree.leaves(optax.apply_updates(params, changes))
            step, *found = invoke(self._meet, asked, *jax.tree.leaves(params), *after)
            return step, jax.tree.map(jnp.subtract, self._tree(found), params), inner

        step, changes, inner = jax.lax.switch(kind, [exchanged, own, averaged])
        return changes, SynclineState(step + 1, state.run, inner)

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def _checked(self, model: FlatModel, updates: Any) -> list[Any]:
        """The gradients; where they are others than the parameters all ranks end with an error that names this one."""
        found = named(updates)
        for number in range(max(len(found), len(self._specs))):
            here = "nothing" if number >= len(found) else _described(*found[number])
            there = "nothing"
            if number < len(self._specs):
                spec = self._specs[number]
                there = f"{bare(self._names[number])} of shape {spec.shape} and type {spec.dtype}"
            if here != there:
                raise model.fault(f"update() is traced with gradients that have {here}, where init() had {there}")
        return [leaf for _, leaf in found]

    # What the calls do.

    def _at(self, arguments: Sequence[Array], results: Sequence[Array]) -> FlatModel:
        """The model, which has to be at the step that the computation is at."""
        step = int(arguments[0])
        results[0][...] = step
        return self._model_at(step)

    def _model_at(self, step: int) -> FlatModel:
        model = self._model
        assert model is not None
        self._session.check_usable()
        if step != model.steps:
            raise model.fault(
                f"a computation makes step {step} where the run is at step {model.steps}: every step goes on"
                " from the optimizer state of the one before. Resume by syncline.jax.load_state_dict(), put the"
                " parameters on all devices that compute before init(params), and let nothing around this"
                f" transformation call it more than once in a step or drop its state: {_ORDER}"
            )
        return model

    def _start(self, tensors: Sequence[int], arguments: list[Array], results: list[Array]) -> None:
        model = self._at(arguments, results)
        for tensor, gradient in zip(tensors, arguments[1:], strict=True):
            model.produced(tensor, gradient)

    def _begun(self, arguments: list[Array], results: list[Array]) -> None:
        assert self._buckets is not None
        step = int(arguments[0])
        self._model_at(step)
        self._buckets.begin(step, results[0])

    def _ended(self, arguments: list[Array], results: list[Array]) -> None:
        assert self._buckets is not None
        model = self._model_at(int(arguments[0][0]))
        results[0][...] = arguments[0]
        self._buckets.finish()
        model.step()
        self._forget()

    def _finished(self, arguments: list[Array], results: list[Array]) -> None:
        model = self._at(arguments, results)
        model.step()
        found = self._weights.now if self._held else model.gradients.flat
        _give(found, results)
        self._forget()

    def _asked(self, arguments: list[Array], results: list[Array]) -> None:
        results[1][...] = _KINDS.index(self._at(arguments, results).kind)

    def _made_alone(self, arguments: list[Array], results: list[Array]) -> None:
        model = self._at(arguments, results)
        self._weights.now = arguments[1:]
        model.step_alone()
        self._forget()

    def _averaged(self, arguments: list[Array], results: list[Array]) -> None:
        model, each = self._at(arguments, results), len(self._specs)
        self._weights.now, self._weights.after = arguments[1 : each + 1], arguments[each + 1 :]
        model.step_alone()
        _give(self._weights.now, results)
        self._forget()

    def _forget(self) -> None:
        """What a call was given is its caller's again."""
        self._weights.now = self._weights.after = []

    # Between steps.

    def consolidate(self, params: Any) -> Any:
        """The newest weights of all."""
        if self._model is None:
            return params
        self._take(params)
        self._session.consolidates[self._model.key]()
        return self._given(params)

    def state_dict(self, params: Any, state: Any) -> dict[str, Any]:
        """All that a resumed run needs."""
        ours = state_of(state)
        self._take(params)
        self._weights.take_state(state)
        if self._model is None:
            found = save_alone(self._session, self._specs, self._weights, int(ours.step))
        else:
            self._check_step(self._model, ours)
            found = save(self._model)
        self._forget()
        return found

    def load_state_dict(self, saved: Any, params: Any, state: Any) -> tuple[Any, Any]:
        """The other way round; parameters and state are those of a fresh start, for their shapes and places."""
        self._take(params)
        self._weights.take_state(state)
        if self._model is None:
            step = load_alone(self._specs, self._weights, saved)
        else:
            load(self._model, saved)
            step = self._model.steps
        if self._held:
            made = given(state, lambda _, leaf: leaf, step, self.number)
        else:
            made = self._weights.give_state(state, step, self.number)
        return self._given(params), made

    def _check_step(self, model: FlatModel, ours: SynclineState) -> None:
        if int(ours.step) != model.steps:
            raise model.fault(f"state_dict() with the optimizer state of step {int(ours.step)} at step {model.steps}")

    def _take(self, params: Any) -> None:
        if not self._ready:
            raise ClosedError("init() of this transformation has not been called here: call it first, outside of jit")
        leaves = named(params)
        if [bare(name) for name, _ in leaves] != [bare(name) for name in self._names]:
            raise UsageError(f"these are parameters of another model: {', '.join(name for name, _ in leaves)}")
        self._weights.now = [host(name, leaf) for name, leaf in leaves]

    def _given(self, params: Any) -> Any:
        leaves = [placed(value, leaf) for value, leaf in zip(self._weights.now, jax.tree.leaves(params), strict=True)]
        self._forget()
        return jax.tree.unflatten(jax.tree.structure(params), leaves)


def run_of(state: Any) -> Run:
    """The run that an optimizer's state is of; raises UsageError where this process has none such."""
    found = _runs.get(int(state_of(state).run))
    if found is None:
        raise UsageError("this optimizer state is not of a run of this process: give that of init(params)")
    return found


def _refuse(run: int, where: str) -> NoReturn:
    text = f"update() is traced {where}, and ranks that leave one out would pair gradients of different steps: {_ORDER}"
    found = _runs.get(run)
    if found is None or found._model is None:
        raise GradientError(text)
    raise found._model.fault(text)


def _give(values: Sequence[Array], results: Sequence[Array]) -> None:
    for value, result in zip(values, results[1:], strict=True):
        np.copyto(result, value.reshape(result.shape))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _described(name: str, leaf: Any) -> str:
    return f"{bare(name)} of shape {tuple(np.shape(leaf))} and type {getattr(leaf, 'dtype', type(leaf).__name__)}"
