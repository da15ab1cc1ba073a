"""Runs the reference of a comparison: step, update and evaluation on one process, as captured or as the user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...artifacts import Plan, UserError
from ...capture.call import call_model, loss_of
from ...capture.export import as_batch, capture
from ...ops.local import replace_arg
from ...program.decisions import Decisions
from ...program.lift import lift_dtypes
from ...program.program import Program, build_program
from ...rank.accumulate import Accumulator
from ...rank.execute import Executor
from ...rank.local import build_local
from ...rank.reshard import SimulatedCommunicator
from ...rank.run_state import RunState
from ...torch_internals.dtypes import default_dtype, in_precision
from ...torch_internals.private import flatten_batch
from ..batch import planned_cut
from ..module import LossOutput, autocast_of, plan_batch, planned_program
from .ranks_draws import RanksDraws

Tensors = Mapping[str, Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class StepResults:
    """The results of one step: its loss, whole gradients, and the buffers after it."""

    loss: float
    gradients: Tensors
    buffers: Tensors


class Reference:
    """Runs a model on one process: call `step`, then `update`, then `evaluate`, each once."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model, self.batch = model, as_batch(batch)
        self.before = _copied({**dict(model.named_parameters()), **dict(model.named_buffers())})
        """Parameters and buffers before the step."""

    def step(self) -> StepResults:
        """Run forward and backward, and return their results."""
        loss = self._loss()
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return StepResults(float(loss.detach()), gradients, _copied(dict(self.model.named_buffers())))

    def update(self, make_optimizer: MakeOptimizer, gradients: Tensors) -> Tensors:
        """Return the parameters after one step of the optimizer with the given gradients."""
        params = dict(self.model.named_parameters())
        for name, param in params.items():
            grad = gradients.get(name)
            # in the parameter's memory order, as autograd has it: torch's fused optimizers go through both as they lie
            param.grad = None if grad is None else torch.empty_like(param).copy_(grad)
        make_optimizer(self.model.named_parameters()).step()
        self.model.zero_grad(set_to_none=True)
        return {name: param.detach() for name, param in params.items()}

    def evaluate(self) -> Tensors:
        """Return loss and outputs in evaluation mode, on the same batch."""
        raise NotImplementedError

    def _loss(self) -> Tensor:
        raise NotImplementedError


