"""Clusters, their constants, and where they come from: names, files and texts."""

from __future__ import annotations

import json
import math

import pytest

from syncline.costs.cluster import Cluster, Constant, loggp
from syncline.errors import DataError, UsageError
from syncline_bench.predict.networks import load_network, network_names, parse_network, to_json

TWO = {"between.alpha": Constant(1e-5), "between.beta": Constant(1e-9)}


@pytest.mark.parametrize("name", network_names())
def test_a_ready_made_network_says_where_every_constant_is_from(name):
    cluster = load_network(name)
    assert cluster.name == name
    assert cluster.about
    assert cluster.source
    assert cluster.date
    for constant in cluster.constants.values():
        assert constant.source
        assert constant.measured != constant.source.startswith(("assumed", "published"))
    assert parse_network(to_json(cluster), name) == cluster


def test_hosts_of_four_gpus_talk_faster_inside():
    for name in ("ib56", "ib100"):
        cluster = load_network(name)
        assert cluster.per_host == 4
        assert cluster.inside is not None
        assert cluster.inside.busy_s(1e6) < cluster.between.busy_s(1e6)


def test_constants_written_out():
    cluster = load_network("alpha=45us,beta=1.2ns,gamma=2.5ns,inside.alpha=1us,inside.beta=0.1ns,per_host=4,cores=2")
    assert cluster.between.busy_s(1000) == pytest.approx(45e-6 + 1.2e-6)
    assert cluster.gamma_s_per_byte == pytest.approx(2.5e-9)
    assert cluster.inside is not None
    assert cluster.inside.busy_s(0) == pytest.approx(1e-6)
    assert (cluster.per_host, cluster.cores) == (4, 2)
    assert not any(constant.measured for constant in cluster.constants.values())


def test_a_rate_is_another_way_to_say_beta():
    assert load_network("alpha=45us,rate=10Gbit").between.bytes_s(1.0) == pytest.approx(0.8e-9)


def test_topologies_may_be_written_out():
    cluster = load_network("alpha=1us,beta=1ns,topology=fat_tree(hosts_per_leaf=4, oversubscription=2)")
    assert str(cluster.topology) == "fat_tree(hosts_per_leaf=4, oversubscription=2)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10gb", "did you mean '10gbe'"),
        ("missing/mine.json", "there is no file"),
        ("alpha=-1us,beta=1ns", "cannot be negative"),
        ("alpha=1us", "between.beta is missing"),
        ("alpha=1us,beta=1ns,gama=1ns", "did you mean 'gamma'"),
        ("alpha=1us,beta=1ns,rate=1Gbit", "repeats rate"),
        ("alpha=1us,rate=0Gbit", "above 0"),
        ("alpha=1us,beta=1ns,per_host=0", "at least 1"),
        ("alpha=1us,beta=1ns,cores=0", "at least one core"),
        ("alpha=1us,beta=1ns,inside.alpha=1us", "inside from 0 bytes needs alpha and beta"),
        ("alpha=1us,beta=1ns,inside.from_99.alpha=1us,inside.from_99.beta=1us", "start at 0 bytes"),
        ("alpha=1us,beta=1ns,codecs.int8.encode=1ns", "codecs.int8.decode is missing"),
        ("alpha=1us,beta=1ns,topology=rink", "did you mean 'ring'"),
        ("alpha=1us,beta=1ns,between.from_0.alpha=2us", "between.from_0.alpha is also given under another name"),
        ("alpha=1us,beta=1ns,inside.flight=1us", "inside.flight also needs inside.alpha and inside.beta"),
        ("nothing_near", "unknown network 'nothing_near'. There are"),
        ("L=5us,o=2us,g=3us", "between.G is missing: LogGP's constants"),
        ("L=5us,o=2us,g=3us,G=1ns,alpha=1us", "between.alpha and LogGP's between.L"),
        ("L=5us,o=2us,g=3us,G=1ms", "needs G <= max"),
        ("inside.L=1us,inside.o=1us,inside.g=1us,inside.G=1ns", "between.alpha is missing"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(UsageError, match=says):
        load_network(text)


def content(**changes):
    return json.dumps({"name": "mine", "constants": {key: {"value": one.value} for key, one in TWO.items()}} | changes)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "mine.json"
    alpha = {"value": "45us", "low": "40us", "high": 5e-5, "measured": True, "source": "a clock"}
    path.write_text(content(constants={"between.alpha": alpha, "between.beta": {"value": 1e-9}}, topology="ring"))
    found = load_network(str(path)).constants["between.alpha"]
    assert found.measured
    assert found.source == "a clock"
    assert (found.value, *found.range) == pytest.approx((45e-6, 40e-6, 50e-6))
    assert str(load_network(str(path)).topology) == "ring"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "its JSON is invalid"),
        ("[]", "needs constants"),
        (content(topolgy="ring"), "unknown key 'topolgy'.*did you mean 'topology'"),
        (content(per_host="four"), "per_host must be a whole number"),
        (content(per_host=None), "per_host must be a whole number"),
        (content(ports_per_host=True), "ports_per_host must be a whole number"),
        (content(one_machine=1), "one_machine must be true or false"),
        (content(source=5), "source must be a text"),
        (content(name=["mine"]), "name must be a text"),
        (content(topology=5), "topology must be a text"),
        (content(constants={"between.alpha": {"value": 2, "source": 5}}), "between.alpha: source must be a text"),
        (content(constants={"between.alpha": {"value": 2, "measured": "no"}}), "measured must be true or false"),
        (content(constants={"between.alpha": {"value": 10**400}}), "between.alpha must be a finite number"),
        (content(constants={"between.alpha": 4}), "between.alpha needs a value"),
        (content(constants={"between.alpha": {"value": -1}}), "between.alpha: .*not negative"),
        (content(constants={"between.alpha": {"value": 2, "low": 3}}), "must lie in its range"),
        (content(constants={"between.alpha": {"value": 2, "hihg": 3}}), "did you mean 'high'"),
        (content(constants={"between.alpha": {"value": [2]}}), "must be seconds"),
    ],
)
def test_a_file_that_is_no_network_is_named(text, says):
    with pytest.raises(DataError, match=f"mine.json.*{says}|{says}"):
        parse_network(text, "mine.json")


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(b"\x80\xff\x00")
    with pytest.raises(DataError, match=r"mine\.json is not a network: it is not a text file"):
        load_network(str(path))


