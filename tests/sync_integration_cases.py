"""A sync method inside Hugging Face's Trainer and Accelerate, called by `tests/sync/test_sync_integrations.py` on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer

from tests.integration_cases import arguments, rows, tiny
from trainwright import sync
from trainwright.launch import rank

PERIOD = 3


def joined(period: int = PERIOD) -> tuple[Any, sync.Sync]:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, sync.create("diloco", model, optimizer, period=period)


def by_accelerate() -> dict[str, Any]:
    """Accelerate's loop beside the same loop by hand: each rank takes every second batch."""
    data, losses = rows(16), []
    model, own = joined()
    accelerator = Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, own.as_optimizer(), DataLoader(data, batch_size=2))
    for batch in loader:
        loss = prepared(**batch).loss
        losses.append(float(loss))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    saved = own.as_optimizer().state_dict()
    other, by_hand = joined()
    for batch in list(DataLoader(data, batch_size=2))[rank() :: 2]:
        loss = other(**batch).loss
        loss.backward()
        by_hand.step(loss)
        by_hand.method.replica.optimizer.zero_grad()
    apart = own.method.replica.digest().hex()
    same = apart == by_hand.method.replica.digest().hex()
    own.finish()
    by_hand.finish()
    return {
        "same": same,
        "apart": apart,
        "together": own.method.replica.digest().hex(),
        "rounds": own.num_rounds,
        "unwrapped": prepared is model,
        "saved": saved["sync"]["num_steps"],
    }


def by_trainer(folder: str) -> dict[str, Any]:
    """The Trainer on ranks that exchange every third step alone, and its checkpoint taken up by another one."""
    model, own = joined()
    plain = {"eval_strategy": "no", "load_best_model_at_end": False, "save_steps": 2, "gradient_accumulation_steps": 1}
    args = arguments(folder, 2, **plain, num_train_epochs=1)
    trainer = Trainer(model=model, args=args, train_dataset=rows(16), optimizers=(own.as_optimizer(), None))
    trainer.train()
    apart = own.method.replica.digest().hex()
    own.finish()
    return {
        "apart": apart,
        "together": own.method.replica.digest().hex(),
        "rounds": own.num_rounds,
        "steps": own.method.num_steps,
    }
