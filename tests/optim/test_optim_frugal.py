"""FRUGAL: its limits AdamW and sign descent, the split of the gradient, and what it keeps and when it forgets."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.optim_cases.foreign_state import assert_one_pass_refuses
from tests.pool import Pool
from trainwright.artifacts import UserError
from trainwright.optim.frugal import FRUGAL
from trainwright.optim.projection import Subspace

KINDS = ["columns", "rows", "entries", "svd", "random", "randperm"]
FOREVER = 10**9


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(step: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=draws(step), dtype=dtype) * 10 ** (step % 3 - 1) + 0.2


def trained(optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> list[Tensor]:
    """The parameters after steps on made-up gradients, the same for every optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + num_steps):
        for index, param in enumerate(params):
            param.grad = gradient(100 * step + index, tuple(param.shape), param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    shapes = [(6, 9), (8, 5), (4, 3, 2, 2), (7,), ()]
    return [nn.Parameter(torch.randn(shape, generator=draws(900 + i)).to(dtype)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("projection", ["columns", "rows", "entries", "randperm", "block"])
def test_with_all_in_the_subspace_it_is_adamw(projection: str) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    own = trained(FRUGAL(weights(), projection=projection, density=1.0, update_gap=FOREVER, **options), 50)  # type: ignore[arg-type]
    for found, expected in zip(own, trained(torch.optim.AdamW(weights(), **options), 50)):  # type: ignore[arg-type]
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("projection", [*KINDS, "block"])
def test_with_nothing_in_it_it_is_sign_descent_without_state(projection: str) -> None:
    optimizer = FRUGAL(weights()[:3], lr=0.01, weight_decay=0.1, projection=projection, density=0.0)
    expected = [weight.detach().clone() for weight in weights()[:3]]
    for step in range(5):
        for index, value in enumerate(expected):
            value.mul_(1 - 0.01 * 0.1).sub_(0.01 * torch.sign(gradient(100 * step + index, tuple(value.shape))))
    for found, value in zip(trained(optimizer, 5), expected):
        assert torch.allclose(found, value, rtol=1e-12, atol=1e-15)
    assert all(set(state) == {"step"} for state in optimizer.state.values())


def test_columns_equal_the_equations_by_hand() -> None:
    weight = nn.Parameter(torch.randn(4, 6, generator=draws(1), dtype=torch.float64))
    optimizer = FRUGAL(
        [weight], lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, density=0.5, update_gap=3,
        inactive_scale=0.3, projected_scale=0.7,
    )  # fmt: skip
    expected = weight.detach().clone()
    chosen: set[tuple[int, ...]] = set()
    for step in range(9):
        grad = gradient(step, (4, 6))
        weight.grad = grad.clone()
        optimizer.step()
        columns = optimizer.state[weight]["projector"].tolist()
        chosen.add(tuple(sorted(columns)))
        if step % 3 == 0:
            first, second = torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
        t = step % 3 + 1
        for i in range(4):
            for j in range(6):
                expected[i, j] *= 1 - 0.02 * 0.1
                if j in columns:
                    first[i, j] = 0.8 * first[i, j] + 0.2 * grad[i, j]
                    second[i, j] = 0.9 * second[i, j] + 0.1 * grad[i, j] ** 2
                    mean, root = first[i, j] / (1 - 0.8**t), math.sqrt(second[i, j] / (1 - 0.9**t))
                    expected[i, j] -= 0.02 * 0.7 * mean / (root + 1e-3)
                else:
                    expected[i, j] -= 0.02 * 0.7 * 0.3 * math.copysign(1.0, grad[i, j])
        assert torch.allclose(weight, expected, rtol=1e-11, atol=1e-13)
    assert len(chosen) > 1


@given(st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 12), st.floats(0.05, 1), st.integers(0, 99))
def test_the_gradient_is_split_without_loss_and_orthogonally(
    kind: str, rows: int, cols: int, share: float, seed: int
) -> None:
    grad = gradient(seed, (rows, cols))
    part = Subspace.of(kind, (rows, cols), share)
    projector = part.choose(grad, draws(seed))
    low = part.down(grad, projector)
    assert (tuple(projector.shape), tuple(low.shape)) == (part.projector_shape, part.low_shape)
    up, rest = part.add_up(torch.zeros_like(grad), low, projector), part.rest(grad, low, projector, 0.0)
    square = float(grad.square().sum())
    assert torch.allclose(up + rest, grad, rtol=1e-12, atol=1e-12)
    assert abs(float((up * rest).sum())) <= 1e-12 * square
    if kind == "svd":
        singular = torch.linalg.svdvals(grad)
        assert float(rest.square().sum()) == pytest.approx(
            float(singular[part.kept :].square().sum()), abs=1e-9 * square
        )


def test_the_sign_of_rounding_is_not_taken() -> None:
    left, right = torch.randn(40, 2, generator=draws(2)), torch.randn(2, 30, generator=draws(3))
    low_rank = left @ right
    part = Subspace.of("svd", (40, 30), 0.25)
    projector = part.choose(low_rank, draws(0))
    low = part.down(low_rank, projector)
    assert (part.rest(low_rank, low, projector, 0.0) != 0).float().mean() > 0.5
    assert not part.rest(low_rank, low, projector, 1e-5).any()


def test_the_step_has_full_rank_where_galore_has_that_of_the_subspace() -> None:
    ranks = {}
    for inactive in ("sign", "none"):
        weight = nn.Parameter(torch.zeros(40, 32, dtype=torch.float64))
        weight.grad = gradient(1, (40, 32))
        FRUGAL([weight], projection="svd", density=0.25, inactive=inactive, lr=1.0).step()  # type: ignore[arg-type]
        ranks[inactive] = int(torch.linalg.matrix_rank(weight.detach()))
    assert ranks["none"] == 8
    assert ranks["sign"] >= 0.9 * 32


@pytest.mark.parametrize("projection", ["columns", "rows", "entries"])
def test_the_state_is_the_share_of_the_matrix(projection: str) -> None:
    weight = nn.Parameter(torch.randn(16, 24, generator=draws(4)))
    optimizer = FRUGAL([weight], projection=projection, density=0.25)
    trained(optimizer, 2)
    moments = [optimizer.state[weight][name].numel() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(moments) == 2 * 0.25 * 16 * 24


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "mirror"])
def test_blocks_take_whole_tensors_in_turn(order: Any) -> None:
    params = [nn.Parameter(torch.zeros(3, 4 + index)) for index in range(6)]
    optimizer = FRUGAL(params, projection="block", density=1 / 3, update_gap=2, block_order=order)
    turns = []
    for step in range(6):
        trained(optimizer, 1, step)
        turns.append([index for index, param in enumerate(params) if "exp_avg" in optimizer.state[param]])
    assert turns[0::2] == turns[1::2]
    assert all(len(turn) == 2 for turn in turns)
    expected = {
        "ascending": [[0, 1], [2, 3], [4, 5]],
        "descending": [[4, 5], [2, 3], [0, 1]],
        "mirror": [[0, 5], [1, 4], [2, 3]],
    }
    assert turns[0::2] == expected.get(order, turns[0::2])
    if order == "random":
        assert len({tuple(turn) for turn in turns}) > 1
    for index in turns[-1]:
        assert optimizer.state[params[index]]["exp_avg"].shape == params[index].shape


@pytest.mark.parametrize(("density", "num_active"), [(0.3, 2), (0.28, 1), (0.1, 0), (0.9, 4)])
def test_the_number_of_blocks_is_the_nearest_to_the_share(density: float, num_active: int) -> None:
    """A share of five tensors is rounded to even: 1.5 are two, 1.4 one, 4.5 four."""
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(5)]
    optimizer = FRUGAL(params, projection="block", density=density, block_order="ascending")
    trained(optimizer, 1)
    assert sum("exp_avg" in optimizer.state[param] for param in params) == num_active


