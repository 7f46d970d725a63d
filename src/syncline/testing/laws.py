"""Laws of a kind of part, how they are tried, and what is said of a part that breaks one.

A law is a function of a case (a part with an example to try it on) that raises AssertionError where it does not hold.
It says which cases concern it, by what the part declares. Cases are drawn from a seed, the smallest first, so that what
is found is found again, and is small.
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
    """A part that does not keep a law of its kind: ``law``, ``part`` and the ``case`` in which it does not."""

    def __init__(self, law: str, part: str, case: str, why: str) -> None:
        super().__init__(f"{part} breaks the law {law!r} with {case}: {why}")
        self.law, self.part, self.case = law, part, case


@dataclass(frozen=True)
class Law(Generic[PartT, CaseT]):
    """One law: the cases that it is tried on, made of a part, a seed and how many to draw, and whom it concerns."""

    name: str
    check: Callable[[CaseT], None]
    cases: Callable[[PartT, int, int], Iterable[CaseT]]
    concerns: Callable[[CaseT], bool]


class Laws(Generic[PartT, CaseT]):
    """The laws of one kind, those of ``parts`` of it, in the order in which they are tried.

    What others build on comes first.
    """

    def __init__(self, *parts: Laws[PartT, Any]) -> None:
        self._laws: list[Law[PartT, CaseT]] = [law for part in parts for law in part]

    def __iter__(self) -> Iterator[Law[PartT, CaseT]]:
        return iter(self._laws)

    @property
    def names(self) -> tuple[str, ...]:
        """What the laws say, in a few words each."""
        return tuple(law.name for law in self)

    def law(
        self, cases: Callable[[PartT, int, int], Iterable[CaseT]], concerns: Callable[[CaseT], bool] = lambda _: True
    ) -> Callable[[Callable[[CaseT], None]], Callable[[CaseT], None]]:
        """Enter the decorated function, whose name is what the law says."""

        def enter(check: Callable[[CaseT], None]) -> Callable[[CaseT], None]:
            self._laws.append(Law(check.__name__.replace("_", " "), check, cases, concerns))
            return check

        return enter

    def hold(self, part: PartT, shown: str, seed: int, count: int) -> tuple[str, ...]:
        """Try all laws; returns the names of those that concern the part. Raises BrokenLaw for the first broken one.

        What a part itself raises breaks the law that was tried. Raises UsageError for a part that no law concerns: a
        test of it would pass whatever it did.
        """
        concerned = tuple(law.name for law in self if holds(law, part, shown, seed, count))
        if not concerned:
            raise UsageError(f"no law concerns the {shown}: what it does is seen in a training only")
        return concerned


def holds(law: Law[PartT, CaseT], part: PartT, shown: str, seed: int, count: int) -> bool:
    """Whether the law concerns the part, which keeps it; raises BrokenLaw where it does not."""
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
    """Raise AssertionError, under ``python -O`` too, unless it ``holds``."""
    if not holds:
        raise AssertionError(fault)


def same(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Two arrays of one dimension are equal, what is no number being equal to itself."""
    require(found.shape == wanted.shape, f"{what}: {found.size} elements in place of {wanted.size}")
    differ = (found != wanted) & ((found == found) | (wanted == wanted))
    if differ.any():
        at = int(np.argmax(differ))
        raise AssertionError(f"{what}: element {at} of {found.size} is {found[at]} in place of {wanted[at]}")
