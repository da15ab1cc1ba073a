"""Rules found by trying shards of small inputs: those that are there, and none that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright as tw
from tests.grids import slow_but
from tests.models import own_ops
from tests.pool import Pool
from trainwright.ops import Call, Signature, TensorSpec
from trainwright.program import discover
from trainwright.program.discover import discovered

OPS = torch.ops.tests_own


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(discover, "_FOUND", {})
    return tmp_path


def found(target: Any, *args: Any, out: tuple[int, ...], gradients: bool = True) -> Signature | None:
    """What is discovered of a call on fp32 tensors; shapes stand for them."""
    specs = [TensorSpec(arg, torch.float32, gradients) if isinstance(arg, tuple) else arg for arg in args]
    call = Call(str(target), tuple(specs), {}, (TensorSpec(out, torch.float32),))
    return discovered(target, call, [gradients] * len(call.inputs))


def split(signature: Signature | None) -> dict[str, Any]:
    """Of each loop that may be split: where inputs and outputs have it, `sum` where an output is a partial sum."""
    assert signature is not None
    assert signature.discovered
    table = {}
    for loop in sorted(set(signature.sizes) - signature.whole):
        places = [next((k for k, dim in enumerate(dims) if loop in dim), None) for dims in signature.inputs]
        outs = [next((k for k, dim in enumerate(dims) if loop in dim), "sum") for dims in signature.outputs]
        assert (loop in signature.reduced) == ("sum" in outs)
        table[loop] = (*places, "->", *outs)
    return table


def test_an_elementwise_op_is_split_along_every_dim() -> None:
    loops = split(found(OPS.gate.default, (4, 6, 10), (4, 6, 10), out=(4, 6, 10)))
    assert sorted(loops.values()) == [(0, 0, "->", 0), (1, 1, "->", 1), (2, 2, "->", 2)]


def test_dims_of_equal_size_are_told_apart() -> None:
    loops = split(found(OPS.rows.default, (8, 8), 0, out=(8, 8)))
    assert list(loops.values()) == [(1, "->", 1)]


@pytest.mark.parametrize(("dim", "free"), [(1, 0), (0, 1), (-1, 0)])
def test_a_softmax_is_not_split_along_its_dim(dim: int, free: int) -> None:
    loops = split(found(OPS.rows.default, (8, 16), dim, out=(8, 16)))
    assert list(loops.values()) == [(free, "->", free)]


def test_a_contraction_leaves_partial_sums() -> None:
    loops = split(found(OPS.product.default, (8, 16), (16, 6), out=(8, 6)))
    assert sorted(loops.values(), key=str) == [(0, None, "->", 0), (1, 0, "->", "sum"), (None, 1, "->", 1)]


def test_a_kernel_that_does_not_check_its_operands_ends_no_process_but_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loops = split(found(OPS.unchecked.default, (8, 16), (8,), out=(8, 16), gradients=False))
    assert sorted(loops.values(), key=str) == [(0, 0, "->", 0), (1, None, "->", 1)]
    assert capfd.readouterr() == ("", "")


def test_a_loss_of_labels_that_no_random_number_is_has_no_loop() -> None:
    """Its labels are -1 and 1; of others it is zero, whole or in parts."""
    vectors, labels = TensorSpec((8, 12), torch.float32, True), TensorSpec((8,), torch.float32)
    target = torch.ops.aten.cosine_embedding_loss.default
    call = Call("cosine_embedding_loss", (vectors, vectors, labels), {}, (TensorSpec((), torch.float32),))
    assert discovered(target, call, [True, True, False]) is None


def test_a_limit_that_small_numbers_do_not_reach_is_found() -> None:
    loops = split(found(torch.ops.aten.renorm.default, (8, 16), 2, 0, 9.0, out=(8, 16)))
    assert list(loops.values()) == [(0, "->", 0)]


def test_what_depends_on_its_place_is_not_split_there() -> None:
    assert list(split(found(OPS.ramp.default, (8, 16), out=(8, 16))).values()) == [(0, "->", 0)]


def test_sizes_that_an_op_refuses_are_replaced_by_its_own() -> None:
    assert list(split(found(OPS.pairs.default, (6, 40), out=(6, 20))).values()) == [(0, "->", 0)]


@pytest.mark.parametrize("name", ["noise", "add_in_place"])
def test_random_and_writing_ops_are_never_tried(name: str) -> None:
    assert found(getattr(OPS, name).default, (8, 16), out=(8, 16)) is None


@pytest.mark.parametrize(
    ("target", "args", "out"),
    [
        (torch.ops.aten.cumsum.default, ((8, 16), 1), (8, 16)),
        (torch.ops.aten.logcumsumexp.default, ((8, 16), 0), (8, 16)),
        (torch.ops.aten.cdist.default, ((8, 16), (6, 16)), (8, 6)),
        (torch.ops.aten.linalg_matrix_exp.default, ((8, 5, 5),), (8, 5, 5)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ops_of_torch_are_found_too(target: Any, args: Any, out: tuple[int, ...]) -> None:
    assert split(found(target, *args, out=out))


def test_a_backward_that_does_not_follow_is_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the forward recombines along every dim, the gradient along none."""
    whole = discover._gradients
    monkeypatch.setattr(discover, "_gradients", lambda *args: [g + g.mean() for g in whole(*args)])
    assert found(OPS.gate.default, (4, 6), (4, 6), out=(4, 6)) is None
    assert found(OPS.gate.default, (4, 6), (4, 6), out=(4, 6), gradients=False) is not None


def test_what_was_found_is_kept_and_not_believed_unseen(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(OPS.rows.default, (8, 16), 1, out=(8, 16))
    (kept,) = (fresh / "rules").iterdir()
    assert json.loads(kept.read_text())["loops"] == [[[0], [0]]]
    searches: list[Any] = []
    search = discover._search
    monkeypatch.setattr(discover, "_search", lambda trial: searches.append(trial) or search(trial))
    monkeypatch.setattr(discover, "_FOUND", {})
    assert list(split(found(OPS.rows.default, (4, 10), 1, out=(4, 10))).values()) == [(0, "->", 0)]
    assert not searches
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "loops": [[[1], [1]]]}))  # of what the op once was
    monkeypatch.setattr(discover, "_FOUND", {})
    assert list(split(found(OPS.rows.default, (8, 16), 1, out=(8, 16))).values()) == [(0, "->", 0)]
    assert len(searches) == 1


@pytest.mark.parametrize(
    "pin",
    slow_but(
        ["product=shard(l2)"], ["", "product=shard(l0)", "product=shard(l1)", "product=shard(l2)", "gate=shard(l1)"]
    ),
)
def test_plans_of_found_rules_are_right(pool2: Pool, pin: str) -> None:
    """Whatever loop is split: rows, columns, and the contracted one, whose partial sums are then added."""
    model, batch = own_ops.net()
    (axis,) = tw.plan(model, batch, hardware="cpu:2").mesh
    plan = tw.plan(model, batch, hardware="cpu:2", pins=[f":{pin}@{axis}"] if pin else [])
    op, _, loop = pin.partition("=shard(")
    assert not pin or plan.modules[f":{op}"].split == (loop[:-1],)
    assert any("found by trying" in note and "tests_own::product" in note for note in plan.notes)
    payload = {"spec": "tests/models/own_ops.py:net", "options": {}}
    results = pool2.run("trainwright.cli.workers:verify", model=payload, plan=plan.to_json(), dtype="float64")
    report = tw.Report.model_validate(results[0])
    assert report.passed, report
