"""A compiled step's profile: kernels by rule, what is saved by torch's own partitioner, memory by the allocator."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import trainwright as tw
from trainwright.artifacts import Cluster, Device, Link, UserError
from trainwright.profiler import ForwardMarks, measure, reference_step, static_bytes
from trainwright.profiler.compiled import may_be_overwritten
from trainwright.profiler.kernel_groups import kernel_groups, kind_of, read_bytes
from trainwright.torch_internals import private


class Block(nn.Module):
    """A norm, two products and an activation of which autograd keeps three tensors, with a residual sum."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.norm(x))
        return x + self.down(up.sigmoid() * up)


def _model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()), (torch.randn(64, 32),)


def _loss(out: torch.Tensor, batch: object) -> torch.Tensor:
    return out.square().mean()


def _groups(function, *args, is_cpu=False):
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return graph, kernel_groups(graph, is_cpu)


def test_a_chain_of_elementwise_ops_is_one_kernel_that_moves_its_ends() -> None:
    x = torch.ones(64, 64)
    _, groups = _groups(lambda x: (x.sin() * 2 + 1).cos() * x.sin(), x)
    assert [group.name for group in groups] == ["fused_add_cos_mul_sin"]
    (group,) = groups
    assert [node.name for node in group.reads] == ["x_1"]
    assert len(group.writes) == 1


def test_a_softmax_is_one_kernel() -> None:
    _, groups = _groups(
        lambda x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, True), torch.ones(8, 64)
    )
    assert len(groups) == 1


def test_products_stand_alone_and_cut_chains() -> None:
    _, groups = _groups(lambda x, w: (x.relu() @ w).relu() @ w, torch.ones(8, 8), torch.ones(8, 8))
    assert [group.is_fused for group in groups] == [True, False, True, False]


def test_what_would_wait_for_itself_is_not_one_kernel() -> None:
    def function(x, w):
        cheap = x.sin().cos()  # read by the product and, past it, by the sum of both
        return (cheap @ w) + cheap

    _, groups = _groups(function, torch.ones(8, 8), torch.ones(8, 8))
    assert [group.is_fused for group in groups] == [True, False, True]


def test_sums_over_rows_and_over_columns_are_two_kernels() -> None:
    _, groups = _groups(lambda x: (x.sin().sum(0), x.sin().sum(1)), torch.ones(8, 16))
    assert len(groups) == 2


def test_of_a_looked_up_table_what_is_found_is_read() -> None:
    table, places = torch.ones(1000, 4), torch.arange(3)
    _graph, groups = _groups(lambda table, places: nn.functional.embedding(places, table) * 2, table, places)
    (group,) = groups
    sizes = {node.name: read_bytes(node, node.users) for node in group.reads}
    assert sizes == {"table_1": 3 * 4 * 4, "places_1": 24}


@pytest.mark.parametrize("is_cpu", [True, False])
def test_kernels_come_after_what_they_read(is_cpu: bool) -> None:
    def function(x, w):
        for _ in range(4):
            x = nn.functional.layer_norm((x @ w).exp() + x, (16,)).sigmoid() * x.sum(-1, keepdim=True)
        return x.sum(0), x

    graph, groups = _groups(function, torch.ones(8, 16), torch.ones(16, 16), is_cpu=is_cpu)
    there = {node for node in graph.nodes if node.op == "placeholder"}
    for group in groups:
        assert set(group.reads) <= there
        there |= set(group.nodes)
    made = [node for group in groups for node in group.nodes]
    assert len(made) == len(set(made))
    ends = list(itertools.chain.from_iterable(group.dies for group in groups))
    assert len(ends) == len(set(ends)), "memory ends once"
    inside = {node for group in groups for node in (*group.nodes, *group.inlined)}
    views = {node for node in graph.nodes if node.op == "call_function" and kind_of(node) == "view"}
    assert inside | views >= {node for node in graph.nodes if node.op == "call_function" and node.users}


@pytest.mark.usefixtures("compiled_anew")
def test_what_is_saved_is_what_torchs_own_partitioner_keeps() -> None:
    """`aot_eager_decomp_partition` has inductor's decompositions and its partitioner, without its kernels."""
    model, batch = _model()
    found = tw.profile(model, batch, loss_fn=_loss, compile=True, capture=False)
    theirs = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
    kept: dict[int, int] = {}
    fixed = {param.untyped_storage().data_ptr() for param in (*model.parameters(), *batch)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = theirs(*batch)
    after = (4 + 64 * 32 * 4) * 1  # the loss, and the output that the loss outside keeps
    assert found.saved_bytes == sum(kept.values()) + after
    eager = tw.profile(model, batch, loss_fn=_loss, capture=False)
    assert found.saved_bytes < eager.saved_bytes
    assert out.shape == (64, 32)


def test_a_compiled_profile_says_what_was_made_of_the_model_and_where() -> None:
    model, batch = _model()
    found = tw.profile(model, batch, loss_fn=_loss, hardware="a100", compile=True, capture=False)
    eager = tw.profile(model, batch, loss_fn=_loss, hardware="a100", capture=False)
    assert found.compiled is not None
    assert found.compiled.num_graphs == 2
    assert found.compiled.num_kernels < found.compiled.num_ops
    assert (found.forward_flops, found.backward_flops) == (eager.forward_flops, eager.backward_flops)
    assert found.step_s < eager.step_s
    assert any(op.op.startswith("fused_") and op.path == "*.norm" for op in found.ops)
    assert "compiled" in found.table()
    assert "compiled" not in eager.table()
    assert found == type(found).parse(found.to_json())
    assert "forward" not in vars(model)


def test_cuda_graphs_have_a_pool_of_their_own() -> None:
    model, batch = _model()
    how = {"loss_fn": _loss, "hardware": "a100", "capture": False}
    plain, graphs = tw.profile(model, batch, compile=True, **how), tw.profile(model, batch, cuda_graphs=True, **how)
    assert plain.compiled.pool_bytes is None
    assert graphs.compiled.pool_bytes >= graphs.saved_bytes
    assert graphs.reserved_bytes >= plain.reserved_bytes
    assert graphs.step_s < plain.step_s


class Disabled(nn.Module):
    """A model that keeps the compiler out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Counting(nn.Module):
    """A model whose Python the compiler cuts at, and that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x.relu())


