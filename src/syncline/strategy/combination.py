"""A combination of the five words as a value, helpers for rules, and the type of a rule's answer.

The rules are in ``rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

from .. import registry
from ..algorithms import Roles
from .grammar import Part
from .parts import build, roles_of
from .words import AUTO, BSP, NONE, WORDS

if TYPE_CHECKING:
    from ..codecs import Codec
    from ..collectives import Collective

SOME_WORKERS = 4
"""The number of workers with which rules test answers that depend on it."""


@dataclass(frozen=True)
class Combination:
    """Architecture, sync mode, codec, schedule and transport as bound parts, in a possibly invalid combination."""

    architecture: Part = AUTO
    sync: Part = BSP
    codec: Part = NONE
    schedule: Part = AUTO
    transport: Part = AUTO

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The five words with their parts, in printing order."""
        for word in WORDS:
            yield word, getattr(self, word)

    @cached_property
    def roles(self) -> Roles | None:
        """The roles of an architecture with owners; None if all workers are alike."""
        return roles_of(self.architecture)

    @property
    def servers(self) -> int:
        """The number of dedicated server processes that the strategy needs."""
        return 0 if self.roles is None else self.roles.servers

    @property
    def server_holds_weights(self) -> bool:
        """Whether servers apply the update. Otherwise every worker does."""
        return self.roles is not None and self.roles.holds_weights

    @cached_property
    def collective(self) -> Collective | None:
        """The library's collective that replaces a plan; None if there is a plan."""
        if self.architecture.name not in registry.names("collectives"):
            return None
        found: Collective = build("collectives", self.architecture)
        return found


Fault = tuple[str, list[dict[str, Part]]]
"""The fault of a combination, and changes that may fix it, the nearest first."""

Rule = Callable[[Combination], Fault | None]
"""A rule returns the fault of a combination, None if it satisfies the rule."""


def with_arguments(part: Part, **changes: Any) -> Part:
    """The part with some arguments changed."""
    return Part(part.name, tuple((part.arguments | changes).items()))


def variants(architecture: Part, wanted: Callable[[Roles], bool]) -> list[dict[str, Part]]:
    """The architecture with one argument changed, to 1 or to one of a few values, if its roles are then as
    ``wanted``.
    """
    found = []
    for parameter in registry.get("algorithms", architecture.name).parameters:
        few: dict[Any, tuple[Any, ...]] = {int: (1,), bool: (True, False)}
        for value in few.get(parameter.annotation, get_args(parameter.annotation)):
            changed = with_arguments(architecture, **{parameter.name: value})
            roles = roles_of(changed)
            if roles is not None and wanted(roles):
                found.append({"architecture": changed})
    return found


def codec_of(given: Combination) -> Codec:
    """The codec object, with nested codecs. The word must not be ``auto``."""
    codec: Codec = build("codecs", given.codec)
    return codec
