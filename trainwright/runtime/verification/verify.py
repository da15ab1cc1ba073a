"""Verifies a plan against one process: loss, gradients, buffers, update, evaluation, and the predicted peak.

The update is compared with one process's optimizer *given the plan's own gradients*: those have been compared already, and an
optimizer that uses signs turns the rounding of a zero gradient into a whole step. So the comparison tests only how the
optimizer handles shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...artifacts import BatchEntry, Plan, Report, UserError
from ...capture.call import check_same_loss, find_loss
from ...capture.export import as_batch
from ...profiler.kernels.allocator import measure, peak_on_gpu, static_bytes
from ...program.decisions import Decisions
from ...program.lift import lift_dtypes
from ...program.plan_text import decisions_of
from ...program.program import Program
from ...program.sampling import sampled_params
from ...torch_internals.dtypes import default_dtype, in_precision
from ..batch import to_device
from ..module import ParallelModule, _check_ranks, full_gradients, full_state_dict, planned_program
from ..pipe import check_stages
from ..training.train import Timer, train_step
from .comparison import (
    FP64_BAR,
    NUM_DRAWS,
    Draws,
    Worst,
    bar_of,
    buffer_errors,
    changes,
    gradient_errors,
    output_errors,
    relative,
    worst_of,
)
from .ranks_draws import RanksDraws
from .reference import Eager, Exact, MakeOptimizer, Reference, StepResults, Tensors, as_double, outputs_of

PeakOf = Callable[[Program, Decisions, Sequence[int], Mapping[str, list[int]]], int]
"""Predicts the peak of the rank at some coordinates, given the rows that each of its ops counted."""


def verify(
    model_fn: Callable[[], Any],
    plan: Plan,
    *,
    dtype: str = "float64",
    make_optimizer: MakeOptimizer | None = None,
    seed: int = 0,
    peak_of: PeakOf | None = None,
) -> Report:
    """Compare a plan's results, without dropout, with those of one process; a collective call on the plan's ranks.

    It compares the loss, every gradient, every buffer after the step, the change of every parameter by one step of the
    optimizer (given the same gradients), and then loss and outputs in evaluation mode, on the same batch.

    model_fn: returns `(model, batch)` or `(model, batch, loss_fn)` with values that are equal on every rank; called for each run.
    dtype: `float64` (bar 1e-9; a model's own casts to fp32 are lifted, in both runs) or `fp32` (bar: the larger of 1e-5 and
    five times the same tensor's single-process error of fp32 against float64; the reference is the model itself, or what was
    captured of it where it draws random numbers).
    make_optimizer: named parameters → optimizer; with it the update is compared, and the peak of two steps is measured.
    peak_of: predicts a rank's peak again from the measured rows, for plans whose rows depend on the data.

    Raises `UserError` when the plan is not the model's.
    """
    if dtype not in ("float64", "fp32"):
        raise UserError(f"verify runs in float64 or fp32; got {dtype!r}; choose one of these")
    check_stages(plan)
    _check_ranks(plan)
    on_disks = plan.tier is not None  # whose peak is of a run there
    plan = plan.in_memory()
    found = _Comparison(model_fn, plan, dtype == "float64", make_optimizer, seed).run()
    measured = _measured(plan, model_fn, make_optimizer, seed, peak_of) if make_optimizer and not on_disks else {}
    return Report(
        num_ranks=plan.num_ranks,
        dtype=dtype,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        rank_peak_bytes=_stage_peaks(plan),
        budget_bytes=plan.budget_bytes,
        predicted_step_s=plan.predicted.step_s,
        **{"peak_bytes": (), **measured},
        **found,
    )


def _stage_peaks(plan: Plan) -> tuple[int, ...]:
    """Return, for each rank, the predicted peak of its stage; nothing for a plan without stages."""
    ranks = plan.num_ranks // plan.num_stages
    return tuple(stage.peak_bytes for stage in plan.predicted.stages for _ in range(ranks))


class _Comparison:
    """Compares the plan's run with one process's in the same precision; in fp32, one process's in float64 sets the bars."""

    def __init__(
        self, model_fn: Callable[[], Any], plan: Plan, is_exact: bool, make_optimizer: MakeOptimizer | None, seed: int
    ) -> None:
        self.make_optimizer, self.seed = make_optimizer, seed
        self.has_no_logits = plan.loss_chunks > 0
        """Whether outputs may be missing: a loss in chunks does not materialise its logits."""
        self.notes: list[str] = []
        self.parallel = _Parallel(plan, *_parts(model_fn()), lifted=is_exact, seed=seed)
        ranks = self.parallel.ranks
        self.exact = Exact(plan, *_parts(model_fn()), ranks)
        self.single: Reference = self.exact
        if not is_exact:
            parts = _parts(model_fn())
            self.single = Exact(plan, *parts, ranks, lifted=False) if ranks.keys else Eager(*parts)

    def run(self) -> dict[str, Any]:
        """Run all comparisons and return the fields of the report."""
        parallel, single = self.parallel.step(), self.single.step()
        exact = single if self.exact is self.single else self.exact.step()
        draws = self.parallel.draws
        worst = {
            "gradient": self._gradients(parallel, single, exact),
            "bias": None if draws is None else draws.worst(),
            "buffer": self._buffers(parallel, single, exact),
            "update": self._update(parallel.gradients),
            "evaluation": self._evaluation(),
        }
        loss_error, own_error = relative(parallel.loss, single.loss), relative(single.loss, exact.loss)
        loss_bar = FP64_BAR if single is exact else bar_of(own_error)
        fields: dict[str, Any] = {"max_relative_error_loss": loss_error, "bar_loss": loss_bar}
        for what, found in worst.items():
            if found is not None:
                fields |= {
                    f"max_relative_error_{what}": found.error,
                    f"worst_{what}": found.name,
                    f"bar_{what}": found.bar,
                }
        holds = all(found.holds for found in worst.values() if found is not None)
        if draws is not None:
            fields["sampled_variance"] = draws.relative_variance()
            self.notes.append(
                f"the plan estimates {len(draws.exact)} gradients, whose mean over {draws.num} draws was compared; with all rows "
                f"kept they are compared as the others are; the variance of one draw is up to {fields['sampled_variance']:.2g} of "
                "the gradient's square"
            )
        return {**fields, "passed": loss_error <= loss_bar and holds, "notes": tuple(self.notes)}

    def _gradients(self, parallel: StepResults, single: StepResults, exact: StepResults) -> Worst:
        """Compare the gradients; those that the plan estimates as they are with all rows kept."""
        own = None if single is exact else gradient_errors(single.gradients, exact.gradients)
        draws = self.parallel.draws
        found = parallel.gradients if draws is None else {**parallel.gradients, **draws.exact}
        return worst_of(gradient_errors(found, single.gradients), own)

    def _buffers(self, parallel: StepResults, single: StepResults, exact: StepResults) -> Worst | None:
        """Return the worst error of the buffers over all ranks, since every rank holds all buffers."""
        if not single.buffers:
            return None
        own = None if single is exact else buffer_errors(single.buffers, exact.buffers, self.exact.before)
        found = worst_of(buffer_errors(parallel.buffers, single.buffers, self.single.before), own)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        worst: Worst = max(everywhere, key=lambda one: one.error / one.bar)
        return worst

    def _update(self, gradients: Tensors) -> Worst | None:
        make = self.make_optimizer
        if make is None:
            return None
        parallel, single = (self._updated(side, make, gradients) for side in (self.parallel, self.single))
        own = None
        if self.exact is not self.single:
            exact = self._updated(self.exact, make, gradients)
            own = gradient_errors(changes(single, self.single.before), changes(exact, self.exact.before))
        before = self.single.before
        return worst_of(gradient_errors(changes(parallel, before), changes(single, before)), own)

    def _updated(self, side: Reference | _Parallel, make: MakeOptimizer, gradients: Tensors) -> Tensors:
        """Return a side's parameters after an update, for which all sides have the same random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return side.update(make, gradients)

    def _evaluation(self) -> Worst | None:
        try:
            exact = self.exact.evaluate()
        except UserError as error:
            self.notes.append(f"evaluation was not compared: {error}")
            return None
        single = exact if self.exact is self.single else self.single.evaluate()
        found = self.parallel.evaluate()
        if self.has_no_logits:
            single, exact = ({name: side[name] for name in found if name in side} for side in (single, exact))
        own = None if self.exact is self.single else output_errors(single, exact)
        return worst_of(output_errors(found, single), own)


class _Parallel:
    """Runs the plan's step, update and evaluation on this rank."""

    def __init__(self, plan: Plan, model: nn.Module, batch: Any, loss_fn: Any, lifted: bool, seed: int) -> None:
        program, decisions = _program(plan, model, loss_fn, lifted)
        if lifted:
            model, batch = as_double(model, batch)
            plan = plan.model_copy(update={"batch": {name: _double_entry(entry) for name, entry in plan.batch.items()}})
        self.module = ParallelModule(model, plan, program, decisions, None, seed, loss_fn is not None)
        self.module.train()
        self.module.use_dropout = False
        self.ranks = RanksDraws(program, decisions, seed, self.module.device)
        """The random numbers that all ranks draw, for the reference."""
        self._dtype = torch.float64 if lifted else torch.get_default_dtype()
        self._part = plan.shard_batch(as_batch(batch))
        self._sampled = sampled_params(program, decisions.splits)
        self.draws: Draws | None = None
        """The comparison of the gradients that the plan estimates, once `step` was called; None where it estimates none."""

    def step(self) -> StepResults:
        with default_dtype(self._dtype):
            if self._sampled:
                self._draw()
                self.module.num_steps = 0  # of the random numbers that the reference draws
            loss = find_loss(self._output())
            loss.backward()
        buffers = self._of_all_stages({name: buffer.detach().clone() for name, buffer in self.module.named_buffers()})
        return StepResults(float(loss.detach()), _on_host(full_gradients(self.module)), _on_host(buffers))

    def _draw(self) -> None:
        """Take the gradients that the plan estimates with all rows kept, and in several draws; nothing of it remains."""
        self.module.use_sampling = False
        self.draws = Draws(self._estimated())
        self.module.use_sampling = True
        for _ in range(NUM_DRAWS):
            self.draws.add(self._estimated())

    def _estimated(self) -> dict[str, torch.Tensor]:
        buffers = [buffer.detach().clone() for buffer in self.module.buffers()]
        find_loss(self._output()).backward()
        found = _on_host({name: value for name, value in full_gradients(self.module).items() if name in self._sampled})
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), buffers):
                buffer.copy_(before)
        return found

    def update(self, make_optimizer: MakeOptimizer, gradients: Tensors) -> Tensors:
        """Return the whole parameters after one step of the optimizer, which uses this rank's own gradients."""
        make_optimizer(self.module.named_parameters()).step()
        self.module.zero_grad(set_to_none=True)
        whole = full_state_dict(self.module)
        return _on_host({name: whole[name] for name in self.module.names})

    def evaluate(self) -> Tensors:
        """Return loss and whole outputs in evaluation mode."""
        self.module.eval()
        self.module.num_steps = 0
        with torch.no_grad(), default_dtype(self._dtype):
            found = outputs_of(self._output())
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        return _on_host(self._of_all_stages(whole))

    def _of_all_stages(self, own: Tensors) -> Tensors:
        pipe = self.module.pipe
        return dict(own) if pipe is None else pipe.merged(own, self.module.device)

    def _output(self) -> Any:
        return self.module(**self._part) if isinstance(self._part, dict) else self.module(*self._part)


