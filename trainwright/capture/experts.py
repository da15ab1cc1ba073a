"""Mixtures of experts, recognised while a model is captured: whatever they are written as, the graph calls `trainwright::experts`.

transformers   its experts' modules ask one table how to run; while a model is captured the table answers with the op
other modules  a class of which `register_experts` says how to write it with `experts`
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from ..ops.experts import EXPERTS, GATES, GateRule
from ..torch_internals import private

__all__ = ["experts", "register_experts", "register_gate"]

Forward = Callable[..., Any]
_MOE = "transformers.integrations.moe"
_BY_CLASS: dict[type[nn.Module], Forward] = {}
_BY_NAME: dict[tuple[str, str], Forward] = {}
"""(module, class) → the forward, of classes that are not imported for its sake."""


def experts(
    tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, *, gate: str = "silu_glu",
    b_in: Tensor | None = None, b_out: Tensor | None = None, transposed: bool = False, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Run each token through the experts that it chose, and sum up their results by weight.

        out[t] = Σ_k weights[t, k] · (gate(w_in[e] · tokens[t] + b_in[e]) · w_out[e] + b_out[e]),   e = ids[t, k]

    tokens: [..., hidden]. ids: [..., k], which experts, each at most once a token. weights: [..., k], of any floating type.
    w_in: [experts, parts · inner, hidden], w_out: [experts, hidden, inner]; with `transposed` their last two dims are exchanged.
    gate: what stands between the products: `relu`, `gelu`, `gelu_tanh`, `silu` (parts = 1), the same with `_glu`
    (parts = 2: activation(first half) · second half; `silu_glu` is SwiGLU), or a name of `register_gate`.
    b_in: [experts, parts · inner], b_out: [experts, hidden]. interleaved: the parts of one feature stand side by side in w_in,
    not each half for itself. Returns [..., hidden] of the tokens' type. No token is dropped, whatever the routing.

    A plan may split tokens, experts, inner features, and tokens with experts (all-to-all); without a plan it is an ordinary
    differentiable op, twice too. For few tokens and experts that all run anyway a batched product is simpler.

    Raises `UserError` for shapes that do not fit and for a gate that nobody defined.

    >>> tokens, w_in, w_out = torch.ones(3, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    >>> ids, weights = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    >>> experts(tokens, ids, weights, w_in, w_out, gate="relu_glu")[0]
    tensor([48., 48., 48., 48.])
    """
    _check(tokens, ids, weights, w_in, w_out, gate, (b_in, b_out), transposed)
    hidden, k = tokens.shape[-1], ids.shape[-1]
    flat = tokens.reshape(-1, hidden).to(w_in.dtype), ids.reshape(-1, k), weights.reshape(-1, k)
    out = EXPERTS(*flat, w_in, w_out, b_in, b_out, gate, transposed, not interleaved)
    return out.to(tokens.dtype).view(tokens.shape)


def register_gate(name: str, gate: Callable[[Tensor], Tensor], parts: int = 2, interleaved: bool = False) -> None:
    """Define what may stand between the products of `experts`, under a name.

    gate: [rows, parts · inner] → [rows, inner], differentiable, each feature of each row for itself: any split of rows or features
    gives the same. It is tried on random rows. parts: columns of w_in to one feature; interleaved: as for `experts`.

    Call it where the module is defined, so that every process that imports the model knows it. Raises `UserError` for a gate
    that mixes rows or features, or gives another shape.

    >>> register_gate("squared_relu", lambda up: torch.relu(up).square(), parts=1)
    """
    made = _tried(gate, parts, not interleaved)
    if made is None:
        raise UserError(
            f"a gate of [rows, {parts} · inner] → [rows, inner] is needed that takes each row and feature for itself, and draws no "
            f"random numbers; {name} does not; leave what mixes them out of it"
        )
    GATES[name] = made


def register_experts(module: type[nn.Module], forward: Forward) -> None:
    """Say how a class of modules computes its experts by `experts`: captured models call that in place of its own forward.

    forward: `(module, *args, **kwargs)`, with the result of the class's own. The model is left as it is.

    >>> class Mixture(nn.Module):
    ...     def forward(self, x, ids, weights):
    ...         raise NotImplementedError("a loop over the experts that are hit")
    >>> register_experts(Mixture, lambda own, x, ids, weights: experts(x, ids, weights, own.w_in, own.w_out))
    """
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise UserError(
            f"a class of modules is needed to say how its experts run; got {module!r}; pass the class itself"
        )
    _BY_CLASS[module] = forward


@contextmanager
def lifted_experts() -> Iterator[None]:
    """Let modules that are known to be experts call the op, for the time of a capture."""
    with ExitStack() as stack:
        moe = sys.modules.get(_MOE)
        if moe is not None:
            stack.enter_context(patch.object(moe.ALL_EXPERTS_FUNCTIONS, "get_interface", _interface))
        for module, forward in {**_imported(), **_BY_CLASS}.items():
            stack.enter_context(patch.object(module, "forward", _method(forward)))
        yield


def know_gates(model: nn.Module) -> None:
    """Define the gates of the model's experts, as a capture of it would: a stored capture names them."""
    if _MOE in sys.modules:
        for module in model.modules():
            if hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated"):
                _gate_of(module)


