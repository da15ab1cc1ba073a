"""Replicas of a plan in the integrations' own classes, called by `tests/integrations/test_replicas_in_integrations.py` on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import trainwright as tw
from tests.integration_cases import BATCH, arguments, rows, tiny
from trainwright import sync
from trainwright.integrations.accelerate import PlannedAccelerator
from trainwright.integrations.fabric import PlannedStrategy
from trainwright.integrations.hf import PlannedTrainer
from trainwright.launch import world_size

METHOD: dict[str, Any] = {"sync": "diloco", "sync_options": {"period": 3}}
REPLICAS, EPOCHS, NUM_ROWS, LR = 2, 2, 8 * BATCH, 3e-3
Found = dict[str, Any]


def reference(case: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each replica, and the parameters at the end, of whole models in a loop by hand, simulated.

    Accelerate and the Trainer deal batches out, Fabric examples; the Trainer divides by all labels, the first of a row too.
    """
    data = rows(NUM_ROWS)
    dealt = [list(DataLoader(data, BATCH))[index::REPLICAS] for index in range(REPLICAS)]
    if case == "by_fabric":
        dealt = [list(DataLoader(data[index::REPLICAS], BATCH)) for index in range(REPLICAS)]  # type: ignore[arg-type]

    def program(index: int) -> sync.Steps[Any]:
        model, losses = tiny(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        joined = yield from sync.join("diloco", model, optimizer, period=3)
        for part in EPOCHS * dealt[index]:
            num_labels = {"num_items_in_batch": (part["labels"] != -100).sum()} if case == "by_trainer" else {}
            optimizer.zero_grad()
            loss = model(**part, **num_labels).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            losses.append(loss.item())
            yield from joined.steps(loss.detach())
        yield from joined.finishing()
        return losses, dict(model.named_parameters())

    ended = sync.simulate([program(index) for index in range(REPLICAS)]).results
    return [losses for losses, _ in ended], {name: value.detach() for name, value in ended[0][1].items()}


def _found(losses: list[float], module: Any, method: sync.Sync, **more: Any) -> Found:
    declared = method.record.sent_bytes(
        method.size, method.method.num_steps + 1
    )  # `finish` is a round, as the next step would be
    weights = {name: value.tolist() for name, value in tw.full_state_dict(module).items()}
    return {"losses": losses, "weights": weights, "rounds": method.num_rounds, "declared": declared,
            "sent": method.traffic.sent_bytes, "replica": module.replicas.index, **more}  # fmt: skip


def _both(run: Callable[[bool], Found]) -> list[Found]:
    """A whole run, and one that goes on from the state between the epochs."""
    return [run(False), run(True)]


def by_accelerate(plan: str, folder: str) -> list[Found]:
    def run(resume: bool) -> Found:
        accelerator = PlannedAccelerator(plan, cpu=True, **METHOD)
        model = tiny()
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0), []
        loader = DataLoader(rows(NUM_ROWS), batch_size=BATCH * REPLICAS // world_size())
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if resume:
            accelerator.load_state(folder)
        for epoch in range(int(resume), EPOCHS):
            for part in loader:
                with accelerator.accumulate(model):
                    loss = model(**part).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 0:
                accelerator.save_state(folder)
        mean = float(accelerator.reduce(torch.tensor(losses[-1]), "mean"))
        joined = accelerator.gather(torch.tensor(losses[-1]))
        accelerator.finish()
        seen = []
        for part in loader:
            with torch.no_grad():
                logits = model(**part).logits
            seen.append(accelerator.gather_for_metrics({"labels": part["labels"], "logits": logits})["labels"])
        return _found(
            losses,
            accelerator.module,
            accelerator.sync,
            mean=mean,
            joined=joined.tolist(),
            labels=torch.cat(seen).tolist(),
        )

    return _both(run)


def by_trainer(plan: str, folder: str) -> list[Found]:
    def run(resume: bool) -> Found:
        args = arguments(
            folder, 1, per_device_train_batch_size=BATCH * REPLICAS // world_size(), gradient_accumulation_steps=1,
            per_device_eval_batch_size=BATCH * REPLICAS // world_size(), eval_strategy="no", load_best_model_at_end=False,
            save_steps=4, save_total_limit=None, learning_rate=LR, weight_decay=0.0, warmup_steps=0,
            lr_scheduler_type="constant", max_grad_norm=0.5, train_sampling_strategy="sequential",
        )  # fmt: skip
        losses: list[float] = []
        trainer = PlannedTrainer(
            model=tiny(), args=args, plan=plan, train_dataset=rows(NUM_ROWS), callbacks=[_Losses(losses)], **METHOD
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resume else None)
        predicted = trainer.predict(rows(2 * BATCH + 3, 1))
        assert predicted.metrics is not None
        evaluated, shape = float(predicted.metrics["test_loss"]), list(predicted.predictions.shape)
        accelerator = trainer.accelerator
        return _found(losses, accelerator.module, accelerator.sync, evaluated=evaluated, shape=shape)

    return _both(run)


class _Losses(TrainerCallback):
    """Takes the losses that the log shows, which are means over replicas."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def by_fabric(plan: str, folder: str) -> list[Found]:
    from lightning.fabric import Fabric

    def run(resume: bool) -> Found:
        strategy = PlannedStrategy(plan, **METHOD)
        fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
        fabric.launch()
        raw = tiny()
        model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=LR, weight_decay=0.0))
        loader = fabric.setup_dataloaders(DataLoader(rows(NUM_ROWS), BATCH * REPLICAS // world_size()))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
        losses = []
        if resume:
            fabric.load(folder, state)
        for epoch in range(state["epoch"], EPOCHS):
            for part in loader:
                loss = model(**part).loss
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 0:
                state["epoch"] = 1
                fabric.save(folder, state)
        strategy.finish()
        return _found(losses, strategy._module, strategy.sync)

    return _both(run)
