"""Models that are part of a run: the objects that ``prepare`` and ``average`` create and later calls look up.

A model is identified by its trained variables, whichever object has them. A Keras optimizer stays the script's object,
with its class and its state; only its ``apply`` is replaced by a method that exchanges first. Both ``fit`` and a
script's own loops call it. ``Means`` is for scripts with another optimizer, or that read gradients.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ...errors import MismatchError, NotBuiltError, UsageError
from ...launch.environment import REPEATS
from ...launch.relay import is_relayed
from ...session.session import Session
from ...strategy.strategy import Strategy
from .._checkpoint import checked, load, load_alone, save, save_alone
from .._computations import broadcast_into
from .._repeating import FlatSums
from .._supported import LastsWhole, check_average, warn_of_plain_steps
from .run import Matching, Run, Unused
from .variables import (
    KerasSlices,
    Rate,
    Slots,
    VariableWeights,
    assign,
    copy_from,
    innermost,
    moving,
    names_of,
    probe,
    resource,
    specs_of,
    trained,
    untrained,
    value,
)

Apply = Callable[..., None]
"""The original ``apply`` of a Keras optimizer."""


class Prepared(LastsWhole):
    """A model in a run, with its optimizer if Keras made it. It outlives the sessions of an elastic run
    (``recovery.lasting``).

    ``run`` is None in a run with one worker, unless others may join it, or it repeats a log.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        optimizer: Any,
        unused: Unused = "error",
        *,
        buffers: bool = True,
        weight: object = 1,
    ) -> None:
        self.session, self.model, self.optimizer = session, model, optimizer
        self.variables, self.untrained = trained(model), untrained(model)
        self.specs, self.ids = specs_of(self.variables), {id(resource(one)) for one in self.variables}
        self._weight = weight
        self.steps = 0
        """The number of steps of a single worker, if no Keras optimizer counts them."""
        self._since = self._begun = 0  # counts of the optimizer and of the model at their common start
        self.matching = Matching(self.variables, self.specs, unused)
        slots = None
        if optimizer is not None:
            _check_optimizer(optimizer, self.variables)
            slots = Slots(optimizer, self.variables)
        self.weights = VariableWeights(self.variables, slots)
        self.run: Run | None = None
        repeats = bool(os.environ.get(REPEATS))
        if session.alone:
            warn_of_plain_steps(session)
            if not (repeats or is_relayed()):
                return
        changing = moving(model) if buffers else []
        self.run = Run(session, self.matching, self.weights, changing, type(optimizer).__name__, weight)
        if repeats and session.alone:
            if optimizer is None:
                raise NotBuiltError(
                    "syncline repeat works with syncline.tensorflow.prepare(model, optimizer), not with average()"
                )
            self.run.sums = FlatSums(session, self.specs, weight == "batch")

    def begin(self) -> bool:
        """Meet all processes and copy rank 0's values. Returns False on a server after its work."""
        run = self.run
        if run is None:
            if self.optimizer is not None:
                _replace_apply(self.optimizer, self.matching, lambda original, found: original(found, self.variables))
                _trace_anew(self.model)
            return True
        keeps = probe(self.optimizer, self.variables, self.specs) if run.held else True
        build = partial(KerasSlices, self.optimizer, beside=not self.session.group.servers)
        if not run.begin(build, self.variables[0], keeps=keeps):
            return False
        if not self.session.alone:
            if self.optimizer is not None:
                self._compare_optimizers()
            copy_from(self.session, [*self.untrained, *self._kept], 0)
        self.session.lasting.append(self)
        if self.optimizer is not None:
            _replace_apply(self.optimizer, self.matching, partial(_exchange, run, self.optimizer))
            self._since = self._made()
            self.session.process.before_end.append(self.check_steps)
            if isinstance(self.model, keras.Model):
                _guard(self.model, run, self.optimizer)
        return True

    @property
    def _kept(self) -> list[Any]:
        return [] if self.optimizer is None else list(self.optimizer.variables)

    # What an elastic run does with it.

    framework = "TensorFlow"

    @property
    def counted(self) -> Run | None:
        """The run, which calls ``finished`` in every step whose variables will change."""
        return self.run

    @property
    def described(self) -> str:
        """A text that differs between models of other variables, and between optimizers."""
        rule = [] if self.optimizer is None else self._rule()
        told = zlib.crc32(str([self.specs, names_of(self.untrained), names_of(self._kept), rule]).encode())
        elements = sum(spec.elements for spec in self.specs)
        made = type(self.optimizer).__name__
        return f"{len(self.specs)} variables of {elements:,} elements with {made} ({told:08x}), weight={self._weight!r}"

    def check_lasting(self, strategy: Strategy) -> None:
        """Raise NotBuiltError if owners hold the weights, or the script updates them."""
        super().check_lasting(strategy)
        if self.optimizer is None:
            raise NotBuiltError(
                "syncline.elastic() works with syncline.tensorflow.prepare(model, optimizer), not with average(), which"
                " leaves the update of the weights to the script"
            )

    def keep_values(self) -> Callable[[], None]:
        """Copy all variables. The returned call puts them back."""
        variables = [*self.variables, *self.untrained, *self._kept]
        arrays = [value(one) for one in variables]

        def put_back() -> None:
            for one, array in zip(variables, arrays, strict=True):
                assign(one, array)

        return put_back

    def copy_again(self, session: Session, root: int, whole: bool) -> None:  # noqa: ARG002 - each worker has it whole
        """Take over all variables of ``root``."""
        if not session.alone:
            copy_from(session, [*self.variables, *self.untrained, *self._kept], root)

    def prepare_again(self, session: Session) -> None:
        """Let the optimizer exchange in another session."""
        assert self.run is not None
        self.session = session
        self.run.begin_again(session, self._made())
        self._since, self._begun = self._made(), self.run.model.steps
        session.process.before_end.append(self.check_steps)
        session.lasting.append(self)

    # Between steps.

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run."""
        if self.session.alone:
            found = save_alone(self.session, self.specs, self.weights, self._made())
        else:
            assert self.run is not None
            self.check_steps()
            found = save(self.run.flat)
        names, arrays = names_of(self.untrained), [value(one) for one in self.untrained]
        if not self.session.alone:
            broadcast_into(self.session, arrays)  # rank 0's, where each has its own
        return found | {"untrained": dict(zip(names, arrays, strict=True))}

    def check_steps(self) -> None:
        """Warn, once, if the optimizer has counted more steps than the workers have made together."""
        if self.run is None or self.optimizer is None or self.run.model.gone or self.run.held:
            return
        alone = self._made() - self._since - (self.run.model.steps - self._begun)
        if alone > 0:
            self._since += alone
            warnings.warn(
                f"{self.session.name(self.session.index)}: the optimizer counts {alone} steps that were made without"
                " the other ranks, for example by a tf.function that was traced before prepare(): call prepare() before"
                " the first call of the step, or create the tf.function again after it. If the script has set"
                " optimizer.iterations itself, ignore this warning",
                stacklevel=2,
            )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a result of ``state_dict``, with any number of workers."""
        names = names_of(self.untrained)
        if not {"untrained", "weights", "steps", "strategy"} <= set(saved):
            raise UsageError(
                "this is not a result of syncline.tensorflow.state_dict(): give the result of an earlier run"
            )
        told = saved["untrained"]
        if sorted(told) != sorted(names):
            raise UsageError(
                f"this state is of another model, whose untrained variables are {', '.join(told) or 'nothing'}"
            )
        if self.session.alone:
            self.steps = load_alone(self.specs, self.weights, saved)
            if self.run is not None:
                self.run.model.resume_at(self.steps)
        else:
            assert self.run is not None
            load(self.run.flat, saved)
            if self.run.held:  # the owners have the elementwise state; a count of steps is here too
                self.weights.keep(checked(self.specs, saved, 0, 1)[1])
                if not self.session.strategy.sync_mode().merges:  # theirs counts the pushes of all
                    innermost(self.optimizer)._iterations.assign(saved["steps"])
        for name, one in zip(names, self.untrained, strict=True):
            assign(one, told[name])
        if self.run is not None and self.optimizer is not None:
            self._since, self._begun = self._made(), self.run.model.steps

    def let_go(self) -> None:
        """Give up the variables, which another model has from now on."""
        if self.run is not None:
            self.run.model.let_go()
        self.session.lasting[:] = [one for one in self.session.lasting if one is not self]

    def _rule(self) -> list[Any]:
        """The optimizer's class and values but for those that are copied, as values of JSON."""
        found = keras.optimizers.serialize(self.optimizer)
        copied = {"name", *(["learning_rate"] if isinstance(found["config"].get("learning_rate"), float) else [])}
        config = {name: one for name, one in found["config"].items() if name not in copied}
        values: list[Any] = json.loads(json.dumps([found["class_name"], config], sort_keys=True, default=repr))
        return values

    def _compare_optimizers(self) -> None:
        """End all ranks with an error that names a rank whose optimizer differs from rank 0's."""
        session, mine = self.session, self._rule()
        first, *_ = session.gather(json.dumps(mine, sort_keys=True).encode())
        theirs = json.loads(first)
        if theirs != mine:
            differs = sorted(name for name in {*mine[1], *theirs[1]} if mine[1].get(name) != theirs[1].get(name))
            here = {name: mine[1].get(name) for name in differs}
            there = {name: theirs[1].get(name) for name in differs}
            text = f"{session.name(session.index)} has the optimizer {mine[0]} with {here}, but {session.name(0)} has"
            raise session.fail(MismatchError(f"{text} {theirs[0]} with {there}: give all ranks the same optimizer"))

    def _made(self) -> int:
        return self.steps if self.optimizer is None else int(innermost(self.optimizer)._iterations.numpy())


