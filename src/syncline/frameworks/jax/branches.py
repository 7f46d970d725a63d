"""Refuses an exchange that ranks may leave out one by one: in a branch, in a loop of unknown length, under ``vmap``.

A rank that leaves one out pairs its gradients with those of another step from then on. JAX traces a function under
``jit`` once: it may have been called outside of branches first, and a branch then sees nothing of it but its jaxpr. So
``watched`` puts an effect of ours there, and ``cond``, ``switch`` and ``while_loop`` ask whether the jaxpr that they
are given has effects that may be there (``control_flow_allowed_effects``). ``scan`` asks in the same words, and may
have ours, since its length is known: the answer depends on who asks. No number that travels could tell at run time: a
rank that has left an exchange out makes its next one under the number of the one that it has left out.

All of this is private to JAX. Where it has changed, this file does not import, and ``run`` warns and goes on without.

To a computation the effect would cost the fast way by which JAX begins it (``calls``). JAX removes what is not used
before it compiles, and that rule removes the effect here; nothing of ``watched`` is left in what is compiled.
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


_BRANCH = "inside of a branch (jax.lax.cond or switch)"
_LOOP = (
    "inside of a loop whose length every rank finds out by itself (jax.lax.while_loop, fori_loop between bounds that"
    " are traced; jax.lax.scan has one that is known)"
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
    """The type of effects that may be where they are: JAX asks by ``isinstance``."""


effects.control_flow_allowed_effects.add_type(_Allowed)
effects.lowerable_effects.add_type(_Exchange)  # where JAX keeps what is not used (keep_unused=True)

_watched = Primitive("syncline_exchange")
_watched.multiple_results = True
_watched.def_impl(lambda *values, **_: list(values))
_watched.def_effectful_abstract_eval(lambda *avals, effect, seen: (list(avals), set() if seen else {effect}))
mlir.register_lowering(_watched, lambda _, *values, **__: values)


def watched(run: int, refuse: Refuse, values: Sequence[Any]) -> list[Any]:
    """The values that an exchange of run ``run`` takes; ``refuse`` raises where JAX traces it in a wrong place."""
    return list(_watched.bind(*values, effect=_Exchange(run, refuse), seen=False))


def _forget_effect(used: list[bool], equation: Any) -> tuple[list[bool], Any]:
    if not any(used):
        return [False] * len(equation.invars), None
    parameters = {**equation.params, "seen": True}
    return [True] * len(equation.invars), equation.replace(params=parameters, effects=set())


def _refuse_batch(_values: Any, _axes: Any, *, effect: _Exchange, **_: Any) -> NoReturn:
    effect.refuse("under jax.vmap, which has no one value of each gradient")


partial_eval.dce_rules[_watched] = _forget_effect
batching.primitive_batchers[_watched] = _refuse_batch
