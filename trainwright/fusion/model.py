"""`fuse`: B models of one shape become one module, and `unfuse` makes them B again."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from ..capture.call import LossFn, call_model, loss_of
from ..torch_internals.private import flatten, unflatten
from . import rules_dims, rules_elementwise, rules_modules, rules_norms, rules_products  # noqa: F401  # fill the table
from .alike import check_alike, per_model_settings, tensors_of
from .array import Fused, is_fused
from .fallback import each_alone, stacked
from .streams import Streams, drawing, streaming


def fuse(models: Sequence[nn.Module], *, seeds: Sequence[int] | None = None, unfused: Sequence[str] = ()) -> FusedModel:
    """Make one module of B models of one shape that computes what they compute, and whose gradients are theirs.

        loss_b(θ_b; x)  for b = 1 … B   →   Σ_b loss_b(θ_b; x),   of which ∂/∂θ_b is model b's own gradient

    Parameters become [B, …]; the models' own forward runs once, on tensors that hide B (`array.Fused`): convolutions are
    grouped, linear layers batched, embeddings looked up in one table, normalisation is each model's, attention has B in its
    batch. A function without a rule runs under `torch.func.vmap`, and where that fails once a model.

    models: in training or evaluation mode all; the first gives the code, all give values; they are copied. Their classes,
    shapes and settings must be equal, but for weights and dropout rates. seeds: of each model's random stream (dropout);
    default 0, 1, …; on the CPU, model b draws what it would alone after `torch.manual_seed(seeds[b])`.
    unfused: modules, by name or pattern (`"encoder.*"`), that run once a model.

    Raises `UserError` for models that differ, with the first difference. Not for models whose forward branches on values
    that differ between them, nor for one large model: several that keep a device busy each run no faster together.

    >>> models = [nn.Linear(3, 2) for _ in range(4)]
    >>> fused, x = fuse(models), torch.randn(5, 3)
    >>> fused(x).shape, bool(torch.allclose(fused(x)[2], models[2](x), atol=1e-6))
    (torch.Size([4, 5, 2]), True)

    Source: Wang et al. 2021, Horizontally Fused Training Array (MLSys), whose array dim and operators these are.
    """
    models = list(models)
    check_alike(models)
    seeds = list(range(len(models))) if seeds is None else list(seeds)
    if len(seeds) != len(models):
        raise UserError(f"fuse needs a seed a model; got {len(seeds)} for {len(models)} models; give as many")
    return FusedModel(models, Streams(seeds), unfused)


class FusedModel(nn.Module):
    """B models as one; `fuse` makes it. `model` is the first one's structure, whose parameters are [B, …]."""

    def __init__(self, models: Sequence[nn.Module], streams: Streams, unfused: Sequence[str] = ()) -> None:
        super().__init__()
        self.num_models, self.streams, self.unfused = len(models), streams, tuple(unfused)
        self.model = copy.deepcopy(models[0])
        self._settings = per_model_settings(models)
        self.shared = _stack_into(self.model, models)
        names = [name for name, _ in self.model.named_modules()]
        if wrong := [each for each in self.unfused if not fnmatch.filter(names, each)]:
            raise UserError(
                f"modules of the model are needed in unfused; there is none {wrong[0]!r}; see named_modules()"
            )
        self.training = models[0].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the models return, each tensor with B in front; arguments are shared by all, or `stack(…)`ed."""
        with self.running():
            found = self.model(*args, **kwargs)
        return _raw(found, self.num_models)

    def loss(self, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
        """Return the models' losses [B]; `loss(…).sum().backward()` gives each model its own gradient.

        batch, loss_fn: as for `trainwright.profile`; the batch is shared by all, or `stack` of one for each.
        """
        with self.running():
            output = call_model(self.model, batch, loss_fn)
            found = loss_of(self.model, batch, loss_fn, output)
        losses = _raw(found, self.num_models)
        if not isinstance(losses, Tensor) or losses.shape != (self.num_models,):
            raise UserError(
                f"one number a model is needed as loss; got {getattr(losses, 'shape', type(losses).__name__)}; return a mean or sum"
            )
        return losses

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let `self.model` stand for all models: its parameters and buffers are fused meanwhile."""
        with streaming(self.streams), _substituted(self), _apart(self), _functions_apart():
            yield

    def stack(self, values: Sequence[Any]) -> Any:
        """Return one argument of B: a value for each model, in place of one that all share."""
        if len(values) != self.num_models:
            raise UserError(
                f"stack needs a value for each of {self.num_models} models; got {len(values)}; give as many"
            )
        flats = [flatten(value) for value in values]
        return stacked([flat for flat, _ in flats], flats[0][1])

    def unfuse(self) -> list[nn.Module]:
        """Return the models, with the values that they have now; nothing is shared with this module.

        >>> fused = fuse([nn.Linear(2, 1), nn.Linear(2, 1)])
        >>> [type(model).__name__ for model in fused.unfuse()]
        ['Linear', 'Linear']
        """
        return [self.one(model) for model in range(self.num_models)]

    def one(self, model: int) -> nn.Module:
        """Return a copy of one of the models; see `unfuse`."""
        with torch.no_grad():
            memo: dict[int, Any] = {}
            for tensor in [*self.parameters(), *self._own_buffers()]:
                own = tensor.detach()[model].clone()
                memo[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
            found = copy.deepcopy(self.model, memo)
        for name, values in self._settings.items():
            path, _, attribute = name.rpartition(".")
            setattr(found.get_submodule(path), attribute, values[model])
        return found.train(self.training)

    def keep(self, models: Sequence[int]) -> FusedModel:
        """Return a fused model of some of these, in that order, each where it stands: values, buffers, random stream.

        `FusedOptimizer.keep` does the same for their optimizers. A model that is kept draws from the same generator.
        """
        found = FusedModel([self.one(model) for model in models], self.streams.only(models), self.unfused)
        return found.train(self.training)

    def _own_buffers(self) -> list[Tensor]:
        return [buffer for name, buffer in self.model.named_buffers(remove_duplicate=False) if name not in self.shared]


def _stack_into(model: nn.Module, models: Sequence[nn.Module]) -> frozenset[str]:
    """Make the tensors of `model` those of all models; return the names of the buffers that stay one for all."""
    new: dict[int, Tensor] = {}
    shared = set()
    for name, ones in tensors_of(models).items():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        is_parameter = isinstance(ones[0], nn.Parameter)
        if not is_parameter and _is_shared(ones):
            shared.add(name)
            continue
        key = id(ones[0])
        if key not in new:
            values = torch.stack([one.detach() for one in ones])
            new[key] = nn.Parameter(values, ones[0].requires_grad) if is_parameter else values
        (owner._parameters if is_parameter else owner._buffers)[attribute] = new[key]  # type: ignore[index,assignment]
        _renew_flat_weights(owner)
    return frozenset(shared)


def _is_shared(ones: Sequence[Tensor]) -> bool:
    """Tell whether one buffer serves all models: counters, masks and positions that all have alike."""
    first = ones[0]
    return (
        not first.is_floating_point()
        and not first.is_complex()
        and all(one is first or torch.equal(one, first) for one in ones)
    )


def _renew_flat_weights(owner: nn.Module) -> None:
    """Recurrent layers keep a list of their parameters beside the names."""
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights = [owner._parameters.get(name) for name in owner._flat_weights_names]


@contextlib.contextmanager
def _substituted(fused: FusedModel) -> Iterator[None]:
    made: dict[int, Fused] = {}
    places: list[tuple[dict[str, Any], str, Any]] = []
    for path, module in fused.model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None or (f"{path}.{name}" if path else name) in fused.shared:
                    continue
                places.append((own, name, tensor))
                own[name] = made.setdefault(id(tensor), Fused(tensor))  # type: ignore[assignment]
        _renew_flat_weights(module)
    settings = [
        (fused.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in fused._settings
    ]
    before = [getattr(module, attribute) for module, attribute in settings]
    for (module, attribute), values in zip(settings, fused._settings.values()):
        setattr(module, attribute, tuple(values))
    try:
        yield
    finally:
        for own, name, tensor in places:
            now = own[name]
            own[name] = tensor
            if is_fused(now) and now.raw is not tensor:  # the forward gave the buffer anew
                own[name] = now.raw.detach()
        for (module, attribute), value in zip(settings, before):
            setattr(module, attribute, value)
        for module in fused.model.modules():
            _renew_flat_weights(module)


@contextlib.contextmanager
def _apart(fused: FusedModel) -> Iterator[None]:
    """Let the modules that are to stay unfused run once a model."""
    changed = []
    for path, module in fused.model.named_modules():
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in fused.unfused):
            changed.append(module)
            module.forward = _once_a_model(module, type(module).forward, fused)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _once_a_model(module: nn.Module, forward: Callable[..., Any], fused: FusedModel) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = flatten((args, kwargs))
        return each_alone(
            partial(forward, module), leaves, tree, fused.num_models, lambda model: _of_one(module, model)
        )

    return run


@contextlib.contextmanager
def _of_one(module: nn.Module, model: int) -> Iterator[None]:
    """Give a module and those in it one model's tensors, and its random stream, meanwhile."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for own in tables:
            for name, tensor in own.items():
                if is_fused(tensor):
                    places.append((own, name, tensor))
                    own[name] = tensor.raw[model]
        _renew_flat_weights(each)
    try:
        with drawing(model):
            yield
    finally:
        for own, name, tensor in places:
            own[name] = tensor


@contextlib.contextmanager
def _functions_apart() -> Iterator[None]:
    """Let an `autograd.Function` of the user's run once a model: it would take fused tensors for tensors."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = own.__get__(None, cls)
        leaves, tree = flatten((args, kwargs))
        return each_alone(plain, leaves, tree) if any(map(is_fused, leaves)) else plain(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


def _raw(found: Any, num: int) -> Any:
    """Return outputs with B in front; a tensor that no parameter reached is each model's too."""
    leaves, tree = flatten(found)
    return unflatten([_raw_leaf(leaf, num) for leaf in leaves], tree)


def _raw_leaf(leaf: Any, num: int) -> Any:
    if is_fused(leaf):
        return leaf.raw
    return leaf.expand(num, *leaf.shape) if isinstance(leaf, Tensor) else leaf
