"""Profiles a step under `torch.compile`: torch itself makes the graphs, which then run on fake tensors kernel by kernel.

Dynamo traces a copy of the model on fake tensors, and AOTAutograd, with inductor's decompositions and passes, makes a forward
and a backward of each graph that it finds; the min-cut partitioner decides what is saved between them, so that is not guessed.
Instead of the code that inductor would generate, each graph runs as the kernels of kernel_groups.py:

    memory   a kernel takes what something outside it reads; what it reads for the last time is given back, before its results
             are taken where one of the same size is elementwise from it (inductor writes in place), else after
    time     bytes that it reads and writes, each tensor once, at the bandwidth; on a CPU with measured kernels, each op's time
             beyond that of moving its own bytes comes on top (exponentials are not free there); products, convolutions and
             attention as without a compiler
    the host `Overheads.graph_s` a graph and `compiled_s` a kernel; with CUDA graphs none a kernel

With CUDA graphs what the graphs take comes from a pool of their own, which nothing else may use, and inputs that move (the
batch) are copied into it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..artifacts import Compiled, Device, UserError
from ..ops.kernels import drawing, moving
from ..torch_internals import private
from ..torch_internals.fakes import FakeMode
from .gpu import GpuForms
from .kernel_groups import KernelGroup, kernel_groups, kind_of, num_bytes, num_elements, read_bytes, tensors_of
from .step import reference_step
from .time import dtype_name, op_seconds, table_of

if TYPE_CHECKING:
    from .run import ObservedStep, Question

GRAPH_POOL = "cuda graphs"
_DRAW = 1.75
"""Seconds of one of inductor's draws on a CPU over those of an eager dropout's: 8.1 over 4.6 ns on one core of a Zen 4."""
_MOST_STEPS = 4


class FusedKernel:
    """Stands for a fused kernel where the tracker and the totals expect an op; it has the kernel's name only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FusedKernel) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class CompiledStep:
    """Holds the graphs of a model's compiled step, and the run to which they report their kernels."""

    def __init__(self, device: Device | None, mode: FakeMode, cuda_graphs: bool = False) -> None:
        self.device, self.mode, self.cuda_graphs = device, mode, cuda_graphs
        self.graphs: list[_Graph] = []
        self.run: ObservedStep | None = None
        """The run that is told of every kernel, once it is set."""
        self._paths: set[str] = set()

    @property
    def is_gpu(self) -> bool:
        return self.device is not None and self.device.kind == "gpu"

    @contextmanager
    def of(self, question: Question) -> Iterator[None]:
        """Compile the question's model in place while the context lasts; steps on fake tensors make its graphs beforehand."""
        with private.compiled_in_place(question.model, self._take), self.made_by(question):
            if not self.graphs:
                raise UserError(
                    "a model that torch.compile takes is needed; it found no graph in it (a forward that is disabled, or "
                    "nothing but Python); profile it without --compile"
                )
            yield

    @contextmanager
    def of_script(self) -> Iterator[None]:
        """Let what is compiled inside make its graphs here, once `made_by` is entered."""
        with private.compiled_by_script(self._take):
            yield

    @contextmanager
    def made_by(self, question: Question) -> Iterator[None]:
        """Compile what there is to compile in the question's model, by steps of it; inside, nothing is compiled anew."""
        self._paths = {path for path, _ in question.model.named_modules()}
        try:
            self._compile(question)
        except private.compiler_errors() as error:
            raise UserError(
                f"a model that torch.compile takes is needed; it says: {_first_line(error)}; profile it without compiling"
            ) from error
        with torch.compiler.set_stance("fail_on_recompile"):
            yield

    def _compile(self, question: Question) -> None:
        """Run steps until one compiles no new graph (a model may set attributes that its forward reads); leave no gradients."""
        model = question.model
        for _ in range(_MOST_STEPS):
            num_graphs = len(self.graphs)
            # what a wrapper allocates for itself is to be a fake as well
            with GpuForms() if self.is_gpu else nullcontext(), nullcontext() if question.compile else self.mode:
                reference_step(
                    model,
                    torch.optim.SGD(model.parameters(), lr=0.0, foreach=False),
                    question.batch,
                    question.loss_fn,
                    autocast=question.autocast,
                )
            for param in model.parameters():
                param.grad = None
            if len(self.graphs) == num_graphs:
                return
        raise UserError(
            f"a model whose graphs stay as they are is needed; each of {_MOST_STEPS} steps compiled it anew; profile it without "
            "--compile"
        )

    def path_of(self, node: fx.Node) -> str | None:
        """Return the path of the module that a graph node belongs to; None where that is not known."""
        names = private.module_names(node)
        paths = (".".join(names[start:]) for start in range(len(names)))
        return next((path for path in paths if path in self._paths), "" if names else None)

    def _take(self, module: fx.GraphModule, is_backward: bool, static: frozenset[int]) -> Callable[[list[Any]], Any]:
        self.graphs.append(_Graph(module, is_backward, static, self))
        return self.graphs[-1]

    def found(self) -> Compiled:
        """Return the counts that the profile reports: graphs, ops, kernels, and the bytes of the CUDA graphs' pool."""
        pool_bytes = None
        if self.cuda_graphs and self.run is not None and self.run.tracker.allocator is not None:
            pool_bytes = self.run.tracker.allocator.reserved_by_stream[GRAPH_POOL]
        run = [graph for graph in self.graphs if graph.has_run]
        return Compiled(
            num_graphs=len(run),
            num_ops=sum(len(group.nodes) + len(group.inlined) for graph in run for group in graph.groups),
            num_kernels=sum(len(graph.groups) for graph in run),
            pool_bytes=pool_bytes,
        )


