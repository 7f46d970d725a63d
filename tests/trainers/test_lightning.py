"""Lightning's Trainer with ``strategy="syncline"``: DDP's weights, codecs, checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripts_of_trainers as scripts

from syncline.errors import UsageError

scripts.need("lightning")

EXAMPLE = scripts.EXAMPLES / "with_lightning.py"
HERE = Path(__file__).parent


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    """And with a codec nearly, here where Lightning does not start the processes."""
    assert "2 ranks over gloo: loss" in scripts.run_forked("lightning", EXAMPLE, "ddp", tmp_path)
    ddp = scripts.weights(tmp_path, "ddp")
    assert "2 ranks over syncline: loss" in scripts.run(EXAMPLE, "syncline", tmp_path)
    assert scripts.distance(scripts.weights(tmp_path, "syncline"), ddp) < 1e-6
    scripts.run_forked("lightning", EXAMPLE, "syncline", tmp_path, SYNCLINE_STRATEGY="tree transport=tcp codec=int8")
    assert 1e-6 < scripts.distance(scripts.weights(tmp_path, "syncline"), ddp) < 0.05


def test_what_a_codec_has_kept_back_is_in_checkpoints(tmp_path: Path) -> None:
    """As under torchrun. A run that is resumed without it goes on otherwise."""
    script = HERE / "lightning_resumed.py"
    told = scripts.run_forked("lightning", script, tmp_path)
    assert told.count("this checkpoint lacks the residuals of the codec in") == 2, told
    whole, again, without = (scripts.weights(tmp_path, name) for name in ("resumed", "again", "without"))
    assert scripts.distance(whole, again) == 0
    assert scripts.distance(whole, without) > 0


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a Trainer of one process; nothing of this process' own environment counts."""
    for name in ("SYNCLINE_STRATEGY", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # Lightning loads an MPI library to find out whether mpirun has started it. Its UCX would stay in this process,
    # where no other one can be loaded for the tests that come later.
    monkeypatch.setattr("lightning.fabric.plugins.environments.mpi._MPI4PY_AVAILABLE", False)
    from lightning.pytorch import Trainer

    import syncline.lightning  # noqa: F401

    def make(strategy: Any = "syncline", **options: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return Trainer(strategy=strategy, accelerator="cpu", devices=1, **quiet, **options)

    yield make
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_what_a_codec_has_kept_back_is_for_the_call_that_was_given_the_checkpoint(trainer: Any, tmp_path: Path) -> None:
    """A run that begins anew after a validation from a checkpoint, or after a resumed run, takes up nothing of it."""
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    from syncline.lightning import SynclineStrategy

    def made() -> Any:
        strategy = SynclineStrategy("ring codec=topk(ratio=0.1)")
        return trainer(strategy, max_steps=2, limit_train_batches=2, limit_val_batches=1, enable_model_summary=False)

    begun, path = made(), tmp_path / "saved.ckpt"
    begun.fit(BoringModel())
    begun.save_checkpoint(path)
    assert "syncline" in torch.load(path)
    resumed = made()
    resumed.fit(BoringModel(), ckpt_path=path)
    assert len(resumed.strategy._hook._loaded) == 1
    resumed.fit(BoringModel())
    assert resumed.strategy._hook._loaded == []
    looked = made()
    looked.validate(BoringModel(), ckpt_path=path)
    looked.fit(BoringModel())
    assert looked.strategy._hook._loaded == []


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("ps(servers=1)", "parameter servers"),
        ("ring sync=local(steps=4)", "synchronous"),
        ("ring codec=auto", "choose a codec"),
        ("rong", "did you mean 'ring'"),
    ],
)
def test_a_strategy_that_ddp_cannot_run_is_refused_before_processes_start(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, says: str
) -> None:
    monkeypatch.setenv("SYNCLINE_STRATEGY", strategy)
    with pytest.raises(UsageError, match=says.replace("(", r"\(")):
        trainer()


def test_the_options_are_those_of_lightnings_ddp(trainer: Any) -> None:
    from syncline.lightning import SynclineStrategy

    made = trainer(SynclineStrategy("ring codec=int8", find_unused_parameters=True)).strategy
    assert made._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(UsageError, match="sets process_group_backend itself"):
        SynclineStrategy(process_group_backend="gloo")


def test_a_process_group_of_another_backend_is_refused(trainer: Any) -> None:
    from torch import distributed

    made = trainer()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"the backend gloo: make it with init_process_group\('syncline'\)"):
        made.strategy.setup_distributed()


def test_an_old_lightning_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning

    from syncline import lightning as ours

    monkeypatch.setattr(lightning, "__version__", "1.9.5")
    monkeypatch.setattr(ours, "_PACKAGES", ("lightning.pytorch",))
    with pytest.raises(UsageError, match=r"lightning 1\.9\.5: pip install 'syncline\[lightning\]'.*2\.4 or newer"):
        ours._strategies()
