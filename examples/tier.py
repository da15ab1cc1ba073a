"""Train a model whose parameters, gradients and optimizer states rest on a disk: python tier.py [FOLDER] [MODEL]

The model is made on the meta device and initialised module by module, so it is never in memory as a whole.
What stays in memory, what rests there and what is recomputed is the plan's. With zoo:gpt2-xl the folder needs 38 GB.
"""

import sys
import tempfile

import torch

import trainwright as tw
from trainwright.runtime import TierOptions
from trainwright.tiers import Policy

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
name = sys.argv[2] if len(sys.argv) > 2 else "zoo:gpt2-tiny"
loaded = tw.load_model(name, device="meta", batch_size=1, seq_len=32)
num_params = sum(param.numel() for param in loaded.model.parameters())
memory = 10 * num_params + 2**20  # of the 16 bytes that a parameter takes; what does not fit rests on the disk
plan = tw.plan(loaded.model, loaded.batch, hardware="cpu:1", memory=memory, tier=Policy(memory // 8))

module = tw.parallelize(loaded.model, plan, seed=0, tier=TierOptions([folder])).train()
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
module.tier.attach(optimizer)
ids = torch.randint(0, loaded.model.config.vocab_size, (1, 32))
batch = {key: ids if key in ("input_ids", "labels") else torch.ones_like(ids) for key in plan.batch}
for step in range(3):
    optimizer.zero_grad()
    loss = module(**plan.shard_batch(batch)).loss
    loss.backward()
    optimizer.step()
    told = module.tier.told()
    print(
        f"step {step}  loss {loss.item():.4f}  read {told['tier_read_bytes'] / 1e6:.2f} MB  "
        f"written {told['tier_write_bytes'] / 1e6:.2f} MB  waited {told['tier_waited_s']:.2f} s"
    )
module.tier.close()
print(f"the last step stays in {folder}")
