"""The syntax of parts and arguments: ``ps(servers=2)``, ``feedback(topk(ratio=0.01))``, ``4MiB``, ``5ms``.

It parses and prints parts, and converts one argument between text and a value of its annotated type. ``words`` knows
which parts exist, ``rules`` which can be combined.

    words    = { part | key "=" part }
    part     = name [ "(" [ argument { "," argument } ] ")" ]
    argument = name "=" part | part              a part without a key is nested, as the codec in feedback(...)

For every type, parsing a printed value returns the same value, and a value has one text: sizes, rates and durations are
printed in the largest unit that is exact.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, Literal, NoReturn

from ..errors import StrategyError
from ..nouns import Rate, Seconds, Size

_KIB, _KB = 1024, 1000
SIZE_UNITS: Mapping[str, Fraction] = {
    "TiB": Fraction(_KIB**4),
    "TB": Fraction(_KB**4),
    "GiB": Fraction(_KIB**3),
    "GB": Fraction(_KB**3),
    "MiB": Fraction(_KIB**2),
    "MB": Fraction(_KB**2),
    "KiB": Fraction(_KIB),
    "KB": Fraction(_KB),
    "B": Fraction(1),
}
"""The units of a Size in bytes, largest first."""

RATE_UNITS: Mapping[str, Fraction] = {
    "Tbit": Fraction(_KB**4),
    "Gbit": Fraction(_KB**3),
    "Mbit": Fraction(_KB**2),
    "Kbit": Fraction(_KB),
    "bit": Fraction(1),
}
"""The units of a Rate in bits per second, largest first."""

TIME_UNITS: Mapping[str, Fraction] = {
    "h": Fraction(3600),
    "min": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}
"""The units of Seconds, largest first."""

_DEEPEST = 16  # limits nested brackets
_LONGEST = 10**18  # larger counts are printed with an exponent
_TOKEN = re.compile(r"\s*(?:(?P<name>[\w.:/+-]+)|(?P<mark>[(),=]))")
# The lengths are limited because the exact fraction of a number such as 1e999999999 would take forever.
_QUANTITY = re.compile(r"([+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?)([A-Za-z]*)", re.ASCII)
_NAME = re.compile(r"[\w.:/+-]+")


@dataclass(frozen=True)
class Part:
    """One word's value: a name and its arguments. An unbound nested part has the argument name ``""``."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.args)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def read_words(text: str) -> list[tuple[str, Part]]:
    """The words of a strategy in order, each with its key, ``""`` if it has none. Raises StrategyError."""
    reader = _Reader(text)
    found = []
    while not reader.at_end:
        found.append(reader.keyed_part())
    return found


def read_part(text: str) -> Part:
    """One part, whose arguments are still text. Raises StrategyError."""
    words = read_words(text)
    if len(words) != 1 or words[0][0]:
        raise StrategyError(f"expected one name with optional arguments, as in ps(servers=2), got {text!r}")
    return words[0][1]


def read_list(texts: Iterable[str]) -> list[str]:
    """The items of texts such as ``shm:ring,tcp:ring``; commas inside brackets belong to arguments."""
    found: list[str] = []
    for text in texts:
        depth, item = 0, ""
        for letter in text:
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                found.append(item)
                item = ""
            else:
                item += letter
        found.append(item)
    return [item.strip() for item in found if item.strip()]