_known: list[Prepared] = []


def prepare(
    session: Session, model: Any, optimizer: Any, unused: Unused, *, buffers: bool = True, weight: object = 1
) -> Prepared | None:
    """Make a model and its optimizer part of the run. Returns None on a server after its work."""
    trained(model)
    used = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if used is None:
        raise UsageError(
            "a model of TensorFlow needs its optimizer: call prepare(model, optimizer), or compile() the model before;"
            " with an optimizer that is not of Keras, call syncline.tensorflow.average(model)"
        )
    return _entered(session, model, used, unused, buffers, weight)


def average(session: Session, model: Any, unused: Unused, leave: Callable[[], NoReturn]) -> Means:
    """Make a model part of the run. The script passes its gradients to the returned ``Means``.

    All processes must call it at the same place. ``leave`` ends a server after its work.
    """
    check_average(session, "syncline.tensorflow.prepare(model, optimizer)")
    made = _entered(session, model, None, unused, True)
    return leave() if made is None else Means(made)


def prepared(model: Any) -> Prepared:
    """The prepared model. Raises UsageError if the model was not prepared."""
    ids = {id(resource(one)) for one in trained(model)}
    for made in _known:
        if made.ids == ids:
            made.session.check_usable()
            return made
    raise UsageError(
        "this model, with its present trainable variables, has not been prepared in this run: call"
        " syncline.tensorflow.prepare(model, optimizer), or average(model), first"
    )


