"""The profile of a step, against what the real CPU allocator did when that step really ran."""

from __future__ import annotations

import math

import pytest
import torch
from profiler_models import (
    LengthDependent,
    TiedAndFrozen,
    length_dependent,
    llama,
    llama_bf16,
    llama_padded,
    mlp,
    skip_without_bf16_lstm,
    tied,
)
from torch import nn

from benchmarks.profiler.architectures import TABLE, find
from benchmarks.profiler.peaks import TOLERANCE, VARIANTS, Variant, can_checkpoint, compare, is_within
from trainwright import optim as tw_optim
from trainwright.artifacts import Profile, UserError
from trainwright.hardware import resolve
from trainwright.profiler import measure, profile, reference_step, static_bytes

BY_NAME = {variant.name: variant for variant in VARIANTS}
IN_CI = {
    ("gpt2", "adamw-foreach"),
    ("llama-padded", "accumulate-2"),
    ("mixtral", "adamw"),
    ("mamba2", "checkpointing"),
    ("deberta-v2", "sgd-momentum"),
    ("resnet", "adamw"),
    ("unet", "adamw"),
    ("unet", "autocast-bf16"),
    ("lstm", "accumulate-2"),
    ("lstm-both-ways", "autocast-bf16"),
    ("mixer", "autocast-bf16"),
    ("tied-and-frozen", "adamw"),
    ("several-losses", "sgd-momentum"),
    ("transformer-encoder", "adamw"),
}
"""Kinds of models that differ, and every way of training; the others join them in the full grid."""
GRID = [
    pytest.param(architecture, variant, marks=() if pair in IN_CI else pytest.mark.slow, id="-".join(pair))
    for architecture in TABLE
    for variant in VARIANTS
    if (pair := (architecture.name, variant.name))
]
OPTIMIZERS = {
    "adafactor": lambda params: torch.optim.Adafactor(params, foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, foreach=False),
    "rprop": lambda params: torch.optim.Rprop(params, foreach=False),
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2]),
    "adan": lambda params: tw_optim.Adan(params),
    "diffgrad": lambda params: tw_optim.DiffGrad(params),
}


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, foreach=False, fused=False)


def real_peak(model, batch, loss_fn, make_optimizer) -> int:
    """The peak of the second of two real steps, from the allocator's records."""
    static = static_bytes(model)
    optimizer = make_optimizer(model.parameters())
    record = measure(lambda: reference_step(model, optimizer, batch, loss_fn))
    assert record.num_missed_frees == 0
    return static + record.peak_of_step(1)


@pytest.fixture(autouse=True)
def _seed_and_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def test_the_table_holds_what_it_promises():
    kinds = {architecture.kind for architecture in TABLE}
    assert {"decoder", "mixture of experts", "state space", "encoder", "encoder-decoder", "speech"} < kinds
    assert {"vision transformer", "convolutional", "multimodal", "plain"} < kinds
    assert len({architecture.name for architecture in TABLE}) == len(TABLE) >= 36
    assert {(architecture.name, variant.name) for architecture in TABLE for variant in VARIANTS} >= IN_CI


@pytest.mark.parametrize(("architecture", "variant"), GRID)
def test_peak_and_saved_bytes_are_the_allocators(architecture, variant):
    if variant.checkpointing and not can_checkpoint(architecture):
        pytest.skip("the model has no gradient checkpointing")
    if "lstm" in architecture.name and variant.autocast:
        skip_without_bf16_lstm()
    row = compare(architecture, variant)
    assert row["num_missed_frees"] == 0
    assert is_within(row), row


