"""Are the ratios of optimizers and forms in the plan their ratios in the run?

    python -m benchmarks.optim.forms [--models MODEL ...] [--steps N] [--keep]

For each optimizer and form: the seconds that the plan gives the update, and the processor seconds that it takes, on one
thread of this machine, all in one process and in turns. Ratios are to torch's fused AdamW. The plan is for a device whose
bandwidth and smallest op are measured in the same process as `calibrate` does; `planned / run` is the one ratio over the
other. Models: a name as the command line takes it, or `wide`, four matrices of a million elements each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trainwright as tw
from trainwright import optim
from trainwright.hardware.presets import resolve
from trainwright.launch.cores import num_cores
from trainwright.reports.terminal import rows_table

from ..solvers.record import write

CASES = (
    "adamw/fused", "adamw/foreach", "adamw/loop", "sgd-momentum/fused", "sgd-momentum/loop", "adamax/foreach", "adamax/loop",
    "adamw8bit/fused", "adamw8bit/foreach", "adamw8bit/loop", "sgd8bit/fused", "sgd8bit/loop", "frugal/fused", "frugal/loop",
    "adabelief/fused", "adabelief/foreach", "adabelief/loop", "lion/fused", "lion/loop",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["zoo:gpt2-tiny", "wide"])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/optim-forms.{json,md}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cluster = this_machine()
    sections = {model: measured(model, cluster, given.steps) for model in given.models}
    for model, rows in sections.items():
        print(model)
        print(rows_table(rows))
    remarks = [
        f"device: {cluster.device.bandwidth_bytes_per_s / 1e9:.1f} GB/s, smallest op {cluster.device.launch_s * 1e6:.1f} us, "
        "measured in the same process; one thread, fp32, plans for one rank.",
        "planned, run: of torch's fused AdamW. run: processor time of a step, the median, in turns.",
    ]
    if given.keep:
        write("optim-forms", sections, remarks, packages=(), keep=True)


def this_machine() -> Any:
    """Return `cpu:1` with the bandwidth and the smallest op of one thread."""
    cluster = resolve("cpu:1")
    value, (left, right) = torch.ones(8, requires_grad=True), (torch.ones(1 << 22) for _ in range(2))
    found: dict[str, Any] = {
        "launch_s": seconds(lambda: [value + 1.0 for _ in range(200)]) / 200,
        "bandwidth_bytes_per_s": 12 * left.numel() / seconds(lambda: left + right),
    }
    found["flops_per_s"] = {key: rate / num_cores() for key, rate in cluster.device.flops_per_s.items()}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=found)})


def seconds(call: Callable[[], Any], num_calls: int = 9) -> float:
    taken = []
    for _ in range(num_calls):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def measured(model: str, cluster: Any, num_steps: int) -> list[dict[str, Any]]:
    cases = [Case(model, cluster, *case.split("/")) for case in CASES]
    for _ in range(num_steps):
        for case in cases:
            case.step()
    first, rows = cases[0], []
    for case in cases:
        planned, run = case.planned_s / first.planned_s, case.run_s / first.run_s
        rows.append({
            "optimizer": case.name, "form": case.form, "planned": f"{case.planned_s * 1e3:.3f} ms",
            "run": f"{case.run_s * 1e3:.3f} ms", "planned, ratio": f"{planned:.2f}", "run, ratio": f"{run:.2f}",
            "planned / run": f"{planned / run:.2f}",
        })  # fmt: skip
    return rows


class Case:
    """One optimizer in one form: planned, and run."""

    def __init__(self, model: str, cluster: Any, name: str, form: str) -> None:
        self.name, self.form = name, form
        module, batch, loss_fn = _loaded(model)
        plan = tw.plan(
            module, batch, loss_fn=loss_fn, hardware=cluster, optimizer=name, optimizer_form=form
        )  # fmt: skip
        self.planned_s = plan.predicted.update_s
        self.module = tw.parallelize(module, plan, loss_fn=loss_fn)
        self.optimizer = optim.of_plan(plan).make(self.module.named_parameters())
        for param in self.module.parameters():
            param.grad = torch.randn_like(param) * 1e-2
        for _ in range(3):
            self.optimizer.step()
        self.taken_s: list[float] = []

    @property
    def run_s(self) -> float:
        return statistics.median(self.taken_s)

    def step(self) -> None:
        began = time.process_time()
        self.optimizer.step()
        self.taken_s.append(time.process_time() - began)


def _loaded(model: str) -> tuple[nn.Module, Any, Any]:
    if model == "wide":
        layers = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
        return nn.Sequential(*layers), (torch.ones(4, 1024), torch.ones(4, 1024)), nn.MSELoss()
    loaded = tw.load_model(model)
    return loaded.model, loaded.batch, loaded.loss_fn


if __name__ == "__main__":
    main()
