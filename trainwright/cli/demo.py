"""`trainwright demo`: the whole line on this machine, from profile to measurement, in a few minutes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import Cluster, Plan, Profile, Refusal, Report, need
from ..reports.terminal import cluster_table, compare_table, plan_table, report_table
from ..reports.terminal_profile import profile_table
from ..reports.units import format_bytes, format_s
from .errors import FAILED, OK
from .model import ModelOptions
from .output import quiet_stdout, status
from .places import check_file, check_readable
from .progress import StepProgress
from .ranks import run_worker
from .train import WORKER, summary
from .verify import holds, run_verification

if TYPE_CHECKING:
    from ..models.targets import Loaded

NUM_RANKS = 2
SETTINGS = ("n_layer=6", "n_embd=384", "n_head=6", "n_positions=256", "vocab_size=260")
"""GPT-2 in small, with a token for each byte."""
MODEL = ModelOptions("zoo:gpt2", batch_size=8, seq_len=256, settings=list(SETTINGS))
BUDGET_SHARES = (0.5, 0.65, 0.8, 0.9)
"""Of what plain data parallelism takes: the budgets that are tried, until the joint plan fits."""
LEARNING_RATE = 1e-3


def demo(
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Text to learn; repeatable. Default: Python's own library.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Training steps.")] = 20,
    html_path: Annotated[str, typer.Option("--html", metavar="FILE", help="Where the report goes.")] = (
        "trainwright-demo.html"
    ),
) -> int:
    """Profile, plan, train and verify a GPT-2 on two processes of this machine, and write a report."""
    need("transformers", "the demo")
    check_readable("--data", data or [])
    check_file("--html", html_path)
    tour = _Tour(MODEL, data or python_library())
    print(f"MODEL is {_as_arguments(MODEL)}")
    tour.profile()
    tour.calibrate()
    tour.plan()
    tour.train(steps)
    tour.verify()
    tour.write(html_path)
    return OK if tour.verified else FAILED


def python_library() -> list[str]:
    """Return the modules of Python's standard library, its packages left out, the largest first."""
    files = Path(os.__file__).parent.glob("*.py")
    return [str(path) for path in sorted(files, key=lambda path: (-path.stat().st_size, path.name))]


@dataclass
class _Tour:
    """The steps of the demo; each shows its answer and leaves it for the next."""

    options: ModelOptions
    files: list[str]
    _begun_s: float = field(default_factory=time.perf_counter)
    _step: int = 0
    _loaded: Loaded = field(init=False)
    _profile: Profile = field(init=False)
    _cluster: Cluster = field(init=False)
    _comparison: Mapping[str, Plan | Refusal] = field(init=False)
    _plan: Plan = field(init=False)
    _step_s: float = field(init=False)
    _report: Report = field(init=False)

    def profile(self) -> None:
        self._heading("What does a step of this model cost? (nothing is run)", "profile MODEL")
        with quiet_stdout(), status("profiling"):
            import trainwright as tw

            self._loaded = self.options.load()
            self._profile = tw.profile(self._loaded.model, self._loaded.batch, name="gpt2, 6 × 384")
        print(profile_table(self._profile))

    def calibrate(self) -> None:
        self._heading(
            f"What does this machine reach, with {NUM_RANKS} processes?",
            f"calibrate --quick --nproc {NUM_RANKS} -o machine.json",
        )
        with quiet_stdout(), status("measuring") as tell:
            import trainwright as tw

            self._cluster = tw.calibrate(NUM_RANKS, quick=True, progress=tell)
        print(cluster_table(self._cluster))

    def plan(self) -> None:
        self._heading(
            "How should it be trained where memory is short?",
            "plan MODEL --hardware machine.json --memory M --compare -o plan.json",
        )
        with quiet_stdout(), status("planning") as tell:
            peak = self._planned("ddp", None, tell).predicted.peak_bytes
        print(f"Plain data parallelism (ddp) takes {format_bytes(peak)} a process.")
        budget_bytes, self._comparison = self._tight_budget(peak)
        print(f"With {format_bytes(budget_bytes)} a process, all recipes priced by the same simulator:\n")
        print(compare_table(self._comparison))
        best = self._comparison["joint"]
        if not isinstance(best, Plan):
            raise best
        self._plan = best
        print(plan_table(best))

    def train(self, num_steps: int) -> None:
        size = sum(os.path.getsize(path) for path in self.files)
        self._heading(
            f"Train the joint plan on {NUM_RANKS} processes: {len(self.files)} files, {format_bytes(size)} of text",
            f"train MODEL --plan plan.json --steps {num_steps} --lr {LEARNING_RATE} --data FILE…",
        )
        payload = {
            "model": self.options.payload(),
            "plan": self._plan.to_json(),
            "steps": num_steps,
            "lr": LEARNING_RATE,
            "seed": 0,
            "data": self.files,
        }
        with quiet_stdout(), StepProgress(num_steps, self._plan) as progress:
            run_worker(WORKER, payload, self._plan, NUM_RANKS, progress.on_event)
        self._step_s = statistics.median(event["step_s"] for event in progress.steps[1:])
        print(summary(progress.steps, self._plan))

    def verify(self) -> None:
        self._heading(
            "Does it compute what one process computes, in the memory promised?", "verify MODEL --plan plan.json"
        )
        with quiet_stdout(), status("verifying in float64"):
            found = run_verification(self.options, self._plan, "float64", NUM_RANKS)
        self._report = found.model_copy(update={"step_s": self._step_s})
        print(report_table(self._report))

    def write(self, path: str) -> None:
        from ..reports.html import write_plan
        from .plan import details

        with quiet_stdout(), status("writing the report"):
            more = details(self._plan, self._loaded)
            write_plan(
                self._plan, path, comparison=self._comparison, profile=self._profile, report=self._report, **more
            )
        print(f"The report: {path}\nIn all {format_s(time.perf_counter() - self._begun_s)}.")

    @property
    def verified(self) -> bool:
        """Same maths, and no rank above its budget."""
        return holds(self._report)

    def _heading(self, text: str, by_hand: str) -> None:
        self._step += 1
        print(f"\n── {self._step}. {text}\n   $ trainwright {by_hand}\n", flush=True)

    def _planned(self, solver: str, memory: int | None, tell: Any) -> Plan:
        import trainwright as tw

        return tw.plan(
            self._loaded.model,
            self._loaded.batch,
            hardware=self._cluster,
            memory=memory,
            solver=solver,
            model_ref=self._loaded.ref,
            progress=tell,
        )

    def _tight_budget(self, ddp_peak_bytes: int) -> tuple[int, Mapping[str, Plan | Refusal]]:
        """Return the smallest of a few budgets below what ddp takes at which the joint plan fits, and all recipes."""
        import trainwright as tw

        for share in BUDGET_SHARES:
            budget_bytes = int(share * ddp_peak_bytes)
            with quiet_stdout(), status(f"planning for {format_bytes(budget_bytes)} a process") as tell:
                comparison = tw.compare(
                    self._loaded.model,
                    self._loaded.batch,
                    hardware=self._cluster,
                    memory=budget_bytes,
                    model_ref=self._loaded.ref,
                    progress=tell,
                )
            if isinstance(comparison["joint"], Plan):
                break
        return budget_bytes, comparison


def _as_arguments(model: ModelOptions) -> str:
    """The model as one writes it on the command line."""
    settings = " ".join(f"--set {setting}" for setting in model.settings or [])
    return f"{model.spec} --batch-size {model.batch_size} --seq-len {model.seq_len} {settings}"
