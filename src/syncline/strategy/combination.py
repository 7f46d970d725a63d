"""A combination of the five words as a value, what rules ask of it, and how a rule says what is wrong.

Knows no rule: these are in ``rules``, ``schedule_rules`` and ``sync_rules``.
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
"""What depends on the number of workers is tried with so many."""


@dataclass(frozen=True)
class Combination:
    """Architecture, sync mode, codec, schedule and transport, each a bound part; they may be impossible together."""

    architecture: Part = AUTO
    sync: Part = BSP
    codec: Part = NONE
    schedule: Part = AUTO
    transport: Part = AUTO

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The five words with their parts, in the order of printing."""
        for word in WORDS:
            yield word, getattr(self, word)

    @cached_property
    def roles(self) -> Roles | None:
        """Who owns what, in an architecture in which not all workers are alike."""
        return roles_of(self.architecture)

    @property
    def servers(self) -> int:
        """How many server processes of their own the strategy needs, beside the workers."""
        return 0 if self.roles is None else self.roles.servers

    @property
    def server_holds_weights(self) -> bool:
        """True when servers apply the update; False when every worker does."""
        return self.roles is not None and self.roles.holds_weights

    @cached_property
    def collective(self) -> Collective | None:
        """The collective of the message library that takes the place of a plan; None where there is a plan."""
        if self.architecture.name not in registry.names("collectives"):
            return None
        found: Collective = build("collectives", self.architecture)
        return found


Fault = tuple[str, list[dict[str, Part]]]
"""Why a combination is impossible, and changes that may mend it, the nearest first."""

Rule = Callable[[Combination], Fault | None]
"""What gives the fault of a combination, if it has that one."""


def with_arguments(part: Part, **changes: Any) -> Part:
    """The part with some arguments changed."""
    return Part(part.name, tuple((part.arguments | changes).items()))


def variants(architecture: Part, wanted: Callable[[Roles], bool]) -> list[dict[str, Part]]:
    """The architecture with one argument changed, to 1 or one of a few values, where its roles are as ``wanted``."""
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
    """The codec, which is not ``auto``, with those nested in it."""
    codec: Codec = build("codecs", given.codec)
    return codec
