"""Parses the texts of ``compare --strategies``: each names a strategy of Syncline or a peer that can train.

Owns the distinction and the checks before any process starts. A peer's text has the syntax of a part of a strategy:
``ddp``, ``ddp(bucket=5MiB)``. Starts no process and does not load the library of a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from syncline import registry
from syncline.errors import StrategyError, UsageError
from syncline.nouns import Group
from syncline.strategy.grammar import Part, read_part, read_words
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import Preset, bind, build, preset_of, write


@dataclass(frozen=True)
class Contender:
    """A checked strategy or peer: its canonical text, number of server processes, and own rate limit in bits/s.

    ``preset`` is the preset if the text names one, else None. ``requested`` is the user's text. ``resolved`` is the
    strategy with every ``auto`` replaced for its group, None for a peer.
    """

    text: str
    servers: int = 0
    rate: float | None = None
    preset: Preset | None = None
    requested: str | None = field(default=None, compare=False)
    resolved: Strategy | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The unique name: the preset's name if there is one, since two presets can have the same strategy."""
        return self.text if self.preset is None else self.preset.name


def contender_of(text: str, workers: int, *, one_host: bool) -> Contender:
    """Parse a strategy or peer. Raises UsageError if it is unknown or impossible for this group."""
    peer = peer_of(text)
    if peer is not None:
        rate = getattr(build("peers", peer), "rate", None)
        return Contender(write("peers", peer), rate=rate, requested=text.strip())
    try:
        strategy = Strategy.parse(text)
    except StrategyError as error:
        raise StrategyError(f"{error}{_nearest_peer(text, str(error))}") from None
    # Some combinations are impossible only for a certain number of workers.
    group = Group(workers, strategy.servers, () if one_host else tuple(range(workers)))
    resolved = strategy.resolve(group, hosts=1 if one_host else workers)
    rate = strategy.transport.arguments.get("rate") or None
    return Contender(str(strategy), strategy.servers, rate, preset_of(read_words(text)), text.strip(), resolved)


def peer_of(text: str) -> Part | None:
    """The peer that ``text`` names, with its arguments; None if ``text`` is a strategy."""
    words = read_words(text)
    if not words or words[0][0] or words[0][1].name not in trainers():
        return None
    return bind("peers", read_part(text))


def trainers() -> tuple[str, ...]:
    """The names of the peers that can train a model, not only run collectives."""
    return tuple(entry.name for entry in registry.entries("peers") if entry.capabilities.get("trains"))


def belongs(contender: Contender, framework: str) -> bool:
    """Whether a contender has rows under this framework: strategies under every one, a peer under its own."""
    peer = peer_of(contender.text)
    return peer is None or _home(peer.name) == framework


def check_peers(contenders: Sequence[Contender], frameworks: Sequence[str]) -> None:
    """Raise UsageError for a peer of a framework that is not in the list."""
    for one in contenders:
        if not any(belongs(one, framework) for framework in frameworks):
            peer = peer_of(one.text)
            assert peer is not None
            known = {name: _home(name) for name in trainers()}
            own = [name for name, home in known.items() if home in frameworks]
            raise UsageError(
                f"{one.text} is a peer under {_home(peer.name)}, not under {' or '.join(frameworks)}: use"
                f" --framework {_home(peer.name)}, or leave it out"
                + (f"; the peer here is {' or '.join(own)}" if own else "")
            )


def check_strategies(contenders: Sequence[Contender], frameworks: Sequence[registry.Entry]) -> None:
    """Raise UsageError if a framework cannot train under a strategy. The text names the frameworks that can."""
    for one in contenders:
        for entry in frameworks:
            if why := _refusal(entry, one.resolved):
                able = [other.name for other in registry.entries("frameworks") if not _refusal(other, one.resolved)]
                hint = f"; --framework {' or '.join(able)} can" if able else ""
                raise UsageError(f"--framework {entry.name} cannot train under {one.name}: {why}{hint}")


def _refusal(entry: registry.Entry, strategy: Strategy | None) -> str:
    try:
        if strategy is not None:
            entry.target.check(strategy)  # type: ignore[attr-defined]
    except UsageError as error:
        return str(error)
    return ""


def _home(peer: str) -> str:
    """The framework that a peer belongs to."""
    return str(registry.get("peers", peer).capabilities.get("framework", "torch"))


def _nearest_peer(text: str, said: str) -> str:
    near = get_close_matches(text.partition("(")[0].strip().lower(), trainers(), n=1)
    return f"; did you mean the peer {near[0]!r}?" if near and "did you mean" not in said else ""