@pytest.mark.parametrize("name", ["unet", "lstm", pytest.param("efficientnet", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["adamw", "autocast-bf16"])
def test_scratch_of_two_threads(name, variant):
    if name == "lstm" and BY_NAME[variant].autocast:
        skip_without_bf16_lstm()
    torch.set_num_threads(2)
    row = compare(find(name), BY_NAME[variant])
    assert is_within(row), row


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_any_optimizer(make_optimizer):
    row = compare(find("several-losses"), Variant("", make_optimizer))
    assert is_within(row), row


def test_numbers_that_an_optimizer_asks_for_are_stood_in_for():
    model, batch, loss_fn = mlp()
    asks, asks_not = (
        profile(model, batch, loss_fn=loss_fn, make_optimizer=OPTIMIZERS[name]) for name in ("adafactor", "nadam")
    )
    assert any("the optimizer asked for" in note for note in asks.notes)
    assert asks_not.notes == ()


@pytest.mark.parametrize("build", [llama_bf16, length_dependent], ids=lambda build: build.__name__)
def test_weights_in_bf16_and_values_that_decide(build):
    model, batch, loss_fn = build()
    predicted = profile(model, batch, loss_fn=loss_fn, make_optimizer=adamw)
    assert math.isclose(predicted.peak_bytes, real_peak(model, batch, loss_fn, adamw), rel_tol=TOLERANCE)


def test_micro_batches_add_up():
    model, batch, loss_fn = mlp()
    once, twice = (profile(model, batch, loss_fn=loss_fn, accumulate=number) for number in (1, 2))
    assert twice.forward_flops == 2 * once.forward_flops
    assert twice.backward_flops == 2 * once.backward_flops
    assert twice.saved_bytes == once.saved_bytes
    assert any("2 micro-batches" in note for note in twice.notes)
    assert not any("micro-batches" in note for note in once.notes)


def test_micro_batches_give_the_gradient_of_their_mean():
    model, batch, loss_fn = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reference_step(model, optimizer, batch, loss_fn)
    expected = [param.grad.clone() for param in model.parameters()]
    reference_step(model, optimizer, batch, loss_fn, accumulate=4)
    for param, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(param.grad, grad)
    with pytest.raises(UserError, match="1 or more"):
        reference_step(model, optimizer, batch, loss_fn, accumulate=0)


def test_another_model_does_not_pass_for_this_one():
    """The bar above can fail: a batch of one row more, and a layer that saves more, are told apart."""
    model, batch, _ = llama()
    larger = {
        key: torch.cat([value, value[:1]]) if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }
    measured = real_peak(model, larger, None, adamw)
    assert not math.isclose(profile(model, batch, make_optimizer=adamw).peak_bytes, measured, rel_tol=TOLERANCE)


@pytest.mark.parametrize("build", [llama, llama_padded, tied, mlp], ids=lambda build: build.__name__)
def test_what_stays_after_the_forward_is_the_allocators(build):
    model, batch, loss_fn = build()
    predicted = profile(model, batch, loss_fn=loss_fn)
    held = []

    def forward():
        out = model(**batch) if isinstance(batch, dict) else model(*batch)
        held.extend([out, loss_fn(out, batch) if loss_fn else None])

    assert math.isclose(predicted.saved_bytes, measure(forward, num_steps=1).end_delta_bytes, rel_tol=1e-3)


def test_static_sizes_count_tied_weights_once_and_unused_ones_never_get_a_gradient():
    model, batch, _ = tied()
    predicted = profile(model, batch, make_optimizer=adamw)
    optimizer = adamw(model.parameters())
    reference_step(model, optimizer, batch)
    assert predicted.num_params == sum(param.numel() for param in model.parameters())
    assert predicted.param_bytes == sum(param.nbytes for param in model.parameters())
    assert predicted.grad_bytes == sum(param.grad.nbytes for param in model.parameters() if param.grad is not None)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert predicted.optimizer_bytes == sum(value.nbytes for value in states)


def test_num_ops_and_flops_are_those_of_the_real_step():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Counter(TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_ops += func.namespace != "profiler"
            return func(*args, **(kwargs or {}))

    model, batch, loss_fn = mlp()
    predicted = profile(model, batch, loss_fn=loss_fn, make_optimizer=adamw)
    optimizer = adamw(model.parameters())
    reference_step(model, optimizer, batch, loss_fn)
    with Counter() as counter:
        reference_step(model, optimizer, batch, loss_fn)
    with FlopCounterMode(display=False) as flop_counter:
        reference_step(model, optimizer, batch, loss_fn)
    assert predicted.num_ops == counter.num_ops
    assert predicted.forward_flops + predicted.backward_flops == flop_counter.get_total_flops()


def test_costs_belong_to_the_modules_that_cause_them():
    model, batch, _ = llama()
    predicted = profile(model, batch)
    costs = {cost.path: cost for cost in predicted.modules}
    first, second = costs["model.layers.0"], costs["model.layers.1"]
    assert (second.forward_flops, second.backward_flops) == (first.forward_flops, first.backward_flops)
    assert first.saved_bytes == second.saved_bytes > 0
    linear = costs["model.layers.1.mlp.down_proj"]
    assert linear.forward_flops == 2 * batch["input_ids"].numel() * 64 * 176
    assert linear.backward_flops == 2 * linear.forward_flops
    root = costs[""]
    assert (root.forward_flops, root.backward_flops) == (predicted.forward_flops, predicted.backward_flops)
    assert root.num_ops == predicted.num_ops
    children = [cost for path, cost in costs.items() if path and "." not in path]
    assert root.forward_flops == sum(child.forward_flops for child in children)


def test_the_timeline_holds_the_peak_and_adds_up():
    model, batch, _ = llama()
    predicted = profile(model, batch)
    assert [point.phase for point in predicted.timeline] == sorted((p.phase for p in predicted.timeline), key=_order)
    for point in predicted.timeline:
        parts = (point.param_bytes, point.grad_bytes, point.optimizer_bytes, point.saved_bytes, point.other_bytes)
        assert point.live_bytes == sum(parts)
    assert max(point.live_bytes for point in predicted.timeline) <= predicted.peak_bytes
    assert len(predicted.timeline) == predicted.num_ops


def _order(phase: str) -> int:
    return ("forward", "backward", "update").index(phase)


def test_nothing_of_the_users_is_touched():
    model, batch, _ = tied()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    profile(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(param.grad is None for param in model.parameters())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_meta_model_has_the_profile_of_a_real_one():
    model, batch, _ = llama()
    with torch.device("meta"):
        meta, _, _ = llama()
        meta_batch = {
            key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in batch.items()
        }
    real, symbolic = profile(model, batch), profile(meta, meta_batch)
    same = {"profile_s"}
    assert symbolic.model_dump(exclude=same) == real.model_dump(exclude=same)


def test_a_profile_survives_its_file(tmp_path):
    model, batch, loss_fn = mlp()
    found = profile(model, batch, loss_fn=loss_fn, name="mlp", capture_s=0.5)
    found.to_json(tmp_path / "p.json")
    assert Profile.from_json(tmp_path / "p.json") == found
    assert (found.model, found.capture_s) == ("mlp", 0.5)


def test_hardware_gives_a_time_and_a_gpus_rounding():
    model, batch, _ = llama()
    cpu, gpu = profile(model, batch), profile(model, batch, hardware=resolve("h100"))
    assert cpu.step_s is None
    floor = (gpu.forward_flops + gpu.backward_flops) / max(resolve("h100").device.flops_per_s.values())
    assert gpu.step_s > floor
    assert gpu.target == resolve("h100").device.name
    rounded = sum(-(-param.nbytes // 512) * 512 for param in model.parameters())
    assert gpu.param_bytes == rounded


def test_autocast_changes_what_is_saved():
    model, batch, _ = llama()
    full, mixed = profile(model, batch), profile(model, batch, autocast="bf16")
    assert mixed.param_bytes == full.param_bytes
    held = []

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            held.append(model(**batch))

    assert math.isclose(mixed.saved_bytes, measure(forward, num_steps=1).end_delta_bytes, rel_tol=3e-3)
    assert mixed.saved_bytes != full.saved_bytes


class BranchesOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y.sum() if y.sum() > 0 else -y.sum()


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (BranchesOnValues(), (torch.ones(2, 4),), ["if y.sum() > 0", "test_profiler.py"]),
        (LengthDependent(), (torch.ones(2, 31), torch.ones(2, dtype=torch.long)), ["profiler_models.py"]),
        (nn.Linear(4, 4), (torch.ones(2, 4),), ["scalar loss"]),
        (TiedAndFrozen(), {"idx": torch.ones(2, 3, dtype=torch.long)}, ["idx", "ids"]),
        (nn.Linear(4, 1), 17, ["dict", "tuple", "int"]),
    ],
)
def test_mistakes_are_told_with_their_place(model, batch, words):
    with pytest.raises(UserError) as caught:
        profile(model, batch)
    for word in words:
        assert word in str(caught.value)
