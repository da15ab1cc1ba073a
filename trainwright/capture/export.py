"""Model + batch → one flat ATen graph of the training step's forward, loss included; nothing allocated, nothing run.

faked       the model's tensors become fakes on the CPU, in a copy            (fakes.py)
_Step       the call and the loss as one module
export      torch.export, training IR, non-strict                            (the only use in the project)
normalise   one flat graph in few forms, the same for profiler, planner and runtime  (normalise.py)
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..artifacts import UserError
from ..torch_internals import private
from ..torch_internals.fakes import FakeMode, fake_like, faked, new_mode
from .call import LossFn, call_model, find_loss, loss_of, name_of_loss
from .dtypes import check_types
from .experts import lifted_experts
from .export_errors import (
    explained,
    innermost_line,
    is_inside,
    refuse_gradients,
    refuse_transforms,
    transforms_refused,
)
from .gradients import follow_saved, unfollowed, without_rules
from .module_state import Watch, same_calls
from .own_backwards import lifted_backwards
from .passes.normalise import Context, normalise
from .passes.regions import no_autocast

__all__ = ["Captured", "capture", "find_loss"]

MODEL_PREFIX = "model"


@dataclass(eq=False)
class Captured:
    """A model's training forward as one flat graph; what each node carries in `meta` is said in `capture`."""

    graph: fx.Graph
    out_spec: Any
    """The tree of (loss, the model's own output), for `rebuild`."""
    aliases: dict[str, str]
    """Every further name of a parameter or buffer → its first name in `named_parameters()`."""
    capture_s: float
    notes: tuple[str, ...]
    loss_chunks: int = 0
    """Into how many chunks of rows a loss is taken with its head (`passes.chunked_loss`); 0: its logits stand whole."""

    def rebuild(self, flat_outputs: Sequence[Any]) -> Any:
        """Return the model's own output object (a Hugging Face `ModelOutput`, say) from the graph's flat outputs."""
        flat = list(flat_outputs)
        if self.out_spec.num_leaves > len(flat):  # the loss is one of the model's own outputs
            flat.insert(0, flat[self.loss_index])
        return self.out_spec.unflatten(flat)[1]

    @property
    def loss_index(self) -> int:
        """Where the loss stands among the flat outputs."""
        return int(output_node(self.graph).meta["loss_index"])


def capture(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any],
    loss_fn: LossFn | None = None,
    *,
    training: bool = True,
    autocast: torch.dtype | None = None,
) -> Captured:
    """Capture one forward of `model`, loss included, as one flat graph of ATen calls.

    The model may be on the meta device, on a CPU or a GPU: only shapes are read, no memory is allocated, no kernel
    run, and neither model nor batch is changed. Batch shapes are fixed by the capture.

    model: in whatever mode; captured in training mode, submodules that the user froze in evaluation mode kept so.
    batch: a mapping (called as `model(**batch)`) or a sequence (`model(*batch)`); what is no tensor passes as it is.
    loss_fn: of the output and what `forward` does not take of the batch (`call.py`); its result is a scalar. Without it
    the loss is the output's `.loss`, its `["loss"]`, or itself.
    training: False captures the evaluation forward, for validation with the same parameters.
    autocast: capture as under `torch.autocast` with this type; the conversions become nodes of the graph.

    In the graph, placeholders carry meta `role` (`param`, `buffer`, `input`, `const`), `name` and `val` (a fake CPU
    tensor); a `const` its `value`. Calls carry `val`, `requires_grad`, `path` (the user's module), `key` (unique),
    `stack` (source line), `constant` (depends on no parameter, input or random number) and, when they write a buffer
    in place, `mutates` (its name). The output node carries `loss_index`.

    Raises `UserError` when the model does not run on the batch, has no scalar loss, or cannot be captured.

    >>> found = capture(nn.Linear(3, 1), (torch.ones(2, 3),), lambda output, batch: output.mean())
    >>> [node.meta["key"] for node in found.graph.nodes if node.op == "call_function"]
    [':linear', ':mean']
    """
    started = time.perf_counter()
    batch = as_batch(batch)
    notes: list[str] = []
    batch = without_cache(model, batch, notes)
    mode = new_mode()
    with no_autocast(), faked(model, mode) as copied:
        _set_training(copied, training, notes)
        program, left = _export(copied, _faked_batch(batch, mode), loss_fn)
        later = left.later(lambda: _export(copied, _faked_batch(batch, mode), loss_fn), program.constants, mode)
    graph = _normalised(program, model, batch, Context(mode, {}, autocast, notes))
    if later is not None and not same_calls(graph, _normalised(later, model, batch, Context(mode, {}, autocast))):
        left.refuse()
    check_types(graph)
    return Captured(graph, program.call_spec.out_spec, aliases_of(model), time.perf_counter() - started, tuple(notes))


