"""Handles PEFT adapters over a frozen base: names of their weights, their initialisation, and their files.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight       the base's `model.layers.0.self_attn.q_proj.weight`
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight   the adapter's `….lora_A.weight` in PEFT's own files

A wrapped model is planned, sharded and trained as any other; only loading and saving its weights differs.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..artifacts import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter, as PEFT writes them."""
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_LORA = re.compile(r"(?P<layer>.+)\.lora_(A|B|embedding_A|embedding_B)(\.(?P<adapter>[^.]+))?")


@dataclass(frozen=True)
class Adapter:
    """The active adapter of a model that PEFT has wrapped: its configuration and the names of its weights."""

    config: str
    """The text of its `adapter_config.json`."""
    names: dict[str, str]
    """A weight's name in the model → its name in PEFT's files."""


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the active adapter of `model`; `None` for a model that PEFT has not wrapped.

    >>> adapter_of(nn.Linear(2, 2)) is None
    True
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict):
        return None
    from peft import get_peft_model_state_dict

    active = _active(model)
    # PEFT says itself what belongs to an adapter and under which name: it is asked with numbers in place of the weights.
    ours = list(model.state_dict())
    numbers = {name: torch.tensor(number) for number, name in enumerate(ours)}
    found = get_peft_model_state_dict(model, numbers, active, save_embedding_layers=False)
    return Adapter(_config_text(configs[active]), {ours[int(number)]: name for name, number in found.items()})


def _active(model: Any) -> str:
    names = model.active_adapters if hasattr(model, "active_adapters") else [model.active_adapter]
    if len(names) != 1:
        raise UserError(
            f"one active adapter is needed; this model has {len(names)}: {', '.join(names)}; activate one with set_adapter(name)"
        )
    return str(names[0])


def _config_text(config: Any) -> str:
    training = config.inference_mode
    with tempfile.TemporaryDirectory() as folder:
        config.inference_mode = True  # as PEFT writes it
        try:
            config.save_pretrained(folder)
        finally:
            config.inference_mode = training
        return (Path(folder) / CONFIG).read_text(encoding="utf8")


def base_name(name: str) -> str:
    """Return the name that a weight of a wrapped model has in the base's own files.

    >>> base_name("base_model.model.lm_head.base_layer.weight"), base_name("lm_head.weight")
    ('lm_head.weight', 'lm_head.weight')
    """
    return _WRAPPED.sub("", name.removeprefix("base_model.model."))


def is_adapters(model: nn.Module, name: str) -> bool:
    """Tell whether weight `name` was added by an adapter, so that no file of the base has it."""
    return (
        isinstance(getattr(model, "peft_config", None), dict) and _LORA.fullmatch(name.rpartition(".")[0]) is not None
    )


def reset_adapter(model: nn.Module, path: str) -> bool:
    """Initialise the LoRA weights of the module at `path` as PEFT does; return False if it has none.

    Raises `UserError` for an initialisation that is computed from the base's weights: on the meta device there are none.
    """
    found = _LORA.fullmatch(path)
    configs: Any = getattr(model, "peft_config", None)
    if found is None or not isinstance(configs, dict):
        return False
    layer: Any = model.get_submodule(found["layer"])
    adapter = found["adapter"] or _active(model)
    how = configs[adapter].init_lora_weights
    if not (isinstance(how, bool) or how == "gaussian"):
        raise UserError(
            f"init_lora_weights true, false or 'gaussian' is needed for a model on the meta device; got {how!r}, which is computed "
            "from the base's weights; build the model on the CPU, or take one of these"
        )
    layer.reset_lora_parameters(adapter, how)
    return True


def write_config(text: str, folder: Path) -> Path:
    """Write an adapter's configuration as PEFT reads it, and return the file's path."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(text), indent=2, sort_keys=True), encoding="utf8")
    return path
