"""Which trainings ``benchmarks/same`` walks: combinations of framework, scenario and strategy, from a side's own words.

Owns what a sensible combination is; knows only the text that ``syncline strategies`` prints. Choices go by the texts of
words and never by how many there are, so that a word more or less changes no other combination.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from zlib import crc32

NEEDED = {"steps": "2", "after": "2", "staleness": "1", "ratio": "0.1", "rank": "2", "CODEC": "int8"}
"""What is given for arguments that have no default."""

ALWAYS = {"servers=1": "2"}
OTHERS = {
    "CODEC": ("onebit", "topk(ratio=0.1)", "powersgd(rank=2)"),
    "bucket=25MiB": ("8KiB",),
    "slice=4MiB": ("4KiB",),
    "on=ranks": ("workers",),
    "update=server": ("worker",),
    "local=false": ("true",),
    "pieces=1": ("3",),
    "backup=0": ("1",),
    "rate=shared": ("own",),
    "momentum=auto": ("shared", "own", "dana"),
    "compensate=0.0": ("0.04",),
    "nesterov=true": ("false",),
    "graph=exponential": ("ring",),
    "steps=1": ("2",),
    "local=true": ("false",),
    "vote=off": ("on",),
    "rounding=stochastic": ("nearest",),
    "levels=127": ("7",),
    "block=1024": ("256",),
    "block=2048": ("256",),
    "warmup=0": ("2",),
    "momentum=0.0": ("0.5",),
    "clip=0.0": ("1.0",),
    "rate=none": ("1Gbit",),
}
"""Arguments with their defaults, and what else is tried, one at a time; those that are not here keep their defaults."""

Scenarios = Mapping[str, Iterable[str]]
"""By framework."""

TURNS = re.compile(r"\bsync=(asp|ssp)|backup=[1-9]")
SERVED = "ps(servers=2)"


@dataclass(frozen=True)
class Combination:
    """One training; its text is its name."""

    framework: str
    scenario: str
    strategy: str
    servers: int = 0
    workers: int = 3
    hosts: int = 1

    @property
    def turns(self) -> bool:
        """Whether workers have to take turns, for one order of updates."""
        return TURNS.search(self.strategy) is not None

    def __str__(self) -> str:
        size = f" on {self.workers} workers" * (self.workers != 3) + f" on {self.hosts} hosts" * (self.hosts > 1)
        return f"{self.framework} {self.scenario}{size}: {self.strategy}"


@dataclass(frozen=True)
class Words:
    """A side's vocabulary: for every word of a strategy what it may be, plain values first, then other arguments."""

    plain: dict[str, list[str]]
    others: dict[str, list[str]]
    presets: dict[str, str]

    @staticmethod
    def read(listing: str) -> Words:
        """From what ``syncline strategies`` prints."""
        found, section, name = Words({}, {}, {}), "", ""
        for line in listing.splitlines():
            if not line.startswith(" "):
                section = line
                found.plain.setdefault(section, [])
                found.others.setdefault(section, [])
            elif section == "presets":
                if line.startswith("      "):
                    found.presets.setdefault(name, line.strip().partition(";")[0])
                else:
                    name = line.strip()
            elif not line.startswith("      ") and not line.startswith("  not built yet"):
                texts = spelled(line.strip())
                found.plain[section] += texts[:1]
                found.others[section] += texts[1:]
        return found


def spelled(text: str) -> list[str]:
    """``int8(block=1024)`` as a strategy says it: with what has to be given, and then with other arguments too."""
    name, _, inside = text.partition("(")
    arguments = re.findall(r"(\w+)(?:=((?:[^,()]|\([^()]*\))+))?", inside.removesuffix(")"))
    given, others = {}, []
    for key, default in arguments:
        kind = key if default in ("", "...") else f"{key}={default}"
        if default in ("", "..."):
            if key not in NEEDED:
                return [f"{name}(" + f"{key}=?)"]  # refused with the reason, and so named
            given[key] = NEEDED[key]
        elif kind in ALWAYS:
            given[key] = ALWAYS[kind]
        others += [(key, value) for value in OTHERS.get(kind, ())]

    def said(values: dict[str, str]) -> str:
        inner = ", ".join(value if key == "CODEC" else f"{key}={value}" for key, value in values.items())
        return f"{name}({inner})" if inner else name

    return [said(given), *(said({**given, key: value}) for key, value in others)]


