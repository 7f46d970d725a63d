"""Hugging Face's Trainer over Syncline: create the process group before the TrainingArguments.

    torchrun --nproc-per-node 2 examples/trainers/with_transformers.py
    SYNCLINE_STRATEGY="tree transport=tcp" torchrun --nproc-per-node 2 examples/trainers/with_transformers.py

The optional first argument is another backend, such as gloo, which gives the same weights. The optional second argument
is a folder to which each rank writes its weights. The model is small and has random weights, so nothing is downloaded.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def sentences(count: int) -> list[dict[str, Any]]:
    """Sentences of eight words; the label says whether the first word is in the first half of the vocabulary."""
    words = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": int(row[0] < 25)} for row in words]


def main(backend: str = "syncline", folder: str = "") -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
    )
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            use_cpu=True,
            max_steps=12,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            ddp_find_unused_parameters=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=sentences(512))
        done = trainer.train()
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} ranks over {dist.get_backend()}: {done.global_step} steps")
    if folder:
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        torch.save(weights, Path(folder, f"{backend}-{arguments.process_index}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