class _Step(nn.Module):
    """The model's call and its loss: `batch → (loss, output)`."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self.watch = Watch(model, is_inside)
        # not as an attribute, or a loss that is a module would have its tensors counted with the model's
        self.loss_of = lambda batch, output: loss_of(model, batch, loss_fn, output)
        self.call = lambda batch: call_model(model, batch, loss_fn)
        self.result = "the loss" if loss_fn is None else f"{name_of_loss(loss_fn)}'s result"

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        with self.watch.forward():
            output = self.call(batch)
            loss = self.loss_of(batch, output)
        _require_scalar(loss, self.result)
        _register_dataclasses(output)
        return loss, output


def _require_scalar(loss: Any, what: str) -> None:
    if not isinstance(loss, Tensor):
        raise UserError(f"a scalar tensor is needed as the loss; {what} is {type(loss).__name__}; return a 0-d tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        found = f"shape {tuple(loss.shape)} and type {str(loss.dtype).removeprefix('torch.')}"
        raise UserError(
            f"a scalar floating-point loss is needed; {what} has {found}; "
            "reduce it to a mean or a sum, or give loss_fn, such as torch.nn.CrossEntropyLoss(), with its target in the batch"
        )


def _register_dataclasses(output: Any) -> None:
    """Let torch.export see into an output that is a plain dataclass."""
    if not dataclasses.is_dataclass(output) or isinstance(output, type | Mapping):
        return
    if private.is_leaf(output):
        torch.export.register_dataclass(type(output))


def as_batch(batch: Any) -> dict[str, Any] | tuple[Any, ...]:
    """Return the batch as a dict or a tuple; a lone tensor is a tuple of one.

    Raises `UserError` for anything else, and for arrays in place of tensors.
    """
    if isinstance(batch, Tensor):
        return (batch,)
    found: dict[str, Any] | tuple[Any, ...] | None = None
    if isinstance(batch, Mapping):
        found = dict(batch)
    elif isinstance(batch, list | tuple):
        found = tuple(batch)
    for name, value in found.items() if isinstance(found, dict) else enumerate(found or ()):
        if type(value).__module__ == "numpy":
            raise UserError(
                f"a batch of tensors is needed; entry {name} is a numpy {type(value).__name__}; wrap it: "
                "torch.as_tensor(…)"
            )
    if found is None:
        is_array, is_loader = type(batch).__module__ == "numpy", hasattr(batch, "__iter__")
        advice = (
            "wrap it: torch.as_tensor(…)" if is_array else "give one batch: next(iter(…))" if is_loader else "wrap it"
        )
        raise UserError(
            "a batch is needed as a dict (model(**batch)) or a tuple (model(*batch)) of tensors; got "
            f"{type(batch).__name__}; {advice}"
        )
    return found


def without_cache(model: nn.Module, batch: Any, notes: list[str]) -> Any:
    """Switch off a Hugging Face model's key-value cache, of no use in training, where the user said nothing of it."""
    wants_cache = getattr(getattr(model, "config", None), "use_cache", False)
    if not wants_cache or not isinstance(batch, dict) or "use_cache" in batch:
        return batch
    if not {"use_cache", "**"} & set(private.parameter_names(model.forward)):
        return batch
    notes.append(
        "use_cache=False was added to the batch: the model's configuration turns on a cache that training lacks"
    )
    return {**batch, "use_cache": False}


def _set_training(model: nn.Module, training: bool, notes: list[str]) -> None:
    if not training:
        model.eval()
    elif not model.training:
        model.train()
        notes.append("the model was in evaluation mode; it is captured in training mode")


def _faked_batch(batch: Any, mode: FakeMode) -> Any:
    named, rebuild = private.flatten_batch(batch)
    return rebuild([fake_like(leaf.detach(), mode) if isinstance(leaf, Tensor) else leaf for _, leaf in named])


