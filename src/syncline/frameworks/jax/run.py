"""The run of one transformation: its operations under ``jit``, and the handling of their calls by the session.

A step under ``jit`` is a chain of calls. Each receives a token from the one before, which fixes their order on any
threads. One call per bucket starts its exchange as soon as its gradients are computed; a call at the end waits for all
and returns the mean. If others hold the weights, it returns the new weights, and the updates are the differences. If
workers train alone between exchanges, a first call asks for the kind of the step, and the computation branches.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, zip_longest
from typing import Any, NoReturn
from warnings import warn
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...errors import ClosedError, GradientError, MismatchError, UsageError
from ...launch.environment import REPEATS
from ...launch.relay import is_relayed
from ...session.session import Session
from ...sync import Averages
from .._checkpoint import load, load_alone, save, save_alone
from .._computations import KINDS, tensors_of_calls
from .._flat import Array, FlatModel, serve_flat
from .._repeating import FlatSums
from .._supported import (
    check_average,
    check_no_replicas,
    check_schedule,
    decide_mode,
    warn_of_plain_steps,
    weight_of_batches,
)
from .calls import PUT, TAKE, TOKEN, Buckets, Call, calls, invoke, invoke_code, shared, unseen, wait_for_steps
from .trees import (
    OptaxSlices,
    SynclineState,
    TreeWeights,
    bare,
    device_of_owners,
    devices_of,
    fresh,
    given,
    host,
    is_traced,
    named,
    outline,
    placed,
    probe,
    specs_of,
    state_of,
    told_to_all,
)

try:
    from .branches import watched
except (ImportError, AttributeError) as error:  # it uses names that are private to JAX
    warn(
        f"with JAX {jax.__version__} exchanges in branches and loops cannot be detected ({error}): call update()"
        " outside of jax.lax.cond, switch and while_loop, because a rank that skips an exchange would pair gradients of"
        " different steps",
        stacklevel=1,
    )

    def watched(run: int, refuse: Callable[[str], NoReturn], values: Sequence[Any]) -> list[Any]:  # noqa: ARG001
        """The unchanged values: this JAX cannot mark the exchange."""
        return list(values)


_STEP = np.zeros((), np.int32)
_ORDER = (
    "transformations that skip or repeat steps (optax.apply_if_finite, MultiSteps, conditionally_transform,"
    " contrib.sam) belong inside Syncline's transformation, where all ranks decide by the mean, as in"
    " syncline.jax.distributed(optax.apply_if_finite(optimizer, 5)) or optax.chain(syncline.jax.average(),"
    " optax.apply_if_finite(optimizer, 5))"
)
_numbers = count(1)
_runs: WeakValueDictionary[int, Run] = WeakValueDictionary()


class Run:
    """The run of a transformation. Without an ``optimizer`` the script's next transformation receives the mean.

    All processes of the session construct it together.
    """

    def __init__(self, session: Session, optimizer: Any, weight: object = 1) -> None:
        self._session, self._weight = session, weight
        self._sums: FlatSums | None = None
        self._passing: Call | None = None
        self._optimizer = None if optimizer is None else optax.with_extra_args_support(optimizer)
        self._model: FlatModel | None = None
        self._ready = self._whole = False
        self.number = next(_numbers)
        _runs[self.number] = self
        self._periodic = isinstance(session.strategy.sync_mode(), Averages)
        self._held = session.strategy.server_holds_weights and not session.alone
        if optimizer is None:
            check_average(session, "syncline.jax.distributed(optimizer)")
        check_schedule(session.strategy, "JAX")
        check_no_replicas(session, "JAX")
        weight_of_batches(session, weight)

    # The start.

    def init(self, params: Any) -> SynclineState | None:
        """The state before the first step; None on a server after its work.

        All processes must call it outside ``jit``. Under ``eval_shape`` it returns shapes and does not communicate.
        """
        if is_traced(params):
            return fresh(self.number, self._inner(params))
        session = self._session
        with told_to_all(session):
            self._look_at(params)
            build = self._builder(params)
        if session.alone:
            warn_of_plain_steps(session)
            self._begin_alone()
            return fresh(self.number, self._inner(params))
        mine = self._weights.now
        if not session.is_worker:
            serve_flat(session, self._specs, self._weights, build, self)
            return None
        self._model = model = self._made(build)
        if not all(
            np.array_equal(_bits(one), _bits(other)) for one, other in zip(mine, self._weights.now, strict=True)
        ):
            text = f"{session.name(session.index)} starts with other parameters than rank 0: call params ="
            raise session.fail(UsageError(f"{text} syncline.jax.broadcast(params) before init(params)"))
        self._compare(params)
        session.barrier()  # nobody goes on from parameters that are not everyone's
        self._weights.forget()
        self._lay_out(model)
        session.process.before_end.append(partial(wait_for_steps, session))
        return fresh(self.number, self._inner(params))

    def begin_again(self, session: Session, step: int) -> None:
        """Go on in another session, from that step, in an elastic run. Computations are traced and compiled anew."""
        if self._model is not None:
            self._model.close()
        self._session, self._model = session, None
        jax.clear_caches()  # they call the session that is over
        if session.alone:
            self._begin_alone()
            return
        self._weights.now = [np.zeros(spec.shape, spec.dtype) for spec in self._specs]  # the script has the values
        self._model = model = self._made(partial(OptaxSlices, self._optimizer, None))
        self._weights.forget()
        model.resume_at(step)
        self._lay_out(model)
        session.process.before_end.append(partial(wait_for_steps, session))

    def _made(self, build: partial[OptaxSlices]) -> FlatModel:
        weight = weight_of_batches(self._session, self._weight)
        return FlatModel(
            self._session, self._specs, self._weights, build, self, weight=weight and partial(self._weigh, weight)
        )

    def _weigh(self, weight: Callable[[], float]) -> float:
        if not self._session.lasting:
            raise self._session.fault(
                "weight='batch' needs syncline.jax.keep(), whose update() waits for a step: without it sampler.commit()"
                " may move on to another batch while the step of this one still computes"
            )
        return weight()

    def _begin_alone(self) -> None:
        """Let gradients pass through a call where the steps of other sessions have one, or in a process that repeats a
        log: a computation without it may round differently."""
        repeats = bool(os.environ.get(REPEATS))
        if repeats:
            self._sums = FlatSums(self._session, self._specs, self._weight == "batch")
        self._passing = None
        if repeats or is_relayed():
            self._passing = self._call(self._passed, [_STEP, *self._specs], [_STEP, *self._specs])

    @property
    def repeats_part(self) -> bool:
        """Whether the last step was a part of one of a log, and not its last."""
        return self._sums is not None and not self._whole

    def _look_at(self, params: Any) -> None:
        leaves = named(params)
        self._specs, self._structure = specs_of(leaves), jax.tree.structure(params)
        self._names = [name for name, _ in leaves]
        self._weights = TreeWeights(self._names, self._specs)
        self._weights.now = [host(name, leaf) for name, leaf in leaves]
        self._devices = max(1, devices_of(params))
        self._shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.float32), params)
        self._ready = True

    def _builder(self, params: Any) -> partial[OptaxSlices]:
        """The constructor of an owner's optimizer. UsageError for an optimizer that several processes cannot use."""
        session, device = self._session, None
        if not session.alone:
            keeps = probe(self._optimizer, params) if self._held else True
            decide_mode(session, self._weights.values(), "the optimizer", keeps)
            if self._held and not (session.is_worker and session.group.servers):
                device = device_of_owners(beside=session.is_worker)  # all see whether there is one
        return partial(OptaxSlices, self._optimizer, device)

    @property
    def rule(self) -> str:
        """A text that differs between optimizers that differ in a visible way, and between weights of batches."""
        told = f"weight={self._weight!r}"
        if self._optimizer is None:
            return told
        keeps, numbers = outline(self._optimizer, self._shapes)
        seen = f"{keeps} {[f'{number:.3e}' for number in numbers]}"
        return f"{told} and an optimizer ({zlib.crc32(seen.encode()):08x})"

    def _compare(self, params: Any) -> None:
        """Raise MismatchError, on all workers, if their optimizers differ in a visible way."""
        if self._optimizer is None:
            return
        session, (keeps, numbers) = self._session, outline(self._optimizer, params)
        kept, theirs = json.loads(session.gather(json.dumps([keeps, numbers]).encode())[0])
        alike = len(numbers) == len(theirs) and np.allclose(numbers, theirs, rtol=1e-4, equal_nan=True)
        if keeps != kept or not alike:
            what = "keeps other state" if keeps != kept else "makes other updates from the same gradients"
            text = f"the optimizer of {session.name(session.rank)} {what} than the optimizer of {session.name(0)}"
            remedy = "give all workers the same transformation of optax, with the same values"
            raise session.fail(MismatchError(session.titled(f"{text}: {remedy}")))

    def _inner(self, params: Any) -> Any:
        return () if self._optimizer is None or self._held else self._optimizer.init(params)

    def _lay_out(self, model: FlatModel) -> None:
        """Create the calls of a step. The first argument of each is the step, or the token of machine code."""
        every, self._tensors = self._specs, tensors_of_calls(model.layout)
        self._buckets: Buckets | None = None
        if self._devices == 1:
            after = model.held if self._held and model.held is not None else model.gradients
            self._buckets = Buckets(model, self._tensors, after.tensors)
            self._begin = self._call(self._begun, [_STEP], [TOKEN])
            self._end = self._call(self._ended, [TOKEN], [TOKEN])
        else:
            of_tensors = [[_STEP, *(every[one] for one in tensors)] for tensors in self._tensors]
            self._starts = [
                self._call(partial(self._start, tensors), arguments, [_STEP])
                for tensors, arguments in zip(self._tensors, of_tensors, strict=True)
            ]
            self._finish = self._call(self._finished, [_STEP], [_STEP, *every])
        if self._periodic:
            self._ask = self._call(self._asked, [_STEP], [_STEP, _STEP])
            self._own = self._call(self._made_alone, [_STEP, *every], [_STEP])
            self._meet = self._call(self._averaged, [_STEP, *every, *every], [_STEP, *every])

    def _call(self, function: Callable[..., None], arguments: Sequence[Any], results: Sequence[Any]) -> Call:
        return calls.make(unseen(self._session, shared(function, self._devices)), arguments, results)

    # Under jit.

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SynclineState]:
        """The ``update`` of an optax transformation."""
        if not isinstance(state, SynclineState):
            raise UsageError(
                f"the state is {type(state).__name__}: give the result of this transformation's init(params)"
            )
        if self._session.alone:
            if self._ready and self._passing is not None:
                structure = jax.tree.structure(updates)
                step, *found = invoke(self._passing, state.step, *jax.tree.leaves(updates))
                updates, state = jax.tree.unflatten(structure, found), state._replace(step=step)
            if self._optimizer is not None:
                updates, inner = self._optimizer.update(updates, state.inner, params, **extra)
                state = state._replace(inner=inner)
            return updates, state._replace(step=state.step + 1)
        self._session.check_usable()
        if self._model is None:
            raise ClosedError(
                "init() of this transformation was only traced, or not called: call it with parameters on all ranks,"
                " outside of jit"
            )
        gradients = self._checked(self._model, updates)
        self._structure = jax.tree.structure(updates)  # of arrays, where init() may have had Variables of flax around
        if params is None and (self._held or self._periodic):
            raise self._model.fault(
                f"{self._session.strategy} exchanges weights: call update(gradients, state, params)"
            )
        if self._held and extra:
            raise self._model.fault(
                f"owners of the weights do not receive {', '.join(extra)}: use ring or an allreduce"
            )
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
        if self._buckets is None:
            for tensors, call in zip(self._tensors, self._starts, strict=True):
                (step,) = invoke(call, step, *(gradients[one] for one in tensors))
            step, *found = invoke(self._finish, step)
            return step, found
        # On one device, the usual case, only the first call and the last but one are Python.
        shape = jax.ShapeDtypeStruct(TOKEN.shape, TOKEN.dtype)
        (token,) = invoke(self._begin, step)
        for number, tensors in enumerate(self._tensors):
            (token,) = invoke_code(PUT, number, [token, *(gradients[one] for one in tensors)], [shape])
        (token,) = invoke(self._end, token)
        every = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in self._specs]
        token, *found = invoke_code(TAKE, 0, [token], [shape, *every])
        return token[0], found

    def _by_kind(self, gradients: list[Any], state: SynclineState, params: Any, extra: Any) -> tuple[Any, Any]:
        """Branch by the kind of the step, which the engine returns at run time."""
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
        """The gradients as a list. If they do not fit the parameters, the run ends with an error of this rank."""
        found = named(updates)
        for pair in zip_longest(found, zip(self._names, self._specs, strict=True)):
            here, there = ("nothing" if one is None else _described(*one) for one in pair)
            if here != there:
                raise model.fault(f"update() is traced with gradients that have {here}, but init() had {there}")
        return [leaf for _, leaf in found]

    # What the calls do.

    def _at(self, arguments: Sequence[Array], results: Sequence[Array]) -> FlatModel:
        """Write the step to the first result and return the model, as ``_model_at``."""
        step = int(arguments[0])
        results[0][...] = step
        return self._model_at(step)

    def _model_at(self, step: int) -> FlatModel:
        model = self._model
        assert model is not None
        self._session.check_usable()
        if step != model.steps:
            raise model.fault(
                f"a computation makes step {step}, but the run is at step {model.steps}: every step continues from the"
                " optimizer state of the step before. Resume with syncline.jax.load_state_dict(), put the"
                " parameters on all devices that compute before init(params), and let no other transformation"
                f" call this one more than once in a step or drop its state: {_ORDER}"
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
        self._weights.forget()

    def _finished(self, arguments: list[Array], results: list[Array]) -> None:
        model = self._at(arguments, results)
        model.step()
        found = self._weights.now if self._held else model.gradients.tensors
        _give(found, results)
        self._weights.forget()

    def _passed(self, arguments: list[Array], results: list[Array]) -> None:
        results[0][...] = arguments[0]
        gradients = arguments[1:]
        if self._sums is not None:
            self._sums.sums.begin_part()
            self._whole = self._sums.add(gradients)
            gradients = [flat.reshape(spec.shape) for flat, spec in zip(self._sums.mean, self._specs, strict=True)]
        _give(gradients, results)

    def _asked(self, arguments: list[Array], results: list[Array]) -> None:
        results[1][...] = KINDS.index(self._at(arguments, results).kind)

    def _made_alone(self, arguments: list[Array], results: list[Array]) -> None:
        model = self._at(arguments, results)
        self._weights.now = arguments[1:]
        model.step_alone()
        self._weights.forget()

    def _averaged(self, arguments: list[Array], results: list[Array]) -> None:
        model, each = self._at(arguments, results), len(self._specs)
        self._weights.now, self._weights.after = arguments[1 : each + 1], arguments[each + 1 :]
        model.step_alone()
        _give(self._weights.now, results)
        self._weights.forget()

    # Between steps.

    def consolidate(self, params: Any) -> Any:
        """The newest parameters of all workers."""
        if self._model is None:
            return params
        self._take(params)
        self._session.consolidates[self._model.key]()
        return self._given(params)

    def state_dict(self, params: Any, state: Any) -> dict[str, Any]:
        """The state for a resumed run."""
        ours = state_of(state)
        self._take(params)
        self._weights.take_state(state)
        if self._model is None:
            found = save_alone(self._session, self._specs, self._weights, int(ours.step))
        else:
            if int(ours.step) != self._model.steps:
                at = f"of step {int(ours.step)} at step {self._model.steps}"
                raise self._model.fault(f"state_dict() with the optimizer state {at}")
            found = save(self._model)
        self._weights.forget()
        return found

    def load_state_dict(self, saved: Any, params: Any, state: Any) -> tuple[Any, Any]:
        """Load a saved state. ``params`` and ``state`` of a fresh start give shapes and places."""
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

    def _take(self, params: Any) -> None:
        if not self._ready:
            raise ClosedError(
                "init() of this transformation has not been called in this process: call it first, outside of jit"
            )
        leaves = named(params)
        if [bare(name) for name, _ in leaves] != [bare(name) for name in self._names]:
            raise UsageError(f"these parameters belong to another model: {', '.join(name for name, _ in leaves)}")
        self._weights.now = [host(name, leaf) for name, leaf in leaves]

    def _given(self, params: Any) -> Any:
        leaves = [placed(value, leaf) for value, leaf in zip(self._weights.now, jax.tree.leaves(params), strict=True)]
        self._weights.forget()
        return jax.tree.unflatten(jax.tree.structure(params), leaves)


def run_of(state: Any) -> Run:
    """The run of an optimizer's state. Raises UsageError if it belongs to no run of this process."""
    found = _runs.get(int(state_of(state).run))
    if found is None:
        raise UsageError(
            "this optimizer state does not belong to a run of this process: give the result of init(params)"
        )
    return found


def _refuse(run: int, where: str) -> NoReturn:
    text = f"update() is traced {where}, and a rank that skips it would pair gradients of different steps: {_ORDER}"
    found = _runs.get(run)
    raise GradientError(text) if found is None or found._model is None else found._model.fault(text)


def _give(values: Sequence[Array], results: Sequence[Array]) -> None:
    for value, result in zip(values, results[1:], strict=True):
        np.copyto(result, value.reshape(result.shape))


def _bits(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _described(name: str, leaf: Any) -> str:
    """A leaf or its Spec, for errors."""
    shape, kind = getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf).__name__)
    return f"{bare(name)} of shape {tuple(shape)} and type {kind}"