def _check(tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, gate: str,
           biases: tuple[Tensor | None, Tensor | None], transposed: bool) -> None:  # fmt: skip
    if gate not in GATES:
        raise UserError(f"a gate is one of {', '.join(GATES)}; got {gate!r}; define it by register_gate")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UserError(f"the numbers of experts are integers; ids are {ids.dtype}; pass topk's indices")
    num, hidden = w_in.shape[0], tokens.shape[-1]
    inner = w_out.shape[1 if transposed else 2] if w_out.dim() == 3 else -1
    wide = GATES[gate].parts * inner
    wanted = {
        "w_in": (w_in, (num, hidden, wide) if transposed else (num, wide, hidden)),
        "w_out": (w_out, (num, inner, hidden) if transposed else (num, hidden, inner)),
        "ids": (ids, (*tokens.shape[:-1], ids.shape[-1])),
        "weights": (weights, tuple(ids.shape)),
        "b_in": (biases[0], (num, wide)),
        "b_out": (biases[1], (num, hidden)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise UserError(
                f"experts of tokens {list(tokens.shape)} and gate {gate} need {name} of shape {list(shape)}; got "
                f"{list(tensor.shape)}; see the shapes in help(trainwright.experts)"
            )


def _interface(name: str, default: Forward) -> Forward:
    """Return the function that transformers' table gives while a model is captured, however its experts are configured to run."""
    del name
    return lambda module, *args, **kwargs: _of_transformers(module, default, args, kwargs)


def _of_transformers(module: Any, default: Forward, args: Any, kwargs: Any) -> Tensor:
    """Call the op for an experts' module of transformers; one that it does not describe takes transformers' own grouped form."""
    named = inspect.signature(default).bind(module, *args, **kwargs)
    _, tokens, ids, weights = named.args[:4]
    gate = None if module.has_post_expert_norm or module._is_expert_parallel else _gate_of(module)
    if gate is None:
        return sys.modules[_MOE].grouped_mm_experts_forward(module, tokens, ids, weights)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{name}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return experts(
        tokens, ids, weights, getattr(module, name), module.down_proj, gate=gate, b_in=biases[0], b_out=biases[1],
        transposed=module.is_transposed, interleaved=not module.is_concatenated,
    )  # fmt: skip


def _gate_of(module: Any) -> str | None:
    """Return the name of a transformers module's gate, defined and tried; None for one that is no function of its rows."""
    activation = getattr(module, "act_fn", None)
    if isinstance(activation, nn.Module) and any(True for _ in (*activation.parameters(), *activation.buffers())):
        return None
    plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, bool))}
    parts = 2 if module.has_gate else 1
    try:
        source = inspect.getsource(type(module)._apply_gate) + inspect.getsource(type(activation))
    except (OSError, TypeError):
        source = repr(type(module))
    text = repr((source, repr(activation), getattr(activation, "__name__", ""), sorted(plain.items()), parts))
    name = f"{type(module).__name__}.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    if name not in GATES:
        made = _tried(_alone(module, plain, activation), parts, module.is_concatenated)
        if made is None:
            return None
        GATES[name] = made
    return name


def _alone(module: Any, plain: dict[str, Any], activation: Any) -> Callable[[Tensor], Tensor]:
    """Return the module's gate without the module, whose parameters it would hold."""
    if not module.has_gate:
        return activation  # type: ignore[no-any-return]
    own = object.__new__(type(module))
    vars(own).update(plain, act_fn=activation)
    return own._apply_gate  # type: ignore[no-any-return]


_TRIED_ROWS, _TRIED_FEATURES = 3, 4


def _tried(gate: Callable[[Tensor], Tensor], parts: int, concatenated: bool) -> GateRule | None:
    """Return a gate as a rule, its results in memory of their own; None where rows or features are not each for itself."""
    with private.without_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        rows = torch.randn(
            _TRIED_ROWS, parts * _TRIED_FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        order = (parts, _TRIED_FEATURES) if concatenated else (_TRIED_FEATURES, parts)
        some = rows.view(_TRIED_ROWS, *order).narrow(1 + concatenated, 1, 2).reshape(_TRIED_ROWS, -1)
        try:
            whole, one, two = gate(rows), gate(rows[1:2]), gate(some)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        if whole.shape != (_TRIED_ROWS, _TRIED_FEATURES) or two.shape != (_TRIED_ROWS, 2):
            return None
        if not torch.allclose(whole[1:2], one) or not torch.allclose(whole[:, 1:3], two):
            return None
        if private.storage_of(whole) == private.storage_of(rows):
            return GateRule(lambda up: gate(up).clone(), parts)
    return GateRule(gate, parts)


def _method(forward: Forward) -> Forward:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return run


def _imported() -> dict[type[nn.Module], Forward]:
    """The classes of `_BY_NAME` that this process has imported."""
    return {getattr(sys.modules[place], name): run for (place, name), run in _BY_NAME.items() if place in sys.modules}


def _llama4(own: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4 scales a token before its expert, not after: each choice is a row of its own, of weight 1."""
    tokens = hidden_states.reshape(-1, own.hidden_dim)
    scores, logits = own.router(tokens)
    weights, ids = torch.topk(scores, own.top_k, dim=1)
    rows = (tokens.unsqueeze(1) * weights.unsqueeze(2)).view(-1, own.hidden_dim)
    gate = _llama4_gate(own.experts.act_fn)
    ones, inner = torch.ones_like(rows[:, :1]), own.experts
    routed = experts(rows, ids.view(-1, 1), ones, inner.gate_up_proj, inner.down_proj, gate=gate, transposed=True)
    return own.shared_expert(tokens) + routed.view(-1, own.top_k, own.hidden_dim).sum(1), logits


def _llama4_gate(activation: Any) -> str:
    name = f"llama4_{type(activation).__name__}"
    if name not in GATES:
        GATES[name] = GateRule(lambda up: activation(up.chunk(2, dim=-1)[0]) * up.chunk(2, dim=-1)[1], 2)
    return name


_BY_NAME["transformers.models.llama4.modeling_llama4", "Llama4TextMoe"] = _llama4
