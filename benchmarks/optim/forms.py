"""Is the order of optimizers and forms in the plan their order in the run?

    python -m benchmarks.optim.forms [--model zoo:gpt2-tiny] [--steps N]

For each optimizer and form: the seconds that the plan gives the update, and the processor seconds that it takes, on one
thread of this machine, all in one process and in turns. Ratios are to torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import trainwright as tw
from trainwright import optim
from trainwright.reports.terminal import rows_table

CASES = (("adamw", "fused"), ("adamw", "loop"), ("adamw8bit", "fused"), ("adamw8bit", "loop"), ("adamax", "loop"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:gpt2-tiny")
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = tw.load_model(options.model)
    cases = [Case(loaded, *case) for case in CASES]
    for _ in range(options.steps):
        for case in cases:
            case.step()
    first = cases[0]
    print(rows_table([
        {
            "optimizer": case.name, "form": case.form,
            "planned": f"{case.planned_s * 1e3:.3f} ms", "run": f"{case.run_s * 1e3:.3f} ms",
            "planned, ratio": f"{case.planned_s / first.planned_s:.2f}", "run, ratio": f"{case.run_s / first.run_s:.2f}",
        }
        for case in cases
    ]))  # fmt: skip
    orders = [[case.label for case in sorted(cases, key=key)] for key in (lambda c: c.planned_s, lambda c: c.run_s)]
    print("in the plan:", " < ".join(orders[0]), "\nin the run: ", " < ".join(orders[1]))


class Case:
    """One optimizer in one form: planned, and run."""

    def __init__(self, loaded: Any, name: str, form: str) -> None:
        self.name, self.form, self.label = name, form, f"{name}/{form}"
        plan = tw.plan(
            loaded.model, loaded.batch, loss_fn=loaded.loss_fn, hardware="cpu:1", optimizer=name, optimizer_form=form
        )
        self.planned_s = plan.predicted.update_s
        self.module = tw.parallelize(loaded.model, plan, loss_fn=loaded.loss_fn)
        self.optimizer = optim.of_plan(plan).make(self.module.named_parameters())
        for param in self.module.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()
        self.taken_s: list[float] = []

    @property
    def run_s(self) -> float:
        return statistics.median(self.taken_s)

    def step(self) -> None:
        began = time.process_time()
        self.optimizer.step()
        self.taken_s.append(time.process_time() - began)


if __name__ == "__main__":
    main()
