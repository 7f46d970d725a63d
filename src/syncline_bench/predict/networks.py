"""Loads networks by name, from a file or from a text with constants. Also loads the error of predictions on a network.

Owns the ready-made files in ``networks/``, the file format, the short form ``alpha=45us,beta=1.2ns``, LogGP's constants
(an alternative to a link's constants everywhere), and the files in ``measured/``. ``costs.cluster`` defines the names
and meanings of the other constants.

A network's file is JSON: ``name``, ``about``, ``source`` and ``date``; optionally ``topology``, ``ports_per_host``,
``per_host``, ``cores`` and ``one_machine``; and ``constants`` by name, each with ``value``, ``low``, ``high``,
``measured`` and ``source``. Values are seconds, as numbers or with a unit.

A file in ``measured/`` has the name of its network, and holds out-of-sample measurements with their predictions:
``source``, ``date``, ``fitted`` (the measurements that the constants were fitted to) and ``rows``, each with
``workload``, ``strategy``, ``workers``, ``measured_s`` and ``predicted_s``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from syncline.costs.cluster import SLOWDOWN, Cluster, Constant, loggp, topology_of
from syncline.errors import DataError, UsageError
from syncline.nouns import Rate, Seconds
from syncline.strategy.grammar import nearest, read_list, read_value

WITHOUT_NATIVE = (
    "has no constants of a message library (native.alpha and native.beta): under inside=native its transfers inside"
    " hosts are assumed to be messages; syncline calibrate --transport torch (or mpi) measures them."
)
"""The note on a network without times for ``inside=native``."""

USUAL = 0.9
"""The share of measurements that an interval should contain."""


@dataclass(frozen=True)
class Holdout:
    """The relative errors of predictions on held-out measurements: mean, worst, and the ``USUAL`` quantile."""

    network: str
    count: int
    mean: float
    worst: float
    usual: float
    source: str = ""
    date: str = ""
    fitted: str = ""


def holdout_of(network: str) -> Holdout | None:
    """The prediction error on a network; None if never measured. Raises DataError for an unreadable file."""
    path = resources.files(__package__) / "measured" / f"{network}.json"
    if "/" in network or not path.is_file():
        return None
    return parse_holdout(path.read_text(encoding="utf-8"), network)


def parse_holdout(text: str, network: str) -> Holdout | None:
    """The prediction error from the text of a file; None if it has no rows. Raises DataError if it is malformed."""
    try:
        data = json.loads(text)
        pairs = [(_time(row["predicted_s"]), _time(row["measured_s"])) for row in data["rows"]]
        texts = {name: str(data.get(name, "")) for name in ("source", "date", "fitted")}
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"the file of measurements of {network} is malformed: {error!r}") from None
    if not pairs:
        return None
    errors = np.array([abs(predicted / measured - 1) for predicted, measured in pairs])
    usual = float(np.quantile(errors, USUAL))
    return Holdout(network, len(errors), float(errors.mean()), float(errors.max()), usual, **texts)


def _time(held: Any) -> float:
    seconds = float(held)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{seconds} s")
    return seconds


_LOGGP = ("L", "o", "g", "G")
_SHORT = {name: f"between.{name}" for name in ("alpha", "beta", "flight", *_LOGGP)}
_SHAPE = ("ports_per_host", "per_host", "cores")
_KEYS = ("name", "about", "source", "date", "topology", *_SHAPE, "one_machine", "constants")
_CONSTANT = ("value", "low", "high", "measured", "source")


def network_names() -> tuple[str, ...]:
    """The ready-made networks, sorted."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _folder().iterdir() if path.name[-5:] == ".json"))


def load_network(text: str) -> Cluster:
    """The cluster from a ready-made network's name, a file's path, or constants.

    Raises UsageError, with the nearest name, for an unknown one, and DataError for a malformed file.
    """
    if "=" in text:
        return inline(text)
    names = network_names()
    if text in names:
        return replace(parse_network((_folder() / f"{text}.json").read_text(encoding="utf-8"), text), ready_made=True)
    path = Path(text)
    if path.is_file():
        return parse_network(_content(path), text)
    if path.suffix == ".json" or path.parent != Path():
        raise UsageError(f"there is no file {text}: give a network's file, or one of {', '.join(names)}")
    raise UsageError(
        f"unknown network {text!r}{nearest(text, names) or '.'} There are {', '.join(names)}, files such as mine.json,"
        " and constants such as alpha=45us,beta=1.2ns,gamma=2.5ns"
    )


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not a network: it is not a text file; give a JSON file such as `syncline calibrate -o` writes"
        ) from None


def inline(text: str) -> Cluster:
    """The cluster from a text such as ``alpha=45us,beta=1.2ns,gamma=2.5ns``.

    These are the seconds per message, per byte sent and per byte reduced. ``rate=10Gbit`` is another form of ``beta``,
    and LogGP's ``L=5us,o=2us,g=3us,G=1ns`` describes a whole link. Other constants have their full names, such as
    ``inside.alpha=2us``; ``topology``, ``ports_per_host``, ``per_host`` and ``cores`` are allowed too.
    """
    constants: dict[str, Constant] = {}
    shape: dict[str, Any] = {}
    for item in read_list([text]):
        key, given, value = _halves(item)
        name = "between.beta" if key == "rate" else _SHORT.get(key, key)
        if not given or name in constants or key in shape:
            raise UsageError(f"network {text!r}: {item!r} is not KEY=VALUE, or repeats {key}")
        if key == "topology":
            shape[key] = topology_of(value)
        elif key in _SHAPE:
            shape[key] = read_value(value, int, key)
        else:
            given_s = read_value(value, float, key) if name.startswith(SLOWDOWN) else _given_s(key, value)
            constants[name] = Constant(given_s, source="given")
    return Cluster(text, _with_links(constants), about="given as constants", source="given", **shape)