def test_a_model_that_is_cut_runs_as_its_pieces() -> None:
    found = tw.profile(Counting(), (torch.ones(4, 8),), loss_fn=_loss, compile=True, capture=False)
    assert found.compiled.num_graphs == 4
    assert found.forward_flops == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        (Disabled(), {"compile": True}, "found no graph"),
        (nn.Linear(4, 4), {"compile": True, "run": True}, "--run was given"),
        (nn.Linear(4, 4), {"cuda_graphs": True}, "a GPU is needed for --cuda-graphs; no hardware was given"),
        (nn.Linear(4, 4), {"cuda_graphs": True, "hardware": "cpu:1"}, "cpu"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(model: nn.Module, asked: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        tw.profile(model, (torch.ones(2, 4),), loss_fn=_loss, capture=False, **asked)


def test_images_and_weights_are_kept_as_channels_last_copies() -> None:
    """Inductor turns a convolution's layout on a CPU: what is kept for the backward is the turned copy, also of a weight."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.zeros(2, 3, 16, 16)
    turned = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    as_it_lies = tw.profile(model, (x,), loss_fn=_loss, compile=True, capture=False)
    already = tw.profile(
        turned, (x.contiguous(memory_format=torch.channels_last),), loss_fn=_loss, compile=True, capture=False
    )
    copies = x.nbytes + model[0].weight.nbytes + model[2].weight.nbytes
    assert as_it_lies.saved_bytes - already.saved_bytes == copies


def test_processes_are_refused() -> None:
    with pytest.raises(UserError, match="one process is needed for --compile"):
        tw.profile(lambda: (nn.Linear(4, 4), (torch.ones(2, 4),), _loss), processes=2, compile=True)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
def test_the_peak_is_that_of_inductors_own_code() -> None:
    model, batch = _model()
    found = tw.profile(model, batch, loss_fn=_loss, compile=True, capture=False)
    model.forward = torch.compile(model.forward, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)

    def step() -> None:
        reference_step(model, optimizer, batch, _loss, observer=ForwardMarks())

    step()
    measured = measure(step)
    # the optimizer has its state already, as records begin
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert found.peak_bytes == pytest.approx(static_bytes(model) + states + measured.peak_of_step(1), rel=0.03)


def test_what_was_saved_is_overwritten_only_where_torch_donates_it() -> None:
    graph = torch.fx.Graph()
    saved, primal = graph.placeholder("sigmoid"), graph.placeholder("primals_1")
    made = graph.call_function(torch.ops.aten.exp.default, (saved,))
    assert [may_be_overwritten(node) for node in (saved, primal, made)] == [True, False, True]
    with private.without_donation():
        assert [may_be_overwritten(node) for node in (saved, primal, made)] == [False, False, True]


def test_a_draw_in_a_compiled_cpu_kernel_takes_more_than_an_eager_one() -> None:
    rates = {
        "mul fp32": ((1e3, 1e10), (1e7, 1e10)),
        "bernoulli_ fp32": ((1e3, 1e9), (1e7, 1e9)),
        "mm fp32": ((8, 8, 8, 1e10),),
    }
    device = Device(name="x", kind="cpu", memory_bytes=2**30, flops_per_s={"fp32": 1e10}, bandwidth_bytes_per_s=1e10, launch_s=0.0,
                    kernels=rates)  # fmt: skip
    cluster = Cluster(
        name="x", device=device, links=(Link(name="cpu", size=1, bandwidth_bytes_per_s=1e9, latency_s=0.0),)
    )

    def seconds(share: float) -> float:
        torch.compiler.reset()
        model, batch = nn.Sequential(nn.Linear(64, 64), nn.Dropout(share)), (torch.randn(1024, 64),)
        found = tw.profile(model, batch, loss_fn=_loss, compile=True, capture=False, hardware=cluster)
        assert found.step_s is not None
        return found.step_s

    draws_s = 1024 * 64 * 4 / 1e9  # eager
    assert draws_s < seconds(0.5) - seconds(0.0) < 2.5 * draws_s
