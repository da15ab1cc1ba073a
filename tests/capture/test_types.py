"""What torch refuses for its types' sake is refused by `profile` and `plan`, and nothing else is: torch is the oracle."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.capture import capture
from trainwright.capture.dtypes import Operand, refused
from trainwright.torch_internals.fakes import check_devices
from trainwright.torch_internals.private import FakeTensorMode

aten = torch.ops.aten
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
Call = tuple[Any, tuple[tuple[int, ...] | None, ...], tuple[Any, ...]]
CALLS: list[Call] = [
    (aten.linear.default, ((2, 3), (4, 3), (4,)), ()),
    (aten.matmul.default, ((2, 5, 3), (3, 4)), ()),
    (aten.bmm.default, ((2, 5, 3), (2, 3, 4)), ()),
    (aten.conv2d.default, ((2, 8, 5, 5), (6, 4, 3, 3), (6,)), ([2, 2], [1, 1], [1, 1], 2)),
    (aten.layer_norm.default, ((2, 3), None, (3,), (3,)), ([3],)),
    (aten.group_norm.default, ((2, 8, 3), None, (8,), (8,)), (4,)),
    (aten.embedding.default, ((4, 3), (2,)), ()),
    (aten.cross_entropy_loss.default, ((2, 3), (2,)), ()),
    (aten.mse_loss.default, ((2, 3), (2, 3)), ()),
    (aten.binary_cross_entropy_with_logits.default, ((2, 3), (2, 3)), ()),
    (aten.where.self, ((2, 3), (2, 3), (2, 3)), ()),
    (aten.gather.default, ((2, 3), None, (2, 3)), (1,)),
    (aten.softmax.int, ((2, 3, 4),), (2,)),
    (aten.gelu.default, ((2, 3),), ()),
    (aten.add.Tensor, ((2, 3), (2, 3)), ()),
    (aten.mul.Tensor, ((2, 3), ()), ()),
    (aten.div.Tensor_mode, ((2, 3), (3,)), ()),
    (aten.lerp.Scalar, ((2, 3), (2, 3)), (0.5,)),
    (aten.silu.default, ((2, 3),), ()),
    (aten.mean.default, ((2, 3),), ()),
]


def _arguments(shapes: tuple[Any, ...], numbers: tuple[Any, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
    """Tensors of these types, with the numbers of the call in the places of None and behind."""
    rest, queue = list(numbers), list(dtypes)
    made = [rest.pop(0) if shape is None else torch.ones(shape, dtype=queue.pop(0)) for shape in shapes]
    return (*made, *rest)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_types_are_refused_where_torch_itself_refuses_them(call: Call) -> None:
    target, shapes, numbers = call
    num = sum(shape is not None for shape in shapes)
    kwargs = {"rounding_mode": "floor"} if target is aten.div.Tensor_mode else {}
    num_refused = 0
    for dtypes in itertools.product(TYPES, repeat=num) if num < 3 else _mixtures(num):
        args = _arguments(shapes, numbers, dtypes)
        found = refused(target, args, kwargs)
        said = _error(lambda args=args: target(*args, **kwargs))
        is_missing = isinstance(said, NotImplementedError) and {torch.float16, torch.bfloat16} & set(dtypes)
        assert (found is None) == (said is None or bool(is_missing)), (dtypes, found, said)
        if found is not None:
            num_refused += 1
            assert _error(lambda found=found: target(*_arguments(shapes, numbers, found.accepted), **kwargs)) is None
    accepts_all = target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor_mode)
    assert accepts_all or num_refused


def _mixtures(num: int) -> list[tuple[torch.dtype, ...]]:
    """All types alike, and one that differs."""
    found = []
    for one, other in itertools.product(TYPES, repeat=2):
        found += [tuple(other if place == at else one for place in range(num)) for at in range(num)]
    return list(dict.fromkeys(found))


def _error(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except (RuntimeError, TypeError, IndexError) as error:
        return error
    return None


def test_only_calls_that_one_element_is_a_whole_one_of_are_asked() -> None:
    """Some kernels trust their sizes: asked with one element, these wrote where they should not, or ended the process."""
    one, lengths = torch.ones(4), [50, 50]
    assert refused(aten._ctc_loss_backward.default, (one, one, one.long(), lengths, lengths, one, one, 0), {}) is None
    hidden, gates = torch.ones(1, 2, 8), [torch.ones(32, 4), torch.ones(32, 8)]
    given = (torch.ones(5, 2, 4).double(), [hidden, hidden], gates, False, 1, 0.0, True, False, False)
    assert refused(aten.lstm.input, given, {}) is None
    assert refused(aten.native_group_norm.default, (torch.ones(2, 8, 3), None, None, 2, 8, 3, 4, 1e-5), {}) is None
    assert refused(aten.layer_norm.default, (torch.ones(2, 3).double(), [3], torch.ones(3)), {}) is not None


def test_of_the_spread_of_one_element_nobody_is_warned(capfd: pytest.CaptureFixture[str]) -> None:
    """torch writes such a warning past Python, where no filter stops it."""
    assert refused(aten.std.correction, (torch.ones(2, 3), [0]), {"correction": 1}) is None
    assert capfd.readouterr().err == ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.norm(x))


X, Y = torch.randn(6, 4), torch.arange(6) % 3
# torch 2.11 runs it on fakes, so that `plan` refuses its node in the graph: "the model or its loss".
SAID_OF_ENTROPY = "loss" if torch.__version__.startswith("2.11") else "the loss, BCEWithLogitsLoss"
WRONG: list[tuple[Any, Any, Any, tuple[str, ...]]] = [
    (nn.Sequential(nn.Linear(4, 3)), (X.double(), Y), nn.CrossEntropyLoss(), ("float64", "float32", "the same dtype")),
    (nn.Sequential(nn.Linear(4, 3)), (X.long(), Y), nn.CrossEntropyLoss(), ("int64", "to float32")),
    (nn.Sequential(nn.Linear(4, 3)).half(), (X, Y), nn.CrossEntropyLoss(), ("float16", "to float16")),
    (Net(), (X.double(), Y), nn.CrossEntropyLoss(), ("self.body(self.norm(x))", "in norm", "to float32")),
    (Net(), (X, Y.float()), nn.CrossEntropyLoss(), ("the loss, CrossEntropyLoss", "int64")),
    (Net(), (X, torch.ones(6, 3).long()), nn.BCEWithLogitsLoss(), (SAID_OF_ENTROPY, "int64")),
    (nn.Embedding(5, 3), (Y.float(), Y), nn.CrossEntropyLoss(), ("float32", "Long")),
]


@pytest.mark.parametrize(("model", "batch", "loss_fn", "parts"), WRONG)
def test_profile_and_plan_refuse_what_a_step_would_die_of(
    model: nn.Module, batch: Any, loss_fn: Any, parts: tuple[str, ...]
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises((RuntimeError, TypeError)):
        tw.reference_step(model, optimizer, batch, loss_fn)
    for verb in (tw.profile, tw.plan):
        with pytest.raises(UserError, match="types that torch takes together are needed") as caught:
            verb(model, batch, loss_fn=loss_fn, hardware="cpu:2")
        for part in parts:
            assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, None), (torch.float32, "bf16"), (torch.float64, None)]
)
def test_what_torch_takes_is_planned(dtype: torch.dtype, autocast: str | None) -> None:
    model, batch = Net().to(dtype), (X.to(dtype), Y)
    assert tw.plan(model, batch, loss_fn=nn.CrossEntropyLoss(), hardware="cpu:1", autocast=autocast).num_ranks == 1


def test_half_a_norm_is_taken_and_a_product_of_two_types_is_not() -> None:
    """Under autocast the product's operands are converted, so that it is taken as well."""
    mixed = Net()
    mixed.body.to(torch.bfloat16)
    with pytest.raises(
        UserError, match=r"linear .* in body is given input: float32, weight \(parameter body.weight\): bf"
    ):
        capture(mixed, (X,), lambda output: output.float().mean())
    assert capture(mixed, (X,), lambda output: output.float().mean(), autocast=torch.bfloat16)


