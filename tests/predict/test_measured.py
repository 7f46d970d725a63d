"""Measurements that predictions are held to: what the files say of the simulator is what it says now."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from syncline.strategy.strategy import Strategy
from syncline_bench.predict.iterations import simulate
from syncline_bench.predict.networks import holdout_of, load_network, network_names
from syncline_bench.predict.settings import model_of, setting_of
from syncline_bench.workloads import load

FOLDER = resources.files("syncline_bench.predict") / "measured"
FILES = sorted(path.name.removesuffix(".json") for path in FOLDER.iterdir())


@pytest.mark.parametrize("network", FILES)
def test_predictions_beside_measurements_are_those_of_this_simulator(network: str) -> None:
    pytest.importorskip("torch")  # which a replay's times are derived with
    rows = json.loads((FOLDER / f"{network}.json").read_text())["rows"]
    models = {name: model_of(load(name)) for name in {row["workload"] for row in rows}}
    for row in rows:
        cluster = load_network(network).replaced({"between.beta": 1 / row["goodput_bytes_per_s"]})
        setting = setting_of(Strategy.parse(row["strategy"]), cluster, row["workers"])
        found = simulate(setting, models[row["workload"]])
        assert found.iteration_s == pytest.approx(row["predicted_s"], rel=1e-3), row["strategy"]


@pytest.mark.parametrize("network", FILES)
def test_predictions_are_off_by_no_more_than_the_docs_say(network: str) -> None:
    found = holdout_of(network)
    assert network in network_names()
    assert found is not None
    assert found.count >= 10
    assert found.mean <= 0.05
    assert found.worst <= 0.17
