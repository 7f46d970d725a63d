"""A training with a codec that keeps much back, and three that resume it: two as they should, one without that."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from syncline.lightning import SynclineStrategy


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(30, 3)

    def training_step(self, batch: tuple[torch.Tensor], _: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(epochs: int, resumed: Path | None = None) -> Trainer:
    points = torch.randn(48, 30, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        strategy=SynclineStrategy("ring codec=topk(ratio=0.05)"),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(points), batch_size=6), ckpt_path=resumed)
    return trainer


def main(folder: Path) -> None:
    saved, stripped = folder / "saved.ckpt", folder / "stripped.ckpt"
    begun = fit(2)
    begun.save_checkpoint(saved)
    if begun.is_global_zero:
        state = torch.load(saved)
        assert len(state.pop("syncline")["ranks"]) == 2
        torch.save(state, stripped)
    torch.distributed.barrier()
    for name, path in (("resumed", saved), ("again", saved), ("without", stripped)):
        done = fit(3, path)
        torch.save(done.lightning_module.state_dict(), folder / f"{name}-{done.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
