"""A planned model in Hugging Face's Trainer: `PlannedTrainer` and the plan are what differs from any such script.

trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 2 examples/hf_trainer.py plan.json runs/trainer
"""

from __future__ import annotations

import sys

import torch
from plain_loop import Counting
from transformers import TrainingArguments

import trainwright as tw
from trainwright.integrations.hf import PlannedTrainer


def main(plan_path: str, folder: str) -> None:
    """Train two epochs; the weights are written as files that `from_pretrained` loads."""
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,  # times two processes: the plan's 4
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=4,
        save_steps=8,
        report_to="none",
        seed=0,
    )
    trainer = PlannedTrainer(model=model, args=args, plan=plan_path, train_dataset=Counting(32))
    trainer.train()
    trainer.save_model(f"{folder}/weights")
    if trainer.is_world_process_zero():
        print(*(f"loss {row['loss']}" for row in trainer.state.log_history if "loss" in row), sep="\n", flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3])
