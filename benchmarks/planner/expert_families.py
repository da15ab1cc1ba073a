"""Every family that transformers dispatches through one place: a tiny model captured with the op, against its own loop, in float64.

    python -m benchmarks.planner.expert_families [FAMILY …] [--record]

A family is a module of transformers that decorates experts with `use_experts_implementation`. Its configuration is made small by
the names of its fields alone. `same`: the captured step's loss and all gradients are those of the model's eager loop.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.oracle import eager_step, graph_step
from trainwright.artifacts import UserError
from trainwright.capture.export import capture
from trainwright.ops.experts import EXPERTS

RESULT = Path(__file__).parent.parent / "results" / "expert-families.jsonl"
BAR = 1e-10
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "vocab_size_per_layer_input": 331,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "dense_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 16,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "max_position_embeddings": 128,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "sliding_window": 16,
    "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "enable_moe_block": True,
    "decoder_sparse_step": 1,
}
"""Small sizes by the names that configurations have."""
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "mlp_only_layers", "moe_layers", "rope_parameters")
OFTEN_UNSET = ("num_experts_per_tok", "head_dim", "moe_topk", "moe_intermediate_size")
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
MOST_PARAMS = 20_000_000


def families() -> list[str]:
    """Return the modules of transformers that dispatch experts through the one place."""
    folder = Path(transformers.__file__).parent / "models"
    found = (p for p in folder.glob("*/modeling_*.py") if "use_experts_implementation" in p.read_text(encoding="utf8"))
    return sorted(path.parent.name for path in found)


def build(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a causal model of a family with two layers and random weights, and a batch."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_class, model_class = _causal(module)
    config = small(config_class)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        num_params = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_params > MOST_PARAMS:
        raise ValueError(f"{num_params / 1e6:.0f} M parameters: some size of this configuration has another name")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = model_class(config).double()
    finally:
        torch.set_default_dtype(before)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1.0 + 0.1 * random if "norm" in name and parameter.dim() == 1 else 0.05 * random)
    ids = torch.randint(3, 331, (2, 16), generator=draw)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def _causal(module: Any) -> tuple[type, type]:
    own = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    ranked = [
        each for ending in ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification", "ForMaskedLM")
        for each in own if each.__name__.endswith(ending) and getattr(each, "config_class", None) is not None
    ]  # fmt: skip
    if not ranked:
        raise LookupError("no class with a head of tokens")
    return ranked[0].config_class, ranked[0]


def small(config_class: type) -> Any:
    """Return a configuration with the small sizes of the fields that it has, those of configurations inside it included."""
    base = config_class()
    known = base.to_dict()
    chosen: dict[str, Any] = {
        key: value for key, value in SIZES.items() if key in known and (known[key] is not None or key in OFTEN_UNSET)
    }
    if (
        "qk_rope_head_dim" in known
    ):  # latent attention: as many keys as queries; `head_dim`, where it is one, is the rotary part's
        chosen |= {key: value for key, value in LATENT.items() if key in known}
    for key, value in known.items():
        if isinstance(value, list) and key in PER_LAYER and value:
            chosen[key] = _ends(value)
        elif key.endswith("_config") and isinstance(value, dict) and hasattr(getattr(base, key), "to_dict"):
            chosen[key] = small(type(getattr(base, key))).to_dict()
    return config_class(**chosen)


def _ends(per_layer: list[Any]) -> list[Any]:
    """The first layer's kind and the last's: mixtures begin late in many models, and kinds alternate."""
    return [per_layer[0], per_layer[-1]] if len(per_layer) > 1 else per_layer


def compared(family: str) -> dict[str, Any]:
    """Return how a family's captured step differs from its own loop's, or why it cannot be said."""
    found: dict[str, Any] = {"family": family}
    try:
        model, batch = build(family)
    except Exception as error:  # the generic configuration does not suit every family: that is what the record says
        return {**found, "outcome": "no tiny model", "why": _short(error)}
    try:
        wanted = eager_step(model, batch)
    except Exception as error:
        return {**found, "outcome": "its own loop does not run", "why": _short(error)}
    try:
        captured = capture(model, batch)
    except (UserError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        return {**found, "outcome": "not captured", "why": _short(error)}
    num_ops = sum(node.target is EXPERTS for node in captured.graph.nodes)
    graph = graph_step(captured, model, batch)
    errors = {"loss": _relative(graph.loss, wanted.loss), "gradient": _worst(graph.gradients, wanted.gradients)}
    if num_ops == 0:
        return {**found, "outcome": "no experts in the tiny model", **errors}
    same = all(error <= BAR for error in errors.values())
    return {**found, "outcome": "same" if same else "differs", "experts_ops": num_ops, **errors}


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient, relative to its norm or a thousandth of all; infinite where one is missing."""
    if found.keys() != wanted.keys() or not wanted:
        return math.inf
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    return max(float((found[n] - g).norm() / max(g.norm(), 1e-3 * whole)) for n, g in wanted.items())


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs() / b.abs())


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row a family."""
    for name in names:
        began = time.process_time()
        yield {**compared(name), "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    """Print and keep a row a family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for row in rows(asked.families or families()):
        text = json.dumps(row)
        print(text, flush=True)
        if asked.record:
            with RESULT.open("a", encoding="utf8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
