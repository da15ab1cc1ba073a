"""LoRA and QLoRA for profiles: what they keep, and that the step is that of the quantised weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.models.lora import BLOCK, SCALES, dequantise, quantised, with_adapters


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 96, bias=False), nn.Linear(96, 5)).double()


@pytest.mark.parametrize("shape", [(48, 100), (7, 9), (256, 64)])
def test_codes_are_the_nearest_of_the_scaled_quantiles(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = 3 * torch.randn(shape) + 1
    codes, scales, outer = quantised(weight)
    found = dequantise(codes, scales, outer, list(shape), torch.float32)
    blocks = -(-weight.numel() // BLOCK)
    assert (codes.nbytes, scales.nbytes, outer.nbytes) == (blocks * BLOCK // 2, blocks, 4 * -(-blocks // SCALES))
    widest = weight.abs().max()
    assert (
        found - weight
    ).abs().max() <= 0.16 * widest  # half of the widest gap between quantiles, and the scale's rounding
    again = dequantise(*quantised(found), list(shape), torch.float32)
    torch.testing.assert_close(again, found, rtol=0.01, atol=0)


def test_the_step_is_that_of_the_quantised_weights_by_hand() -> None:
    model, x = with_adapters(network(), "qlora", rank=3), torch.randn(4, 96, dtype=torch.float64, requires_grad=True)
    weights = [
        dequantise(part.codes, part.scales, part.group_scales, part.shape, torch.float64)
        for part in (model[0], model[2])
    ]
    nn.init.normal_(model[0].up)
    nn.init.normal_(model[2].up)
    by_hand = x
    for place, weight in zip((0, 2), weights):
        part = model[place]
        whole = weight + part.scale * part.up @ part.down
        by_hand = by_hand @ whole.T + (0 if part.bias is None else part.bias)
        by_hand = by_hand.tanh() if place == 0 else by_hand
    by_hand = model[3](by_hand)
    torch.testing.assert_close(model(x), by_hand)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 4
    for one, other in zip(
        torch.autograd.grad(model(x).square().sum(), [x, *trained]),
        torch.autograd.grad(by_hand.square().sum(), [x, *trained]),
    ):
        torch.testing.assert_close(one, other)


def test_lora_leaves_the_model_as_it_was_until_it_is_trained() -> None:
    x = torch.randn(4, 96, dtype=torch.float64)
    torch.testing.assert_close(with_adapters(network(), "lora")(x), network()(x))


def test_a_profile_keeps_codes_and_no_weight() -> None:
    """Between them the ways differ by the frozen weights alone: 2 bytes an element, or 0.516."""
    found = {}
    for way in ("lora", "qlora"):
        model, batch = tw.zoo.build("llama-tiny", dtype="bf16", batch_size=2)
        sizes = [
            each.weight.numel()
            for name, each in model.named_modules()
            if type(each) is nn.Linear and "head" not in name
        ]
        found[way] = tw.profile(with_adapters(model, way, rank=4), batch, hardware="a100", capture=False)
    lora, qlora = found["lora"], found["qlora"]
    assert lora.grad_bytes == qlora.grad_bytes
    assert lora.optimizer_bytes == qlora.optimizer_bytes
    saved = (lora.param_bytes + lora.buffer_bytes) - (qlora.param_bytes + qlora.buffer_bytes)
    assert saved == sum(block(2 * n) - block(n / 2) - block(n / BLOCK) - block(1) for n in sizes)
    assert qlora.saved_bytes <= lora.saved_bytes  # the codes stand among the buffers, and no weight is kept
    assert qlora.step_s > lora.step_s


def block(num_bytes: float) -> int:
    """Return the bytes that a GPU's allocator takes for so many."""
    return 512 * math.ceil(num_bytes / 512)


def test_a_model_without_linear_layers_has_none_to_adapt() -> None:
    with pytest.raises(UserError, match="train all of it"):
        with_adapters(nn.Sequential(nn.Conv2d(3, 3, 3)), "qlora")