def _export(model: nn.Module, batch: Any, loss_fn: Any) -> tuple[Any, Watch]:
    """Return the exported step, and what its forward left behind in the modules."""
    if isinstance(loss_fn, nn.Module) and any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise UserError(
            f"a loss without parameters of its own is needed; {type(loss_fn).__name__} has some; "
            "make it part of the model"
        )
    step = _Step(model, loss_fn)
    with (
        explained(model, batch),
        lifted_backwards(),
        lifted_experts(),
        private.without_compiling(),
        private.innermost_frames(is_inside),
        private.without_distributions_checks(),
        private.masks_as_given(),
        transforms_refused(),
        warnings.catch_warnings(),
    ):
        # modules that keep their weights in a list as well (LSTM) are told off by torch for what is torch's own doing
        warnings.filterwarnings("ignore", message="The tensor attribute")
        program = torch.export.export(step, (batch,), strict=False)
        if unfollowed(program):
            with private.composites_in_parts():
                program = torch.export.export(step, (batch,), strict=False)
        follow_saved(program)
        refuse_gradients(without_rules(program))
        refuse_transforms(program.graph)
        return program, step.watch


def _normalised(program: Any, model: nn.Module, batch: Any, context: Context) -> fx.Graph:
    graph = _with_roles(program, model, batch, context)
    context.notes += _unused(graph)
    with no_autocast():
        return normalise(graph, program.graph_module, context)


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return every further name of a shared parameter or buffer → its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            known = first.setdefault(id(tensor), name)
            if known != name:
                aliases[name] = known
    return aliases


def _with_roles(program: Any, model: nn.Module, batch: Any, context: Context) -> fx.Graph:
    """Give the exported graph's nodes their roles, names and module paths; one placeholder a tensor."""
    graph: fx.Graph = program.graph
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    aliases = aliases_of(model)
    names = iter([name for name, _ in private.flatten_batch(batch)[0]])
    seen: dict[str, fx.Node] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        role, name = _role(specs[node.name], names, aliases)
        node.meta.update(role=role, name=name, requires_grad=role == "param" and tensors[name].requires_grad)
        if role == "const":
            node.meta["value"] = _real(program.constants.get(specs[node.name].target))
        elif role in ("param", "buffer"):
            _merge(node, seen.setdefault(f"{role} {name}", node))
    for nested in private.graphs_of(program.graph_module):
        for node in nested.nodes:
            _locate(node)
    _keep_values(graph, tensors, context)
    return graph


def _unused(graph: fx.Graph) -> list[str]:
    inputs = [node for node in graph.nodes if node.meta.get("role") == "input" and not node.users]
    names = [node.meta["name"] for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    return [f"neither the model nor the loss uses {', '.join(names)} of the batch"] if names else []


def _role(spec: Any, batch_names: Any, aliases: dict[str, str]) -> tuple[str, str]:
    kind = spec.kind.name
    if kind == "USER_INPUT":
        return "input", next(batch_names)
    name = spec.target.removeprefix(MODEL_PREFIX + ".")
    if kind == "CONSTANT_TENSOR":
        return "const", name
    if kind not in ("PARAMETER", "BUFFER"):
        raise UserError(f"a model of tensors is needed; {name} is a {kind.lower()}; remove it from the forward")
    return ("param" if kind == "PARAMETER" else "buffer"), aliases.get(name, name)


def _merge(node: fx.Node, first: fx.Node) -> None:
    if node is not first:
        node.replace_all_uses_with(first)
        node.graph.erase_node(node)


def _real(constant: Any) -> Tensor | None:
    """A lifted constant's value; None when the model was built on meta and the value never was."""
    known = isinstance(constant, Tensor) and not isinstance(constant, private.FakeTensor)
    return constant.detach() if known and constant.device.type != "meta" else None


def _locate(node: fx.Node) -> None:
    """Put the innermost module's path and the innermost source line in plain fields."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    path = "" if path == MODEL_PREFIX else path.removeprefix(MODEL_PREFIX + ".")
    node.meta["path"] = path.partition("@")[0]
    node.meta["stack"] = innermost_line(node.meta.get("stack_trace") or "")


def _keep_values(graph: fx.Graph, tensors: dict[str, Tensor], context: Context) -> None:
    """Remember the real values at hand, by which masks can be recognised."""
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        known = node.meta.get("value") if node.meta["role"] == "const" else None
        if node.meta["role"] == "buffer":
            known = tensors[node.meta["name"]]
        if isinstance(known, Tensor) and known.device.type == "cpu" and not isinstance(known, private.FakeTensor):
            context.constants[node.meta["name"]] = known


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the graph's output node."""
    return next(node for node in reversed(graph.nodes) if node.op == "output")
