"""The question of `plan`, `compare` and `frontier`, resolved from the names that users write to what the planner takes.

PlanRequest(model, batch, hardware=…, …)   one field an option of `plan`, each as the user gave it
.question()                                the fields of a planner `Task`: a captured program, a cluster, bytes
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Required, TypedDict

from .arguments import as_chosen, as_cluster, as_dtype_name, as_imbalance, as_mesh, as_pins, as_share, check_model
from .artifacts import DEFAULT_IMBALANCE, Cluster, ModelRef, Plan, UserError, parse_bytes

if TYPE_CHECKING:
    import os

    import torch
    from torch import Tensor, nn

    from .planner import ChunkedLoss, Shaped, Variants
    from .program.program import Program
    from .tiers import Policy

    LossFn = Callable[..., Tensor]
    HardwareLike = str | int | Cluster | os.PathLike[str]
    OptimizerLike = str | type[torch.optim.Optimizer] | torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
    DtypeLike = str | torch.dtype

MEMORY_SHARE = 0.9
"""The budget where none is given, as a share of a device's memory."""


class PlanOptions(TypedDict, total=False):
    """The options that `plan`, `compare` and `frontier` share; `plan` says what each means."""

    hardware: Required[HardwareLike]
    memory: float | str | None
    optimizer: OptimizerLike
    optimizer_options: Mapping[str, Any] | None
    optimizer_form: str | None
    loss_fn: LossFn | None
    mesh: int | str | Sequence[int] | None
    pins: str | Sequence[str]
    offload: str
    keep_graph: bool
    expert_imbalance: float | str
    loss_chunks: int | str
    sampled: float | None
    time_limit_s: float
    autocast: DtypeLike | None
    micro_batches: int | str
    compile: bool
    pipeline: int | str | None
    pipeline_schedule: str
    tier: Policy | None
    model_ref: ModelRef | None
    progress: Callable[[str], None] | None


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """One planning question as a user asks it."""

    model: nn.Module
    batch: Any
    hardware: HardwareLike
    memory: float | str | None = None
    optimizer: OptimizerLike = "adamw"
    optimizer_options: Mapping[str, Any] | None = None
    optimizer_form: str | None = None
    loss_fn: LossFn | None = None
    mesh: int | str | Sequence[int] | None = None
    pins: str | Sequence[str] = ()
    offload: str = "auto"
    keep_graph: bool = False
    expert_imbalance: float | str = DEFAULT_IMBALANCE
    loss_chunks: int | str = "auto"
    sampled: float | None = None
    time_limit_s: float = 30.0
    autocast: DtypeLike | None = None
    micro_batches: int | str = 1
    compile: bool = False
    pipeline: int | str | None = None
    pipeline_schedule: str = "auto"
    tier: Policy | None = None
    model_ref: ModelRef | None = None
    progress: Callable[[str], None] | None = None

    @classmethod
    def of(cls, verb: str, model: nn.Module, batch: Any, options: Mapping[str, Any]) -> PlanRequest:
        """Return the request of a verb's keyword arguments; raise `TypeError`, as Python does, for a name that it has not.

        >>> PlanRequest.of("compare", None, None, {"hardware": 2, "memry": "1GiB"})
        Traceback (most recent call last):
        TypeError: compare() got an unexpected keyword argument 'memry'; did you mean memory?
        >>> PlanRequest.of("compare", None, None, {})
        Traceback (most recent call last):
        TypeError: compare() missing a required keyword argument: 'hardware'
        """
        known = [field.name for field in fields(cls)][2:]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}; {hint}")
        if "hardware" not in options:
            raise TypeError(f"{verb}() missing a required keyword argument: 'hardware'")
        return cls(model, batch, **options)

    def question(self) -> dict[str, Any]:
        """Return the fields of the planner's `Task`; `UserError` where an argument cannot be."""
        from .capture.call import name_of_loss

        check_model(self.model)
        cluster = self.cluster
        chosen = as_chosen(self.optimizer, self.optimizer_options, self.optimizer_form, self.model, cluster.device.kind)
        goes_again = chosen.name if chosen.needs_loss else "keep_graph" if self.keep_graph else None
        pipeline = as_stages(self.pipeline)
        schedule = self.pipeline_schedule.strip().lower()
        if pipeline is None and schedule != "auto":
            raise UserError(
                f"pipeline stages are needed for a schedule of them; got {self.pipeline_schedule!r} and no stages; try "
                "--pipeline auto"
            )
        micro_batches = "auto" if pipeline is not None and self.micro_batches == 1 else self.micro_batches
        twice = goes_again or (chosen.name if chosen.differentiates_twice else None)
        share = _share_of(self.sampled, twice)
        num_chunks, is_free = _chunks_of(self.loss_chunks, twice)
        runs = _runs_of(micro_batches, goes_again)
        program, variants = self._programs(runs, num_chunks or 0)
        return {
            "program": program,
            "variants": variants,
            "pipeline": pipeline,
            "pipeline_schedule": schedule,
            "chunked": self._chunked(runs, is_free) if num_chunks is None else None,
            "model_ref": self.model_ref or ModelRef(name=type(self.model).__name__),
            "cluster": cluster,
            "budget_bytes": self._budget_bytes(cluster),
            "mesh": as_mesh(self.mesh),
            "optimizer": chosen.name,
            "optimizer_cost": chosen,
            "make_optimizer": chosen.on_fakes,
            "literals": literals_of(self.batch),
            "loss_fn": name_of_loss(self.loss_fn),
            "dtype": dtype_of(self.model),
            "autocast": as_dtype_name(self.autocast),
            "pins": as_pins(self.pins),
            "offload": self.offload,
            "keep_graph": self.keep_graph,
            "imbalance": as_imbalance(self.expert_imbalance),
            "sampled": share,
            "time_limit_s": self.time_limit_s,
            "tier": self.tier,
            "progress": self.progress,
        }

    @property
    def cluster(self) -> Cluster:
        """The hardware."""
        return as_cluster(self.hardware)

    def shaped(self, batch: Any, shapes: Mapping[str, tuple[int, ...]]) -> Shaped:
        """Return the same model captured on another batch."""
        from .planner import Shaped
        from .program.micro_batches import capture_step

        chunks = _chunks_of(self.loss_chunks, None)[0] or 0
        return Shaped(capture_step(self.model, batch, self.loss_fn, self._autocast, loss_chunks=chunks), shapes)

    def _budget_bytes(self, cluster: Cluster) -> int:
        if self.memory is None:
            return int(MEMORY_SHARE * cluster.device.memory_bytes)
        return parse_bytes(self.memory)

    @property
    def _autocast(self) -> torch.dtype | None:
        return _dtype(as_dtype_name(self.autocast))

    def _chunked(self, micro_batches: int | str, is_free: bool) -> ChunkedLoss:
        """Return the same step with its loss in chunks, of which none is captured before it is asked for."""
        from .planner import ChunkedLoss

        return ChunkedLoss(partial(self._programs, micro_batches), is_free)

    def _programs(self, micro_batches: int | str, loss_chunks: int | None) -> tuple[Program, Variants | None]:
        """Return the program of `micro_batches`, and those of other numbers where the number is to be chosen."""
        from .planner import Variants
        from .program.micro_batches import batch_size, candidates, capture_step

        model, batch, loss_fn, dtype = self.model, self.batch, self.loss_fn, self._autocast
        if isinstance(micro_batches, int) and micro_batches >= 1:
            return capture_step(model, batch, loss_fn, dtype, micro_batches, loss_chunks=loss_chunks), None
        if micro_batches != "auto":
            raise UserError(f"a number of micro-batches is needed, 1 or more, or auto; got {micro_batches!r}; try auto")
        whole = capture_step(model, batch, loss_fn, dtype, loss_chunks=loss_chunks)
        return whole, Variants(
            candidates(batch_size(batch)),
            lambda num: capture_step(model, batch, loss_fn, dtype, num, whole=whole, loss_chunks=loss_chunks),
        )


