"""Models that their own script wraps, profiled as one process of several whose others are imagined."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainwright as tw
from trainwright.artifacts import UserError
from trainwright.profiler.processes import Communication, imagined

WIDTH, LAYERS, RANKS = 512, 4, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)


def sharded(again: bool = True, dtype: torch.dtype = torch.bfloat16):
    def build():
        net, mesh = layers(), init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in net:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        return fully_shard(net, mesh=mesh, mp_policy=policy), batch(), nn.MSELoss()

    return build


def found(build, processes: int = RANKS, **options):
    return tw.profile(build, processes=processes, hardware="4xh100", optimizer=torch.optim.SGD, **options)


def test_a_shard_is_what_one_process_holds() -> None:
    costs = found(sharded())
    assert costs.param_bytes == LAYERS * WEIGHT_BYTES // RANKS == costs.grad_bytes
    assert costs.num_params == LAYERS * WIDTH * WIDTH


def test_gathered_weights_that_stay_are_held_through_the_forward() -> None:
    held = [
        max(point.live_bytes for point in found(sharded(again)).timeline if point.phase == "forward")
        for again in (True, False)
    ]
    kept_bytes = (LAYERS - 1) * WEIGHT_BYTES // 2  # bf16; with resharding one layer is there at a time
    assert held[1] - held[0] == kept_bytes


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return x + self.down(up.sigmoid() * up)


def test_blocks_that_the_script_compiles_are_followed_as_compiled() -> None:
    def build(compiles: bool):
        net = nn.Sequential(*[Gated() for _ in range(3)])
        mesh = init_device_mesh("cpu", (RANKS,))
        for place in range(3):
            net[place] = torch.compile(net[place], fullgraph=True) if compiles else net[place]
            fully_shard(net[place], mesh=mesh)
        return fully_shard(net, mesh=mesh), batch(), nn.MSELoss()

    plain, compiled = (found(lambda compiles=compiles: build(compiles)) for compiles in (False, True))
    assert plain.compiled is None
    assert compiled.compiled.num_graphs == 2  # one forward and one backward, which all blocks share
    assert compiled.forward_flops == plain.forward_flops
    assert compiled.saved_bytes < plain.saved_bytes
    assert torch.compile.__module__ == "torch"


def test_the_gather_is_of_the_policys_type() -> None:
    narrow, wide = (found(sharded(dtype=dtype)).peak_bytes for dtype in (torch.bfloat16, torch.float32))
    assert narrow < wide


def test_ddp_keeps_buckets_apart_from_gradients_unless_they_are_views() -> None:
    def wrapped(**options):
        return lambda: (DistributedDataParallel(layers(), **options), batch(), nn.MSELoss())

    apart, views = found(wrapped()), found(wrapped(gradient_as_bucket_view=True))
    weights = LAYERS * WEIGHT_BYTES
    assert apart.buffer_bytes == views.buffer_bytes == weights
    assert apart.grad_bytes == weights
    assert apart.peak_bytes - views.peak_bytes == pytest.approx(weights, rel=0.3)


def test_communication_goes_on_beside_the_computation() -> None:
    beside = Communication()
    beside.gather(0.0, 1.0)
    clock = beside.arrived(0.0)
    assert clock == 1.0
    beside.gather(clock + 3.0, 2.0)  # under way since the computation began
    clock = beside.arrived(clock + 3.0)
    assert clock == 4.0
    beside.reduce(clock, 5.0)
    assert beside.arrived(clock + 1.0) == 9.0


def test_ops_and_waits_add_up_to_the_step() -> None:
    costs = found(sharded())
    assert sum(point.time_s for point in costs.timeline) == pytest.approx(costs.step_s)


def test_the_group_is_gone_afterwards_and_none_is_imagined_beside_another() -> None:
    with imagined(3):
        assert dist.get_world_size() == 3
        with pytest.raises(UserError, match="there is one already"), imagined(2):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "given", "options", "said"),
    [
        (layers, None, {"processes": 0}, "1 or more"),
        (layers(), (torch.zeros(2, WIDTH),), {"processes": 2}, "a function that makes and wraps"),
        (lambda: 3, None, {"processes": 2}, "returned int"),
    ],
)
def test_what_cannot_be_is_refused(model, given, options, said) -> None:
    with pytest.raises(UserError, match=said):
        tw.profile(model, given, **options)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("wraps", "said"), [(True, "wrapped by its own script"), (False, "exchange nothing in a step")]
)
def test_a_note_says_whether_the_processes_exchange_anything(wraps: bool, said: str) -> None:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
        model = nn.Linear(4, 2)
        return (
            nn.parallel.DistributedDataParallel(model) if wraps else model,
            (torch.ones(3, 4), torch.ones(3, 2)),
            nn.MSELoss(),
        )

    notes = tw.profile(build, processes=4).notes
    assert [said in note for note in notes if "4 processes" in note] == [True]
