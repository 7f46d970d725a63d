"""Owns the network file of a calibration: the names of its constants, their sources and the assumptions.

Measures nothing. If there is no link to measure, the file takes the links of a ready-made network and marks them as
assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syncline.costs.cluster import Cluster, Constant
from syncline.errors import SynclineError
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value

from ..predict.networks import load_network
from ..report import units
from ..report.predictions import ConstantRow
from .computing import Computed
from .fits import TOLERANCE, Estimate
from .links import LinkFit, Timed, fit_link, fit_processor

ASSUMED = "loopback"
"""The ready-made network whose links are assumed for a single rank, which has none to measure."""

Constants = dict[str, Constant]


@dataclass(frozen=True)
class Hosts:
    """The place of a measurement: the host of every rank, the cores, and the transport.

    If ``one_machine``, all hosts are namespaces of one machine and share its cores.
    """

    nodes: tuple[int, ...]
    cores: int
    one_machine: bool
    transport: str
    lab_rate: Rate | None = None

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""
        return [[rank for rank, node in enumerate(self.nodes) if node == host] for host in sorted(set(self.nodes))]

    @property
    def per_host(self) -> int:
        """Ranks per host. On a single host each rank counts as a host, because only links between ranks exist."""
        return max(map(len, self.hosts)) if len(self.hosts) > 1 else 1

    @property
    def between(self) -> list[int]:
        """An even number of ranks, one per host, or ranks of the only host; empty if there is no link."""
        ranks = [ranks[0] for ranks in self.hosts] if len(self.hosts) > 1 else list(range(len(self.nodes)))
        return self._undisturbed(ranks, self.one_machine)

    @property
    def inside(self) -> list[int]:
        """An even number of ranks of one host if there are several hosts, else empty."""
        ranks = max(self.hosts, key=len) if len(self.hosts) > 1 else []
        return self._undisturbed(ranks, True)

    @property
    def native(self) -> list[int]:
        """All ranks of the host with the most ranks, if there are several: a message library's group."""
        ranks = max(self.hosts, key=len)
        return ranks if len(ranks) > 1 else []

    def _undisturbed(self, ranks: list[int], share_cores: bool) -> list[int]:
        """An even number of ranks, limited to one per core (but two) if cores are shared; predictions model sharing."""
        most = min(len(ranks), max(2, self.cores)) if share_cores else len(ranks)
        return ranks[: most - most % 2]

    @property
    def text(self) -> str:
        """Ranks, hosts and transport, as a clause."""
        ranks, hosts = len(self.nodes), len(self.hosts)
        if hosts == 1:
            return f"{ranks} rank{'s' * (ranks > 1)} of one host" + (f" over {self.transport}" if ranks > 1 else "")
        each = f"{self.per_host} rank{'s' * (self.per_host > 1)} each"
        rate = "" if self.lab_rate is None else f" of a lab with links of {write_value(self.lab_rate, Rate)}"
        return f"{hosts} hosts{rate} with {each} over {self.transport}"


@dataclass(frozen=True)
class Calibration:
    """The network, the rows of its table, and remarks that help to judge them."""

    cluster: Cluster
    rows: tuple[ConstantRow, ...]
    remarks: tuple[str, ...]


def calibration_of(
    name: str,
    place: Hosts,
    between: Sequence[Timed],
    inside: Sequence[Timed],
    slowdown: Estimate | str,
    computed: Computed,
    origin: Mapping[str, Any],
    asked: str,
    native: Sequence[Timed] = (),
    tensor: Estimate | str = "",
) -> Calibration:
    """Make the network from the measurements. ``origin`` comes from ``machine.provenance``; ``asked`` is the command.

    ``native`` are the times of the message library's collectives inside a host. ``slowdown`` and ``tensor`` may be the
    reason why they were not measured.

    Raises SynclineError if the times of a link do not grow with the size of its messages.
    """
    versions = ", ".join(f"{package} {version}" for package, version in origin["versions"].items())
    source = f"{asked}; {origin['machine']}, {origin['cores']} cores; {versions}"
    estimates, constants, remarks = _Estimates(), Constants(), []
    for end, timed in (("between", between), ("inside", inside)):
        if timed:
            found = fit_link(timed)
            if not _shows_bandwidth(found, timed):
                raise SynclineError(
                    f"{end}: the times of messages of {_span(timed)} do not grow with their size, so they show no"
                    " bandwidth: measure longer, with --seconds, on a machine that does nothing else"
                )
            estimates.link(end, found, timed)
            remarks.append(_held_against(end, found))
    if native:
        estimates.native(fit_link(native), native, len(place.native), place.transport)
    if between:
        estimates.processor(between)
        remarks += [*estimates.steps(tensor, slowdown)]
    else:
        like = load_network(ASSUMED)
        reason = f"assumed: from the network {ASSUMED}, since a single rank has no link to measure"
        wanted = ("between.alpha", "between.beta", "message", "byte_cpu")
        constants |= {key: replace(like.constants[key], measured=False, source=reason) for key in wanted}
        remarks.append(
            "Links were not measured, because there was only one rank: start two or more, on the hosts whose links you"
            f" want to measure. The constants of the network {ASSUMED} are assumed instead."
        )
    estimates.computed(computed)
    constants |= estimates.constants
    remarks += [*_outliers([*between, *inside, *native]), *(f"{key}: {why}." for key, why in computed.assumed.items())]
    cluster = Cluster(
        name,
        constants,
        about=place.text,
        source=source,
        date=origin["started"],
        per_host=place.per_host,
        cores=place.cores,
        one_machine=place.one_machine,
    )
    rows = [_row(key, constant, estimates.found.get(key)) for key, constant in constants.items()]
    return Calibration(cluster, tuple(rows), tuple(remarks))


