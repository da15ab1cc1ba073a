"""8-bit moments: as good as fp32 ones where equal steps diverge, a quarter of the bytes, safe from one bad gradient."""

from __future__ import annotations

import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optim_cases.foreign_state import assert_one_pass_refuses
from trainwright import optim
from trainwright.artifacts import UserError
from trainwright.nn import StableEmbedding
from trainwright.numerics import native
from trainwright.numerics.native import library
from trainwright.numerics.quantise import Codebook, dequantise, dynamic_codebook, quantise
from trainwright.optim import fused_8bit

WIDE: dict[str, float] = {"min_8bit_size": math.inf}


def regression(seed: int, optimizer_of: Any, num_steps: int = 600) -> float:
    """The loss, in units of the start's, of linear regression on 1024 features with scales 10^U(-3, 0)."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(1024, 1024, generator=draw) * 10 ** (torch.rand(1024, generator=draw) * 3 - 3)
    target = features @ torch.randn(1024, generator=draw)
    weight = nn.Parameter(torch.zeros(1024))
    optimizer = optimizer_of([weight])
    start = target.square().mean()
    for _ in range(num_steps):
        rows = torch.randint(1024, (64,), generator=draw)
        error = features[rows] @ weight.detach() - target[rows]
        weight.grad = features[rows].T @ error * (2 / 64)
        optimizer.step()
    return float((features @ weight.detach() - target).square().mean() / start)


def test_the_sign_of_a_small_mean_is_kept_in_the_loop_too() -> None:
    """Beside one of 0.1, means of ∓1e-10 are nearest to 0: the negative one gets the code below it."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = optim.AdamW8bit([weight], lr=0.1, min_8bit_size=1)
    weight.grad = torch.tensor([1.0, -1e-9, 1e-9, 0.0])
    optimizer.step()
    assert (optimizer.state[weight]["exp_avg"].int() - 127).tolist() == [128, -1, 0, 0]