class Exact(Reference):
    """Runs the captured program: unsplit, nothing rematerialised; lifted: in float64, the model's casts too.

    The program is that of the whole batch. Where the model draws random numbers, it runs on those that the ranks draw, and with
    micro-batches, each of which has its own, on one after the other.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        batch: Any,
        loss_fn: Any,
        ranks: RanksDraws | None = None,
        *,
        lifted: bool = True,
    ) -> None:
        self._plan, self._ranks, self._dtype = plan, ranks, torch.float64 if lifted else torch.get_default_dtype()
        self._evaluation: Program | UserError
        if ranks is not None and ranks.keys and plan.micro_batches > 1:
            self._training = planned_program(plan, model, loss_fn)
            self._evaluation = UserError("each micro-batch draws its own random numbers")
        else:
            self._training = self._captured(model, loss_fn, training=True)
            try:
                self._evaluation = self._captured(model, loss_fn, training=False)
            except UserError as error:
                self._evaluation = error
        for program in (self._training, self._evaluation):
            if lifted and isinstance(program, Program):
                lift_dtypes(program)
        self._has_loss_fn = loss_fn is not None
        super().__init__(*(as_double(model, batch) if lifted else (model, batch)))

    def _captured(self, model: nn.Module, loss_fn: Any, training: bool) -> Program:
        batch, autocast = plan_batch(self._plan), autocast_of(self._plan)
        return build_program(capture(model, batch, loss_fn, training=training, autocast=autocast))

    def step(self) -> StepResults:
        """Run forward and backward, and return their results."""
        with default_dtype(self._dtype):
            return super().step()

    def _loss(self) -> Tensor:
        loss: Tensor = self._run(self._training)[self._training.captured.loss_index]
        return loss

    def evaluate(self) -> Tensors:
        """Return loss and outputs in evaluation mode; raise `UserError` if the model has no loss in that mode."""
        program = self._evaluation
        if isinstance(program, UserError):
            raise program
        with torch.no_grad(), default_dtype(self._dtype):
            flat = self._run(program, training=False)
        output = program.captured.rebuild(flat)
        return outputs_of(LossOutput(flat[program.captured.loss_index], output) if self._has_loss_fn else output)

    def _run(self, program: Program, training: bool = True) -> list[Any]:
        alone = unsplit(program, 1)
        executor = Executor(build_local(program, alone, SimulatedCommunicator(alone.mesh)))
        state = RunState(training=training, dropout=False)
        if self._ranks is not None:
            self._ranks.follow(executor)
            state = replace(state, seed=self._ranks.seed)
        # by their role: a parameter and an entry of the batch may have one name
        tensors: dict[str, Tensors] = {
            "param": dict(self.model.named_parameters()),
            "buffer": dict(self.model.named_buffers()),
            "input": dict(flatten_batch(self.batch)[0]),
        }
        needed = (tensor for tensor in program.tensors if tensor.role != "op")
        sources = {t: t.value if t.role == "const" else tensors[t.role][t.key] for t in needed}
        if program.num_runs == 1:
            return executor.run(sources, state)
        cut = planned_cut(self._plan)
        pieces = {tensor: cut.pieces(tensor.key, sources.pop(tensor)) for tensor in program.inputs}
        parts = [{tensor: found[run] for tensor, found in pieces.items()} for run in range(program.num_runs)]
        return Accumulator(executor).run(sources, parts, state)


class Eager(Reference):
    """Runs the user's own model unchanged, but without dropout."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Any) -> None:
        super().__init__(model, batch)
        self._loss_fn = loss_fn
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.dropout = 0.0  # inside one call, out of a mode's reach

    def _loss(self) -> Tensor:
        if not self.model.training:  # or what the user froze in evaluation mode would train
            self.model.train()
        return self._run()[0]

    def evaluate(self) -> Tensors:
        self.model.eval()
        with torch.no_grad():
            loss, output = self._run()
        return outputs_of(LossOutput(loss, output) if self._loss_fn is not None else output)

    def _run(self) -> tuple[Tensor, Any]:
        with _NoDropout():
            output = call_model(self.model, self.batch, self._loss_fn)
            return loss_of(self.model, self.batch, self._loss_fn, output), output


_DROPOUTS = {f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")}
_DROPOUTS |= {"dropout1d", "dropout2d", "dropout3d"}
_WITH_DROPOUT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions with dropout inside, with the position of their argument `dropout_p`."""


class _NoDropout(TorchFunctionMode):
    """Function mode that runs a model as if every dropout probability were zero; it sees only outermost function calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name in _WITH_DROPOUT:
            args, kwargs = replace_arg(tuple(args), kwargs, _WITH_DROPOUT[name], "dropout_p", 0.0)
        return func(*args, **kwargs)


def as_double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return model and batch with their floating-point and complex tensors in double precision; the model is converted in place."""
    lift = lambda leaf: leaf.to(in_precision(leaf.dtype, torch.float64)) if isinstance(leaf, Tensor) else leaf  # noqa: E731
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # which `Module.double` leaves
            tensor.data = lift(tensor.data)
    named, rebuild = flatten_batch(as_batch(batch))
    return model.double(), rebuild([lift(leaf) for _, leaf in named])


def unsplit(program: Program, num_axes: int) -> Decisions:
    """Return the decisions of one process: no split, everything kept."""
    splits = {group: (-1,) * num_axes for region_class in program.classes for group in region_class.groups}
    return Decisions((1,) * num_axes, splits, dict.fromkeys(program.params, (-1,) * num_axes))


def outputs_of(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a forward's output, by name."""
    if isinstance(output, LossOutput):
        return {"loss": output.loss.detach(), **outputs_of(output.output)}
    if isinstance(output, Tensor):
        return {"output": output.detach()}
    if is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = vars(output)
    return {name: leaf.detach() for name, leaf in flatten_batch(output)[0] if isinstance(leaf, Tensor)}


def _copied(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