class _Estimates:
    """Collects the constants, each with its estimate and its source."""

    def __init__(self) -> None:
        self.found: dict[str, Estimate] = {}
        self.constants: Constants = {}

    def link(self, end: str, fit: LinkFit, timed: Sequence[Timed]) -> None:
        """Add alpha, beta and flight of a link."""
        what = f"messages of {_span(timed)}"
        self._lines(end, fit, f"{what}, in sequence, by all ranks of a ring at once")
        self._add(f"{end}.flight", fit.flight, f"{what}: a step of a ring minus a message of a stream")

    def native(self, fit: LinkFit, timed: Sequence[Timed], ranks: int, transport: str) -> None:
        """Add alpha and beta of the message library's collectives inside a host."""
        what = f"reduce-scatter and all-gather of {_span(timed)} among {ranks} ranks of a host"
        self._lines("native", fit, f"{what}, by the library of transport={transport}")

    def _lines(self, end: str, fit: LinkFit, source: str) -> None:
        for start, alpha, beta in zip(fit.starts, fit.alpha, fit.beta, strict=True):
            key = f"{end}.from_{start}." if start else f"{end}."
            self._add(f"{key}alpha", alpha, source)
            self._add(f"{key}beta", beta, source)

    def processor(self, timed: Sequence[Timed]) -> None:
        """Add the processor time per message, byte and bucket."""
        of = "processor time of a rank in the steps of a ring"
        for key, estimate in fit_processor(timed).items():
            self._add(key, estimate, of)

    def steps(self, tensor: Estimate | str, slowdown: Estimate | str) -> Iterator[str]:
        """Add what steps take besides messages; a remark for each that was not measured."""
        of_tensor = (
            "processor time of the training thread outside the engine per tensor in a bucket of its own, real steps"
        )
        of_slowdown = "seconds that backward passes lose per processor second of allreduces: transformer, wide layers"
        for key, found, of, otherwise in (
            ("tensor", tensor, of_tensor, "gradients take no time of the training thread beside their messages"),
            ("slowdown.cpu", slowdown, of_slowdown, "layers lose no time beside messages"),
        ):
            if isinstance(found, Estimate):
                self._add(key, found, of)
            else:
                yield f"{key} was not measured: {found}. Predictions assume that {otherwise}."

    def computed(self, computed: Computed) -> None:
        """Add the times of one thread per byte."""
        for key, estimate in computed.per_byte.items():
            self._add(key, estimate, computed.assumed.get(key, "one thread"), key not in computed.assumed)

    def _add(self, key: str, estimate: Estimate, source: str, measured: bool = True) -> None:
        self.found[key] = estimate
        self.constants[key] = Constant(estimate.value, estimate.low, estimate.high, measured, source)


def _shows_bandwidth(fit: LinkFit, timed: Sequence[Timed]) -> bool:
    """Whether the largest message's bytes take a notable share of its time; else the network would have no rate."""
    bytes_s = fit.beta[-1].value * max(one.cell.nbytes for one in timed)
    return bytes_s > TOLERANCE * (fit.alpha[-1].value + bytes_s)


def _span(timed: Sequence[Timed]) -> str:
    sizes = {one.cell.nbytes for one in timed}
    return f"{units.size(min(sizes))} to {units.size(max(sizes))}"


def _row(key: str, constant: Constant, estimate: Estimate | None) -> ConstantRow:
    low, high = constant.range
    samples, outliers = (0, 0) if estimate is None else (estimate.samples, estimate.outliers)
    return ConstantRow(key, constant.value, low, high, samples, outliers, constant.measured)


def _held_against(end: str, fit: LinkFit) -> str:
    """A remark on the difference between the lone messages' times and the fit without them."""
    size = max(fit.off, key=lambda nbytes: abs(fit.off[nbytes]))
    mean = sum(map(abs, fit.off.values())) / len(fit.off)
    return (
        f"{end}: the times of lone messages, which the fit excludes, differ from these constants by"
        f" {units.percent(mean)} on average, at worst by {_signed(fit.off[size])} (messages of {units.size(size)})."
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _outliers(timed: Sequence[Timed]) -> list[str]:
    """A remark on the number of outliers and the farthest one; empty if there are none."""
    far = [(float(max(one.times_s.far) / one.times_s.median), one) for one in timed if len(one.times_s.far)]
    if not far:
        return []
    count = sum(len(one.times_s.far) for one in timed)
    every = sum(len(one.times_s.every) for one in timed)
    times, one = max(far, key=lambda found: found[0])
    return [
        f"{count} of {every:,} times of messages were excluded as outliers; the farthest, {one.cell.text}, was"
        f" {units.significant(times, 2)} times the median."
    ]
