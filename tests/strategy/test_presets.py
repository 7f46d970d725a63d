"""Names for whole strategies: what they stand for, that they stand alone, and what is said to be different."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec

import pytest

from syncline import registry
from syncline.errors import StrategyError
from syncline.nouns import Group
from syncline.registry import Entry
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import PRESETS, Preset


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_is_the_strategy_that_it_stands_for(preset: Preset) -> None:
    strategy = Strategy.parse(f" {preset.name} ")
    assert strategy == Strategy.parse(preset.text)
    assert Strategy.parse(str(strategy)) == strategy
    assert str(strategy) == preset.text  # rows show the canonical text
    for workers in (1, 2, 4):
        strategy.resolve(Group(workers))
        strategy.resolve(Group(workers), hosts=workers + strategy.servers)
    assert preset.name not in registry.names("algorithms")
    assert preset.summary.endswith(".")
    assert "arXiv 1711.05979" in preset.source


def test_the_frameworks_differ_as_their_papers_say() -> None:
    caffe_mpi, cntk, mxnet, tensorflow = (Strategy.parse(name) for name in PRESETS)
    assert caffe_mpi.roles is cntk.roles is None
    assert all(strategy.server_holds_weights for strategy in (mxnet, tensorflow))
    releases = [strategy.schedule_object().release for strategy in (caffe_mpi, cntk, mxnet, tensorflow)]
    assert releases[1] not in (releases[0], *releases[2:])  # only CNTK sends nothing while backward goes on
    assert len({releases[0], *releases[2:]}) == 1


@pytest.mark.parametrize(
    ("name", "library"), [("mxnet", "zmq"), ("tensorflow", "grpc"), ("caffe-mpi", "auto"), ("cntk", "auto")]
)
def test_a_preset_talks_over_the_library_of_its_framework(name: str, library: str) -> None:
    """NCCL knows collectives on GPUs only, so whoever sums with it there talks over what is the fastest here."""
    package = None if library == "auto" else registry.get("transports", library).capabilities["package"]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert Strategy.parse(name).transport.name == library
    assert PRESETS[name].note == ("" if package else f"the original sums with {PRESETS[name].library}")


def test_a_preset_stands_alone() -> None:
    for text in ("mxnet codec=int8", "mxnet(servers=2)", "mxnet sync=bsp"):
        with pytest.raises(StrategyError, match=re.escape(f"start from {PRESETS['mxnet'].text!r}")):
            Strategy.parse(text)
    with pytest.raises(StrategyError, match="did you mean 'tensorflow'"):
        Strategy.parse("tensorflw")


def test_a_message_library_that_is_not_there_is_replaced_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Preset("own", "ring", "Carrier Pigeon", "pigeon", "By air.", "RFC 1149")
    assert (preset.text, preset.note) == ("ring transport=tcp", "tcp in the place of Carrier Pigeon")
    registry.names("transports")
    tcp = registry.get("transports", "tcp")
    pigeon = Entry("transports", "pigeon", tcp.target, tcp.capabilities)
    monkeypatch.setitem(registry._entries["transports"], "pigeon", pigeon)
    assert (preset.text, preset.note) == ("ring transport=pigeon", "")
    assert Strategy.parse(preset.text).transport.name == "pigeon"
    for package, transport in (("syncline", "pigeon"), ("columba_livia", "tcp")):
        there = replace(pigeon, capabilities={**pigeon.capabilities, "package": package})
        monkeypatch.setitem(registry._entries["transports"], "pigeon", there)
        assert preset.text == f"ring transport={transport}"
    assert PRESETS["caffe-mpi"].note == "the original sums with NCCL"