def combinations(words: Words, scenarios: Scenarios) -> Iterator[Combination]:
    """Every sensible one, some of them twice: all pairs of words, and every word in every scenario and framework."""
    plain, others = words.plain, words.others
    architectures = plain["architecture"] + [text for text in others["architecture"] if text.startswith("ps(")]
    keyed = {key: [f"{key}={value}" for value in plain[key]] for key in ("sync", "codec", "schedule", "transport")}
    changed = {key: [f"{key}={value}" for value in others[key]] for key in keyed}
    unkept = [f"{codec} feedback=off" for codec in keyed["codec"]]
    words_of = [word for key in ("sync", "codec", "schedule") for word in keyed[key]]

    def make(framework: str, scenario: str, *strategy: str, **where: int) -> Combination:
        text = " ".join(strategy)
        whole = words.presets.get(text, text)
        count = re.search(r"servers=(\d+)", whole)
        servers = int(count[1]) if count and "on=workers" not in whole else 0
        if "backup" in whole:
            where["workers"] = 2  # of three, two would have to take their turn at once
        return Combination(framework, scenario, text, servers, **where)

    def home(word: str) -> str:
        """Where updates are by themselves, servers; else what the text chooses, alike on both sides.

        Groups of workers have no servers of their own beside them.
        """
        if word.startswith("in groups"):
            return ("ring", f"{SERVED[:-1]}, on=workers)")[TURNS.search(word) is not None or crc32(word.encode()) % 2]
        if "sync=" in word:
            return SERVED if TURNS.search(word) else "ring"
        return ("ring", SERVED)[crc32(word.encode()) % 2]

    for architecture in architectures:
        for word in ["", *words_of, *keyed["transport"]]:
            yield make("torch", "plain", *filter(None, (architecture, word)))
        for scenario in scenarios["torch"]:
            yield make("torch", scenario, architecture)
        for where in ({"workers": 4}, {"hosts": 2}):
            yield make("torch", "plain", architecture, **where)
        yield make("numpy", "plain", architecture)
        for transport in keyed["transport"]:
            yield make("distributed", "ddp", architecture, transport)
        yield make("distributed", "fsdp", architecture)
    yield from (make("torch", "plain", text) for text in [*others["architecture"], *words.presets])
    for first, second in (("codec", "schedule"), ("codec", "sync"), ("schedule", "sync")):
        for one in keyed[first]:
            for two in keyed[second]:
                yield make("torch", "plain", home(f"{one} {two}"), two, one)
    for word in [*(one for of in changed.values() for one in of), *unkept]:
        yield from (make("torch", "plain", architecture, word) for architecture in ("ring", SERVED))
    for word in words_of:
        yield make("torch", "plain", "hierarchical", word, hosts=2)
        yield make("torch", "plain", home(word), word, "transport=tcp")
        for scenario in scenarios["torch"]:
            yield make("torch", scenario, home(f"{scenario} {word}"), word)
        for architecture in ("ring", SERVED):
            yield from (make("numpy", scenario, architecture, word) for scenario in scenarios["numpy"])
        for framework in ("jax", "tensorflow"):
            yield make(framework, "plain", home(f"{framework} {word}"), word)
            if crc32(word.encode()) % 4 == 0:
                for scenario in scenarios[framework]:
                    yield make(framework, scenario, home(word), word)
    for framework in ("jax", "tensorflow"):
        for architecture in ("ring", "tree", *(text for text in architectures if text.startswith("ps("))):
            yield from (make(framework, scenario, architecture) for scenario in scenarios[framework])
    for codec in keyed["codec"]:
        yield make("distributed", "hook", codec)