class _Reader:
    """A recursive-descent parser over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.at = self.depth = 0

    def _tokens(self) -> Iterator[tuple[str, bool, int]]:
        end = len(self.text.rstrip())
        start = 0
        while start < end:
            match = _TOKEN.match(self.text, start)
            if match is None:
                column = start + len(self.text[start:]) - len(self.text[start:].lstrip())
                self._fail(f"unexpected {self.text[column]!r}", column)
            yield match[match.lastgroup or ""], match.lastgroup == "name", match.start(match.lastgroup or "")
            start = match.end()

    @property
    def at_end(self) -> bool:
        return self.at == len(self.tokens)

    def keyed_part(self) -> tuple[str, Part]:
        name = self.name()
        if self.take("="):
            return name, self.part(self.name())
        return "", self.part(name)

    def part(self, name: str) -> Part:
        if not self.take("("):
            return Part(name)
        args: list[tuple[str, Any]] = []
        self.depth += 1
        if self.depth > _DEEPEST:
            self._fail(f"brackets are nested more than {_DEEPEST} deep", self.column)
        while not self.take(")"):
            if args and not self.take(","):
                self.fail("',' or ')'")
            column = self.column
            key, value = self.keyed_part()
            if key in [known for known, _ in args]:
                self._fail(f"{key!r} is given twice" if key else f"a second argument without a name in {name}", column)
            # A value without arguments stays text until the type of its argument is known.
            args.append((key, value if value.args or not key else value.name))
        self.depth -= 1
        return Part(name, tuple(args))

    def name(self) -> str:
        if self.at_end or not self.tokens[self.at][1]:
            self.fail("a name or value")
        self.at += 1
        return self.tokens[self.at - 1][0]

    def take(self, mark: str) -> bool:
        if not self.at_end and self.tokens[self.at][0] == mark:
            self.at += 1
            return True
        return False

    @property
    def column(self) -> int:
        return len(self.text) if self.at_end else self.tokens[self.at][2]

    def fail(self, expected: str) -> NoReturn:
        found = "the text ends" if self.at_end else f"there is {self.tokens[self.at][0]!r}"
        self._fail(f"expected {expected}, but {found}", self.column)

    def _fail(self, message: str, column: int) -> NoReturn:
        raise StrategyError(f"{message} (column {column + 1} of {self.text!r})")


def read_value(text: str, annotation: Any, what: str) -> Any:
    """The value of ``text`` for an argument of type ``annotation``. ``what`` names the argument in errors.

    Supports int, float, bool, str, Size, Rate, Seconds, Literal, and each of them ``| None``. Raises StrategyError.
    """
    inner, optional = _without_none(annotation)
    if optional and text.lower() == "none":
        return None
    if typing.get_origin(inner) is Literal:
        return _one_of(text, typing.get_args(inner), what)
    if inner is str:
        return text
    if inner is bool:
        return _boolean(text, what)
    if inner in (int, float):
        return _number(text, inner, what)
    units = _UNITS.get(inner)
    if units is None:
        raise StrategyError(f"{what} cannot be given in a text: its type is {annotation}")
    exact = _quantity(text, units, what)
    if inner is Size and exact.denominator != 1:
        raise StrategyError(f"{what} must be a whole number of bytes, got {text!r}")
    try:
        return int(exact) if inner is Size else float(exact)
    except OverflowError:
        raise StrategyError(f"{what} must be finite, got {text!r}") from None


def check_value(value: Any, annotation: Any, what: str) -> Any:
    """Validate a program's value against the type of its argument; an int serves as a float. Raises StrategyError."""
    inner, optional = _without_none(annotation)
    if value is None and optional:
        return None
    if typing.get_origin(inner) is Literal:
        return _one_of(str(value), typing.get_args(inner), what)
    base = {Size: int, Rate: float, Seconds: float}.get(inner, inner)
    held: Any = float(value) if base is float and type(value) is int else value
    if type(held) is not base:
        raise StrategyError(f"{what} must be {_describe(inner)}, got {value!r}")
    if base is float and not math.isfinite(held):
        raise StrategyError(f"{what} must be finite, got {value!r}")
    if base is str and not _NAME.fullmatch(held):
        raise StrategyError(f"{what} may contain only letters, digits and . : / + - _, got {value!r}")
    if inner in _UNITS and held < 0:
        raise StrategyError(f"{what} cannot be negative, got {value!r}")
    return held


def write_value(value: Any, annotation: Any) -> str:
    """The canonical text of a value, which ``read_value`` parses back."""
    inner, _ = _without_none(annotation)
    if value is None:
        return "none"
    if inner is bool:
        return "true" if value else "false"
    if inner in _UNITS:
        return _write_quantity(value, _UNITS[inner], exact=inner is Size)
    return repr(value) if inner is float else str(value)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _describe(annotation: Any) -> str:
    known = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a word",
        Size: "a size such as 4MiB",
        Rate: "a rate such as 1Gbit",
        Seconds: "a duration such as 5ms",
    }
    return known.get(annotation, str(annotation))


def _one_of(text: str, choices: tuple[Any, ...], what: str) -> Any:
    named = {str(choice): choice for choice in choices}
    if text in named:
        return named[text]
    raise StrategyError(f"{what} must be {' or '.join(named)}, got {text!r}{nearest(text, named)}")


def _boolean(text: str, what: str) -> bool:
    known = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    if text.lower() not in known:
        raise StrategyError(f"{what} must be true or false, got {text!r}")
    return known[text.lower()]


def _number(text: str, kind: type, what: str) -> int | float:
    try:
        value: int | float = kind(text)
    except ValueError:
        raise StrategyError(f"{what} must be {_describe(kind)}, got {text!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise StrategyError(f"{what} must be finite, got {text!r}")
    return value


def _quantity(text: str, units: Mapping[str, Fraction], what: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    names = ", ".join(reversed(list(units)))
    if match is None:
        raise StrategyError(f"{what} must be a number with a unit ({names}), got {text!r}")
    number, unit = Fraction(match[1]), match[2].lower()
    by_name = {name.lower(): factor for name, factor in units.items()}
    # A bare number is in the base unit, whose factor is 1.
    factor = by_name.get(unit) if unit else Fraction(1)
    if factor is None:
        raise StrategyError(f"{what} has the unit {match[2]!r} in {text!r}; the units are {names}")
    if number < 0:
        raise StrategyError(f"{what} cannot be negative, got {text!r}")
    return number * factor


def _write_quantity(value: float, units: Mapping[str, Fraction], exact: bool) -> str:
    base = next(name for name, factor in units.items() if factor == 1)
    if value == 0:
        return f"0{base}"
    for name, factor in units.items():
        count = round(Fraction(value) / factor)
        # A duration such as 5ms is not an exact binary fraction, so the test is that parsing returns the same value.
        if exact and count * factor == value:
            return f"{count}{name}"
        if not exact and 0 < count < _LONGEST and float(count * factor) == value:
            return f"{count}{name}"
    return f"{value!r}{base}"


_UNITS: Mapping[Any, Mapping[str, Fraction]] = {Size: SIZE_UNITS, Rate: RATE_UNITS, Seconds: TIME_UNITS}


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known word most similar to ``word``, else an empty text."""
    found = get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