def _entered(
    session: Session, model: Any, optimizer: Any, unused: Unused, buffers: bool, weight: object = 1
) -> Prepared | None:
    made = Prepared(session, model, optimizer, unused, buffers=buffers, weight=weight)
    _known[:] = [known for known in _known if known.session.process.usable]
    for known in [known for known in _known if not made.ids.isdisjoint(known.ids)]:
        known.let_go()
        _known.remove(known)
    if not made.begin():
        return None
    _known.append(made)
    return made


def _guard(model: Any, run: Run, optimizer: Any) -> None:
    """Let ``fit`` refuse steps that would not be exchanged, and raise the original error of a failed call."""
    original = type(model).make_train_function.__get__(model)

    def make_train_function(force: bool = False) -> Any:
        if model.optimizer is not optimizer:
            raise run.model.fault(
                "the model is compiled with another optimizer than prepare() was given, so it would train without the"
                " other ranks: give compile() the same optimizer, or call prepare() after compile()"
            )
        if model.jit_compile:
            raise run.model.fault(
                "the model is compiled with jit_compile=True, and computations of XLA on the CPU cannot call Syncline:"
                " use compile(..., jit_compile=False)"
            )
        before = model.train_function
        made = original(force)
        if model.train_function is not before:
            model.train_function = _said(model.train_function, run)
        return made

    model.make_train_function = make_train_function
    _trace_anew(model)


