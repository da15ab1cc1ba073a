"""`VectorisedTraining`: the work of many alike clients at once, stacked along a first dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..artifacts import UserError, check_range
from .arrays import Arrays
from .checks import whole
from .clock import State
from .local import METRIC, LocalTraining, MakeOptimizer, Plain, is_planned


class VectorisedTraining:
    """The work of many clients at once, as `simulate(together=…)` asks for it: one `torch.func.vmap` over all of them.

    clients: a `LocalTraining` a client, all with the same model, loss, optimizer, steps and batch size, data in tensors, and
    the plain gradient. chunk: clients at a time. The optimizer updates stacked parameters, so it has to be elementwise
    (`tw.optim.record(name).reads == "element"`): SGD, Adam, Adan … Results differ from one client at a time by rounding.

    Raises `UserError` where the clients are not alike, the model has buffers, or the optimizer is not elementwise.
    """

    def __init__(self, clients: Mapping[str, LocalTraining], chunk: int = 256) -> None:
        check_range(
            "VectorisedTraining",
            chunk=(chunk, "whole, of at least 1", whole()),
            clients=(clients, "of one client at least", lambda value: len(value) > 0),
        )
        first = next(iter(clients.values()))
        alike = all(
            (each.model, each.loss_fn, each.make_optimizer, each.num_steps, each.batches.batch_size)
            == (first.model, first.loss_fn, first.make_optimizer, first.num_steps, first.batches.batch_size)
            and type(each.method) is Plain and each.batches.is_tensors
            for each in clients.values()
        )  # fmt: skip
        if not alike or any(True for _ in first.model.buffers()) or is_planned(first.model):
            raise UserError(
                "clients that are alike are needed to train together: one model object without buffers and plan, one loss, one "
                "optimizer, equal steps and batch sizes, tensors as data, Plain(); got others; leave `together` out"
            )
        shapes = [param.shape for param in first.model.parameters() if param.requires_grad]
        if not _is_elementwise(first.make_optimizer, shapes):
            raise UserError(
                "an elementwise optimizer is needed to train clients together, such as sgd, adam or adan; got one that reads more "
                "of a parameter at once; leave `together` out"
            )
        self.clients, self.chunk, self.first = clients, chunk, first

    def __call__(
        self, works: Sequence[tuple[str, State, Arrays, Mapping[str, Any]]]
    ) -> list[tuple[dict[str, np.ndarray], State]]:
        """Return the change and the state of each piece of work, in their order."""
        found = []
        for begin in range(0, len(works), self.chunk):
            found += self._chunk(works[begin : begin + self.chunk])
        return found

    def _chunk(self, works: Sequence[Any]) -> list[tuple[dict[str, np.ndarray], State]]:
        first, names = self.first, list(works[0][2])
        start = {name: torch.from_numpy(np.stack([work[2][name] for work in works])) for name in names}
        params = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        frozen = {name: value for name, value in first.model.named_parameters() if name not in params}
        numbers = [int(work[1].get("works", 0)) for work in works]
        chosen = [
            self.clients[work[0]].batches.indices(number, first.num_steps) for work, number in zip(works, numbers)
        ]
        optimizer, step = first.make_optimizer(list(params.values())), self._step_of(frozen)
        total = torch.zeros(len(works))
        for k in range(first.num_steps):
            batch = self._batch(works, [each[k] for each in chosen])
            grads, losses = step({name: value.detach() for name, value in params.items()}, batch)
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
            total += losses
        change = {name: (params[name].detach() - start[name]).numpy() for name in names}
        return [
            (
                {name: change[name][k] for name in names},
                {"works": numbers[k] + 1, METRIC + "loss": float(total[k]) / first.num_steps},
            )
            for k in range(len(works))
        ]

    def _batch(self, works: Sequence[Any], chosen: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        data = [self.clients[work[0]].batches.data for work in works]
        return tuple(
            torch.stack([each[kind][places] for each, places in zip(data, chosen)]) for kind in range(len(data[0]))
        )

    def _step_of(self, frozen: Mapping[str, Tensor]) -> Any:
        model, loss_fn = self.first.model, self.first.loss_fn
        model.train()

        def loss(params: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            def called(*inputs: Any, **named: Any) -> Any:
                return torch.func.functional_call(model, {**params, **frozen}, inputs, named)

            value = loss_fn(called, batch)
            return value, value.detach()

        return torch.func.vmap(torch.func.grad(loss, has_aux=True), randomness="different")


def _is_elementwise(make_optimizer: MakeOptimizer, shapes: Sequence[torch.Size]) -> bool:
    """Return whether two steps on pairs of parameters in one stack are those on each of the two alone."""
    generator = torch.Generator().manual_seed(0)
    drawn = [[torch.randn(2, *shape, generator=generator) for shape in shapes] for _ in range(3)]
    together = _stepped(make_optimizer, drawn)
    for k in range(2):
        alone = _stepped(make_optimizer, [[stack[k] for stack in each] for each in drawn])
        if not all(torch.allclose(stack[k], one, rtol=1e-4, atol=1e-6) for stack, one in zip(together, alone)):
            return False
    return True


def _stepped(make_optimizer: MakeOptimizer, drawn: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    params = [nn.Parameter(value.clone()) for value in drawn[0]]
    optimizer = make_optimizer(params)
    for grads in drawn[1:]:
        for param, grad in zip(params, grads):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]