def test_the_backwards_types_are_looked_at_too() -> None:
    """Torch's binary cross-entropy takes targets in float64 in no form; its backward is asked for with its forward."""
    output, target = Operand(torch.float32, 2, differentiated=True), Operand(torch.float32, 2)
    assert refused(aten.binary_cross_entropy.default, (output, target), {}) is None
    wrong = Operand(torch.int64, 2)
    assert refused(aten.binary_cross_entropy.default, (output, wrong), {}) is not None


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8, device="meta"), nn.Linear(8, 3, device="meta"))
    check_devices(model)
    model[0].weight = nn.Parameter(torch.empty(8, 4))
    check_devices(model)  # what is on the meta device is on none
    with FakeTensorMode():  # this machine may have no GPU
        model[1].weight = nn.Parameter(torch.empty(3, 8, device="cuda"))
    for verb in (tw.profile, tw.plan):
        with pytest.raises(UserError, match=r"one device is needed; 0\.weight on cpu and 1\.weight on cuda:0"):
            verb(model, (X, Y), loss_fn=nn.CrossEntropyLoss(), hardware="cpu:2")


def test_a_refused_trial_keeps_no_tensor_of_its_caller() -> None:
    """Its error's frames would: the memory of the caller's step then seems to be taken until Python collects them."""

    def caller() -> weakref.ref[Tensor]:
        held = torch.ones(3)
        call = (torch.ones(1, 6, 4, 4), torch.ones(6, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1)
        refused(aten.convolution.default, call, {})
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_a_write_to_an_activation_is_no_matter_of_types() -> None:
    """Autograd refuses writes to leaves, which activations are not."""
    activation = Operand(torch.float32, 2, differentiated=True)
    assert refused(aten.mul_.Tensor, (activation, 2), {}) is None
    assert refused(aten.linear.default, (activation, Operand(torch.float64, 2)), {}) is not None