def has_compiled(model: torch.nn.Module) -> bool:
    """Tell whether a script has compiled pieces of its model."""
    return any(private.is_compiled(module) for module in model.modules())


class _Graph:
    """Runs one compiled graph on fake tensors, kernel by kernel, in the place of inductor's code."""

    def __init__(self, module: fx.GraphModule, is_backward: bool, static: frozenset[int], step: CompiledStep) -> None:
        self.module, self.is_backward, self.static, self.step = module, is_backward, static, step
        private.with_plain_random_ops(module, step.is_gpu)
        if not is_backward:
            private.laid_out_as_compiled(module, step.is_gpu)
        _lay_out_as_viewed(module.graph)
        self.inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        (self.output,) = (node for node in module.graph.nodes if node.op == "output")
        self.groups = kernel_groups(module.graph, is_cpu=not step.is_gpu)
        self.costs = [self._cost(group) for group in self.groups]
        self._has_copies = False
        self.has_run = False
        """Whether the reported step has run this graph."""

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on fake tensors; `args` is emptied, as by a boxed call, so that the inputs can be freed inside."""
        self._check(args)
        env: dict[fx.Node, Any] = dict(zip(self.inputs, args))
        args.clear()
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                env[node] = operator.attrgetter(node.target)(self.module)
        run = self.step.run
        self.has_run = run is not None
        with self._inside(run) if run is not None else nullcontext():
            for group, cost in zip(self.groups, self.costs):
                self._run(group, cost, env, run)
        return fx.node.map_arg(self.output.args[0], lambda node: self._value(node, env))

    def _check(self, args: list[Any]) -> None:
        for node, arg in zip(self.inputs, args):
            made_for = node.meta.get("val")
            if isinstance(arg, Tensor) and isinstance(made_for, Tensor) and arg.shape != made_for.shape:
                raise UserError(
                    f"a model whose compiled pieces have one shape each is needed; one got {list(arg.shape)} beside "
                    f"{list(made_for.shape)}; profile it without --compile"
                )

    @contextmanager
    def _inside(self, run: ObservedStep) -> Iterator[None]:
        overheads = run.totals.overheads
        with ExitStack() as stack:
            path = run.tracker.path
            stack.callback(setattr, run.tracker, "path", path)
            if self.step.cuda_graphs:
                run.tracker.pool = GRAPH_POOL
                stack.callback(setattr, run.tracker, "pool", None)
                self._copy_inputs(run)
            run.totals.enter_graph()
            run.totals.compiled_host_s = 0.0 if self.step.cuda_graphs else overheads.compiled_s
            stack.callback(setattr, run.totals, "compiled_host_s", None)
            yield

    def _copy_inputs(self, run: ObservedStep) -> None:
        """Count, once, the static buffers into which a CUDA graph copies the inputs whose address changes from step to step."""
        if not self.is_backward and not self._has_copies:
            moving = [node for place, node in enumerate(self.inputs) if place not in self.static]
            run.tracker.hold(sum(num_bytes(node.meta.get("val")) for node in moving))
            self._has_copies = True

    def _run(
        self, group: KernelGroup, cost: tuple[int, int, float], env: dict[fx.Node, Any], run: ObservedStep | None
    ) -> None:
        if run is not None and (path := self.step.path_of(group.nodes[0])) is not None:
            run.tracker.path = path
        if not group.is_fused:
            (node,) = group.nodes
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self._value(source, env))
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # the modes that are on see it
        else:
            self._fused(group, cost, env, run)
        for node in group.dies:
            env.pop(node, None)

    def _fused(
        self, group: KernelGroup, cost: tuple[int, int, float], env: dict[fx.Node, Any], run: ObservedStep | None
    ) -> None:
        made: list[Tensor] = []
        for node in group.nodes:
            if private.is_mutating(node.target):
                env[node] = self._value(node.args[0], env)
            elif node in group.writes:
                # written in place of what is read for the last time, where nobody else holds that
                for old in group.overwritable[node]:
                    is_free = isinstance(env.get(old), Tensor) and may_be_overwritten(old)
                    if is_free and num_bytes(old.meta.get("val")) == num_bytes(node.meta["val"]):
                        del env[old]
                        break
                env[node] = self._memory(node.meta["val"])
                made += tensors_of(env[node])
        if run is not None:
            kernel = FusedKernel(group.name)
            run.tracker.ran(kernel, made)
            run.totals.add_kernel(run.tracker.current_phase, run.tracker.path, kernel, *cost)

    def _memory(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [self._memory(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        with private.without_modes(), self.step.mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    def _value(self, node: Any, env: dict[fx.Node, Any]) -> Any:
        """Return the tensor of a node; one that has no memory of its own is recomputed as a view of those that have."""
        if node in env:
            return env[node]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self._value(source, env))
        if node.target is operator.getitem:
            return args[0][args[1]]
        with private.without_modes(), self.step.mode:
            return node.target(*args, **kwargs)

    def _cost(self, group: KernelGroup) -> tuple[int, int, float]:
        """Return the elementwise operations, moved bytes and seconds of a fused kernel; zeros for a kernel of one op."""
        if not group.is_fused:
            return 0, 0, 0.0
        nodes = (*group.inlined, *group.nodes)
        ops = sum(num_elements(node.meta.get("val")) for node in nodes)
        written = [node for node in group.nodes if node in group.writes or private.is_mutating(node.target)]
        moved = sum(read_bytes(node, node.users) for node in group.reads)
        moved += sum(num_bytes(node.meta.get("val")) for node in written)
        device = self.step.device
        if device is None:
            return ops, moved, 0.0
        dtype = next((tensor.dtype for node in written for tensor in tensors_of(node.meta.get("val"))), torch.float32)
        seconds = _moving_s(device, moved, dtype) + device.launch_s
        if device.kernels and device.kind == "cpu":
            seconds += sum(_beyond_moving_s(device, node) for node in nodes)
        return ops, moved, seconds * device.factors.get("compute", 1.0)


def _lay_out_as_viewed(graph: fx.Graph) -> None:
    """Let elementwise results that a view reads as one piece lie so.

    Inductor drops the copies that an eager step makes of transposed results before it views them, since it writes what a kernel
    makes in rows wherever nobody asks for another order.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not _is_plain_view(node):
            continue
        views: list[Any] = [node]
        while (
            isinstance(source := views[-1].args[0], fx.Node) and source.op == "call_function" and _is_plain_view(source)
        ):
            views.append(source)
        if not isinstance(source, fx.Node) or source.op != "call_function" or kind_of(source) != "elementwise":
            continue
        value = source.meta.get("val")
        if isinstance(value, Tensor) and not value.is_contiguous() and not _can_be_viewed(value, views):
            source.meta["val"] = value.new_empty(value.shape)


