"""What links are told about their rate: laws that every rate keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Rate
from syncline_bench.lab import links
from syncline_bench.lab.links import LEAST, MOST, PEAK, shape
from syncline_bench.lab.records import address

RATES = st.floats(LEAST, MOST).map(Rate)


@given(RATES)
def test_a_piece_fits_into_every_bucket(rate: Rate) -> None:
    """Or the kernel would cut it."""
    found = shape(rate)
    headers = 100
    assert found.piece_bytes >= 2 * 1514
    assert found.burst_bytes > found.piece_bytes + headers
    if found.peak_bytes is not None:
        assert found.burst_bytes > found.peak_bytes > found.piece_bytes + headers


@given(RATES)
def test_queues_are_some_milliseconds_deep(rate: Rate) -> None:
    found = shape(rate)
    seconds = found.queue_bytes * 8 / rate
    assert seconds < 0.006 or found.queue_bytes <= 32 * 1514
    assert found.queue_bytes >= 32 * 1514


@given(RATES)
def test_the_line_names_the_rate_and_bounds_the_peak(rate: Rate) -> None:
    words = shape(rate).tc("p3").split()
    assert words[:6] == ["qdisc", "add", "dev", "p3", "root", "tbf"]
    options = dict(zip(words[6::2], words[7::2], strict=True))
    assert options["rate"] == f"{round(rate)}bit"
    assert int(options["limit"]) == shape(rate).queue_bytes
    if "peakrate" in options:
        assert rate < float(options["peakrate"].removesuffix("bit")) <= PEAK * rate + 1


@pytest.mark.parametrize("rate", [0.0, 999.0, 1e12])
def test_rates_that_no_link_has_are_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="1Mbit to 100Gbit"):
        shape(Rate(rate))


def test_every_host_is_joined_to_the_switch_and_has_its_address() -> None:
    lines = links.switch((11, 12, 13))
    for number, pid in enumerate((11, 12, 13)):
        port = links.port_of(number)
        assert any(line.startswith(f"link add {port} ") and line.endswith(f"netns {pid}") for line in lines)
        assert f"link set {port} master br0" in lines
        own = links.host("lab0", number, shape(Rate(1e9)))
        assert f"address add {address('lab0', number)}/24 dev eth0" in own
        assert own[-1] == "link set eth0 up"
    assert not any("gso" in line for line in links.host("lab0", 0, None))
