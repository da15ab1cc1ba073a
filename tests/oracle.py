"""The oracle of the capture tests: the captured graph, run with the model's own tensors, against the model itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from trainwright.capture.export import Captured, as_batch, find_loss
from trainwright.capture.stored import as_data, from_data


@dataclass
class Step:
    """What one forward and backward left behind."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    output: Any


def eager_step(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None = None, seed: int = 0) -> Step:
    """One step of a copy of the model as its author wrote it."""
    model = copy.deepcopy(model)
    batch = as_batch(batch)
    torch.manual_seed(seed)
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = find_loss(output) if loss_fn is None else loss_fn(output, batch)
    loss.backward()
    return _after(model, loss.detach(), output)


def graph_step(captured: Captured, model: nn.Module, batch: Any, seed: int = 0) -> Step:
    """One step of the captured graph on the tensors of a copy of the model."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    flat = run_graph(captured.graph, model, batch)
    loss = flat[captured.loss_index]
    loss.backward()
    return _after(model, loss.detach(), captured.rebuild(flat))


def run_graph(graph: fx.Graph, model: nn.Module, batch: Any) -> list[Any]:
    """Interpret the graph with the model's parameters and buffers, and the batch's tensors."""
    entries = _leaves(as_batch(batch))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    inputs = []
    for node in graph.nodes:
        if node.op == "placeholder":
            sources = {"input": entries, "param": tensors, "buffer": tensors}
            role, name = node.meta["role"], node.meta["name"]
            inputs.append(node.meta["value"] if role == "const" else sources[role][name])
    module = fx.GraphModule(nn.Module(), graph)
    return list(fx.Interpreter(module).run(*inputs))


def assert_same_step(found: Step, wanted: Step, rtol_loss: float = 1e-6, rtol_gradient: float = 1e-5) -> None:
    """The losses, every gradient and every buffer agree; a gradient that one has, the other has."""
    torch.testing.assert_close(found.loss, wanted.loss, rtol=rtol_loss, atol=1e-12)
    assert found.gradients.keys() == wanted.gradients.keys()
    assert wanted.gradients, "an oracle without gradients proves nothing"
    whole = torch.stack([gradient.norm() for gradient in wanted.gradients.values()]).norm()
    for name, gradient in wanted.gradients.items():
        error = (found.gradients[name] - gradient).norm() / max(gradient.norm(), 1e-3 * whole)
        assert error <= rtol_gradient, f"gradient of {name} is off by {float(error):.2g}"
    assert found.buffers.keys() == wanted.buffers.keys()
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-5, atol=1e-6)


def assert_stored_whole(captured: Captured, model: nn.Module, batch: Any) -> None:
    """A capture that was written down and read again is the same, and computes the same."""
    data, values = as_data(captured)
    again = from_data(json.loads(json.dumps(data)), values)
    assert as_data(again)[0] == data
    assert str(again.graph) == str(captured.graph)
    assert_same_step(graph_step(again, model, batch), graph_step(captured, model, batch), 1e-6, 1e-6)


def _after(model: nn.Module, loss: Tensor, output: Any) -> Step:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Step(loss, gradients, dict(model.named_buffers()), output)


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Key path → leaf, by hand: `nested.key`, `0`."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: dict[str, Any] = {}
    for key, part in pairs:
        name = f"{prefix}{key}"
        found.update(_leaves(part, name + ".") if isinstance(part, dict | list | tuple) else {name: part})
    return found