@pytest.mark.parametrize("projection", ["columns", "block"])
def test_bias_correction_restarts_with_the_subspace(projection: str) -> None:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = FRUGAL([weight], lr=0.1, projection=projection, density=1.0, update_gap=5, projected_scale=0.5)
    for step in range(11):
        before = weight.detach().clone()
        weight.grad = torch.full((4, 4), 2.0 if step < 5 else 8.0, dtype=torch.float64)
        optimizer.step()
        assert torch.allclose(before - weight, torch.full((4, 4), 0.05, dtype=torch.float64), rtol=1e-7)


def test_the_variant_of_the_proof_is_momentum_inside_and_descent_outside() -> None:
    weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
    optimizer = FRUGAL(
        [weight], lr=0.1, betas=(0.5, 0.9), density=0.25, active="sgdm", inactive="sgd", update_gap=FOREVER
    )
    trained(optimizer, 2)
    columns = optimizer.state[weight]["projector"].tolist()
    first, second = gradient(0, (3, 8)), gradient(100, (3, 8))
    inside = -0.1 * (0.5 * first + 0.25 * first + 0.5 * second)
    outside = -0.1 * (first + second)
    expected = outside.clone()
    expected[:, columns] = inside[:, columns]
    assert torch.allclose(weight, expected, rtol=1e-12)
    assert set(optimizer.state[weight]) == {"step", "projector", "exp_avg"}


