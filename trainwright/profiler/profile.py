"""Profiles a training step by running the user's own model on fake tensors, which take no memory."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import Cluster, Profile, UserError
from ..capture.export import as_batch
from ..capture.export_errors import ValuesNeeded, explained
from ..torch_internals import private
from ..torch_internals.fakes import FakeMode, fake_like, faked, new_mode
from ..torch_internals.trees import tensors_in
from .compiled import CompiledStep, has_compiled
from .graph import MAX_FORWARD_OPS, not_tried, try_capture
from .processes import MakeModel, imagined, is_exchange
from .run import MakeOptimizer, ObservedStep, Question
from .step import DTYPES, LossFn
from .values import KnownValues, keeps_values


def profile(
    model: nn.Module | MakeModel,
    batch: Any = None,
    *,
    loss_fn: LossFn | None = None,
    make_optimizer: MakeOptimizer | None = None,
    optimizer: str = "adamw",
    autocast: str | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    clip_norm: float | None = None,
    processes: int = 1,
    expandable_segments: bool = False,
    hardware: Cluster | None = None,
    name: str = "",
    capture: bool | None = False,
    capture_s: float | None = None,
    timeline: bool = True,
    run: bool = False,
    compile: bool = False,
    cuda_graphs: bool = False,
) -> Profile:
    """Predict memory, FLOPs and time of a steady-state training step without running it or taking its memory.

    `reference_step` runs on fake CPU tensors, as the second of a training would. `model` (on any device, meta
    included) and `batch` are not touched. `make_optimizer(params)` defaults to AdamW; `optimizer` is its name in the
    report. `autocast` is a dtype name (`"bf16"`); `accumulate` micro-batches like `batch` make one step;
    `keep_grads` zeroes gradients instead of dropping them, `clip_norm` clips them before the update. With
    `hardware` the step's time is predicted on one of its devices, and a GPU's differences from the CPU are modelled.

    `model` may be a function that makes and wraps a model (`fully_shard`, `parallelize_module`) as the script of one of
    `processes` processes does, and may return its batch, and a loss, beside it; the batch is this process's. It is called
    where `torch.distributed` is initialised with that many, of which the others are imagined; meshes are of type `cpu`.

    capture: also capture the model as a graph, as a plan needs it; `capture_s` is then how long that took, and where it
    fails a note says why. None: where the forward has few enough ops. `capture_s` hands over an earlier capture's time.
    compile: the model runs as `torch.compile(model)` would have it (compiled.py); cuda_graphs: in its mode `reduce-overhead`.
    run: if the model cannot run without values, run two real steps of a copy of it instead, and take their figures.

    Raises `UserError` when the model does not run on the batch; `ValuesNeeded`, with the line, when it asks for values.

    >>> costs = profile(nn.Linear(30, 20, bias=False), (torch.zeros(10, 30),), loss_fn=lambda out, batch: out.sum())
    >>> costs.num_params, costs.forward_flops, costs.backward_flops
    (600, 12000, 12000)
    >>> costs.grad_bytes, costs.optimizer_bytes
    (2400, 4804)
    """
    if clip_norm is not None and not clip_norm > 0:
        raise UserError(f"a norm above 0 is needed to clip gradients to; got {clip_norm:g}; try 1.0")
    start = time.perf_counter()
    device = hardware.device if hardware is not None else None
    make = make_optimizer or _adamw
    wrap = None if isinstance(model, nn.Module) else model
    links = () if wrap is None or hardware is None else hardware.links
    module = model if isinstance(model, nn.Module) else nn.Module()
    question = Question(
        module,
        {} if batch is None else as_batch(batch),
        loss_fn,
        autocast,
        accumulate,
        device,
        timeline,
        links,
        keep_grads,
        clip_norm,
        expandable_segments,
        compile or cuda_graphs,
        cuda_graphs,
    )
    _check_compiled(question, run, wrap is not None)
    if wrap is None and (processes > 1 or batch is None):
        raise UserError(
            f"a function that makes and wraps the model is needed for {processes} processes, and a batch for a model; "
            f"got a {type(model).__name__}; wrap it in a function, or leave the processes out and give a batch"
        )
    if wrap is not None:
        found, notes = _wrapped(question, make, wrap, processes)
        return _profile_of(found, name, optimizer, notes, time.perf_counter() - start, None)
    found, notes = _followed(question, make, run)
    profile_s = time.perf_counter() - start
    if capture or (capture is None and capture_s is None):
        capture_s, note = _captured(question, found, is_asked=bool(capture))
        notes += note
    return _profile_of(found, name or type(model).__name__, optimizer, notes, profile_s, capture_s)


def _profile_of(
    found: ObservedStep, name: str, optimizer: str, notes: list[str], profile_s: float, capture_s: float | None
) -> Profile:
    model, device = found.model, found.question.device
    return Profile(
        model=name or type(model).__name__,
        dtype=_dtype_name(model),
        optimizer=optimizer,
        target=device.name if device is not None else "cpu",
        num_params=sum(param.numel() for param in model.parameters()),
        grad_bytes=found.grad_bytes,
        optimizer_bytes=found.optimizer_bytes,
        param_bytes=found.static["param"],
        buffer_bytes=found.static["buffer"],
        saved_bytes=found.tracker.saved_bytes,
        peak_bytes=found.tracker.peak_bytes,
        peak_at=found.tracker.peak_at,
        breakdown=found.breakdown(),
        reserved_bytes=found.reserved_bytes,
        forward_flops=found.totals.total("forward", "heavy"),
        backward_flops=found.totals.total("backward", "heavy"),
        other_flops=found.totals.total(None, "other"),
        num_ops=found.tracker.num_ops,
        step_s=found.totals.step_s if device is not None else None,
        capture_s=capture_s,
        profile_s=profile_s,
        modules=found.modules(),
        ops=found.totals.hottest(found.model),
        timeline=found.timed_timeline(),
        notes=tuple(notes),
        compiled=None if found.compiled is None else found.compiled.found(),
    )


def _check_compiled(question: Question, may_run: bool, is_wrapped: bool) -> None:
    """Raise `UserError` for an option that cannot be combined with `--compile`."""
    if not question.compile:
        return
    if is_wrapped:
        raise UserError(
            "a model of one process is needed for --compile; several processes were given, whose exchanges cut the graphs; "
            "leave one of the two out"
        )
    if may_run:
        raise UserError(
            "a step on tensors without values is needed for --compile; --run was given; leave one of them out"
        )
    if question.cuda_graphs and (question.device is None or question.device.kind != "gpu"):
        found = "no hardware was" if question.device is None else f"{question.device.name} was"
        raise UserError(f"a GPU is needed for --cuda-graphs; {found} given; name one with --hardware, or leave it out")


def _followed(question: Question, make_optimizer: MakeOptimizer, may_run: bool) -> tuple[ObservedStep, list[str]]:
    """Return the profiled step, on fake tensors or else for real, and the notes that a reader of its figures needs."""
    notes = [] if question.autocast is None else [f"autocast to {question.autocast}"]
    if question.accumulate > 1:
        notes.append(f"{question.accumulate} micro-batches, each like the batch, before the update")
    try:
        found = _on_fakes(question, make_optimizer)
    except UserError as error:
        if not may_run or (not isinstance(error, ValuesNeeded) and not _has_values(question)):
            raise _with_way_out(error) from None
        reason = error
    else:
        return found, notes + _notes_on_values(found.values)
    # not in the handler: what the real steps raise would come with what the fakes raised, and be taken for it
    found = _for_real(question, make_optimizer)
    notes.append(f"found by running two real steps, since {_found(reason)}; a step on other data may differ")
    return found, notes + _notes_on_values(found.values)


def _with_way_out(error: UserError) -> UserError:
    if not isinstance(error, ValuesNeeded):
        return error
    return ValuesNeeded(f"{error}; or say run=True (--run), which runs two real steps on this machine")


def _has_values(question: Question) -> bool:
    tensors = [*question.model.parameters(), *question.model.buffers(), *tensors_in(question.batch)]
    return all(tensor.device.type != "meta" for tensor in tensors)


def _notes_on_values(values: KnownValues | None) -> list[str]:
    notes = []
    if values is not None and values.num_drawn:
        notes.append(
            f"{values.num_drawn} single random numbers were drawn, on which the forward may branch (dropped layers); "
            "another step may take other branches"
        )
    if values is not None and values.num_stood_in:
        notes.append(f"the optimizer asked for {values.num_stood_in} numbers that only a real step has; taken as 1")
    return notes


def _wrapped(
    question: Question, make_optimizer: MakeOptimizer, make_model: MakeModel, processes: int
) -> tuple[ObservedStep, list[str]]:
    """Return the profiled step of rank 0 of `processes`, whose model `make_model` makes and wraps, and its notes."""
    mode = new_mode()
    step = CompiledStep(question.device, mode)
    with imagined(processes), step.of_script():
        with torch.device("meta"):
            made = make_model()
        model, batch, loss_fn = (*made, None)[:3] if isinstance(made, tuple) else (made, question.batch, None)
        if not isinstance(model, nn.Module):
            raise UserError(
                f"a function that returns a module, or one with its batch, is needed; it returned {type(model).__name__}; "
                "wrap the model in it and return that"
            )
        with mode:
            _onto_the_cpu(model)
        with explained(model, batch), private.without_distributions_checks():
            faked_batch = _fake_batch(as_batch(batch), mode)
            loss_fn = loss_fn if loss_fn is not None else question.loss_fn
            asked = replace(question, model=model.train(), batch=faked_batch, loss_fn=loss_fn)
            with step.made_by(asked) if has_compiled(model) else nullcontext():
                values = KnownValues(mode)
                found = step.run = ObservedStep(asked, values)
                found.compiled = step if step.graphs else None
                with values:
                    found.go(make_optimizer, rehearse=False)
    if any(is_exchange(func) for _, _, func in found.totals.tallies):
        return found, [f"one of {processes} processes, whose model is wrapped by its own script"]
    return found, [
        f"one of {processes} processes that exchange nothing in a step: the function does not wrap its model (fully_shard, "
        "DistributedDataParallel, parallelize_module)"
    ]


def _onto_the_cpu(model: nn.Module) -> None:
    """Give a model on the meta device tensors on the CPU; modules that shared a parameter still do, which `to_empty` ends."""
    first: dict[int, str] = {}
    names = [(name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)]
    model.to_empty(device="cpu")
    for name, key in names:
        if (shared := first.setdefault(key, name)) != name:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, model.get_parameter(shared))


def _on_fakes(question: Question, make_optimizer: MakeOptimizer) -> ObservedStep:
    mode = new_mode()
    model, batch = question.model, question.batch
    with faked(model, mode) as stand_in, explained(model, batch), private.without_distributions_checks():
        values = KnownValues(mode)
        asked = replace(question, model=stand_in.train(), batch=_fake_batch(batch, mode))
        if not question.compile:
            found = ObservedStep(asked, values)
            with values:
                found.go(make_optimizer)
            return found
        step = CompiledStep(question.device, mode, question.cuda_graphs)
        with step.of(asked):
            found = step.run = ObservedStep(asked, values)
            found.compiled = step
            with values:
                found.go(make_optimizer)
    return found


def _for_real(question: Question, make_optimizer: MakeOptimizer) -> ObservedStep:
    """Return the profile of two real steps of a copy of the model; the user's weights, batch and generator stay unchanged."""
    if not _has_values(question):
        raise UserError(
            "a model and a batch with values are needed to run them; some are on the meta device; build them on the cpu"
        )
    with torch.random.fork_rng(), explained(question.model, question.batch):
        model = copy.deepcopy(question.model).train()
        found = ObservedStep(replace(question, model=model, batch=_own_batch(question.batch)))
        found.go(make_optimizer, rehearse=False)
    return found


