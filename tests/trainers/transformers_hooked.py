"""The example with Transformers' Trainer, and a callback that gives DDP's wrapper a codec."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "trainers"))

import with_transformers
from transformers import Trainer, TrainerCallback

import syncline


class Compressing(TrainerCallback):
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.model_wrapped.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)


class Hooked(Trainer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_callback(Compressing(self))


if __name__ == "__main__":
    with_transformers.Trainer = Hooked
    with_transformers.main("syncline", sys.argv[1])
