"""What trainwright uses of torch's private names behaves as it is used; a failure names the release that changed it."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from trainwright.torch_internals import private
from trainwright.torch_internals.fakes import new_mode

RELEASE = f"changed in torch {torch.__version__}"
aten = torch.ops.aten


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(("shape", "stride"), [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((), ()), ((0, 2), (2, 1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fake_made_the_short_way_is_the_one_that_torch_makes(shape, stride, dtype):
    mode, cpu = new_mode(), torch.device("cpu")
    plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    theirs, make = private.FakeTensor(mode, plain, cpu), private.FakeMaker(mode)
    for ours in (make(plain, cpu), make(plain, cpu)):  # the second is the short way
        assert (type(ours), vars(ours)) == (type(theirs), vars(theirs)), RELEASE
        assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (shape, stride, dtype, cpu), RELEASE
        keys = [torch._C._dispatch_keys(fake) for fake in (ours, theirs)]
        assert keys[0] == keys[1], RELEASE
        assert (ours.requires_grad, ours.untyped_storage().nbytes()) == (False, plain.untyped_storage().nbytes()), (
            RELEASE
        )


def test_fakes_made_the_short_way_compute_and_differentiate():
    mode = new_mode()
    make = private.FakeMaker(mode)
    weight, x = (make(torch.empty(3, 3, device="meta"), torch.device("cpu")) for _ in range(2))
    weight.requires_grad_()
    with mode:
        (weight @ x).sum().backward()
    assert (weight.grad.shape, weight.grad.device.type) == ((3, 3), "cpu"), RELEASE
    assert (x.grad, x.requires_grad) == (None, False), RELEASE


def test_an_export_without_compiling_is_the_same_export():
    plain = torch.export.export(Double(), (torch.ones(3),), strict=False)
    with private.without_compiling():
        lazy = torch.export.export(Double(), (torch.ones(3),), strict=False)
    assert str(lazy.graph) == str(plain.graph), RELEASE
    assert torch.equal(lazy.module()(torch.ones(3)), torch.full((3,), 2.0)), RELEASE


def test_marks_are_those_of_conjugates_and_their_imaginary_parts():
    numbers = torch.complex(torch.ones(3), torch.arange(3.0))
    part = numbers.conj().imag
    assert (numbers.conj().is_conj(), part.is_neg()) == (True, True), RELEASE
    memory = torch.empty(0).set_(part.untyped_storage(), part.storage_offset(), part.size(), part.stride())
    assert torch.equal(private.with_marks(memory, False, True), part), RELEASE
    assert torch.equal(private.with_marks(numbers, True, False), numbers.conj()), RELEASE


def test_composite_ops_are_traced_in_parts_where_asked():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    with private.composites_in_parts():
        graph = torch.export.export(layer, (torch.ones(2, 3),), strict=False).graph
    names = [private.packet(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names == ["t", "addmm", "dropout"], RELEASE


def test_distributions_check_nothing_while_they_are_told_so(monkeypatch):
    # torch.compile turns the checks off for the rest of its process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with private.without_distributions_checks():
        assert torch.distributions.Normal(0.0, -1.0).scale == -1, RELEASE
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(0.0, -1.0)


def test_a_mask_is_added_as_it_is_given():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.randn(2, 5, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    theirs = [encoder(x, mask=causal), encoder(x, mask=causal, is_causal=True)]
    with private.masks_as_given():
        asked = torch.export.export(encoder, (x,), {"mask": causal}, strict=False)
        ours = [encoder(x, mask=causal), encoder(x, mask=causal, is_causal=True)]
    assert "item" not in str(asked.graph), RELEASE
    torch.testing.assert_close(ours, theirs, msg=RELEASE)


def test_transforms_leave_marks_in_a_graph():
    class Batched(nn.Module):
        def forward(self, x):
            return torch.vmap(torch.sin)(x)

    graph = torch.export.export(Batched(), (torch.ones(3, 2),), strict=False).graph
    assert any(private.is_of_a_transform(node.target) for node in graph.nodes), RELEASE
    assert not private.is_of_a_transform(aten.sin.default)


def test_transforms_that_take_gradients_are_noted_as_they_begin():
    noted = []
    with private.watching_transforms(lambda: noted.append("begun")):
        torch.func.grad(torch.sin)(torch.ones(()))
        torch.func.jvp(torch.sin, (torch.ones(()),), (torch.ones(()),))
        torch.vmap(torch.sin)(torch.ones(2))  # leaves marks
    assert len(noted) == 2, RELEASE
    torch.func.grad(torch.sin)(torch.ones(()))
    assert len(noted) == 2, RELEASE


def test_ops_say_what_they_write_view_and_draw():
    add, add_ = aten.add.Tensor, aten.add_.Tensor
    assert [private.is_mutating(op) for op in (add_, add)] == [True, False], RELEASE
    assert private.mutated_arguments(add_) == ["self"], RELEASE
    assert [private.is_view(op) for op in (aten.view.default, add)] == [True, False], RELEASE
    assert [private.reshapes_in_place(op) for op in (aten.unsqueeze_.default, add_)] == [True, False], RELEASE
    assert [private.is_random(op) for op in (aten.dropout.default, aten.rand.default, add)] == [True, True, False], (
        RELEASE
    )
    assert [private.is_pure(op) for op in (add, add_)] == [True, False], RELEASE
    assert (private.packet(add), private.overload_of(add, "mul")) == ("add", aten.mul.Tensor), RELEASE
    assert [name for name, _, _ in private.arguments(add)] == ["self", "other", "alpha"], RELEASE


def test_batches_are_taken_apart_and_put_together():
    named, rebuild = private.flatten_batch({"a": (1, 2), "b": [3]})
    assert [name for name, _ in named] == ["a.0", "a.1", "b.0"], RELEASE
    assert rebuild([leaf for _, leaf in named]) == {"a": (1, 2), "b": [3]}, RELEASE


def test_tensors_that_share_memory_have_equal_storages():
    x = torch.ones(4)
    assert private.storage_of(x) == private.storage_of(x[1:]) != private.storage_of(x.clone()), RELEASE


def test_a_tensor_without_storage_is_one_to_torch_and_hands_over_what_is_asked_of_it():
    class Four(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert (func, type(args[0])) == (aten._local_scalar_dense.default, cls), RELEASE
            return 4.0

    four = private.without_storage(Four, torch.Size([]), torch.float64, torch.device("cpu"))
    assert (type(four), four.shape, four.dtype, four.requires_grad) == (Four, (), torch.float64, False), RELEASE
    assert torch.full((2,), four).tolist() == [4.0, 4.0], RELEASE


def test_values_that_fakes_lack_are_asked_for_by_name():
    with new_mode(), pytest.raises(private.VALUE_NEEDED):
        torch.ones(3).nonzero().shape[0] and torch.ones(()).item()


def test_profilers_are_seen():
    assert not private.is_profiled(), RELEASE
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiled(), RELEASE


def test_nodes_remember_the_innermost_frame_that_is_not_inside():
    model, x = Double(), torch.ones(3)
    with private.innermost_frames(lambda filename: filename.startswith(str(Path(torch.__file__).parent))):
        short = torch.export.export(model, (x,), strict=False)
    stacks = [node.meta.get("stack_trace") or "" for node in short.graph.nodes if node.op == "call_function"]
    line = inspect.getsourcelines(Double.forward)[1] + 1
    assert len(stacks) == 1, RELEASE
    assert f'File "{__file__}", line {line}' in stacks[0], RELEASE
    assert "return 2 * x" in stacks[0], RELEASE
    assert stacks[0].count("File ") == 1, RELEASE
    with private.innermost_frames(lambda _: True):  # nothing but inside: all frames, as ever
        whole = torch.export.export(model, (x,), strict=False)
    assert any("return 2 * x" in (node.meta.get("stack_trace") or "") for node in whole.graph.nodes), RELEASE


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Tries(nn.Module):
    """Tries a Function on a tensor of its own amid the trace, and has it once in the graph."""

    def forward(self, x):
        with private.without_modes(), private.mode_of([x]):
            tried = torch.empty_strided(x.shape, x.stride()).requires_grad_()
            assert isinstance(Tripled.apply(tried) + torch.ones(3), private.FakeTensor), RELEASE
        with private.without_switches():
            return Tripled.apply(x).sum()


def test_a_trial_amid_a_trace_leaves_nothing_in_it():
    graph = torch.export.export(Tries(), (torch.ones(2, 3),), strict=False).graph
    calls = [node.target for node in graph.nodes if node.op == "call_function"]
    assert calls == [aten.mul.Tensor, aten.sum.default], RELEASE


def test_a_call_has_its_arguments_by_name():
    assert private.bound(aten.add.Tensor, (1, 2), {"alpha": 3}) == {"self": 1, "other": 2, "alpha": 3}, RELEASE
    assert private.bound(aten.add.Tensor, (1, 2), {})["alpha"] == 1, RELEASE


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_backward_can_be_run_under_a_mode():
    x = torch.ones(3, requires_grad=True)
    y = checkpoint(lambda x: torch.exp(x).sin(), x, use_reentrant=False).sum()
    with Seen() as seen:
        private.run_backward(y, torch.ones_like(y), False, False)
    assert "exp" in seen.names, RELEASE
    assert "backward" not in seen.names, RELEASE
    assert torch.equal(x.grad, (torch.e * torch.ones(3)).cos() * torch.ones(3).exp()), RELEASE


def test_a_node_of_a_backward_knows_the_shapes_and_types_of_its_results():
    x = torch.ones(3, 4, requires_grad=True)
    variance, mean = torch.var_mean(x, 1)
    assert private.results_of(variance.grad_fn) == [((3,), torch.float32)] * 2, RELEASE
    assert private.results_of(mean.half().grad_fn) == [((3,), torch.float16)], RELEASE
    assert private.results_of(torch.autograd.graph.get_gradient_edge(x).node) == [((3, 4), torch.float32)], RELEASE


def test_a_group_of_imagined_processes_has_its_size_and_is_gone_afterwards():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with private.imagined_group(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
        inner = mesh["inner"].get_group()
        assert (dist.get_world_size(), private.group_ranks(inner.group_name)) == (6, [0, 1, 2]), RELEASE
        part = distribute_tensor(torch.zeros(6, 4), mesh["inner"], [Shard(0)])
        assert private.local_part(part).shape == (2, 4), RELEASE
    assert not dist.is_initialized()
    assert private.local_part(whole := torch.zeros(2)) is whole


def test_a_compiled_module_hands_its_graphs_over_and_is_itself_again():
    layer = nn.Sequential(nn.Linear(4, 4))
    taken = []

    class Runs:
        def __init__(self, graph):
            self.graph = graph

        def __call__(self, args):
            given = list(args)
            args.clear()
            return torch.fx.Interpreter(self.graph).run(*given)

    def take(graph, is_backward, static):
        names = [private.module_names(node) for node in graph.graph.nodes if node.op == "call_function"]
        taken.append((is_backward, names))
        assert static or is_backward
        return Runs(graph)

    x = torch.ones(2, 4)
    plain = layer(x).square().sum()
    with private.compiled_in_place(layer, take):
        loss = layer(x).square().sum()
        loss.backward()
    assert [is_backward for is_backward, _ in taken] == [False, True]
    assert any(names[-1:] == ["0"] for _, nodes in taken for names in nodes), RELEASE
    assert torch.equal(loss, plain)
    assert layer[0].weight.grad is not None
    assert "forward" not in vars(layer)


@pytest.mark.usefixtures("compiled_anew")
def test_a_module_is_compiled_in_a_process_in_which_torch_has_given_up():
    """Of eight modules it compiles forward; the ninth, and every other from then on, runs as it is."""
    for width in range(1, 11):
        torch.compile(nn.Sequential(nn.Linear(width, 1)).forward, dynamic=False, backend="eager")(torch.ones(2, width))
    taken, layer = [], nn.Sequential(nn.Linear(4, 4))

    def take(graph, is_backward, static):
        taken.append(is_backward)
        return lambda args: torch.fx.Interpreter(graph).run(*args)

    with private.compiled_in_place(layer, take):
        layer(torch.ones(2, 4))
    assert taken == [False], RELEASE
