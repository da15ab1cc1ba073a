"""Streamed MeZO against MeZO: equal to the bit, whatever the model, the groups, the types and who looks when."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.grids import slow_but
from trainwright.artifacts import UserError
from trainwright.numerics.normals import PIECE, normals
from trainwright.optim.mezo import MeZO, descend
from trainwright.streaming import (
    DiskStore,
    HostStore,
    Streamed,
    block_names,
    check_fits,
    find_parts,
    from_safetensors,
    peak_of_step,
    predicted_peak,
    without_values,
)
from trainwright.streaming.saving import load, save


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Tokens(nn.Module):
    """An embedding, blocks, a head; what is awkward about it is chosen by `kind`."""

    def __init__(self, kind: str = "plain", dropout: float = 0.0, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.wte = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(5, width) * 0.1)
        self.h = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.batch_norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if kind == "tied":
            self.head.weight = self.wte.weight
        if kind == "shared block":
            self.h[2] = self.h[0]
        if kind == "tied blocks":
            self.h[1].up.weight = self.h[3].up.weight
        if kind == "frozen":
            self.h[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.place[: ids.shape[1]]
        for index, block in enumerate(self.h):
            if self.kind == "its own loop":
                x = x + block.down(F.gelu(block.up(block.norm(x))))
            elif self.kind != "skips" or index != int(torch.randint(4, ())):
                x = block(x)
            if self.kind == "reads a block" and index == 3:
                x = x * self.h[0].norm.weight
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return F.linear(x, self.wte.weight) if self.kind == "read elsewhere" else self.head(x)


KINDS = [
    "plain",
    "tied",
    "shared block",
    "tied blocks",
    "frozen",
    "its own loop",
    "skips",
    "reads a block",
    "read elsewhere",
]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, the others without."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "lr": 3e-3},
    ]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(11, (3, 5), generator=generator) for _ in range(4)]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def trained(model: nn.Module, streams: bool, **options: Any) -> tuple[list[float], nn.Module]:
    store, storage = options.pop("store", None), options.pop("storage", None)
    optimizer = MeZO(groups(model), lr=1e-2, seed=5, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    streamed = Streamed(model, optimizer, store, storage=storage) if streams else None
    torch.manual_seed(3)
    losses = []
    for ids in batches():
        losses.append(optimizer.step(lambda ids=ids: loss_of(model, ids)))
        schedule.step()
    losses.append(float(torch.rand(())))  # torch's generator goes on where MeZO leaves it
    return losses, model if streamed is None else streamed.close()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("exact", slow_but([True], [False, True]))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_mezos_to_the_bit(kind: str, exact: bool) -> None:
    torch.manual_seed(0)
    model = Tokens(kind, dropout=0.3)
    one, whole = trained(copy.deepcopy(model), streams=False, exact=exact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other, streamed = trained(model, streams=True, exact=exact)
    assert one == other
    assert_equal(whole, streamed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_so_are_they_in_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tokens("tied", dropout=0.3).to(dtype)
    one, whole = trained(copy.deepcopy(model), streams=False)
    other, streamed = trained(model, streams=True)
    assert one == other
    assert_equal(whole, streamed)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_steps_below_the_resolution_of_storage_are_not_lost(storage: torch.dtype) -> None:
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(3)])
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = MeZO(model.parameters(), lr=1.0, epsilon=0.1)
    streamed = Streamed(model, optimizer, storage=storage)
    streamed.step(lambda: model(torch.ones(1, 100))[0, 0] * 1e-9)
    step = -optimizer.slope * normals(10_000, (0, 0, 1))
    moved = streamed.close()[1].weight.detach().flatten() - 1
    assert 0 < step.abs().mean() < torch.finfo(storage).eps / 4
    assert (moved * step).mean() / (step * step).mean() == pytest.approx(1.0, rel=0.2)


def test_masters_beside_a_model_in_bf16() -> None:
    torch.manual_seed(0)
    start = Tokens("tied").bfloat16()
    wide = copy.deepcopy(start).float()
    model = copy.deepcopy(start)
    optimizer = MeZO(groups(model), lr=1e-2, seed=5)
    streamed = Streamed(model, optimizer, storage=torch.float32)
    for ids in batches():
        streamed.step(lambda ids=ids: loss_of(model, ids))
        key, wanted = optimizer.param_groups[0]["num_steps"] - 1, dict(wide.named_parameters())
        for (_, own, number), group in zip(MeZO(groups(wide)).numbered(), [g for g, _, _ in optimizer.numbered()]):
            descend(own.data, [((5, key, number), optimizer.slope)], group["lr"], group["weight_decay"], (0,))
        for _, tensors in streamed.tensors():
            for name, tensor in tensors.items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, wanted[name]), name
    for name, param in streamed.close().named_parameters():
        assert torch.equal(param, wanted[name].bfloat16())


@pytest.mark.parametrize("storage", slow_but([torch.bfloat16], [None, torch.bfloat16]))
@pytest.mark.parametrize(
    "kind", slow_but(["tied", "its own loop"], ["plain", "tied", "read elsewhere", "its own loop"])
)
def test_the_peak_is_predicted_to_the_byte(kind: str, storage: torch.dtype | None) -> None:
    model, ids = Tokens(kind, dropout=0.1, width=32), batches()[0]
    predicted = predicted_peak(model, ids, loss_of, storage=storage)
    streamed = Streamed(model, MeZO(model.parameters()), storage=storage)
    streamed.step(lambda: loss_of(model, ids))
    assert peak_of_step(streamed, lambda: streamed.step(lambda: loss_of(model, ids)), ids) == predicted


def test_the_peak_is_three_blocks_and_what_stays() -> None:
    """Of forty blocks; the temporaries of a move are at most a few pieces of a direction."""
    model, x = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(40)]), torch.ones(1, 1024)
    peak = predicted_peak(model, x, lambda stand_in, x: stand_in(x).sum())
    block = 4 * 1024 * 1024
    assert 3 * block < peak <= 3 * block + 5 * 4 * PIECE


def test_whoever_looks_sees_every_update() -> None:
    torch.manual_seed(0)
    model = Tokens("tied")
    whole, ids = copy.deepcopy(model), batches()[0]
    streamed, of_whole = Streamed(model, MeZO(model.parameters(), lr=1e-2)), MeZO(whole.parameters(), lr=1e-2)
    for _ in range(2):
        streamed.step(lambda: loss_of(model, ids))
        of_whole.step(lambda: loss_of(whole, ids))
        assert_equal(whole, model)  # state_dict
        assert_equal(whole.h[1], model.h[1])
        for each in (whole, model):
            each.eval()
        with torch.no_grad():
            assert torch.equal(model(ids), whole(ids))
        assert streamed.evaluate(lambda: loss_of(model, ids)) == loss_of(whole, ids).item()
        for each in (whole, model):
            each.train()
    with pytest.raises(UserError, match="no gradients"):
        model(ids)
    assert_equal(whole, streamed.close())
    assert torch.equal(model(ids), whole(ids))  # with gradients, as before
    for each, optimizer in ((model, streamed.optimizer), (whole, of_whole)):
        optimizer.step(lambda each=each: loss_of(each, ids))
    assert_equal(whole, model)


def test_an_update_that_is_not_flushed_is_missing() -> None:
    """The fault that flushing is for: what rests is one step behind."""
    model, ids = Tokens(), batches()[0]
    store = HostStore()
    streamed = Streamed(model, MeZO(model.parameters(), lr=1e-2), store)
    streamed.step(lambda: loss_of(model, ids))
    key = streamed.blocks[0].name
    before = torch.empty(streamed.resting.num_bytes[key], dtype=torch.uint8)
    store.read(key, before)
    streamed.flush()
    after = torch.empty_like(before)
    store.read(key, after)
    assert not torch.equal(before, after)


def test_every_block_comes_in_once_a_step() -> None:
    model, ids = Tokens(depth=6), batches()[0]
    streamed = Streamed(model, MeZO(model.parameters()))
    for _ in range(3):
        before = streamed.resting.num_read, streamed.resting.num_written
        streamed.step(lambda: loss_of(model, ids))
    size = sum(streamed.resting.num_bytes.values())
    assert streamed.resting.num_written - before[1] == size
    # the last two blocks of a step and the first of the next are in the two buffers
    assert size - 2 * max(streamed.resting.num_bytes.values()) <= streamed.resting.num_read - before[0] <= size


def test_a_model_that_hands_values_past_its_calls_goes_one_by_one() -> None:
    class Stashes(Tokens):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen = self.wte(ids)  # what the last forward saw
            x = self.seen
            for block in self.h:
                x = block(x)
            return self.head(x + self.seen)

    torch.manual_seed(0)
    model = Stashes()
    one, whole = trained(copy.deepcopy(model), streams=False)
    with pytest.warns(UserWarning, match="cannot take turns"):
        other, streamed = trained(model, streams=True)
    assert one == other
    assert_equal(whole, streamed)


def test_autocast_casts_each_side_anew() -> None:
    torch.manual_seed(0)
    model, ids = Tokens(), batches()[0]
    losses = []
    for each, streams in ((copy.deepcopy(model), False), (model, True)):
        optimizer = MeZO(each.parameters(), lr=1e-2)
        streamed = Streamed(each, optimizer) if streams else None

        def closure(each: nn.Module = each) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(each, ids)

        losses.append([optimizer.step(closure) for _ in range(2)] + [optimizer.slope])
    assert streamed is not None
    assert losses[0] == losses[1]


def test_a_closure_that_fails_leaves_the_run_whole() -> None:
    torch.manual_seed(0)
    model, ids = Tokens(), batches()[0]
    whole = copy.deepcopy(model)
    streamed, of_whole = Streamed(model, MeZO(model.parameters(), exact=True)), MeZO(whole.parameters(), exact=True)
    calls = iter([1, 1, 1, 1, 1, 0])  # 0: the second forward of the second step
    streamed.step(lambda: loss_of(model, ids) / (1 // next(calls)))
    with pytest.raises(ZeroDivisionError):
        streamed.step(lambda: loss_of(model, ids) / (1 // next(calls)))
    of_whole.step(lambda: loss_of(whole, ids))
    assert_equal(whole.h, model.h)
    assert not [thread for thread in threading.enumerate() if thread.name == "trainwright-forward"]


def test_a_slope_that_is_not_finite_changes_nothing() -> None:
    model, ids = Tokens(), batches()[0]
    before = copy.deepcopy(model.state_dict())
    streamed = Streamed(model, MeZO(model.parameters(), exact=True, weight_decay=0.1))
    streamed.step(lambda: loss_of(model, ids) * float("nan"))
    for name, param in streamed.close().named_parameters():
        assert torch.equal(param, before[name])


def test_a_disk_gives_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens("tied", dropout=0.3)
    one, whole = trained(copy.deepcopy(model), streams=False)
    store = DiskStore([tmp_path])
    other, streamed = trained(model, streams=True, store=store)
    store.close()
    assert one == other
    assert_equal(whole, streamed)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens("tied", dropout=0.3)
    one, whole = trained(copy.deepcopy(model), streams=False)
    torch.manual_seed(3)
    for first in (0, 2):
        own = copy.deepcopy(model)
        optimizer = MeZO(groups(own), lr=1e-2, seed=5)
        streamed = Streamed(own, optimizer)
        assert (load(streamed, tmp_path) if first else 0) == first
        for step in (first, first + 1):
            for group, base in zip(optimizer.param_groups, (1e-2, 3e-3)):
                group["lr"] = base * 0.1 ** (step // 2)
            loss = streamed.step(lambda own=own, step=step: loss_of(own, batches()[step]))
            assert loss == one[step]
        save(streamed, tmp_path, first + 2)
    assert_equal(whole, streamed.close())
    other = Tokens("plain", depth=2)
    with pytest.raises(UserError, match="of this model"):
        load(Streamed(other, MeZO(groups(other))), tmp_path)
    with pytest.raises(UserError, match="there is none"):
        load(Streamed(own, MeZO(groups(own))), tmp_path / "empty")


def test_a_model_too_large_to_build_reads_its_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens("tied")
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    with without_values():
        empty = Tokens("tied")
    assert all(param.untyped_storage().nbytes() == 4 for param in empty.parameters())
    streamed = Streamed(empty, MeZO(empty.parameters()), source=from_safetensors(tmp_path))
    assert streamed.evaluate(lambda: loss_of(empty, batches()[0])) == loss_of(model, batches()[0]).item()
    with pytest.raises(UserError, match="have none"):
        from_safetensors(tmp_path)("other", nn.Parameter(torch.ones(1)))
    with pytest.raises(UserError, match="has none"):
        from_safetensors(tmp_path / "missing")


def test_blocks_are_found() -> None:
    assert block_names(Tokens()) == ["h.0", "h.1", "h.2", "h.3"]
    parts = find_parts(Tokens("tied"))
    assert [(part.name, sorted(part.params)) for part in parts.parts if part.stays] == [
        ("wte", ["wte.weight"]),
        ("batch_norm", ["batch_norm.bias", "batch_norm.weight"]),
    ]
    assert list(parts.standing) == ["place"]
    assert sorted(find_parts(Tokens("tied blocks")).standing) == ["h.1.up.weight", "place"]
    assert [part.name for part in find_parts(Tokens(), ["h.*.up"]).blocks] == [f"h.{index}.up" for index in range(4)]


def test_mistakes_are_said(tmp_path: Path) -> None:
    model = Tokens()
    with pytest.raises(UserError, match="no list of modules"):
        Streamed(nn.Linear(2, 2), MeZO(nn.Linear(2, 2).parameters()))
    with pytest.raises(UserError, match="MeZO is needed"):
        Streamed(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="own parameters"):
        Streamed(model, MeZO(Tokens().parameters()))
    with pytest.raises(UserError, match=r"blocks 'x\.\*'"):
        Streamed(model, MeZO(model.parameters()), blocks=["x.*"])
    with pytest.raises(UserError, match="storage"):
        Streamed(model, MeZO(model.parameters()), storage=torch.int8)
    with pytest.raises(UserError, match="closure"):
        Streamed(model, MeZO(model.parameters())).step()
    with pytest.raises(UserError, match="three times"):
        check_fits(model, 3_000, None)
    with pytest.raises(UserError, match="at the peak"):
        check_fits(model, 40_000, 50_000)
    with pytest.raises(UserError, match=r"missing"):
        DiskStore([tmp_path / "missing"])
