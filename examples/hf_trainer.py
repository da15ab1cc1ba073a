"""A planned model in Hugging Face's Trainer: a subclass of a few lines says where data and loss come from.

trainwright plan zoo:gpt2-tiny --batch-size 4 --hardware cpu:2 -o plan.json
torchrun --nproc-per-node 2 examples/hf_trainer.py plan.json runs/trainer
"""

from __future__ import annotations

import sys

import torch
from plain_loop import Counting
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

import trainwright as tw
from trainwright.launch import process_group
from trainwright.runtime import Checkpointer, export_weights


class PlannedTrainer(Trainer):
    """Takes this rank's rows from the plan's sampler, and cuts what else the plan splits."""

    def __init__(self, plan: tw.Plan, **keywords) -> None:
        super().__init__(**keywords)
        self.plan = plan

    def get_train_dataloader(self) -> DataLoader:
        sampler = self.plan.sampler(self.train_dataset, seed=self.args.seed)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        return super().compute_loss(model, self.plan.shard_batch(inputs), return_outputs, **keywords)


class Saving(TrainerCallback):
    """Saves where the Trainer would write the whole model from one process."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every, self.checkpointer = folder, every, None

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if self.checkpointer is None:
            self.checkpointer = Checkpointer(self.folder, model, optimizer.optimizer, scheduler=lr_scheduler)
        if state.global_step % self.every == 0:
            self.checkpointer.save(state.global_step - 1)

    def on_train_end(self, args, state, control, **_):
        self.checkpointer.wait()


def main(plan_path: str, folder: str) -> None:
    """Train two epochs; the weights are written as files that `from_pretrained` loads."""
    plan = tw.Plan.from_json(plan_path)
    model, _ = tw.zoo.build("gpt2-tiny", device="cpu")
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if not torch.cuda.is_available() else None,
        num_train_epochs=2,
        learning_rate=3e-3,
        logging_steps=4,
        save_strategy="no",  # the callback saves
        report_to="none",
        remove_unused_columns=False,
        optim="adamw_torch",
        seed=0,
    )
    trainer = PlannedTrainer(
        plan,
        model=tw.parallelize(model, plan, seed=0),
        args=arguments,
        train_dataset=Counting(32),
        callbacks=[Saving(f"{folder}/saved", every=8)],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(*(f"loss {row['loss']}" for row in trainer.state.log_history if "loss" in row), sep="\n")
        print(*export_weights(f"{folder}/saved", f"{folder}/weights"), sep="\n", flush=True)


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:3])