def as_stages(pipeline: int | str | None) -> int | str | None:
    """Return a number of pipeline stages, `auto`, or None for no stages, which 1 means too.

    >>> as_stages("4"), as_stages("auto"), as_stages(1)
    (4, 'auto', None)
    """
    text = "1" if pipeline is None else str(pipeline).strip().lower()
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"a number of pipeline stages is needed, 1 or more, or auto; got {pipeline!r}; try auto")
    return int(text) if int(text) > 1 else None


def by_size(request: PlanRequest, shapes: Sequence[Any]) -> tuple[Any, list[Shaped]]:
    """Return the batch to plan on, and the others as captures of their own; batches of equal shapes count once."""
    from .planner import check_alike, largest
    from .program.micro_batches import shapes_of

    refuse_stages(request, "several shapes")
    refuse_compiled(request, "several shapes")
    if request.micro_batches != 1:
        raise UserError(
            f"one micro-batch is needed to plan for several shapes; got {request.micro_batches}; plan for the largest "
            "shape alone: smaller batches run under its plan"
        )
    batches = [request.batch, *shapes]
    seen = [shapes_of(batch) for batch in batches]
    for each in seen:
        check_alike(seen[0], each)
    at = largest(seen)
    different = [k for k in range(len(seen)) if seen[k] not in (seen[at], *seen[:k])]
    return batches[at], [request.shaped(batches[k], seen[k]) for k in different]


