"""`SampledLinear`: a linear layer that keeps some rows of its input for the weight's gradient, which stays unbiased.

choose    probabilities of rows → the c largest, and k − c drawn of the others     `ops.sampled.weighted_rows`
forward   y = x Wᵀ + b, exact; kept: the chosen rows and their numbers              `ops.sampled.SampledProduct`
backward  dx = g W and db = Σ g, exact; dW = Σ_kept w_i g_i x_iᵀ
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from ..artifacts import UserError, check_range
from ..ops.sampled import SampledProduct, row_norms, rows_kept, weighted_rows


class SampledLinear(nn.Linear):
    r"""Keep k of the n rows (tokens) of the input for the backward, and estimate the weight's gradient from them.

        dW = Σ_{i in C} g_i x_iᵀ + Σ_{j drawn} g_j x_jᵀ (1 − P_C) / (p_j (k − c)),      E[dW] = Σ_i g_i x_iᵀ

    p_i is proportional to ‖x_i‖ (times ‖g_i‖ of the last visit, where `norms` are given); C holds the c largest, taken for
    certain, and the others are drawn with replacement. c minimises (1 − P_C) / (k − c). The output, the input's gradient and
    the bias's are exact. Kept: k (in_features elements and one index of 8 bytes), where a linear layer keeps all n rows.

    in_features, out_features, bias, device, dtype: as `nn.Linear`. budget: k / n, in (0, 1). min_rows: k at least; where
    k ≥ n, in evaluation, and where the weight needs no gradient, it is a linear layer. Rows are counted over all dims but
    the last. Draws come from torch's generator, so under `torch.utils.checkpoint`, which restores it, the rerun draws
    the same; each rank of a data-parallel run draws its own. A weight that `parallelize_module` has cut by rows or by columns is
    sampled on each rank among the rows of its own part. Raises `UserError` for a budget out of range.

    Pays where inputs of linear layers fill the memory and few rows hold most of the norm: of rows of equal norm the
    variance is that of uniform sampling, (n − k) / k of the gradient's square and more. Not for small batches, nor behind
    what keeps its own result for the backward (ReLU, attention), where the rows come on top.

    >>> layer = SampledLinear(8, 4, budget=0.5, min_rows=1)
    >>> layer(torch.randn(2, 10, 8)).shape
    torch.Size([2, 10, 4])

    Source: Liu et al. 2023, Winner-Take-All Column Row Sampling for Memory Efficient Adaptation of Language Model
    (NeurIPS). Departs in that what is drawn is always with replacement and scaled, and c at most k − 1: unbiased always.
    """

    def __init__(self, *args: Any, budget: float = 0.3, min_rows: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget, self.min_rows = check_budget(budget), min_rows
        self.norms: Tensor | None = None
        """Norms of the output's gradient rows [n] at these examples' last visit (`GradientNorms`); `None`: by the input's alone."""
        self.grad_norms: Tensor | None = None
        """After a backward with `norms`: those of this visit [n]."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        if isinstance(self.weight, DTensor):
            return self._on_parts(self.weight, input)
        return self._product(input, self.weight, self.bias)

    def _on_parts(self, weight: DTensor, input: Tensor) -> Tensor:
        """Return the product of this rank's part of the weight; each rank chooses among the rows of its own columns.

        A sum of unbiased estimates is unbiased, so no rank asks another.
        """
        mesh, last = weight.device_mesh, input.dim() - 1
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, [Replicate()] * mesh.ndim, run_check=False)
        given, given_back, weight_back, out = zip(
            *(_around(place, own, last) for place, own in zip(weight.placements, input.placements, strict=True)),
            strict=True,
        )
        x = input.redistribute(placements=given).to_local(grad_placements=given_back)
        adds_up = any(place.is_partial() for place in out)
        bias = (
            None
            if self.bias is None or adds_up
            else self.bias.to_local()
            if isinstance(self.bias, DTensor)
            else self.bias
        )
        local = self._product(x, weight.to_local(grad_placements=weight_back), bias)
        shape = torch.Size([*input.shape[:-1], weight.shape[0]])
        found = DTensor.from_local(local, mesh, out, run_check=False, shape=shape, stride=_strides(shape))
        return found if self.bias is None or bias is not None else found + self.bias

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num = input.shape[:-1].numel()
        k = rows_kept(num, self.budget, self.min_rows)
        if not self.training or k >= num or not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(input, weight, bias)
        scores, noted = row_norms(input.detach().reshape(num, -1)), None
        if self.norms is not None:
            scores, noted = scores * self._known_norms(scores), self._note
        return SampledProduct.apply(input, weight, bias, k, scores, F.linear, False, noted, None)  # type: ignore[no-any-return]

    def _known_norms(self, scores: Tensor) -> Tensor:
        num = len(scores)
        assert self.norms is not None
        if self.norms.numel() != num:
            raise UserError(
                f"a norm for each of the layer's {num} rows is needed; the table has {self.norms.numel()} of these examples; "
                "give GradientNorms as many tokens as the layer sees, and the batch's own examples"
            )
        return _with_unknown(self.norms.to(scores)).reshape(-1)

    def _note(self, norms: Tensor) -> None:
        self.grad_norms = norms

    def extra_repr(self) -> str:
        """Return the settings for the module's text."""
        return f"{super().extra_repr()}, budget={self.budget}"


