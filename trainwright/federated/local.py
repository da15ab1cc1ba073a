"""`LocalTraining`: a client's work on a model, K steps of any torch optimizer.

Each piece of work begins from the model that the server sent, with a fresh optimizer, and goes on through the client's data in
an order drawn from its seed and the number of the piece: the same work gives the same bits wherever it runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..artifacts import UserError, check_range
from .arrays import Arrays
from .checks import whole
from .clock import State

LossFn = Callable[[Any, Any], Tensor]
"""`loss_fn(model, batch)` returns a scalar; `batch` is a tuple of tensors, or what the user's loader yields."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_BUFFER = "buffer."
METRIC = "metric."
"""Numbers of a client's state under such names are reported to the server's strategy."""


def model_arrays(model: nn.Module, *, buffers: bool = False) -> dict[str, np.ndarray]:
    """Return what of a model travels: its trained parameters, as arrays by name; with `buffers` its running statistics too.

    What is narrower than fp32 travels as fp32. Without `buffers` each client keeps its own batch norm statistics. Of a planned
    module the arrays are whole, in the user's names; every rank calls this.

    >>> sorted(model_arrays(nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"an nn.Module is needed; got {type(model).__name__}; give the model itself")
    found = {name: _as_array(value) for name, value in _travelling(model, buffers).items()}
    if not found:
        raise UserError(
            "a model with parameters to train is needed; got one without; unfreeze what clients are to train"
        )
    return found


def load_arrays(model: nn.Module, arrays: Arrays) -> None:
    """Copy arrays by name into the model's parameters and buffers, in their own types; ranks of a planned module take their parts.

    >>> net = nn.Linear(1, 1)
    >>> load_arrays(net, {"weight": np.array([[2.0]]), "bias": np.array([1.0])})
    >>> net(torch.ones(1, 1)).item()
    3.0
    """
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    if unknown := [name for name in arrays if name not in targets]:
        raise UserError(
            f"arrays of this model are needed; it has no {unknown[0]}; start the server from its model_arrays"
        )
    if is_planned(model):
        from ..runtime.weights import load_full_state_dict

        load_full_state_dict(model, {name: _as_tensor(value) for name, value in arrays.items()})
        return
    with torch.no_grad():
        for name, value in arrays.items():
            if (shape := tuple(targets[name].shape)) != np.shape(value):
                raise UserError(
                    f"arrays of this model are needed; its {name} is {list(shape)}, the array {list(np.shape(value))}; start the "
                    "server from its model_arrays"
                )
            targets[name].copy_(_as_tensor(value))


def is_planned(model: nn.Module) -> bool:
    """Return whether the model is laid out by a plan, so that a process may hold a part of each parameter only.

    >>> is_planned(nn.Linear(1, 1))
    False
    """
    return any(hasattr(param, "full_tensor") for param in model.parameters())


def _travelling(model: nn.Module, buffers: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if buffers:
        found |= {name: value for name, value in model.named_buffers() if value.is_floating_point()}
    return _whole(model, found)


def _whole(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors for those of the model's, which a planned module gathers from its ranks."""
    if not is_planned(model) or not values:
        return values
    from ..runtime.module import full_state_dict

    trainable = all(value.requires_grad for value in values.values())
    gathered = full_state_dict(model, trainable=trainable)  # type: ignore[arg-type]
    return {name: gathered[name] for name in values if name in gathered}


def _as_array(value: Tensor) -> np.ndarray:
    value = value.detach()
    wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    return np.array(wide.cpu().numpy())


def _as_tensor(value: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(value))  # a copy: arrays of a server are not to be written to