def _halves(item: str) -> tuple[str, str, str]:
    """Split at the first equals sign outside brackets, because the arguments of codecs have equals signs too."""
    depth = 0
    for at, letter in enumerate(item):
        depth += (letter == "(") - (letter == ")")
        if letter == "=" and depth == 0:
            return item[:at], "=", item[at + 1 :]
    return item, "", ""


def _given_s(key: str, value: str) -> float:
    if key != "rate":
        return float(read_value(value, Seconds, key))
    rate: float = read_value(value, Rate, key)
    if rate <= 0:
        raise UsageError(f"rate must be above 0 bit/s, got {value!r}")
    return 8 / rate


def parse_network(text: str, where: str) -> Cluster:
    """The cluster from the text of a file. Raises DataError, which names ``where``, if the text is malformed."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not a network: its JSON is invalid: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("constants"), dict):
        raise DataError(
            f"{where} is not a network: it needs constants, such as {{'between.alpha': {{'value': '45us'}}, ...}}"
        )
    _only(data, _KEYS, where)
    try:
        constants = {key: _constant(key, held) for key, held in data["constants"].items()}
        shape = {key: _shape(key, data[key]) for key in (*_SHAPE, "one_machine") if key in data}
        texts = {key: _text(data, key) for key in ("about", "source", "date")}
        topology = topology_of(_text(data, "topology", "switch"))
        given: dict[str, Any] = {**texts, **shape}
        return Cluster(_text(data, "name", where), _with_links(constants), topology=topology, **given)
    except UsageError as error:
        raise DataError(f"{where}: {error}") from None


def to_json(cluster: Cluster) -> str:
    """The text of the file of a cluster; ``parse_network`` is the inverse."""
    content: dict[str, Any] = {key: getattr(cluster, key) for key in _KEYS if key not in ("topology", "constants")}
    content["topology"] = str(cluster.topology)
    content["constants"] = {
        key: {what: getattr(one, what) for what in _CONSTANT if getattr(one, what) is not None}
        for key, one in cluster.constants.items()
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _shape(key: str, held: Any) -> Any:
    if key == "one_machine":
        if not isinstance(held, bool):
            raise UsageError(f"{key} must be true or false, got {held!r}")
    elif type(held) is not int and (key != "cores" or held is not None):
        raise UsageError(f"{key} must be a whole number, got {held!r}: give one, or leave it out")
    return held


def _text(data: Mapping[str, Any], key: str, default: str = "") -> str:
    held = data.get(key, default)
    if not isinstance(held, str):
        raise UsageError(f"{key} must be a text in quotes, got {held!r}")
    return held


def _constant(key: str, held: Any) -> Constant:
    if not isinstance(held, dict) or "value" not in held:
        raise UsageError(f"{key} needs a value, such as {{'value': '45us', 'measured': true}}, got {held!r}")
    _only(held, _CONSTANT, key)
    low, high = (_seconds(held[end], key) if held.get(end) is not None else None for end in ("low", "high"))
    measured = held.get("measured", False)
    try:
        if not isinstance(measured, bool):
            raise UsageError(f"measured must be true or false, got {measured!r}")
        return Constant(_seconds(held["value"], key), low, high, measured, _text(held, "source"))
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from None


def _seconds(held: Any, key: str) -> float:
    if isinstance(held, str):
        return float(read_value(held, Seconds, key))
    if isinstance(held, bool) or not isinstance(held, int | float):
        raise UsageError(f"{key} must be seconds, as a number or with a unit, got {held!r}")
    try:
        return float(held)
    except OverflowError:
        raise UsageError(f"{key} must be a finite number of seconds, got a number with too many digits") from None


def _with_links(constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """The constants, with LogGP's L, o, g and G replaced by alpha, beta and flight."""
    found = dict(constants)
    for end in ("between", "inside"):
        given = {name: found.pop(f"{end}.{name}") for name in _LOGGP if f"{end}.{name}" in found}
        if not given:
            continue
        if missing := [name for name in _LOGGP if name not in given]:
            raise UsageError(f"{end}.{missing[0]} is missing: LogGP's constants are L, o, g and G; give all four")
        if beside := [key for key in found if key.startswith(f"{end}.")]:
            raise UsageError(
                f"{beside[0]} and LogGP's {end}.L, o, g and G describe the same link: leave one of the two out"
            )
        found |= {f"{end}.{name}": constant for name, constant in _link_of(list(given.values())).items()}
    return found


def _link_of(given: Sequence[Constant]) -> dict[str, Constant]:
    """Alpha, beta and flight from L, o, g and G. They are monotonic in each, so their ranges end at the corners."""
    corners = [loggp(*values) for values in ([one.value for one in given], *product(*(one.range for one in given)))]
    measured = all(one.measured for one in given)
    source = "; ".join(dict.fromkeys(one.source for one in given if one.source))
    numbers = {
        "alpha": [link.pieces[0].busy_s for link in corners],
        "beta": [link.pieces[0].per_byte_s for link in corners],
        "flight": [link.flight_s for link in corners],
    }
    return {name: Constant(of[0], min(of), max(of), measured, source) for name, of in numbers.items()}


def _only(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := [key for key in data if key not in known]:
        hint = nearest(unknown[0], known)
        raise DataError(f"{where}: unknown key {unknown[0]!r}{hint}; there are {', '.join(known)}")


def _folder() -> Any:
    return resources.files(__package__) / "networks"
