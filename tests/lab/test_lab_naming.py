"""Names and addresses of labs and hosts."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline_bench.lab import naming

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,30}", fullmatch=True)
HOSTS = st.integers(0, naming.MAX_HOSTS - 1)


@given(NAMES, HOSTS)
def test_a_hosts_name_tells_its_lab(lab: str, host: int) -> None:
    assert naming.read_host_name(naming.host_name(naming.check_name(lab), host)) == (lab, host)
    assert len(naming.host_name(lab, host)) <= 64  # the kernel's limit


@given(NAMES)
def test_addresses_are_private_and_differ(lab: str) -> None:
    found = {IPv4Address(naming.address(lab, host)) for host in range(naming.MAX_HOSTS)}
    assert len(found) == naming.MAX_HOSTS
    network = naming.network(lab)
    assert network.subnet_of(IPv4Network("10.0.0.0/8"))
    assert found <= set(network.hosts())


@pytest.mark.parametrize("name", ["", "Lab", "1st", "a" * 32, "a_b", "a.b", "../x", "a\n", "-a"])
def test_names_that_hosts_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="small letters"):
        naming.check_name(name)


@pytest.mark.parametrize("name", ["vm", "lab0-h", "lab0-h1234", "lab0-h-1", "Lab-h0"])
def test_other_hosts_are_no_labs(name: str) -> None:
    with pytest.raises(UsageError, match="not a host of a lab"):
        naming.read_host_name(name)


def test_the_first_free_name_is_taken() -> None:
    assert naming.free_name([]) == "lab0"
    assert naming.free_name(["lab1", "lab0", "mine", "lab3"]) == "lab2"


def test_every_host_is_in_the_hosts_file_under_its_name() -> None:
    lines = [line.split() for line in naming.hosts_file("a", 3).splitlines()]
    for host in range(3):
        assert [naming.address("a", host), naming.host_name("a", host)] in lines
    assert ["127.0.0.1", "localhost"] in lines
