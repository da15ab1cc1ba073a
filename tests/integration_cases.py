"""Training code of other libraries around a planned model, called by `test_integrations` on ranks and alone."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from trainwright.integrations.accelerate import PlannedAccelerator
from trainwright.integrations.fabric import PlannedStrategy
from trainwright.integrations.hf import PlannedTrainer

BATCH, LENGTH, VOCABULARY = 4, 16, 64
TIMES = ("runtime", "per_second", "preparation_time")


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences that count upwards, each with another number of labels."""
    numbers, found = random.Random(seed), []
    for _ in range(num):
        ids = (torch.arange(LENGTH) + numbers.randrange(VOCABULARY)) % VOCABULARY
        labels = ids.clone()
        labels[numbers.randrange(2, LENGTH) :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def batch() -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows(BATCH)]) for key in ("input_ids", "labels")}


# Hugging Face's Trainer


def arguments(folder: str, num_processes: int, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "seed": 3, "learning_rate": 1e-2,
        "per_device_train_batch_size": BATCH // num_processes, "per_device_eval_batch_size": BATCH // num_processes,
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2,
        "save_total_limit": 2, "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_delay": 0,
        "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    return TrainingArguments(**(settings | {"save_strategy": "steps", "eval_steps": 2} | changes))


def accuracy(found: Any) -> dict[str, float]:
    counted = found.label_ids[:, 1:] != -100
    hits = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
    return {"accuracy": float(hits[counted].mean()), "rows": len(found.label_ids)}


class Counting(TrainerCallback):
    """What a callback sees."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        assert keywords["model"] is not None
        assert keywords["optimizer"] is not None
        self.seen["steps"] = self.seen.get("steps", 0) + 1

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.seen["saves"] = self.seen.get("saves", 0) + 1


def trainer_run(folder: str, plan: str | None = None) -> dict[str, Any]:
    """Train, evaluate, predict and save: by the stock Trainer, or with a plan by ours."""
    counting = Counting()
    settings: dict[str, Any] = {
        "train_dataset": rows(5 * BATCH - 1), "eval_dataset": rows(2 * BATCH - 1, 1), "compute_metrics": accuracy,
        "callbacks": [counting],
    }  # fmt: skip
    if plan is None:
        trainer = Trainer(model=tiny(), args=arguments(folder, 1), **settings)
    else:
        trainer = PlannedTrainer(model=tiny(), args=arguments(folder, 2), plan=plan, **settings)
    trainer.train()
    predicted = trainer.predict(rows(BATCH, 2))
    trainer.save_model(f"{folder}/final")
    return {
        "log": [without_times(row) for row in trainer.state.log_history],
        "best": Path(str(trainer.state.best_model_checkpoint)).name,
        "kept": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "seen": counting.seen,
        "predicted": predicted.predictions.astype("float64").sum(-1).ravel().tolist(),
        "shape": list(predicted.predictions.shape),
        "metrics": without_times(predicted.metrics or {}),
    }


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.endswith(TIMES)}


def trainer_resumes(folder: str, plan: str) -> dict[str, Any]:
    """Break off, leave half a checkpoint behind, and go on; beside a run that was never broken off."""
    changes = {
        "eval_strategy": "no", "load_best_model_at_end": False, "save_total_limit": None, "save_steps": 2,
        "per_device_train_batch_size": BATCH // 2,
    }  # fmt: skip
    runs = []
    for name, how in (("whole", None), ("broken", "half"), ("broken", "resumed")):
        args = arguments(f"{folder}/{name}", 2, **changes)
        trainer = PlannedTrainer(model=tiny(), args=args, plan=plan, train_dataset=rows(5 * BATCH))
        if how == "half":
            trainer.add_callback(StopsAt(3))
        if how == "resumed" and trainer.is_world_process_zero():
            shutil.copytree(f"{folder}/broken/checkpoint-2", f"{folder}/broken/checkpoint-9")
            Path(f"{folder}/broken/checkpoint-9/trainer_state.json").unlink()  # as if killed while it was written
        trainer.accelerator.wait_for_everyone()
        trainer.train(resume_from_checkpoint=how == "resumed")
        runs.append((trainer.state.log_history, trainer.accelerator.get_state_dict(trainer.model)))
    whole, _, resumed = runs
    losses = [[row["loss"] for row in log if "loss" in row] for log, _ in (whole, resumed)]
    same = all(torch.equal(weight, resumed[1][name]) for name, weight in whole[1].items())
    return {"losses": losses, "weights": same, "num_weights": len(whole[1])}


class StopsAt(TrainerCallback):
    """Ends a run after some steps, as a time limit would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def trainer_from_meta(folder: str, plan: str, weights: str) -> dict[str, Any]:
    """Build on the meta device, read the weights of files, evaluate with and without labels."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny().config)
    args = arguments(folder, 2, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    trainer = PlannedTrainer(model=model, args=args, plan=plan, weights=weights, compute_metrics=accuracy)
    labelled = rows(BATCH, 2)
    unlabelled = trainer.predict([{"input_ids": row["input_ids"]} for row in labelled])
    labelled_too = trainer.predict(labelled)
    return {
        "same": bool((unlabelled.predictions == labelled_too.predictions).all()),
        "no_loss": "test_loss" not in (unlabelled.metrics or {}),
        "metrics": without_times(labelled_too.metrics or {}),
    }


class Head(nn.Module):
    """A small model whose loss is a plain mean (`plain`, `ignores` the number of items), or has other `terms`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, **keywords: Any) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.kind == "terms":
            num_items = keywords.get("num_items_in_batch")
            loss = loss * (1.0 if num_items is None else (labels != -100).sum() / num_items) + logits.square().mean()
        return {"loss": loss, "logits": logits}