@pytest.mark.parametrize("projection", [*KINDS, "block"])
def test_a_resumed_run_goes_on_bit_for_bit(projection: str) -> None:
    options: dict[str, Any] = {
        "projection": projection,
        "density": 0.4,
        "update_gap": 3,
        "weight_decay": 0.1,
        "seed": 5,
    }
    expected = trained(FRUGAL(weights(torch.float32), **options), 8)
    first = FRUGAL(weights(torch.float32), **options)
    values = trained(first, 5)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = FRUGAL([nn.Parameter(value.clone()) for value in values], **{**options, "seed": 6})
    second.load_state_dict(torch.load(file, weights_only=True))
    for found, value in zip(trained(second, 3, 5), expected):
        assert torch.equal(found, value)


def test_a_late_tensor_counts_its_own_steps_and_gradients_stay() -> None:
    late, early = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))
    optimizer = FRUGAL([late, early], density=0.5, update_gap=4)
    for step in range(3):
        early.grad = gradient(step, (4, 4), torch.float32)
        late.grad = gradient(step, (4, 4), torch.float32) if step else None
        kept = [param.grad.clone() for param in (late, early) if param.grad is not None]
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(kept, [p.grad for p in (late, early) if p.grad is not None]))
    assert (float(optimizer.state[late]["step"]), float(optimizer.state[early]["step"])) == (2.0, 3.0)


def test_low_precision_keeps_its_state_in_fp32_and_complex_goes_in_full() -> None:
    half = nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    pair = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    optimizer = FRUGAL([half, pair], lr=0.1)
    half.grad, pair.grad = torch.full_like(half, 2.0), torch.full_like(pair, 3 - 4j)
    optimizer.step()
    assert optimizer.state[half]["exp_avg"].dtype == torch.float32
    assert torch.equal(half, torch.full_like(half, 0.9))
    assert torch.allclose(pair, torch.full_like(pair, 0.9 + 0.1j))


def test_a_nan_gradient_moves_nothing_outside_the_part_and_stays_inside_it() -> None:
    weight = nn.Parameter(torch.zeros(4, 8))
    optimizer = FRUGAL([weight], lr=0.1, density=0.5)
    weight.grad = torch.full((4, 8), torch.nan)
    optimizer.step()
    columns = optimizer.state[weight]["projector"].tolist()
    inside = torch.zeros(8, dtype=torch.bool)
    inside[columns] = True
    assert weight.detach()[:, inside].isnan().all()
    assert not weight.detach()[:, ~inside].any()


@pytest.mark.parametrize("projection", ["columns", "rows", "entries", "randperm", "block"])
@pytest.mark.parametrize(("dtype", "maximize"), [(torch.float32, False), (torch.bfloat16, True)])
def test_one_pass_over_memory_equals_the_loop(projection: str, dtype: torch.dtype, maximize: bool) -> None:
    shapes = ((33, 130), (130, 33), (3, 5, 7), (41,), (1, 5), (300, 200))
    for own in (
        {},
        {"inactive": "sgd", "active": "sgdm"},
        {"inactive": "none", "reset_moments": False},
        {"density": 0.0},
    ):
        results = []
        for fused in (False, True):
            params = [
                nn.Parameter(gradient(index, shape, torch.float32).to(dtype)) for index, shape in enumerate(shapes)
            ]
            how: dict[str, Any] = {
                "projection": projection,
                "update_gap": 3,
                "weight_decay": 0.1,
                "inactive_scale": 0.3,
            }
            optimizer = FRUGAL(params, lr=0.01, fused=fused, maximize=maximize, **{**how, **own})
            results.append((trained(optimizer, 5), [optimizer.state[param] for param in params]))
        (loop, states), (one_pass, found) = results
        for index in range(len(shapes)):
            apart = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one_pass[index], loop[index], rtol=apart, atol=apart)
            assert (one_pass[index] == loop[index]).float().mean() > (0.0 if dtype == torch.float32 else 0.97)
            torch.testing.assert_close(found[index], states[index], rtol=1e-5, atol=1e-6)


