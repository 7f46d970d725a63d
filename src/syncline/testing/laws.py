"""Runs the laws of a kind of part and reports violations.

A law is a function of a case (a part with an example) that raises AssertionError if the law is violated. It selects the
cases that it applies to by the part's declarations. Cases are drawn from a seed, the smallest first, so that failures
are reproducible and small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

PartT = TypeVar("PartT")
CaseT = TypeVar("CaseT")


class BrokenLaw(AssertionError):
    """A part that violates a law of its kind: ``law``, ``part`` and the failing ``case``."""

    def __init__(self, law: str, part: str, case: str, why: str) -> None:
        super().__init__(f"{part} breaks the law {law!r} with {case}: {why}")
        self.law, self.part, self.case = law, part, case


@dataclass(frozen=True)
class Law(Generic[PartT, CaseT]):
    """One law: its cases, made from a part, a seed and their number, and the parts that it applies to."""

    name: str
    check: Callable[[CaseT], None]
    cases: Callable[[PartT, int, int], Iterable[CaseT]]
    concerns: Callable[[CaseT], bool]


class Laws(Generic[PartT, CaseT]):
    """The laws of a kind of part (``parts``), in the order in which they run: first those that others depend on."""

    def __init__(self, *parts: Laws[PartT, Any]) -> None:
        self._laws: list[Law[PartT, CaseT]] = [law for part in parts for law in part]

    def __iter__(self) -> Iterator[Law[PartT, CaseT]]:
        return iter(self._laws)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the laws."""
        return tuple(law.name for law in self)

    def law(
        self, cases: Callable[[PartT, int, int], Iterable[CaseT]], concerns: Callable[[CaseT], bool] = lambda _: True
    ) -> Callable[[Callable[[CaseT], None]], Callable[[CaseT], None]]:
        """Register the decorated function, whose name states the law."""

        def enter(check: Callable[[CaseT], None]) -> Callable[[CaseT], None]:
            self._laws.append(Law(check.__name__.replace("_", " "), check, cases, concerns))
            return check

        return enter

    def hold(self, part: PartT, shown: str, seed: int, count: int) -> tuple[str, ...]:
        """Run all laws. Returns the names of those that apply. Raises BrokenLaw for the first violation.

        An exception of the part itself counts as a violation. Raises UsageError for a part that no law applies to,
        because such a test would always pass.
        """
        concerned = tuple(law.name for law in self if holds(law, part, shown, seed, count))
        if not concerned:
            raise UsageError(f"no law applies to the {shown}: only a training can test it")
        return concerned


def holds(law: Law[PartT, CaseT], part: PartT, shown: str, seed: int, count: int) -> bool:
    """Whether the law applies to the part. Raises BrokenLaw if the part violates it."""
    concerned, case = False, None
    try:
        for case in law.cases(part, seed, count):
            if law.concerns(case):
                concerned = True
                law.check(case)
    except Exception as error:
        why = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise BrokenLaw(law.name, shown, "its first case" if case is None else str(case), why) from error
    return concerned


def require(holds: bool | np.bool_, fault: str) -> None:
    """Raise AssertionError unless ``holds``, even under ``python -O``."""
    if not holds:
        raise AssertionError(fault)


def same(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Check that two one-dimensional arrays are equal; NaN equals NaN."""
    require(found.shape == wanted.shape, f"{what}: {found.size} elements instead of {wanted.size}")
    differ = (found != wanted) & ((found == found) | (wanted == wanted))
    if differ.any():
        at = int(np.argmax(differ))
        raise AssertionError(f"{what}: element {at} of {found.size} is {found[at]} instead of {wanted[at]}")
