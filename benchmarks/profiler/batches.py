"""Batches for the architectures: each a function of the model's configuration; 2 or 3 samples, of odd lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .sizes import VOCAB


def tokens(batch: int, length: int, vocab: int = VOCAB) -> Tensor:
    return torch.randint(3, vocab, (batch, length))


def text(config: Any) -> dict[str, Any]:
    ids = tokens(3, 37)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def masked_text(config: Any) -> dict[str, Any]:
    return {
        "input_ids": tokens(3, 37),
        "labels": tokens(3, 37),
        "attention_mask": torch.ones(3, 37, dtype=torch.long),
    }


def padded_text(config: Any) -> dict[str, Any]:
    batch = text(config)
    mask = torch.ones(3, 37, dtype=torch.long)
    mask[0, :13] = 0
    return {**batch, "attention_mask": mask}


def pair(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(3, 37), "labels": tokens(3, 23), "use_cache": False}


def image(config: Any, size: int = 40) -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.randint(0, 7, (3,))}


def large_image(config: Any) -> dict[str, Any]:
    return image(config, 64)


def segments(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 7, (2, 64, 64))}


def mel(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 20, 60), "labels": tokens(2, 17), "use_cache": False}


def wave(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(2, 2100), "labels": torch.randint(1, 31, (2, 4))}


def image_and_text(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(3, 13), "pixel_values": torch.randn(3, 3, 40, 40), "return_loss": True}


def caption(config: Any) -> dict[str, Any]:
    ids = tokens(3, 13)
    return {"input_ids": ids, "pixel_values": torch.randn(3, 3, 40, 40), "labels": ids.clone()}


def image_in_text(config: Any) -> dict[str, Any]:
    ids = tokens(2, 41)
    ids[:, 2:27] = config.image_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 40, 40), "labels": ids.clone(), "use_cache": False}