def test_one_pass_uses_threads_and_leaves_what_it_cannot_take_to_the_loop() -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            strided = nn.Parameter(torch.ones(6, 4, 5, 5).to(memory_format=torch.channels_last))
            params = [nn.Parameter(torch.ones(700, 300)), nn.Parameter(torch.ones(70, 30).double()), strided]
            optimizer = FRUGAL(params, fused=True, update_gap=2)
            results.append(trained(optimizer, 3))
        finally:
            torch.set_num_threads(before)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    with pytest.raises(
        UserError, match="one pass over memory for coordinates alone; got fused=True and projection='svd'"
    ):
        FRUGAL([nn.Parameter(torch.ones(2, 2))], projection="svd", fused=True)


@pytest.mark.parametrize("size", [21, 22])
@pytest.mark.parametrize("projection", ["columns", "rows", "entries", "svd"])
def test_a_projector_of_another_matrix_is_refused(projection: str, size: int) -> None:
    """Half of 21 columns are as many as half of 20; one of them may be the 21st."""
    param, wider = (nn.Parameter(torch.ones(each, each).cumsum(0)) for each in (20, size))
    how: dict[str, Any] = {"projection": projection, "density": 0.5, "update_gap": 1, "betas": (0.9, 0.9)}
    optimizer, other = (FRUGAL([{"params": [each], "projected": True}], **how) for each in (param, wider))
    for each in (optimizer, other):
        trained(each, 1)
    state = other.state_dict()
    if projection in ("columns", "rows") and size == 21:
        state["state"][0]["projector"][-1] = 20
    with pytest.raises(
        UserError, match=r"needs a projector of a matrix .* load a state saved for parameters of the same shapes"
    ):
        optimizer.load_state_dict(state)


def test_one_pass_refuses_moments_of_another_parameter() -> None:
    small, large = (nn.Parameter(torch.ones(size, size)) for size in (20, 40))
    how: dict[str, Any] = {"projection": "block", "density": 1.0, "fused": True}
    assert_one_pass_refuses(*(FRUGAL([{"params": [param], "projected": True}], **how) for param in (large, small)))


def test_blocks_that_stay_keep_their_moments_and_their_count() -> None:
    """Of four tensors two are active, in turns of two steps and in order: none stays; of three, one does now and then."""
    params = [nn.Parameter(torch.zeros(2, 2, dtype=torch.float64)) for _ in range(3)]
    how: dict[str, Any] = {"projection": "block", "density": 2 / 3, "block_order": "ascending", "update_gap": 1}
    optimizer = FRUGAL(params, lr=1.0, reset_moments=False, betas=(0.5, 0.75), eps=0.0, **how)
    for value in (1.0, 3.0):  # active: the first and the second, then the third and the first
        for param in params:
            param.grad = torch.full((2, 2), value, dtype=torch.float64)
        optimizer.step()
    first, second = 0.5 * (0.5 * 1.0) + 0.5 * 3.0, 0.75 * (0.25 * 1.0) + 0.25 * 9.0
    stayed = first / (1 - 0.5**2) / math.sqrt(second / (1 - 0.75**2))
    assert [param[0, 0].item() for param in params] == pytest.approx([-1.0 - stayed, -2.0, -2.0])
    assert "exp_avg" not in optimizer.state[params[1]]


def test_groups_of_a_model_project_its_linear_layers_only() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(7, 4), "mlp": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "lm_head": nn.Linear(4, 7)}
    )
    inside, outside = FRUGAL.groups(model)
    assert inside["params"] == [model["mlp"].weight]
    assert len(outside["params"]) == len(list(model.parameters())) - 1
    optimizer = FRUGAL([inside, outside], density=0.5)
    trained(optimizer, 1)
    assert optimizer.state[model["embed"].weight]["exp_avg"].shape == (7, 4)
    assert optimizer.state[model["mlp"].weight]["exp_avg"].shape == (6, 2)


