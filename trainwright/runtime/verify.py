"""Does a plan compute what one process computes? Loss, every gradient, and the peak that was promised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..artifacts import Plan, Report, UserError
from ..capture._torch_private import flatten_batch
from ..capture.decide import decisions_of
from ..capture.execute import Executor, RunState
from ..capture.export import as_batch, find_loss
from ..capture.lift import lift_dtypes
from ..capture.local import Decisions, build_local
from ..capture.micro_batches import capture_step
from ..capture.program import Program
from ..capture.reshard import SimulatedCommunicator
from ..profiler.allocator import measure, static_bytes
from .module import DTYPES, ParallelModule, _check_ranks, full_gradients, plan_batch
from .train import Timer, train_step

Gradients = Mapping[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
FP64_BAR, FP32_BAR, FP32_FACTOR = 1e-9, 1e-5, 5.0
FLOOR = 1e-3
"""A gradient is compared to at least this share of what it would be if all gradients were equally large."""


@dataclass
class Result:
    """Loss and whole gradients of one way to compute a step."""

    loss: float
    gradients: Gradients


def verify(
    model_fn: Callable[[], Any],
    plan: Plan,
    *,
    dtype: str = "float64",
    make_optimizer: MakeOptimizer | None = None,
    seed: int = 0,
) -> Report:
    """Compare a plan's loss and gradients, dropout off, with one process's; a collective call on the plan's ranks.

    model_fn: returns `(model, batch)` or `(model, batch, loss_fn)`, real and the same on every rank; called anew for each run.
    dtype: `float64` (bar 1e-9; a model's own casts to fp32 are lifted, in both runs) or `fp32` (bar: the larger of 1e-5 and
    five times the same gradient's single-process error of fp32 against float64; the reference is the model itself).
    make_optimizer: parameters → optimizer; with it the peak of two whole steps is measured too.

    Raises `UserError` when the plan is not the model's.
    """
    if dtype not in ("float64", "fp32"):
        raise UserError(f"verify runs in float64 or fp32; got {dtype!r}; choose one of these")
    _check_ranks(plan)
    exact = _single_process(plan, *_parts(model_fn()))
    if dtype == "float64":
        single, parallel = exact, _parallel(plan, *_parts(model_fn()), lifted=True, seed=seed)
        bars = dict.fromkeys(exact.gradients, FP64_BAR)
        loss_bar = FP64_BAR
    else:
        single = _eager(*_parts(model_fn()))
        parallel = _parallel(plan, *_parts(model_fn()), lifted=False, seed=seed)
        own = gradient_errors(single.gradients, exact.gradients)
        bars = {name: max(FP32_BAR, FP32_FACTOR * error) for name, error in own.items()}
        loss_bar = max(FP32_BAR, FP32_FACTOR * relative(single.loss, exact.loss))
    errors = gradient_errors(parallel.gradients, single.gradients)
    worst = max(errors, key=lambda name: errors[name] / bars[name], default="")
    loss_error = relative(parallel.loss, single.loss)
    peaks, step_s = _measured_peaks(plan, *_parts(model_fn()), make_optimizer, seed) if make_optimizer else ((), None)
    passed = loss_error <= loss_bar and all(error <= bars[name] for name, error in errors.items())
    return Report(
        num_ranks=plan.num_ranks,
        dtype=dtype,
        max_relative_error_loss=loss_error,
        max_relative_error_gradient=max(errors.values(), default=0.0),
        worst_gradient=worst,
        bar_loss=loss_bar,
        bar_gradient=bars.get(worst, FP64_BAR),
        passed=passed,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        peak_bytes=peaks,
        budget_bytes=plan.budget_bytes,
        step_s=step_s,
        predicted_step_s=plan.predicted.step_s,
    )


def relative(value: float, reference: float) -> float:
    """Return |value − reference| / |reference|."""
    return abs(value - reference) / max(abs(reference), 1e-300)


def gradient_errors(found: Gradients, reference: Gradients) -> dict[str, float]:
    """Return each gradient's relative error ‖a − b‖ / max(‖b‖, 10⁻³ √(n/N) ‖g‖), g all gradients, n and N element counts.

    A gradient that one side lacks counts as zeros there.

    >>> gradient_errors({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 4.0])})
    {'w': 0.75}
    """
    total = sum(grad.numel() for grad in reference.values())
    norm = math.sqrt(sum(float(grad.double().norm()) ** 2 for grad in reference.values()))
    errors = {}
    for name in {**reference, **found}:
        b = reference.get(name)
        a = found.get(name)
        shown = b if b is not None else a
        assert shown is not None
        zero = torch.zeros((), dtype=torch.float64)
        difference = (a.double() if a is not None else zero) - (b.double() if b is not None else zero)
        floor = FLOOR * math.sqrt(shown.numel() / max(1, total)) * norm
        scale = max(float(b.double().norm()) if b is not None else 0.0, floor, 1e-300)
        errors[name] = float(difference.norm()) / scale
    return errors


def _parts(built: Any) -> tuple[nn.Module, Any, Any]:
    model, batch, *rest = built
    return model, batch, rest[0] if rest else None


def _program(plan: Plan, model: nn.Module, loss_fn: Any, lifted: bool) -> tuple[Program, Decisions]:
    autocast = DTYPES[plan.autocast] if plan.autocast else None
    program = capture_step(model, plan_batch(plan), loss_fn, autocast, plan.micro_batches, plan.corrections)
    decisions = decisions_of(program, plan)
    if lifted:
        lift_dtypes(program)
    return program, decisions


def _as_double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    named, rebuild = flatten_batch(as_batch(batch))
    lift = lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf  # noqa: E731
    return model.double(), rebuild([lift(leaf) for _, leaf in named])


def _single_process(plan: Plan, model: nn.Module, batch: Any, loss_fn: Any) -> Result:
    """The captured program of the whole batch on one process in float64: no split, nothing recomputed."""
    program = capture_step(model, plan_batch(plan), loss_fn, DTYPES[plan.autocast] if plan.autocast else None)
    lift_dtypes(program)
    model, batch = _as_double(model, batch)
    alone = unsplit(program, 1)
    executor = Executor(build_local(program, alone, SimulatedCommunicator(alone.mesh)))
    named = dict(flatten_batch(batch)[0])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers()) | named
    sources = {t: t.value if t.role == "const" else tensors[t.key] for t in program.tensors if t.role != "op"}
    flat = executor.run(sources, RunState(dropout=False))
    loss = flat[program.captured.loss_index]
    loss.backward()
    return Result(float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def unsplit(program: Program, num_axes: int) -> Decisions:
    """Return the decisions of one process: nothing split, everything kept."""
    splits = {group: (-1,) * num_axes for region_class in program.classes for group in region_class.groups}
    return Decisions((1,) * num_axes, splits, dict.fromkeys(program.params, (-1,) * num_axes))


class _NoDropout(TorchFunctionMode):
    """Runs a model as if every dropout probability were zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout"):
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def _eager(model: nn.Module, batch: Any, loss_fn: Any) -> Result:
    """The user's own model, as it stands."""
    model.train()
    batch = as_batch(batch)
    with _NoDropout():
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = find_loss(output) if loss_fn is None else loss_fn(output, batch)
    loss.backward()
    return Result(float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _parallel(plan: Plan, model: nn.Module, batch: Any, loss_fn: Any, lifted: bool, seed: int) -> Result:
    program, decisions = _program(plan, model, loss_fn, lifted)
    if lifted:
        model, batch = _as_double(model, batch)
    module = ParallelModule(model, plan, program, decisions, None, seed, loss_fn is not None)
    module.train()
    module.use_dropout = False
    part = plan.shard_batch(as_batch(batch))
    output = module(**part) if isinstance(part, dict) else module(*part)
    loss = find_loss(output)
    loss.backward()
    return Result(float(loss.detach()), dict(full_gradients(module)))


def _measured_peaks(
    plan: Plan, model: nn.Module, batch: Any, loss_fn: Any, make_optimizer: MakeOptimizer, seed: int
) -> tuple[tuple[int, ...], float]:
    """Every rank's peak over two whole steps, from the allocator's own records, and the time of later ones."""
    program, decisions = _program(plan, model, loss_fn, lifted=False)
    module = ParallelModule(model, plan, program, decisions, None, seed, loss_fn is not None)
    del model
    module.train()
    part = plan.shard_batch(as_batch(batch))
    optimizer = make_optimizer(module.parameters())
    static = static_bytes(module)
    with module.communicator.settling():
        record = measure(lambda: train_step(module, optimizer, part), num_steps=2)
    timer = Timer()
    for _ in range(3):
        with timer:
            train_step(module, optimizer, part)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, static + record.peak_delta_bytes)
    return tuple(int(peak) for peak in gathered), timer.median_s
