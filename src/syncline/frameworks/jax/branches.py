"""Refuses an exchange that some ranks may skip: in a branch, in a loop of unknown length, or under ``vmap``.

A rank that skips an exchange from then on pairs its gradients with the others' gradients of another step. JAX traces a
function under ``jit`` once, possibly outside of branches first; a branch then contains only its jaxpr. ``watched``
therefore adds an effect to the jaxpr. ``cond``, ``switch`` and ``while_loop`` check whether a jaxpr has effects that
are allowed there (``control_flow_allowed_effects``). ``scan`` makes the same check, but it may contain exchanges,
because its length is known; the answer therefore depends on the caller. A check at run time is impossible: a rank that
has skipped an exchange makes its next one under the number of the skipped one.

All of this is private to JAX. If a version differs, the import of this file fails, and ``run`` warns and goes on
without it. The effect would disable JAX's fast dispatch (``calls``). JAX eliminates dead code before it compiles, and
the rule registered for that removes the effect, so nothing of ``watched`` remains in compiled code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jax._src import effects  # JAX shows nowhere else which effects a branch may have
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

Refuse = Callable[[str], NoReturn]
"""Raises the error; the text says where the exchange is."""


@dataclass(frozen=True)
class _Exchange(effects.Effect):  # type: ignore[misc]
    """An exchange of run ``run``; ``refuse`` raises the error."""

    run: int
    refuse: Refuse = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"syncline's exchange {self.run}"


_BRANCH = "inside a branch (jax.lax.cond or switch)"
_LOOP = (
    "inside of a loop whose length each rank determines by itself (jax.lax.while_loop, fori_loop between traced"
    " bounds; the length of jax.lax.scan is known)"
)


class _ByPlace(type):
    def __instancecheck__(cls, effect: Any) -> bool:
        if type(effect) is not _Exchange:
            return False
        asks = sys._getframe(1)
        while asks.f_back is not None and asks.f_globals.get("__name__") == effects.__name__:
            asks = asks.f_back
        if asks.f_code.co_name.startswith("scan"):
            return True
        branch = asks.f_globals.get("__name__", "").endswith(".conditionals")
        return effect.refuse(_BRANCH if branch else _LOOP)


class _Allowed(metaclass=_ByPlace):
    """The type of allowed effects, which JAX tests by ``isinstance``."""


effects.control_flow_allowed_effects.add_type(_Allowed)
effects.lowerable_effects.add_type(_Exchange)  # for unused values that JAX keeps (keep_unused=True)

_watched = Primitive("syncline_exchange")
_watched.multiple_results = True
_watched.def_impl(lambda *values, **_: list(values))
_watched.def_effectful_abstract_eval(lambda *avals, effect, seen: (list(avals), set() if seen else {effect}))
mlir.register_lowering(_watched, lambda _, *values, **__: values)


def watched(run: int, refuse: Refuse, values: Sequence[Any]) -> list[Any]:
    """Mark the values of an exchange of run ``run``; ``refuse`` raises if JAX traces it in a forbidden place."""
    return list(_watched.bind(*values, effect=_Exchange(run, refuse), seen=False))


def _forget_effect(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(equation.invars), None
    parameters = {**equation.params, "seen": True}
    return [True] * len(equation.invars), equation.replace(params=parameters, effects=set())


def _refuse_batch(_values: Any, _axes: Any, *, effect: _Exchange, **_: Any) -> NoReturn:
    effect.refuse("under jax.vmap, where a gradient has no single value")


partial_eval.dce_rules[_watched] = _forget_effect
batching.primitive_batchers[_watched] = _refuse_batch