@pytest.mark.slow
def test_quality_lies_between_adam_and_the_subspace_alone() -> None:
    for seed in range(3):
        adam, frugal, alone = (final_loss(seed, options) for options in ({"density": 1.0}, {}, {"inactive": "none"}))
        assert adam < frugal < alone


def final_loss(seed: int, options: dict[str, Any]) -> float:
    generator = draws(seed)
    inputs = torch.randn(4096, 32, generator=generator)
    teacher = [torch.randn(64, 32, generator=generator) / 32**0.5, torch.randn(10, 64, generator=generator) / 8]
    labels = ((inputs @ teacher[0].T).relu() @ teacher[1].T).argmax(1)
    sizes = [32, 128, 128, 10]
    layers = [
        nn.Parameter(torch.randn(o, i, generator=generator) * (2 / i) ** 0.5) for i, o in itertools.pairwise(sizes)
    ]
    optimizer = FRUGAL(layers, lr=3e-3, **{"update_gap": 50, "inactive_scale": 0.3, **options})

    def loss(rows: Tensor) -> Tensor:
        hidden = inputs[rows]
        for layer in layers[:-1]:
            hidden = (hidden @ layer.T).relu()
        return nn.functional.cross_entropy(hidden @ layers[-1].T, labels[rows])

    for step in range(400):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 400)
        optimizer.zero_grad()
        loss(torch.randint(0, 4096, (128,), generator=generator)).backward()
        optimizer.step()
    return float(loss(torch.arange(4096)).detach())


def sharded(projection: str, dim: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(w.detach(), mesh, [Shard(dim)])) for w in weights()[:3]]
    optimizer = FRUGAL(params, projection=projection, density=0.5, update_gap=2, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = distribute_tensor(gradient(100 * step + index, tuple(param.shape)), mesh, [Shard(dim)])
        optimizer.step()
    moments = [optimizer.state[param]["exp_avg"] for param in params if "exp_avg" in optimizer.state[param]]
    local = [m.to_local().numel() if isinstance(m, DTensor) else m.numel() for m in moments]
    return [[param.full_tensor().tolist() for param in params], sum(local)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("projection", "dim"), [("columns", 0), ("columns", 1), ("svd", 0), ("entries", 1), ("block", 0)]
)
def test_shards_are_updated_as_the_whole(pool2: Pool, projection: str, dim: int) -> None:
    params = weights()[:3]
    optimizer = FRUGAL(params, projection=projection, density=0.5, update_gap=2, lr=0.1, weight_decay=0.1)
    expected = trained(optimizer, 3)
    whole = sum(optimizer.state[param]["exp_avg"].numel() for param in params if "exp_avg" in optimizer.state[param])
    results = pool2.run("tests.optim.test_optim_frugal:sharded", projection=projection, dim=dim)
    for values, _ in results:
        for found, value in zip(values, expected):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), value, rtol=1e-12, atol=1e-14)
    kept = [num for _, num in results]
    assert sum(kept) == whole if (projection, dim) == ("columns", 0) else kept == [whole, whole]


def test_bad_settings_are_named() -> None:
    weight = [nn.Parameter(torch.ones(2, 2))]
    for options, message in [
        ({"density": 1.5}, r"FRUGAL needs density in \[0, 1\]"),
        ({"update_gap": 0}, "FRUGAL needs update_gap of at least 1"),
        ({"inactive": "no"}, "FRUGAL needs inactive sign, sgd or none"),
        ({"inactive_scale": -1.0}, "FRUGAL needs inactive_scale"),
        ({"projected_scale": -1.0}, "FRUGAL needs projected_scale"),
        ({"active": "sgd"}, "FRUGAL needs active adam or sgdm"),
        ({"block_order": "down"}, "FRUGAL needs block_order random, ascending"),
        ({"tolerance": -1.0}, "FRUGAL needs tolerance"),
        ({"projection": "cols"}, "a projection is needed, one of block, columns"),
        ({"fused": True, "projection": "svd"}, "one pass over memory for coordinates alone"),
        ({"capturable": True}, "FRUGAL needs capturable=False"),
    ]:
        with pytest.raises(UserError, match=message):
            FRUGAL(weight, **options)  # type: ignore[arg-type]