@dataclass(frozen=True)
class Batches:
    """A client's examples: `data` is a tuple of tensors with equal first dims, or an iterable of batches, such as a DataLoader.

    Tensors are cut into batches of `batch_size` along a sequence of shuffled epochs. A loader is iterated through and then
    begun anew, under torch's generator seeded for the piece of work.
    """

    data: Any
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(
            "Batches", batch_size=(self.batch_size, "whole, of at least 1", whole()),
            seed=(self.seed, "whole, of at least 0", whole(0)),
            data=(self.data, "as a tuple of tensors or a loader", lambda value: isinstance(value, Iterable)),
        )  # fmt: skip
        lengths = {tuple(each.shape[:1]) for each in self.data} if self.is_tensors else {(1,)}
        if len(lengths) != 1 or not max(lengths) > (0,):
            raise UserError(
                "tensors of one length, at least 1, are needed as a client's data; got others; check its split"
            )

    @property
    def is_tensors(self) -> bool:
        return isinstance(self.data, (tuple, list)) and all(torch.is_tensor(each) for each in self.data)

    def indices(self, number: int, num_steps: int) -> np.ndarray:
        """Return which examples the steps of piece `number` take, [num_steps, batch_size]; for tensors."""
        rng, size = np.random.default_rng([self.seed, number]), len(self.data[0])
        num_epochs = math.ceil(num_steps * self.batch_size / size)
        drawn = np.concatenate([rng.permutation(size) for _ in range(num_epochs)])
        return drawn[: num_steps * self.batch_size].reshape(num_steps, self.batch_size)

    def of(self, number: int, num_steps: int) -> Iterator[Any]:
        """Yield the batches of piece `number`."""
        if self.is_tensors:
            for chosen in self.indices(number, num_steps):
                yield tuple(each[chosen] for each in self.data)
        else:
            for _, batch in zip(range(num_steps), _round_and_round(self.data)):
                yield batch


