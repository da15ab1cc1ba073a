"""Train a GPT-2 under two plans: with exact gradients, and with those of the MLPs' weights estimated from three tenths of the rows.

    python examples/sampled_gradients.py

The loop is the same; the plan says what is kept. `trainwright plan --sampled 0.3` leaves it to the planner where estimates pay;
here a pin asks for them.
"""

from __future__ import annotations

import torch
from plain_loop import Counting

import trainwright as tw

NUM_STEPS, BATCH, LENGTH = 30, 16, 32


def trained(plan: tw.Plan) -> list[float]:
    """Return the losses of a short run under `plan`."""
    torch.manual_seed(0)
    model, _ = tw.zoo.build("gpt2-tiny", batch_size=BATCH, seq_len=LENGTH, device="cpu")
    module = tw.parallelize(model, plan, seed=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    data = Counting(BATCH * NUM_STEPS, LENGTH)
    losses = []
    for step in range(NUM_STEPS):
        rows = [data[index] for index in range(BATCH * step, BATCH * (step + 1))]
        optimizer.zero_grad()
        loss = module(**plan.shard_batch(torch.utils.data.default_collate(rows))).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Plan, train, and print peaks and losses of both."""
    model, batch = tw.zoo.build("gpt2-tiny", batch_size=BATCH, seq_len=LENGTH, device="meta")
    exact = tw.plan(model, batch, hardware="cpu:1")
    sampled = tw.plan(model, batch, hardware="cpu:1", sampled=0.3, pins="*.mlp.c_*=sampled")
    for name, plan in (("exact", exact), ("sampled", sampled)):
        losses = trained(plan)
        kept = f"{plan.predicted.peak_bytes / 2**20:.2f} MiB at the peak"
        print(f"{name}: {kept}; loss {losses[0]:.2f} → {losses[-1]:.2f}")
    print(f"estimated: {', '.join(sampled.sampled)}")


if __name__ == "__main__":
    main()