def _found(error: UserError) -> str:
    """Return the middle part of an error's message *what is needed; what was found; what to try*."""
    needed, _, rest = str(error).partition("; ")
    return rest.partition("; ")[0] or needed


def _captured(question: Question, found: ObservedStep, is_asked: bool) -> tuple[float | None, list[str]]:
    num_forward = found.totals.total("forward", "num_ops")
    if not is_asked and num_forward > MAX_FORWARD_OPS:
        return None, [not_tried(num_forward)]
    seconds, reason = try_capture(question.model, question.batch, question.loss_fn, question.autocast)
    return seconds, [] if reason is None else [reason]


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def _fake_batch(value: Any, mode: FakeMode) -> Any:
    """Return the batch with fake tensors instead of real ones, in dicts, tuples and lists; small integer tensors stay real."""
    if isinstance(value, Tensor):
        if keeps_values(value):
            return value.clone()
        return fake_like(value.detach(), mode).requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _fake_batch(item, mode) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_fake_batch(item, mode) for item in value])
    return value


def _own_batch(value: Any) -> Any:
    """Return a copy of the batch, its tensors' values included."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _own_batch(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_own_batch(item) for item in value])
    return value


def _dtype_name(model: nn.Module) -> str:
    """Return the name of the dtype that most of the model's parameter elements have."""
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for param in model.parameters():
        sizes[param.dtype] += param.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return next((name for name, dtype in DTYPES.items() if dtype is most), str(most).removeprefix("torch."))
