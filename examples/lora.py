"""LoRA adapters over a frozen base: every rank holds a part of the base, the adapter alone is trained and saved.

    trainwright plan examples/lora.py:build --hardware cpu:2 --solver fsdp --memory 1.2MiB -o plan.json
    torchrun --nproc-per-node 2 examples/lora.py plan.json runs/adapter

`runs/adapter` is what PEFT itself writes: `PeftModel.from_pretrained(base, "runs/adapter")` loads it. With a base in files,
build it on the meta device and give `tw.parallelize(model, plan, weights="base/")`: each rank then reads its part alone.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model

import trainwright as tw
from trainwright.launch import process_group, rank

NUM_STEPS = 20


def build(name: str = "llama-tiny", batch_size: int = 4, dropout: float = 0.05, device: str = "cpu"):
    """Return a language model whose weights are frozen but for adapters of its queries and values, and a batch."""
    torch.manual_seed(0)
    base, batch = tw.zoo.build(name, device=device, batch_size=batch_size)
    targets = ["c_attn"] if name.startswith("gpt2") else ["q_proj", "v_proj"]
    config = LoraConfig(
        r=4, lora_alpha=16, lora_dropout=dropout, target_modules=targets, fan_in_fan_out=name.startswith("gpt2"),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(base, config), batch


def main(plan_path: str, folder: str) -> None:
    """Train the adapter, and write it as PEFT does."""
    plan = tw.Plan.from_json(plan_path)
    wrapped, batch = build()
    model = tw.parallelize(wrapped, plan, seed=0)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    part = plan.shard_batch(batch)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(**part).loss
        loss.backward()
        optimizer.step()
        if rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}", flush=True)
    adapter = tw.full_state_dict(model, trainable=True)  # gathers the adapter, not the base
    if rank() == 0:
        wrapped.save_pretrained(folder, state_dict=adapter)


if __name__ == "__main__":
    with process_group():
        main(*sys.argv[1:3])
