"""Lightning's Trainer over Syncline: one import and ``strategy="syncline"``. Lightning starts both processes.

    python examples/trainers/with_lightning.py
    SYNCLINE_STRATEGY="tree codec=int8" python examples/trainers/with_lightning.py

The optional first argument is another strategy of Lightning, such as ddp, which gives the same weights. The optional
second argument is a folder to which each rank writes its weights.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import syncline.lightning  # noqa: F401 - makes strategy="syncline" known


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        points, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(strategy: str = "syncline", folder: str = "") -> None:
    points = torch.randn(320, 20, generator=torch.Generator().manual_seed(1))
    labels = points[:, :4].argmax(1)
    model = Classifier()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(points, labels), batch_size=16))  # Lightning adds a DistributedSampler
    if trainer.is_global_zero:
        backend = torch.distributed.get_backend()
        print(f"{trainer.world_size} ranks over {backend}: loss {trainer.callback_metrics['loss']:.3f}")
    if folder:
        torch.save(model.layers.state_dict(), Path(folder, f"{strategy}-{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