def refuse_compiled(request: PlanRequest, what: str) -> None:
    """Raise `UserError` where compiled blocks are asked for beside what they cannot be planned for yet."""
    if request.compile:
        raise UserError(
            f"a plan that is not compiled is needed for {what}; got compile=True (--compile); leave one of them out"
        )


def refuse_stages(request: PlanRequest, what: str) -> None:
    """Raise `UserError` where pipeline stages are asked for beside what they cannot be planned for yet."""
    if as_stages(request.pipeline) is not None:
        raise UserError(
            f"a plan without stages is needed for {what}; got pipeline {request.pipeline}; leave one of them out"
        )


def program_of(plan: Plan, model: nn.Module, batch: Any, loss_fn: Any) -> Program:
    """Return the program that `plan` is a plan of; raise `UserError` where the model and batch are not those it was made with."""
    from .capture.call import check_same_loss
    from .program.micro_batches import capture_step
    from .program.program import Program

    if isinstance(model, Program):  # the command line may have it at hand without the model
        return model
    given = {"dtype": dtype_of(model), "literals": literals_of(batch)}
    own = {"dtype": plan.dtype, "literals": plan.literals}
    for name, value in given.items():
        if value != own[name]:
            raise UserError(
                f"the model and batch that were planned are needed; {name} is {value!r} here, and {own[name]!r} in the plan; "
                "plan anew, or restore it"
            )
    check_same_loss(plan, loss_fn)
    autocast = _dtype(plan.autocast)
    return capture_step(
        model, batch, loss_fn, autocast, plan.micro_batches, plan.corrections, loss_chunks=plan.loss_chunks
    )


def literals_of(batch: Any) -> dict[str, Any]:
    """Return what of a batch is no tensor, by name."""
    import torch

    from .capture.export import as_batch
    from .torch_internals.private import flatten_batch

    return {name: leaf for name, leaf in flatten_batch(as_batch(batch))[0] if not isinstance(leaf, torch.Tensor)}


def dtype_of(model: nn.Module) -> str:
    """Return the name of the type of a model's floating-point parameters, of the first where they differ."""
    from .profiler.step import DTYPES

    first = next((param.dtype for param in model.parameters() if param.is_floating_point()), DTYPES["fp32"])
    return next((name for name, dtype in DTYPES.items() if dtype == first), str(first).removeprefix("torch."))


def _dtype(name: str | None) -> torch.dtype | None:
    from .profiler.step import DTYPES

    return DTYPES[name] if name else None


def _runs_of(micro_batches: int | str, goes_again: str | None) -> int | str:
    """Return the number of micro-batches; 1 where the loss is differentiated more than once: their graphs are gone by then."""
    if goes_again is None or micro_batches in ("auto", 1):
        return micro_batches if goes_again is None else 1
    raise UserError(
        f"one micro-batch is needed for {goes_again}, for the graph of the loss is gone through more than once; got "
        f"{micro_batches}; leave micro_batches out, or take adamw"
    )


def _share_of(sampled: Any, goes_again: str | None) -> float:
    """Return the share of rows that linear maps may keep; `UserError` where gradients are differentiated again."""
    share = as_share(sampled)
    if share and goes_again is not None:
        raise UserError(
            f"exact gradients are needed for {goes_again}, for an estimate is differentiated once; got sampled {share:g}; leave "
            "sampled out, or take adamw"
        )
    return share


def _chunks_of(loss_chunks: int | str, goes_again: str | None) -> tuple[int | None, bool]:
    """Return into how many chunks a loss is taken, None where that is left open, and whether that is free where it need not be.

    >>> _chunks_of("auto", None), _chunks_of("free", None), _chunks_of("none", None), _chunks_of(8, None)
    ((None, False), (None, True), (0, False), (8, False))
    """
    is_number = isinstance(loss_chunks, int) and not isinstance(loss_chunks, bool) and loss_chunks >= 1
    if not is_number and loss_chunks not in ("auto", "free", "none"):
        raise UserError(
            f"a number of chunks is needed for the loss, 1 or more, or auto, free or none; got {loss_chunks!r}; try auto"
        )
    if goes_again is None:
        return (int(loss_chunks), False) if is_number else (0 if loss_chunks == "none" else None, loss_chunks == "free")
    if is_number:
        raise UserError(
            f"whole logits are needed for {goes_again}, for a loss in chunks is differentiated once; got {loss_chunks} chunks; "
            "leave loss_chunks out, or take adamw"
        )
    return 0, False