def _is_plain_view(node: fx.Node) -> bool:
    return kind_of(node) == "view" and node.target is not operator.getitem


def _can_be_viewed(value: Tensor, views: list[Any]) -> bool:
    """Tell whether a tensor that lies like `value` can be seen through `views`, the last of which reads it."""
    found: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    try:
        for node in reversed(views):
            found = node.target(found, *node.args[1:], **node.kwargs)
    except (RuntimeError, ValueError):
        return False
    return True


def may_be_overwritten(node: fx.Node) -> bool:
    """Tell whether a kernel that reads `node` last may write its result in the same memory.

    It may not overwrite the graph's primals and tangents, which autograd or the caller owns. What the forward saved belongs to
    the backward where AOTAutograd donates buffers (torch's default since 2.6).
    """
    if node.op == "call_function":
        return True
    return private.donates_saved_tensors() and not node.name.startswith(("primals", "tangents"))


def _moving_s(device: Device, size: int, dtype: torch.dtype) -> float:
    """Return the seconds of a copy of `size` bytes: measured where the device has measured kernels, else by bandwidth."""
    if device.kernels and size:
        measured_s = table_of(device).seconds(moving(size), dtype_name(dtype))
        if measured_s is not None:
            return measured_s
    return size / device.bandwidth_bytes_per_s


def _beyond_moving_s(device: Device, node: fx.Node) -> float:
    """Return the seconds by which the op alone exceeds a copy of the same bytes: its arithmetic beyond the memory traffic."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0.0
    if private.draws_at_random(node.target):
        return _drawing_s(device, value)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    moved = sum(num_bytes(source.meta.get("val")) for source in node.all_input_nodes) + num_bytes(value)
    alone_s = op_seconds(device, node.target, args, kwargs, value) - device.launch_s
    return max(alone_s - _moving_s(device, moved, value.dtype), 0.0)


def _drawing_s(device: Device, value: Tensor) -> float:
    """Return the seconds of inductor's random draws on a CPU: by a counter (Philox), an element at a time."""
    eager_s = table_of(device).seconds(drawing(value.nbytes), dtype_name(value.dtype))
    return 0.0 if eager_s is None else _DRAW * eager_s


def _first_line(error: Exception) -> str:
    """Return the first line of the compiler's message; where that ends in a colon, the second line too."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said.rstrip(".;")