def _trace_anew(model: Any) -> None:
    """Discard the traced training step of ``fit``, which contains the optimizer's former ``apply``."""
    if isinstance(model, keras.Model):
        model.train_function = None


def _said(function: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def train_function(*arguments: Any) -> Any:
        run.error = None  # the script has seen the error of an earlier call
        try:
            return function(*arguments)
        except tf.errors.OpError as error:
            found, run.error = run.error, None
            raise (found or error) from error

    return train_function


# Its optimizer.


def _check_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build the optimizer if necessary. UsageError for an object that is not of Keras, and for other variables."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}: give an optimizer of Keras, such as"
            " keras.optimizers.Adam(1e-3), or keep your own and call syncline.tensorflow.average(model)"
        )
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    built = {id(resource(one)) for one in innermost(optimizer)._trainable_variables}
    if built != {id(resource(one)) for one in variables}:
        raise UsageError(
            "the optimizer was not built for the model's present trainable variables: freeze layers before compile()"
            " and prepare(), and give each model its own optimizer"
        )


def _replace_apply(optimizer: Any, matching: Matching, use: Callable[[Apply, list[Any]], None]) -> None:
    """Replace the optimizer's ``apply`` by a call of ``use`` with the original and the gradients of all variables."""
    original = type(optimizer).apply.__get__(optimizer)

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if gradients := list(grads):
            given = innermost(optimizer)._trainable_variables if trainable_variables is None else trainable_variables
            use(original, matching.matched(gradients, list(given)))

    optimizer.apply = tf.autograph.experimental.do_not_convert(apply)


def _exchange(run: Run, optimizer: Any, original: Apply, gradients: Sequence[Any]) -> None:
    """Exchange gradients and update with their means by ``original``, or read the weights from their owners."""
    if run.sums is not None:
        run.repeat(gradients, Rate(optimizer), lambda means: original(means, run.variables))
        return
    if run.held:
        rate = tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float64)
        for variable, weights in zip(run.variables, run.exchange(gradients, rate), strict=True):
            resource(variable).assign(weights)
        innermost(optimizer)._iterations.assign_add(1)
        return
    if run.periodic:
        run.train(gradients, lambda those: original(those, run.variables))
        return
    run.apply(gradients, lambda means: original(means, run.variables), lent=_keeps_none(optimizer, run.variables))


def _keeps_none(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether the optimizer keeps no reference to a gradient: Keras' own do if a gradient overwrites a variable."""
    of_keras = all(type(one).__module__.startswith("keras.src.") for one in (optimizer, innermost(optimizer)))
    return of_keras and not any(getattr(one, "overwrite_with_gradient", False) for one in variables)


# Means of gradients.


class Means:
    """The result of ``syncline.tensorflow.average``: a call with gradients returns their means over all workers."""

    def __init__(self, made: Prepared) -> None:
        self._made = made

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """The means in the order of ``variables``; by default these are the model's, in its order.

        All workers must call it equally often, inside ``tf.function`` or outside.
        """
        made = self._made
        of = made.variables if variables is None else list(variables)
        means = made.matching.matched(list(gradients), of)
        if made.run is not None:
            means = made.run.exchange(means)
        return [means[made.matching.number(one)] for one in of]

    def tape(self, persistent: bool = False, watch_accessed_variables: bool = True) -> MeanTape:
        """A ``tf.GradientTape`` whose ``gradient(loss, variables)`` returns the means."""
        return MeanTape(self, persistent, watch_accessed_variables)


class MeanTape(tf.GradientTape):  # type: ignore[misc]
    """A ``tf.GradientTape`` whose gradients are averaged over all workers."""

    def __init__(self, means: Means, persistent: bool, watch_accessed_variables: bool) -> None:
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        self._means = means

    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """As in TensorFlow; ``sources`` must be all variables of the model."""
        nest = tf.nest
        found = super().gradient(target, sources, *arguments, **options)
        flat = [found] if not isinstance(sources, list | tuple | dict) else nest.flatten(found)
        means = self._means(flat, nest.flatten(sources))
        return nest.pack_sequence_as(sources, means)
