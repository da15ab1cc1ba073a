"""Planned models inside other training loops: `hf` (Hugging Face's Trainer), `accelerate`, `fabric` (Lightning).

    trainwright.integrations.hf.PlannedTrainer              in place of `transformers.Trainer`
    trainwright.integrations.accelerate.PlannedAccelerator  in place of `accelerate.Accelerator`
    trainwright.integrations.fabric.PlannedStrategy         a strategy for `lightning.Fabric`

Each module imports its library; where that is missing, the error says what to install. In all three, a loader yields the
whole batch on every rank, the module takes its own part of it, and what the rest of the loop sees (losses, predictions,
metrics) is the whole batch's.
"""