class LinearCodes(torch.optim.Optimizer):
    """The control: Adam whose moments are kept as 256 equal steps of each block's largest magnitude."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        steps = torch.arange(256, dtype=torch.float64)
        self.books = (Codebook(steps / 127.5 - 1), Codebook(steps / 255))
        self.kept = [quantise(torch.zeros(1024), book) for book in self.books]
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (weight,), self.num_steps = self.param_groups[0]["params"], self.num_steps + 1
        mean, square = (dequantise(*kept, book) for kept, book in zip(self.kept, self.books))
        mean, square = 0.9 * mean + 0.1 * weight.grad, 0.999 * square + 0.001 * weight.grad**2
        corrected = mean / (1 - 0.9**self.num_steps), square / (1 - 0.999**self.num_steps)
        weight -= self.param_groups[0]["lr"] * corrected[0] / (corrected[1].sqrt() + 1e-8)
        self.kept = [quantise(values, book) for values, book in zip((mean, square), self.books)]


MISSED = pytest.mark.xfail(strict=True, reason="this draw ends 14 % below fp32: further than the bar, on the good side")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=(pytest.mark.slow, *([MISSED] if seed == 1 else ()))) for seed in range(3)]
)
def test_as_good_as_fp32_where_equal_steps_diverge(seed: int) -> None:
    wide = regression(seed, lambda params: torch.optim.Adam(params, lr=1e-2))
    assert wide < 0.02
    for block_size in (256, 2048):
        narrow = regression(
            seed, lambda params, size=block_size: optim.Adam8bit(params, lr=1e-2, min_8bit_size=1, block_size=size)
        )
        assert narrow == pytest.approx(wide, rel=0.1)
    assert regression(seed, lambda params: LinearCodes(params, lr=1e-2)) > 1


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit", "lamb8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (257, 1031), (4, 3, 40, 40)])
def test_two_bytes_an_element(name: str, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    optimizer = optim.create(name, [weight])
    optimizer.step()
    kept = sum(value.untyped_storage().nbytes() for value in optimizer.state[weight].values())
    assert kept <= 2.1 * weight.numel()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.uint8


@pytest.mark.parametrize("name", ["adamw8bit", "sgd8bit", "lamb8bit"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_is_the_wide_one_then_rounded(name: str, foreach: bool) -> None:
    """From the same codes, parameters move as with fp32 moments, and the new codes are those of the new moments."""
    draw = torch.Generator().manual_seed(1)
    start, grads = torch.randn(9, 700, generator=draw), torch.randn(3, 9, 700, generator=draw)
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 0.1, "weight_decay": 0.05, "foreach": foreach}
    pair = optim.create(name, [narrow], **settings), optim.create(name, [wide], **settings, **WIDE)
    for grad in grads:
        for weight, optimizer in zip((narrow, wide), pair):
            weight.grad = grad.clone()
            optimizer.step()
        torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-6)
        for key, value in pair[1].state[wide].items():
            if key == "step":
                continue
            book = dynamic_codebook(signed=key != "exp_avg_sq")
            codes, scales = quantise(value, book, keep_sign=key != "exp_avg_sq")
            state = pair[0].state[narrow]
            assert (state[key] != codes).float().mean() < 1e-3
            torch.testing.assert_close(state[f"{key}_absmax"], scales, rtol=1e-6, atol=0)
            value.copy_(dequantise(state[key], state[f"{key}_absmax"], book))
            wide.data.copy_(narrow.data)


@pytest.mark.parametrize("name", ["adamw8bit", "sgd8bit"])
@pytest.mark.parametrize("size", [4096, 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_without_a_finite_gradient_is_left_alone(name: str, size: int, bad: float) -> None:
    def run(poison: bool) -> tuple[Tensor, dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(2)
        weight = nn.Parameter(torch.randn(size, generator=draw))
        optimizer = optim.create(name, [weight], lr=0.1, weight_decay=0.1)
        for step in range(3):
            weight.grad = torch.randn(size, generator=draw)
            if poison and step == 1:
                before = weight[17].item()
                weight.grad[17] = bad
            optimizer.step()
            if poison and step == 1:
                assert weight[17].item() == before
        return weight.detach(), optimizer.state[weight]

    (clean, _), (found, state) = run(False), run(True)
    assert found.isfinite().all()
    assert all(value.float().isfinite().all() for value in state.values())
    others = torch.arange(size) != 17
    torch.testing.assert_close(found[others], clean[others], rtol=0.05, atol=0.02)
    assert found[17] != clean[17]


def test_lamb_steps_are_as_long_as_the_parameter_says() -> None:
    draw = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(80, 80, generator=draw) * 7)
    optimizer = optim.LAMB8bit([weight], lr=0.01)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn(80, 80, generator=draw) * 1e-3
        optimizer.step()
        assert (weight - before).norm().item() == pytest.approx(0.01 * before.norm().item(), rel=1e-4)


def test_layers_that_blocks_repeat_are_no_heads_where_positions_are_as_many() -> None:
    layers = {"words": nn.Embedding(90, 16), "positions": nn.Embedding(16, 16), "score": nn.Linear(16, 90)}
    blocks = nn.ModuleList(nn.ModuleDict({"first": nn.Linear(16, 64), "second": nn.Linear(64, 16)}) for _ in range(2))
    model = nn.ModuleDict({**layers, "blocks": blocks})
    wide = optim.eight_bit_groups(model)[1]["params"]
    assert {id(param) for param in wide} == {
        id(param) for name, param in model.named_parameters() if not name.startswith("blocks")
    }


def test_embeddings_keep_wide_moments_in_groups_made_for_it() -> None:
    model = nn.Sequential(StableEmbedding(100, 64), nn.Linear(64, 90), nn.Linear(90, 100))
    optimizer = optim.AdamW8bit(optim.eight_bit_groups(model), lr=0.1)
    model(torch.tensor([1, 2])).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model[1].weight]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.float32
    assert len(optim.eight_bit_groups(nn.Linear(2, 2))) == 1


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit", "sgd8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (33, 257), (4, 3, 40, 40), (5000,)])
@pytest.mark.parametrize("block_size", [256, 2048, 100])
@pytest.mark.parametrize(("dtype", "maximize"), [(torch.float32, False), (torch.bfloat16, True)])
def test_the_compiled_pass_equals_the_loop(
    name: str, shape: tuple[int, ...], block_size: int, dtype: torch.dtype, maximize: bool
) -> None:
    """Up to a code where rounding decides: the pass finds codes by arithmetic, the loop by a table."""
    results = []
    for fused in (False, True):
        draw = torch.Generator().manual_seed(5)
        weight = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        how = {"fused": fused, "maximize": maximize}
        optimizer = optim.create(name, [weight], lr=0.01, weight_decay=0.1, block_size=block_size, **how)
        for step in range(4):
            grad = torch.randn(shape, generator=draw) * (2 * torch.randn(shape, generator=draw)).exp()
            weight.grad = grad.to(dtype)
            weight.grad.view(-1)[3 * step] = (math.nan, math.inf, -math.inf, 0.0)[step]
            before = weight.grad.clone()
            optimizer.step()
            torch.testing.assert_close(weight.grad, before, rtol=0, atol=0, equal_nan=True)
        results.append((weight.detach(), optimizer.state[weight]))
    (loop, states), (one_pass, found) = results
    near = torch.isclose(loop, one_pass, rtol=1e-4, atol=1e-5).float().mean()
    assert near > (0.999 if dtype == torch.float32 else 0.998)  # bf16: ties are rounded either way
    for key, value in states.items():
        if value.dtype == torch.uint8:
            apart = (value.int() - found[key].int()).abs()
            assert (apart > 0).float().mean() < 2e-3
            assert (apart > 1).float().mean() < 1e-3
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-7)


def test_the_compiled_pass_on_many_threads_and_other_dtypes() -> None:
    results = []
    before = torch.get_num_threads()
    for num_threads in (1, 3):
        draw = torch.Generator().manual_seed(6)
        weights = [
            nn.Parameter(torch.randn(700_001, generator=draw)),
            nn.Parameter(torch.randn(90, 90, generator=draw).bfloat16()),
            nn.Parameter(torch.randn(90, 90, generator=draw).double()),
            nn.Parameter(torch.randn(16, 8, 8, 8, generator=draw).to(memory_format=torch.channels_last)),
        ]
        optimizer = optim.AdamW8bit(weights, fused=True)
        torch.set_num_threads(num_threads)
        try:
            for _ in range(3):
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
                optimizer.step()
        finally:
            torch.set_num_threads(before)
        results.append([weight.detach() for weight in weights])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert all(weight.isfinite().all() for weight in results[0])


def test_one_pass_is_refused_elsewhere_than_on_the_cpu_before_anything_changes() -> None:
    weights = [nn.Parameter(torch.ones(70, 70)), nn.Parameter(torch.ones(70, 70, device="meta"))]
    optimizer = optim.AdamW8bit(weights, fused=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(
        UserError, match="fused form is a kernel for CPUs; got a parameter on meta; take its form foreach"
    ):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(weights[0], torch.ones(70, 70))


@pytest.mark.parametrize("num_elements", [1000, 10_000])
def test_one_pass_refuses_moments_of_another_parameter(num_elements: int) -> None:
    """In fp32 and in 8 bits: the kernel would read and write behind them."""
    small, large = (nn.Parameter(torch.ones(times * num_elements)) for times in (1, 2))
    assert_one_pass_refuses(optim.AdamW8bit([large], fused=True), optim.AdamW8bit([small], fused=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
@pytest.mark.parametrize(
    "instructions", ["x86-64-v3", *(pytest.param(f"x86-64-v{i}", marks=pytest.mark.slow) for i in (2, 4))]
)
def test_other_instruction_sets_find_the_same_codes(
    instructions: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if instructions.endswith("4") and "avx512vl" not in Path("/proc/cpuinfo").read_text(encoding="utf8"):
        pytest.skip("this processor has no AVX-512")

    def steps() -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(9)
        weight = nn.Parameter(torch.randn(41, 257, generator=draw))
        optimizer = optim.AdamW8bit([weight], fused=True)
        for _ in range(4):
            weight.grad = torch.randn(41, 257, generator=draw) * (4 * torch.randn(41, 257, generator=draw)).exp()
            weight.grad.view(-1)[300] = math.nan
            optimizer.step()
        return {**optimizer.state[weight], "weight": weight.detach()}

    expected = steps()
    flags = [flag.replace("-march=native", f"-march={instructions}") for flag in native._FLAGS]
    monkeypatch.setattr(native, "_FLAGS", flags)
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    fused_8bit._call.cache_clear()
    fused_8bit._load.cache_clear()
    library.cache_clear()
    try:
        found = steps()
    finally:
        fused_8bit._call.cache_clear()
        fused_8bit._load.cache_clear()
        library.cache_clear()
    assert len(list(tmp_path.glob("*.so"))) == 1
    for key, value in expected.items():
        tolerance = 0.0 if value.dtype == torch.uint8 else 1e-5
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


def test_one_pass_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fused_8bit._call.cache_clear()
    fused_8bit._load.cache_clear()
    library.cache_clear()
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    weight = nn.Parameter(torch.ones(5000))
    weight.grad = torch.ones(5000)
    optimizer = optim.AdamW8bit([weight], fused=True)
    with pytest.raises(UserError, match=r"takes blockwise.cpp; false says: .* set CXX .* leave out fused=True"):
        optimizer.step()
    assert weight.detach().eq(1).all()
    assert not list(tmp_path.glob("*.so"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"need g\+\+; found none"):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()
    assert weight.detach().ne(1).all()