def _on_host(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the values where those of one process are; a plan's may be on a GPU."""
    return {name: value.detach().cpu() for name, value in tensors.items()}


def _parts(built: Any) -> tuple[nn.Module, Any, Any]:
    model, batch, *rest = built
    return model, batch, rest[0] if rest else None


def _program(plan: Plan, model: nn.Module, loss_fn: Any, lifted: bool) -> tuple[Program, Decisions]:
    check_same_loss(plan, loss_fn)
    program = planned_program(plan, model, loss_fn)
    decisions = decisions_of(program, plan)
    if lifted:
        lift_dtypes(program)
    return program, decisions


def _double_entry(entry: BatchEntry) -> BatchEntry:
    dtype = in_precision(getattr(torch, entry.dtype), torch.float64)
    return entry.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})


@dataclass(frozen=True)
class _OnRank:
    """The measurements of one rank."""

    peak_bytes: int
    routed_peak_bytes: int | None
    imbalance: float | None


def _measured(
    plan: Plan, model_fn: Callable[[], Any], make_optimizer: MakeOptimizer, seed: int, peak_of: PeakOf | None
) -> dict[str, Any]:
    """Return the measured fields of a report: every rank's peak over two whole steps, and the time of later ones."""
    model, batch, loss_fn = _parts(model_fn())
    program, decisions = _program(plan, model, loss_fn, lifted=False)
    module = ParallelModule(model, plan, program, decisions, None, seed, loss_fn is not None)
    del model
    module.train()
    part = to_device(plan.shard_batch(as_batch(batch)), module.device)
    optimizer, routed = make_optimizer(module.named_parameters()), module.communicator.routed

    def step() -> None:
        routed.clear()  # optimizer states are there from the second step on: that one's rows are those of the peak
        train_step(module, optimizer, part)

    with module.communicator.settling():
        peak_bytes = _peak_of(step, module, optimizer)
    seen = routed.clear()
    timer = Timer()
    for _ in range(3):
        with timer:
            train_step(module, optimizer, part)
            if module.device.type == "cuda":
                torch.cuda.synchronize()  # kernels are only queued until then
    rows = {key: each.numbers for key, each in seen.items()}
    again = peak_of(program, decisions, module.communicator.coords, rows) if routed.ever and peak_of else None
    own = _OnRank(peak_bytes, again, max((each.factor for each in seen.values()), default=None))
    return {**_of_ranks(own), "step_s": timer.median_s}


def _peak_of(step: Callable[[], None], module: ParallelModule, optimizer: torch.optim.Optimizer) -> int:
    """Return the peak of two steps, on the rank's device: that of the second, which finds optimizer state."""
    if module.device.type == "cuda":
        step()
        return peak_on_gpu(step, module, optimizer)
    return static_bytes(module) + measure(step, num_steps=2).peak_delta_bytes


def _of_ranks(own: _OnRank) -> dict[str, Any]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    routed = tuple(rank.routed_peak_bytes for rank in ranks if rank.routed_peak_bytes is not None)
    factors = [rank.imbalance for rank in ranks if rank.imbalance is not None]
    return {
        "peak_bytes": tuple(rank.peak_bytes for rank in ranks),
        "routed_peak_bytes": routed,
        "expert_imbalance": max(factors, default=None),
    }