class PlainHead(Head):
    """One whose forward takes no more than the batch."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(input_ids, labels)


def head(kind: str) -> Head:
    return (PlainHead if kind == "plain" else Head)(kind)


def head_run(folder: str, kind: str, plan: str | None = None) -> list[float]:
    """Three updates of two batches each: the losses that the Trainer logs."""
    changes = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "num_train_epochs": 1}
    settings: dict[str, Any] = {"model": head(kind), "train_dataset": rows(5 * BATCH)}
    if plan is None:
        trainer = Trainer(args=arguments(folder, 1, **changes), **settings)
    else:
        trainer = PlannedTrainer(args=arguments(folder, 2, **changes), plan=plan, **settings)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def bf16_run(folder: str, plan: str | None = None) -> dict[str, Any]:
    """Three updates in bf16, and what a prediction's type is."""
    changes = {
        "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "num_train_epochs": 1, "bf16": True,
    }  # fmt: skip
    settings: dict[str, Any] = {"model": tiny(), "train_dataset": rows(5 * BATCH)}
    if plan is None:
        trainer = Trainer(args=arguments(folder, 1, **changes), **settings)
    else:
        trainer = PlannedTrainer(args=arguments(folder, 2, **changes), plan=plan, **settings)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    dtype = str(trainer.predict(rows(BATCH, 2)).predictions.dtype)
    reset_precision()
    return {"losses": losses, "dtype": dtype}


def reset_precision() -> None:
    """Accelerate keeps the precision of a process's first accelerator."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()


# Accelerate


def accelerate_run(accelerator: Any, folder: str, resume: bool = False) -> dict[str, Any]:
    """A loop that accumulates, clips, follows a schedule, saves its state between the epochs and evaluates."""
    from accelerate.utils import set_seed

    set_seed(5)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader, held_out = DataLoader(rows(6 * BATCH), BATCH, shuffle=True), DataLoader(rows(2 * BATCH, 1), BATCH)
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    if resume:
        accelerator.load_state(folder)
    values: list[list[float]] = []
    for epoch in range(1 if resume else 0, 2):
        loader.set_epoch(epoch)
        for part in loader:
            with accelerator.accumulate(model):
                loss = model(**part).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    values.append([loss.item(), float(norm), schedule.get_last_lr()[0]])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0 and not resume:
            accelerator.save_state(folder)
    model.eval()
    found = []
    for part in held_out:
        with torch.no_grad():
            logits = model(**part).logits
        found.append(accelerator.gather_for_metrics((logits.argmax(-1), part["labels"])))
    accelerator.save_model(model, f"{folder}/model")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/pretrained",
        state_dict=accelerator.get_state_dict(model),
        is_main_process=accelerator.is_main_process,
    )
    accelerator.free_memory()
    return {
        "values": values,
        "predicted": torch.cat([one for one, _ in found]).tolist(),
        "labels": torch.cat([other for _, other in found]).tolist(),
    }


def planned_accelerate(plan: str, folder: str) -> list[dict[str, Any]]:
    """A whole run, and one that goes on from the state between the epochs."""
    from accelerate import DataLoaderConfiguration

    found = []
    for resume in (False, True):
        accelerator = PlannedAccelerator(
            plan, cpu=True, gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        )  # fmt: skip
        found.append(accelerate_run(accelerator, folder, resume))
    return found


# Fabric


def fabric_run(fabric: Any, folder: str, batch_size: int, resume: bool = False) -> list[list[float]]:
    """A loop that accumulates, clips, and saves between the epochs."""
    fabric.launch()
    model = tiny()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(rows(6 * BATCH), batch_size))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    if resume:
        fabric.load(folder, state)
    values = []
    for epoch in range(state["epoch"], 2):
        for number, part in enumerate(loader, start=1):
            with fabric.no_backward_sync(model, enabled=number % 2 != 0):
                loss = model(**part).loss
                fabric.backward(loss / 2)
            if number % 2 == 0:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                values.append([loss.item(), float(norm)])
        if epoch == 0 and not resume:
            state["epoch"] = 1
            fabric.save(folder, state)
    return [*values, [float(len(list(model.parameters())))]]


def planned_fabric(plan: str, folder: str) -> list[list[list[float]]]:
    from lightning.fabric import Fabric

    found = []
    for resume in (False, True):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=PlannedStrategy(plan))
        found.append(fabric_run(fabric, folder, BATCH // 2, resume))
    return found


def differing_batches(plan: str) -> None:
    """Each rank shuffles by a seed of its own."""
    import trainwright as tw
    from trainwright.integrations.planned import planned
    from trainwright.launch import rank

    module = planned(tiny(), tw.Plan.from_json(plan))
    module(**{key: value.roll(rank(), 0) for key, value in batch().items()})