def _round_and_round(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        num_batches = 0
        for batch in loader:
            num_batches += 1
            yield batch
        if not num_batches:
            raise UserError("batches are needed as a client's data; its loader yields none; check its split")


class LocalMethod(ABC):
    """How a local step comes by its gradient; abstract. `state` is the client's, `config` the server's."""

    takes_loss = False

    def check(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to check)
        """Raise `UserError` for a model that the method cannot train."""

    def begin(self, params: Mapping[str, nn.Parameter], state: State, config: Mapping[str, Any]) -> State:
        """Start a piece of work from the model that was sent; return the state that goes on."""
        return state

    @abstractmethod
    def gradients(self, loss: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> Tensor:
        """Leave the gradient of a step in `.grad` and return the loss; `loss()` runs the model on the step's batch."""

    def end(self, delta: Arrays, state: State, config: Mapping[str, Any]) -> State:
        """Finish a piece of work; return the state to keep."""
        return state


class Plain(LocalMethod):
    """The loss's own gradient; with a proximal-mu μ in the server's config, as Flower's FedProx sends it, plus μ (x - x^t)."""

    def begin(self, params: Mapping[str, nn.Parameter], state: State, config: Mapping[str, Any]) -> State:
        self._mu = float(config.get("proximal-mu", 0.0))
        self._start = [param.detach().clone() for param in params.values()] if self._mu else []
        return state

    def gradients(self, loss: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> Tensor:
        value = loss()
        value.backward()
        for param, start in zip(params, self._start):
            if param.grad is not None:
                param.grad.add_(param.detach() - start, alpha=self._mu)
        return value.detach()


class LossTaking(LocalMethod):
    """For optimizers whose `step(closure)` takes the loss with its graph: AdaHessian, Sophia, GradNormSmoothNewton.

    Not SSO, whose closure returns the model's targets apart from their loss.
    """

    takes_loss = True

    def gradients(self, loss: Callable[[], Tensor], params: Sequence[nn.Parameter]) -> Tensor:
        raise NotImplementedError("the optimizer takes the loss itself")


class LocalTraining:
    """K local steps on a client's own examples: `update(state, arrays, config) -> (delta, state)`, for `simulate` and for Flower.

    model: an `nn.Module`; many clients may share one, for each piece of work loads what it needs. Or what `tw.parallelize`
    gave, on one rank or several: every rank then calls the work with the same arrays, and each gets the whole change.
    data: a tuple of tensors with equal first dims, or a loader. loss_fn: `loss_fn(model, batch)`, a scalar. optimizer: a
    function from parameters to an optimizer, `functools.partial(tw.optim.create, "adan", lr=1e-3)`; made anew for each
    piece of work, so momentum begins at zero. num_steps, batch_size, seed: of a piece of work. method: `Plain()`,
    `FedSpeed(…)`, `LossTaking()`. buffers: batch norm's running statistics travel with the model; else each client keeps
    its own.

    The state keeps the number of pieces, the last mean loss (`metric.loss`), buffers that do not travel, and what the
    method keeps. Raises `UserError` for settings out of range and for arrays that are not the model's.

    >>> _ = torch.manual_seed(0)
    >>> net, data = nn.Linear(3, 1), (torch.randn(8, 3), torch.ones(8, 1))
    >>> work = LocalTraining(net, data, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...                      lambda params: torch.optim.SGD(params, lr=0.1), num_steps=5, batch_size=4)
    >>> delta, state = work({}, model_arrays(net), {})
    >>> sorted(delta), state["works"]
    (['bias', 'weight'], 1)
    """

    def __init__(
        self, model: nn.Module, data: Any, loss_fn: LossFn, optimizer: MakeOptimizer, *, num_steps: int = 10,
        batch_size: int = 32, seed: int = 0, method: LocalMethod | None = None, buffers: bool = False,
    ) -> None:  # fmt: skip
        check_range(
            "LocalTraining", num_steps=(num_steps, "whole, of at least 1", whole()),
            model=(model, "an nn.Module", lambda value: isinstance(value, nn.Module)),
            loss_fn=(loss_fn, "a function of (model, batch)", callable),
            optimizer=(optimizer, "a function from parameters to an optimizer", callable),
            method=(method, "a LocalMethod, or None", lambda value: value is None or isinstance(value, LocalMethod)),
        )  # fmt: skip
        self.model, self.loss_fn, self.make_optimizer, self.num_steps = model, loss_fn, optimizer, num_steps
        self.batches, self.method, self.buffers = Batches(data, batch_size, seed), method or Plain(), buffers
        self.method.check(model)

    def __call__(self, state: State, arrays: Arrays, config: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], State]:
        """Train from `arrays`; return the change to them, and the state to keep."""
        number = int(state.get("works", 0))
        with torch.random.fork_rng():
            torch.manual_seed((self.batches.seed * 1_000_003 + number) % 2**63)
            self._take(arrays, state)
            loss, state = self._train(number, state, config)
        delta = self._change(arrays)
        state = self.method.end(delta, state, config) | self._own_buffers()
        return delta, state | {"works": number + 1, METRIC + "loss": loss}

    def _take(self, arrays: Arrays, state: State) -> None:
        load_arrays(self.model, arrays)
        own = {name.removeprefix(_BUFFER): value for name, value in state.items() if name.startswith(_BUFFER)}
        load_arrays(self.model, own)

    def _train(self, number: int, state: State, config: Mapping[str, Any]) -> tuple[float, State]:
        params = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.model.train()
        optimizer, state = self.make_optimizer(list(params.values())), self.method.begin(params, state, config)
        total = 0.0
        for batch in self.batches.of(number, self.num_steps):
            total += float(self._step(optimizer, list(params.values()), batch))
        return total / self.num_steps, state

    def _step(self, optimizer: torch.optim.Optimizer, params: list[nn.Parameter], batch: Any) -> Tensor:
        def loss() -> Tensor:
            value = self.loss_fn(self.model, batch)
            if not torch.is_tensor(value) or value.numel() != 1:
                shape = list(value.shape) if torch.is_tensor(value) else type(value).__name__
                raise UserError(f"a loss_fn that returns a scalar is needed; got {shape}; take its mean")
            return value

        optimizer.zero_grad(set_to_none=True)
        if self.method.takes_loss:
            found = optimizer.step(loss)  # type: ignore[arg-type]
            return torch.as_tensor(found).detach()
        value = self.method.gradients(loss, params)
        optimizer.step()
        return value

    def _change(self, arrays: Arrays) -> dict[str, np.ndarray]:
        new = _travelling(self.model, self.buffers)
        return {name: _as_array(new[name]) - value for name, value in arrays.items()}

    def _own_buffers(self) -> State:
        if self.buffers:
            return {}
        own = _whole(self.model, dict(self.model.named_buffers()))
        return {_BUFFER + name: value.detach().cpu().numpy().copy() for name, value in own.items()}