def test_only_what_the_library_brings_is_ready_made(tmp_path):
    path = tmp_path / "lab.json"
    path.write_text(to_json(load_network("lab")))
    assert load_network("lab").ready_made
    assert not load_network(str(path)).ready_made
    assert not load_network("alpha=1us,beta=1ns").ready_made


@pytest.mark.parametrize("number", [-1e-9, math.inf, math.nan])
def test_constants_are_finite_and_not_negative(number):
    with pytest.raises(UsageError, match="not negative"):
        Constant(number)
    with pytest.raises(UsageError, match="not negative"):
        Cluster("two", TWO).replaced({"between.beta": number})


def test_another_cluster_with_other_constants():
    cluster = Cluster("two", TWO | {"gamma": Constant(2.0, 1.0, 4.0, measured=True)})
    changed = cluster.replaced({"between.beta": 2e-9, "message": 1e-6})
    assert changed.between.bytes_s(1.0) == 2e-9
    assert changed.message_s == 1e-6
    assert (cluster.between.bytes_s(1.0), cluster.message_s) == (1e-9, 0.0)
    assert [cluster.at(end).gamma_s_per_byte for end in ("low", "high")] == [1.0, 4.0]


def test_codecs_are_found_by_their_text():
    names = ("codecs.topk(ratio=0.01).encode", "codecs.topk(ratio=0.01).decode")
    cluster = Cluster("two", TWO).replaced(dict(zip(names, (3e-9, 1e-9), strict=True)))
    assert cluster.codecs["topk(ratio=0.01)"] == (3e-9, 1e-9)
    given = ",".join(f"{name}={value}" for name, value in zip(names, ("3ns", "1ns"), strict=True))
    assert load_network(f"alpha=1us,beta=1ns,{given}").codecs["topk(ratio=0.01)"] == pytest.approx((3e-9, 1e-9))


def test_loggp_stands_for_a_link_in_a_text_and_in_a_file(tmp_path):
    written = load_network("L=5us,o=2us,g=3us,G=1ns,inside.L=1us,inside.o=2us,inside.g=0us,inside.G=0.5ns")
    assert written.between == loggp(5e-6, 2e-6, 3e-6, 1e-9)
    assert written.inside == loggp(1e-6, 2e-6, 0.0, 5e-10)
    path = tmp_path / "mine.json"
    numbers = {"L": ("5us", "4us", "6us"), "o": ("2us", "1us", "2us"), "g": ("3us", "3us", "4us"), "G": ("1ns",) * 3}
    constants = {
        f"between.{name}": {"value": value, "low": low, "high": high, "measured": True, "source": "a fit"}
        for name, (value, low, high) in numbers.items()
    }
    path.write_text(content(constants=constants))
    alpha, beta, flight = (load_network(str(path)).constants[f"between.{name}"] for name in ("alpha", "beta", "flight"))
    assert (alpha.value, *alpha.range) == pytest.approx((3e-6 - 1e-9, 3e-6 - 1e-9, 4e-6 - 1e-9))
    assert (beta.value, *beta.range) == (1e-9, 1e-9, 1e-9)
    assert (flight.value, *flight.range) == pytest.approx((6e-6, 4e-6 + 2e-6 - 4e-6, 6e-6 + 4e-6 - 3e-6))
    assert alpha.measured
    assert alpha.source == "a fit"