def _around(weight: Placement, input: Placement, last: int) -> tuple[Placement, Placement, Placement, Placement]:
    """Return, along one mesh axis, how the input comes, its gradient and the weight's leave, and the output lies.

    weight, input: as they lie; last: the input's last dim. Rows that are split stay so where the weight is whole.
    """
    if weight.is_shard(0):
        return Replicate(), Partial(), Shard(0), Shard(last)
    if weight.is_shard(1):
        return Shard(last), Shard(last), Shard(1), Partial()
    if isinstance(input, Shard) and input.dim < last:
        return input, input, Partial(), input
    return Replicate(), Replicate(), Replicate(), Replicate()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(*shape, device="meta").stride()


def check_budget(budget: float) -> float:
    """Return a budget that is a share of rows, or raise `UserError`."""
    check_range("SampledLinear", budget=(budget, "in (0, 1)", lambda value: 0.0 < value < 1.0))
    return budget


def chosen_rows(scores: Tensor, k: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the numbers of k rows and their weights [..., k], such that Σ w_i v_i is Σ v over all rows in expectation.

    scores: [..., n], of at least 0, by which rows are taken, each leading index by itself: all zero are all equal. Raises
    `UserError` unless 1 ≤ k < n.

    >>> rows, weights = chosen_rows(torch.tensor([8.0, 1.0, 1.0]), 2)
    >>> rows[0].item(), weights.tolist()
    (0, [1.0, 2.0])
    """
    num = scores.shape[-1]
    if not 1 <= k < num:
        raise UserError(f"a number of rows from 1 to {num - 1} is needed; got {k}; take a smaller budget, or keep all")
    return weighted_rows(scores, k, generator)


def _with_unknown(norms: Tensor) -> Tensor:
    """Return norms whose zeros (rows not visited yet) are the mean of the others: each row can be drawn."""
    known = norms > 0
    mean = norms.sum() / known.sum().clamp_min(1)
    return torch.where(known, norms, mean.where(mean > 0, 1.0))


def sample_activations(
    model: nn.Module, budget: float = 0.3, *, modules: Sequence[str] = ("*",), min_rows: int = 10
) -> list[str]:  # fmt: skip
    """Make linear layers of a model `SampledLinear`, in place; returns their names.

    The parameters stay the same objects, under the same names. budget, min_rows: see `SampledLinear`. modules: names or
    patterns of the layers; only layers of class `nn.Linear` itself whose weight is trained are changed. Raises `UserError` where
    a pattern finds none.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> sample_activations(model, budget=0.5, modules=["0"])
    ['0']
    """
    check_budget(budget)
    linears = {
        name: each for name, each in model.named_modules() if type(each) is nn.Linear and each.weight.requires_grad
    }
    chosen = [name for name in linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in modules)]
    if not chosen:
        raise UserError(
            f"trained layers of class nn.Linear are needed for {', '.join(modules)}; the model's are {', '.join(linears) or 'none'}"
            "; name some of them"
        )
    for name in chosen:
        linears[name].__class__ = SampledLinear
        linears[name].__dict__.update(budget=budget, min_rows=min_rows, norms=None, grad_norms=None)
    return chosen


class GradientNorms:
    """Remember ‖g‖ of every token of every example, so that `SampledLinear` draws by ‖x‖·‖g‖; a table of 2 bytes a token and layer.

    model: with sampled layers. num_examples, num_tokens: the table's size; layers whose rows are not [examples of the batch,
    num_tokens] are refused. Around forward and backward of a batch of known examples: `with table.visiting(index): …`. Until an
    example's first visit its rows have the mean norm, so draws stay unbiased.

    >>> model = nn.Sequential(SampledLinear(4, 2, budget=0.5, min_rows=1))
    >>> table = GradientNorms(model, num_examples=6, num_tokens=3)
    >>> with table.visiting(torch.tensor([4, 1])):
    ...     model(torch.randn(2, 3, 4)).square().sum().backward()
    >>> (table.norms["0"][:, 0] > 0).tolist()
    [False, True, False, False, True, False]
    """

    def __init__(self, model: nn.Module, num_examples: int, num_tokens: int) -> None:
        self.layers = {name: each for name, each in model.named_modules() if isinstance(each, SampledLinear)}
        if not self.layers:
            raise UserError(
                "sampled layers are needed for a table of norms; the model has none; call sample_activations(model)"
            )
        self.norms = {name: torch.zeros(num_examples, num_tokens, dtype=torch.bfloat16) for name in self.layers}

    @contextlib.contextmanager
    def visiting(self, index: Tensor) -> Iterator[None]:
        """Let the layers draw by the norms of these examples [batch], and note those of this visit."""
        index = index.cpu()
        for name, layer in self.layers.items():
            layer.norms, layer.grad_norms = self.norms[name][index].to(layer.weight.device), None
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                if layer.grad_norms is not None:
                    self.norms[name][index] = layer.grad_norms.reshape(len(index), -1).to("cpu", torch.bfloat16)
                layer.norms = layer.grad_norms = None
