"""Sampled activations: exact forward and input gradient, an unbiased weight gradient, the sheet's variances, the bytes kept."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trainwright as tw
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.nn import GradientNorms, SampledLinear, chosen_rows, sample_activations

NUM, NUM_IN, NUM_OUT, DRAWS = 512, 32, 16, 600


def problem(sigma: float) -> tuple[Tensor, Tensor]:
    """Rows of log-normal norms, and gradients."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.exp(sigma * torch.randn(NUM, 1, generator=generator, dtype=torch.float64))
    x = scales * torch.randn(NUM, NUM_IN, generator=generator, dtype=torch.float64)
    return x, torch.randn(NUM, NUM_OUT, generator=generator, dtype=torch.float64)


def column_row(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Classic sampling: all with replacement."""
    p = scores / scores.sum()
    rows = torch.multinomial(p, k, replacement=True)
    return rows, 1 / (p[rows] * k)


def estimates(x: Tensor, g: Tensor, k: int, how: object) -> Tensor:
    torch.manual_seed(0)
    scores = x.norm(dim=1) * g.norm(dim=1)
    found = []
    for _ in range(DRAWS):
        rows, scale = how(scores, k)  # type: ignore[operator]
        found.append((g[rows] * scale[:, None]).T @ x[rows])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("sigma", "share", "most"), [(2.0, 0.3, 0.15), (2.0, 0.1, 1.0), (1.0, 0.3, 1.0), (0.0, 0.3, 1.05)]
)
def test_unbiased_and_of_less_variance_than_column_row_sampling(sigma: float, share: float, most: float) -> None:
    x, g = problem(sigma)
    exact, k = g.T @ x, int(share * NUM)
    ours, classic = (estimates(x, g, k, how) for how in (chosen_rows, column_row))

    def relative(values: Tensor) -> float:
        return ((values - exact).square().sum((1, 2)).mean() / exact.square().sum()).item()

    bias = ((ours.mean(0) - exact).norm() / exact.norm()).item()
    assert bias < 4 * math.sqrt(relative(ours) / DRAWS)
    assert relative(ours) <= most * relative(classic)


def test_taking_the_largest_alone_is_biased() -> None:
    """The bound of the test above can fail: it does for rows taken without any drawn."""
    x, g = problem(2.0)
    rows = (x.norm(dim=1) * g.norm(dim=1)).topk(153).indices
    exact = g.T @ x
    error = ((g[rows].T @ x[rows] - exact).square().sum() / exact.square().sum()).item()
    assert math.sqrt(error) > 4 * math.sqrt(error / DRAWS)


@given(scores=st.lists(st.floats(0, 1e6), min_size=2, max_size=12), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_expectation_is_the_sum_by_enumeration(scores: list[float], data: st.DataObject) -> None:
    """Rows weigh one in expectation, by the probabilities of the draw; and c minimises (1 − P) / (k − c)."""
    k = data.draw(st.integers(1, len(scores) - 1))
    values = torch.tensor(scores, dtype=torch.float64)
    p = values / values.sum() if values.sum() > 0 else torch.full_like(values, 1 / len(scores))
    torch.manual_seed(0)
    rows, weights = chosen_rows(values, k)
    assert len(rows) == len(weights) == k
    ordered = p.sort(descending=True).values.tolist()
    spread = [sum(ordered[c:]) / (k - c) for c in range(k)]
    num_sure = next((c for c in range(k) if spread[c] <= min(spread) * (1 + 1e-9)), 0)
    rest = sum(ordered[num_sure:])
    for row, weight in list(zip(rows.tolist(), weights.tolist()))[num_sure:]:
        if rest > 1e-12 and p[row] > 0:
            assert weight == pytest.approx(rest / (p[row].item() * (k - num_sure)), rel=1e-6) or weight == 1.0


def layer_and_input() -> tuple[SampledLinear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    sampled = SampledLinear(NUM_IN, NUM_OUT, budget=0.25, dtype=torch.float64)
    plain = nn.Linear(NUM_IN, NUM_OUT, dtype=torch.float64)
    plain.load_state_dict(sampled.state_dict())
    return sampled, plain, problem(2.0)[0].reshape(8, 64, NUM_IN)


def test_all_but_the_weights_gradient_is_exact() -> None:
    sampled, plain, x = layer_and_input()
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    left, right = sampled(one), plain(two)
    assert torch.equal(left, right)
    left.tanh().sum().backward()
    right.tanh().sum().backward()
    assert sampled.bias.grad is not None
    assert plain.bias.grad is not None
    for a, b in ((one.grad, two.grad), (sampled.bias.grad, plain.bias.grad)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert sampled.weight.grad is not None
    assert not torch.allclose(sampled.weight.grad, plain.weight.grad)


def test_what_is_kept_is_k_rows_and_their_numbers() -> None:
    sampled, _, x = layer_and_input()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        sampled(x.requires_grad_())
    k = NUM // 4
    own = [tensor for tensor in kept if tensor is not sampled.weight and tensor.data_ptr() != sampled.weight.data_ptr()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in own) == k * (NUM_IN * 8 + 8)
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in own)


def test_a_rerun_draws_the_same() -> None:
    sampled, _, x = layer_and_input()
    grads = []
    for rerun in (False, True):
        sampled.zero_grad()
        torch.manual_seed(3)
        loss = checkpoint(sampled, x, use_reentrant=False) if rerun else sampled(x)
        loss.square().sum().backward()
        assert sampled.weight.grad is not None
        grads.append(sampled.weight.grad.clone())
    assert torch.equal(*grads)


def test_evaluation_few_rows_and_frozen_weights_are_a_linear_layer() -> None:
    sampled, plain, x = layer_and_input()
    for way in ("eval", "few", "frozen"):
        sampled.train(way != "eval").requires_grad_(way != "frozen")
        given = x[0, :10] if way == "few" else x
        found = sampled(given)
        assert found.grad_fn is None or "SampledProduct" not in type(found.grad_fn).__name__
        assert torch.equal(found, plain(given))


def test_a_models_layers_become_sampled_in_place() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    before = dict(model.named_parameters())
    assert tw.sample_activations(model, budget=0.5, modules=["linear*"]) == ["linear1", "linear2"]
    assert all(before[name] is value for name, value in model.named_parameters())
    assert "budget=0.5" in repr(model)
    model(torch.randn(8, 16, 16)).square().sum().backward()
    assert model.linear1.weight.grad is not None


def test_norms_of_the_last_visit_make_the_estimate_better_and_stay_unbiased() -> None:
    torch.manual_seed(0)
    layer = SampledLinear(NUM_IN, NUM_OUT, budget=0.1, dtype=torch.float64)
    x = problem(0.5)[0].reshape(32, 16, NUM_IN)
    slopes = torch.exp(2.0 * torch.randn(32, 16, 1, dtype=torch.float64)).expand(32, 16, NUM_OUT)
    exact = slopes.reshape(-1, NUM_OUT).T @ x.reshape(-1, NUM_IN)
    table, index = GradientNorms(nn.Sequential(layer), 40, 16), torch.arange(5, 37)
    errors = []
    for visits in (False, True):
        found = []
        for _ in range(200):
            layer.zero_grad()
            if visits:
                with table.visiting(index):
                    (layer(x) * slopes).sum().backward()
            else:
                (layer(x) * slopes).sum().backward()
            assert layer.weight.grad is not None
            found.append(layer.weight.grad.clone())
        values = torch.stack(found[1:])
        errors.append(((values - exact).square().sum((1, 2)).mean() / exact.square().sum()).item())
        assert ((values.mean(0) - exact).norm() / exact.norm()).item() < 4 * math.sqrt(errors[-1] / len(values))
    assert errors[1] < 0.3 * errors[0]
    assert (table.norms["0"] > 0).sum() == 32 * 16
    with pytest.raises(UserError, match="each of the layer's"), table.visiting(index[:2]):
        layer(x)


def test_mistakes_are_said() -> None:
    for budget in (0.0, 1.0, -1.0, 2.0):
        with pytest.raises(UserError, match="budget"):
            SampledLinear(2, 2, budget=budget)
        with pytest.raises(UserError, match="budget"):
            sample_activations(nn.Linear(2, 2), budget)
    for k in (0, 4, 9):
        with pytest.raises(UserError, match="from 1 to 3"):
            chosen_rows(torch.ones(4), k)
    with pytest.raises(UserError, match=r"nn\.Linear"):
        sample_activations(nn.ReLU())
    with pytest.raises(UserError, match="sampled layers"):
        GradientNorms(nn.Linear(2, 2), 1, 1)


def test_low_precision_and_zeros() -> None:
    layer = SampledLinear(8, 4, budget=0.5, min_rows=1, dtype=torch.bfloat16)
    for x in (torch.randn(16, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)):
        layer.zero_grad()
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.isfinite().all()


def on_two_ranks() -> list[float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layer = SampledLinear(4, 2, budget=0.5, min_rows=1, dtype=torch.float64)
    x = torch.arange(64, dtype=torch.float64).reshape(16, 4)[8 * rank : 8 * rank + 8] / 64
    parallel = nn.parallel.DistributedDataParallel(layer)
    total = torch.zeros_like(layer.weight)
    for step in range(400):
        torch.manual_seed(1000 * step + rank)
        layer.zero_grad()
        F.mse_loss(parallel(x), torch.ones(8, 2, dtype=torch.float64)).backward()
        assert layer.weight.grad is not None
        total += layer.weight.grad / 400
    return total.flatten().tolist()


def test_data_parallel_ranks_agree_and_average_to_the_gradient(pool2: Pool) -> None:
    found = pool2.run("tests.nn.test_sampled_linear:on_two_ranks")
    assert found[0] == found[1]
    torch.manual_seed(0)
    plain = nn.Linear(4, 2, dtype=torch.float64)
    x = torch.arange(64, dtype=torch.float64).reshape(16, 4) / 64
    F.mse_loss(plain(x), torch.ones(16, 2, dtype=torch.float64)).backward()
    assert plain.weight.grad is not None
    assert found[0] == pytest.approx(plain.weight.grad.flatten().tolist(), rel=0.05)


class Ends(nn.Module):
    """A layer that is cut by columns, and one that is cut by rows."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias, dtype=torch.float64), nn.Linear(6, 2, bias, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def rows_of_x() -> torch.Tensor:
    return torch.arange(128, dtype=torch.float64).reshape(4, 8, 4).cos().requires_grad_()


def on_two_parts() -> list[list[float]]:
    """The output and the input's gradient of a sampled step, and the mean of the weights' gradients over many draws."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    found = []
    for bias in (True, False):
        torch.manual_seed(0)
        model = Ends(bias)
        sample_activations(model, budget=0.5, modules=["up"], min_rows=1)
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sample_activations(model, budget=0.5, modules=["down"], min_rows=1)  # after it was cut, too
        totals = [torch.zeros_like(param) for param in model.parameters()]
        num_draws = 600 if bias else 1  # a bias changes nothing of the weights' estimate; all else is exact in one step
        for step in range(num_draws):
            torch.manual_seed(1000 * step + rank)
            model.zero_grad()
            x = rows_of_x()
            out = model(x)
            out.square().mean().backward()
            for total, param in zip(totals, model.parameters(), strict=True):
                total += param.grad / num_draws
        assert x.grad is not None
        grads = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
        found += [value.flatten().tolist() for value in (out.detach(), x.grad, *grads)]
    return found


@pytest.mark.slow
def test_layers_cut_by_columns_and_rows_are_exact_but_for_the_weights(pool2: Pool) -> None:
    """The tensor-parallel form of torch: output, input gradient and biases to the bit of rounding, weights in the mean."""
    ranks = pool2.run("tests.nn.test_sampled_linear:on_two_parts")
    assert ranks[0] == ranks[1]
    found = iter(ranks[0])
    for bias in (True, False):
        torch.manual_seed(0)
        model, x = Ends(bias), rows_of_x()
        out = model(x)
        out.square().mean().backward()
        for exact in (out.detach(), x.grad):
            assert exact is not None
            assert next(found) == pytest.approx(exact.flatten().tolist(), rel=1e-12, abs=1e-15)
        for name, param in model.named_parameters():
            assert param.grad is not None
            rough = name.endswith("weight")
            scale = float(param.grad.abs().max())
            if rough and not bias:
                next(found)
                continue
            close = {"rel": 0.0, "abs": 0.08 * scale} if rough else {"rel": 1e-12, "abs": 1e-15}
            assert next(found) == pytest.approx(param.grad.flatten().tolist(), **close), name
