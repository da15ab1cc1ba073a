"""Every name that torch does not promise to keep, in one place: a wrapper each, with the reason it is needed."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload  # the type of `torch.ops.aten.add.Tensor`; has no public name
from torch._subclasses.fake_tensor import (  # shapes without memory, on a device of choice; what it cannot do
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributions import Distribution
from torch.fx import proxy as fx_proxy  # writes down where each node of a graph comes from
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # graphs that nobody calls are not compiled
from torch.fx.experimental import proxy_tensor  # writes calls into a graph
from torch.multiprocessing.reductions import StorageWeakRef  # public module, not documented: a storage's identity
from torch.nn.modules import transformer  # asks for the values of masks
from torch.utils import _pytree as pytree  # the trees that `torch.export` itself flattens; the public one lacks paths
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # observes the ops below autocast and autograd
    _disable_current_modes,  # a trial amid a trace, that the trace does not see
    _get_current_dispatch_mode_stack,  # modes are a thread's own: one that works for another has to take them over
    _pop_mode,
    _push_mode,
)

__all__ = [
    "VALUE_NEEDED",
    "FakeMaker",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "PlainDispatchMode",
    "TorchDispatchMode",
    "arguments",
    "attention_kernels",
    "bound",
    "called",
    "classes_in_form",
    "compiled_by_script",
    "compiled_in_place",
    "composites_in_parts",
    "dtensor_like",
    "flatten",
    "flatten_batch",
    "form_from_text",
    "form_to_text",
    "group_ranks",
    "imagined_group",
    "innermost_frames",
    "is_mutating",
    "is_profiled",
    "is_random",
    "is_view",
    "keeping",
    "laid_out_as_compiled",
    "local_part",
    "mode_of",
    "modes_entered",
    "modes_now",
    "module_names",
    "mutated_arguments",
    "namespace",
    "overload_of",
    "packet",
    "results_of",
    "returned_argument",
    "storage_of",
    "unflatten",
    "watching_transforms",
    "with_marks",
    "with_plain_random_ops",
    "without_compiling",
    "without_modes",
    "without_switches",
]


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap for Dynamo's sake: twice a call, the wrapper took a tenth of a simulation.

    The modes that follow fakes never run under compiled code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FakeMaker:
    """Makes fakes of `mode` around tensors on the meta device, as `FakeTensor(mode, tensor, device)` does.

    Torch's constructor looks at each of its many fields anew; here they are those of a first fake on the same device. A
    simulation makes tens of thousands.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._fields: dict[torch.device, dict[str, Any]] = {}

    def __call__(self, plain: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a fake on `device` of the shape, strides, type and storage of `plain`."""
        fields = self._fields.get(device)
        if fields is None:
            first = FakeTensor(self._mode, plain, device)
            self._fields[device] = dict(vars(first))
            return first
        fake = torch.Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(fake).update(fields)
        return fake


def without_compiling() -> AbstractContextManager[None]:
    """Leave graph modules that are made inside without Python code until they are called: export makes dozens."""
    return _use_lazy_graph_module(True)


@contextmanager
def without_distributions_checks() -> Iterator[None]:
    """Let torch.distributions take arguments and samples unseen, as under `python -O`: its checks ask for their values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Let torch's transformers add a mask without a look at its values, which say no more than whether it is the causal one.

    Without `is_causal`, nn.Transformer and its encoder and decoder compare a mask with that, for a kernel that needs none.
    """
    theirs = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = theirs


@contextmanager
def composites_in_parts() -> Iterator[None]:
    """Let an export see the calls that composite ops are made of: `linear` as a transpose and a product.

    A gradient within a forward reads what those calls have saved. Dropout stays whole: its parts draw numbers by themselves.
    """
    theirs = proxy_tensor.maybe_handle_decomp

    def in_parts(mode: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = theirs(mode, op, args, kwargs)
        if found is not NotImplemented or is_view(op) or is_random(op):
            return found
        with mode:
            return op.decompose(*args, **kwargs)

    proxy_tensor.maybe_handle_decomp = in_parts  # type: ignore[assignment]
    try:
        yield
    finally:
        proxy_tensor.maybe_handle_decomp = theirs


def is_of_a_transform(target: Any) -> bool:
    """Tell whether what a node calls begins or ends a transform of torch.func (vmap, grad, jvp)."""
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"


def is_within_a_transform(filename: str) -> bool:
    """Tell whether a source file runs the transforms of torch.func."""
    place = Path(filename)
    return place.parent.name == "_functorch" and place.stem in ("apis", "eager_transforms", "vmap")


@contextmanager
def watching_transforms(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` where a transform of torch.func that takes gradients begins (grad, vjp, jvp).

    Before torch 2.13 these leave no mark in a graph, and the export fails later, over the tensors that they gave.
    """
    from torch._functorch import eager_transforms

    theirs = {name: getattr(eager_transforms, name) for name in ("grad_increment_nesting", "jvp_increment_nesting")}

    def noted(begin: Callable[[], Any]) -> Callable[[], Any]:
        def begun() -> Any:
            note()
            return begin()

        return begun

    for name, begin in theirs.items():
        setattr(eager_transforms, name, noted(begin))
    try:
        yield
    finally:
        for name, begin in theirs.items():
            setattr(eager_transforms, name, begin)


@contextmanager
def innermost_frames(is_inside: Callable[[str], bool]) -> Iterator[None]:
    """Let nodes that are traced inside remember one frame each: the innermost whose file is not `is_inside`.

    Torch writes down the source text of some ninety frames for every node, which took a seventh of an export. Where all
    frames are inside, it still does.
    """
    theirs = fx_proxy.CapturedTraceback
    is_own: dict[str, bool] = {}

    class Innermost:
        @staticmethod
        def extract() -> Any:
            frame = sys._getframe(1)
            while frame is not None:
                filename = frame.f_code.co_filename
                if filename not in is_own:
                    is_own[filename] = filename[:1] != "<" and not is_inside(filename)
                if is_own[filename]:
                    return Innermost(filename, frame.f_lineno)
                frame = frame.f_back  # type: ignore[assignment]
            return theirs.extract()

        def __init__(self, filename: str, line: int) -> None:
            # torch keeps what begins at a frame of this name
            self._frame = (filename, line, "forward", None)

        def summary(self) -> traceback.StackSummary:
            return traceback.StackSummary.from_list([self._frame])

    fx_proxy.CapturedTraceback = Innermost  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        fx_proxy.CapturedTraceback = theirs  # type: ignore[misc]


VALUE_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""What a fake raises when an op needs values (`nonzero`, `.item()`)."""


def arguments(target: OpOverload) -> list[tuple[str, Any, bool]]:
    """Return (name, default or None, keyword-only) of each argument of an ATen op."""
    return [
        (argument.name, argument.default_value if argument.has_default_value() else None, argument.kwarg_only)
        for argument in target._schema.arguments
    ]


def mutated_arguments(target: OpOverload) -> list[str]:
    """Return the names of the arguments that the op writes, as its schema says."""
    return [
        argument.name
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def returned_argument(target: OpOverload) -> str | None:
    """Return the name of the argument that the op writes and gives back as its first result, if it does."""
    returns = target._schema.returns
    shared = returns[0].alias_info if returns else None
    if shared is None:
        return None
    for argument in target._schema.arguments:
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set & shared.before_set:
            return str(argument.name)
    return None


def is_mutating(target: Any) -> bool:
    """Tell whether `target` is an ATen op that writes one of its arguments."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def reshapes_in_place(target: Any) -> bool:
    """Tell whether the op changes the shape of its first argument itself, as `unsqueeze_` does."""
    return is_mutating(target) and torch.Tag.inplace_view in target.tags


def takes_device(target: Any) -> bool:
    """Tell whether the op `target` is told on which device to make its result, as `arange` is."""
    return isinstance(target, OpOverload) and any(arg.name == "device" for arg in target._schema.arguments)


def is_profiled() -> bool:
    """Tell whether a `torch.profiler` session is on in this thread: a second one would end it."""
    return bool(torch.autograd._profiler_enabled())


def is_view(target: Any) -> bool:
    """Tell whether an output of the op may share its first argument's memory, by its schema."""
    if not isinstance(target, OpOverload) or not target._schema.arguments:
        return False
    info = target._schema.arguments[0].alias_info
    return info is not None and not info.is_write


def is_random(target: Any) -> bool:
    """Tell whether the op draws random numbers (dropout too, which carries no tag)."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or "dropout" in packet(target)


def is_pure(target: Any) -> bool:
    """Tell whether an op only computes: it writes nothing, returns no view, draws no numbers, talks to no other rank."""
    if not isinstance(target, OpOverload) or "c10d" in target.namespace or is_mutating(target) or is_random(target):
        return False
    return all(argument.alias_info is None for argument in target._schema.arguments)


def namespace(target: Any) -> str:
    """Return the namespace of an op: `aten`, or that of a library of the user's; empty for a plain function."""
    return str(target.namespace) if isinstance(target, OpOverload) else ""


def schema_text(target: Any) -> str:
    """Return an op's schema: name, arguments, results."""
    return str(target._schema)


def packet(target: Any) -> str:
    """Return the op's name without overload: `add` for `aten.add.Tensor`, `ours::add` for another's; a function's own name."""
    if isinstance(target, OpOverload):
        return target._schema.name.removeprefix("aten::")
    return getattr(target, "__name__", str(target))


def registered(op: Any) -> Any:
    """Return the `OpOverload` behind a `custom_op` of torch or one of `torch.ops`; anything else as it is."""
    if hasattr(op, "_opoverload"):
        return op._opoverload
    return getattr(op, op.overloads()[0]) if hasattr(op, "overloads") else op


def overload_of(target: OpOverload, name: str) -> Any | None:
    """Return the op `name` with the overload of `target`, or with its only one, or None."""
    other = getattr(getattr(torch.ops, target.namespace), name, None)
    if other is None:
        return None
    overloads = other.overloads()
    if target._overloadname in overloads:
        return getattr(other, target._overloadname)
    return getattr(other, overloads[0]) if len(overloads) == 1 else None


def with_marks(tensor: torch.Tensor, is_conjugate: bool, is_negative: bool) -> torch.Tensor:
    """Return a view that is read as the conjugate, and as the negative, of what the tensor's memory holds, as is asked."""
    marked = tensor.conj() if is_conjugate else tensor
    return torch._neg_view(marked) if is_negative else marked


def storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what is equal for two tensors exactly when they share memory."""
    return StorageWeakRef(tensor.untyped_storage())


def run_backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor,
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[torch.Tensor, ...] = (),
) -> None:
    """Accumulate gradients as `tensor.backward(gradient)` does, with the function modes of now active in what is recomputed.

    `torch.autograd.backward` hands itself to those modes first, and runs without them.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (tensor,), (gradient,), retain_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
    )


def results_of(node: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shape and type of each result of a node of autograd's graph, as its engine checks gradients against them."""
    return [(torch.Size(each.shape), each.dtype) for each in node._input_metadata]


@contextmanager
def imagined_group(num_processes: int) -> Iterator[None]:
    """Make this the first process of a default group whose other processes are imagined: collectives have shapes alone.

    The backend `fake` and the shape functions of its collectives are torch's own, for its tools. A `DTensor`
    asks for the shapes of whole tensors by running ops on fakes, once an op; that is no memory, so no mode sees it.
    """
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives  # noqa: F401  (registers them)
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def asked(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return original(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = asked  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]
        dist.destroy_process_group()


@torch.compiler.assume_constant_result
def attention_kernels() -> list[str]:
    """Return the kernels that attention may take, in the order in which torch tries them (`torch.nn.attention.sdpa_kernel`)."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    return [backend.name.partition("_")[0].lower() for backend in _cur_sdpa_kernel_backends(with_priority=True)]


def group_ranks(name: str) -> list[int]:
    """Return the ranks of the process group that a functional collective names."""
    from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks

    resolve: Any = _resolve_process_group  # takes a type of its own in some releases
    return get_process_group_ranks(resolve(name))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a `DTensor`, outside of autograd; another tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def without_storage(kind: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of the class `kind` that has a shape and no values: its `__torch_dispatch__` is given what is asked of it."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def dtensor_like(local: torch.Tensor, like: Any) -> Any:
    """Return this rank's part `local` as a `DTensor` of the layout of `like`, outside of autograd.

    The public `from_local` runs an autograd function and derives shapes anew, at a tenth of a millisecond a tensor.
    """
    kind: Any = type(like)
    return kind.__new__(kind, local, like._spec, requires_grad=False)


def flatten_batch(batch: Any) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]:
    """Return the batch's leaves with their key paths (`input_ids`, `0`, `nested.key`), and the way back."""
    leaves, spec = pytree.tree_flatten_with_path(batch)
    named = [(".".join(_key(part) for part in path), leaf) for path, leaf in leaves]
    return named, spec.unflatten


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree of tuples, lists, dicts …, and its form, for `unflatten`."""
    return pytree.tree_flatten(tree)


def form_to_text(spec: Any) -> str:
    """Return the form of a tree as JSON; `NotImplementedError` for one with classes that say no way to be written."""
    return pytree.treespec_dumps(spec)


def form_from_text(text: str) -> Any:
    """Return the form of a tree that `form_to_text` wrote; its classes must have been imported."""
    return pytree.treespec_loads(text)


def classes_in_form(spec: Any) -> set[type]:
    """Return the classes of the containers in the form of a tree.

    >>> sorted(kind.__name__ for kind in classes_in_form(flatten(([1], {"a": 2}))[1]))
    ['dict', 'list', 'tuple']
    """
    own = set() if spec.type is None else {spec.type}
    return own.union(*(classes_in_form(child) for child in spec.children()))


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Return the tree of the form `spec` with these leaves."""
    return pytree.tree_unflatten(leaves, spec)


def modes_now() -> list[TorchDispatchMode]:
    """Return the dispatch modes of this thread, the outermost first."""
    return list(_get_current_dispatch_mode_stack())


@contextmanager
def modes_entered(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Let another thread's dispatch modes hold in this one; that thread waits meanwhile."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave out the modes in force: what runs inside is not traced, its switches of the gradient mode neither."""
    with _disable_current_modes(), without_switches():
        yield


def without_switches() -> AbstractContextManager[None]:
    """Keep switches of the gradient mode inside ops out of the trace, which would write them down as calls of its own."""
    return torch._C.DisableTorchFunction()


def mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """Return the mode of the first fake among `tensors`."""
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))


def bound(target: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    named: dict[str, Any] = {}
    for position, (name, default, _) in enumerate(arguments(target)):
        named[name] = args[position] if position < len(args) else kwargs.get(name, default)
    return named


def called(target: OpOverload, named: dict[str, Any]) -> Any:
    """Call an ATen op with its arguments by name; a default of a type that Python does not know is left out."""
    args, kwargs = [], {}
    for argument in target._schema.arguments:
        if argument.kwarg_only:
            if named[argument.name] is not None:
                kwargs[argument.name] = named[argument.name]
        else:
            args.append(named[argument.name])
    return target(*args, **kwargs)


def is_leaf(tree: Any) -> bool:
    """Tell whether the pytree machinery sees nothing inside `tree`."""
    return bool(pytree.tree_structure(tree).is_leaf())


def parameter_names(function: Any) -> list[str]:
    """Return a callable's parameter names; `**` stands for any further keyword."""
    parameters = inspect.signature(function).parameters.values()
    return ["**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters]


def graphs_of(module: torch.nn.Module) -> list[torch.fx.Graph]:
    """Return the graph of a graph module and those of the regions inside it."""
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


Take = Callable[[torch.fx.GraphModule, bool, frozenset[int]], Callable[[list[Any]], Any]]
"""`take(graph, is_backward, static)` gets each graph that a compilation makes, and the positions of inputs that stay where they
are (parameters); it returns what runs in its place, called with one list that it is to empty."""


@contextmanager
def compiled_in_place(module: torch.nn.Module, take: Take) -> Iterator[None]:
    """Let calls of `module` run as `torch.compile` would have them, up to where inductor writes kernels.

    Dynamo cuts the model into graphs; AOTAutograd makes each one's backward, with inductor's decompositions and passes, and
    its partitioner (min-cut) decides what is kept. `take` gets what comes out.

    A dispatch mode changes the keys of every tensor, which Dynamo's guards on tensors would take for another input, so those
    guards are left out: `take` has to see that shapes are those of the graph. Caches of compiled code are not asked.
    """
    with _compiling_anew():
        own = vars(module).get("forward")
        # `module.compile()` compiles what torch's own containers call piece by piece; `torch.compile(module)` the whole forward
        compiled = torch.compile(module.forward, **_up_to_kernels(take))
        module.forward = functools.wraps(module.forward)(lambda *args, **kwargs: compiled(*args, **kwargs))
        try:
            yield
        finally:
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextmanager
def compiled_by_script(take: Take) -> Iterator[None]:
    """Let all that is compiled inside by `torch.compile` or `Module.compile` end as in `compiled_in_place`.

    What a script says of its pieces (`fullgraph`) holds; its backend and mode give way.
    """
    original, how = torch.compile, _up_to_kernels(take)  # one backend: pieces of one code share their graphs

    def compile(model: Any = None, *, fullgraph: bool = False, disable: bool = False, **_: Any) -> Any:
        # torch takes its own option out of the dict, so each compilation needs a dict of its own
        return original(model, fullgraph=fullgraph, disable=disable, **{**how, "options": dict(how["options"])})

    with _compiling_anew():
        torch.compile = compile  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = original  # type: ignore[assignment]


def keeping(share: float) -> AbstractContextManager[Any]:
    """Let graphs whose first call is inside keep for their backward that share of what the partitioner would keep by itself.

    0: the graph's inputs alone; between, it decides by a knapsack of bytes and FLOPs. 1 is its own choice.
    """
    import torch._functorch.config as functorch_config

    return functorch_config.patch(activation_memory_budget=share)


def donates_saved_tensors() -> bool:
    """Tell whether a compiled backward may write its results into what its forward saved: torch's `donated_buffer`."""
    import torch._functorch.config as functorch_config

    return bool(functorch_config.donated_buffer)


def without_donation() -> AbstractContextManager[Any]:
    """Let compiled backwards write into nothing that was saved, as before torch 2.6 (pytorch#140113)."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)


def is_compiled(module: torch.nn.Module) -> bool:
    """Tell whether calls of `module` go to compiled code: a wrapper by `torch.compile`, or after `Module.compile`."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


@contextmanager
def _compiling_anew() -> Iterator[None]:
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    _take_up_again()
    with (
        dynamo_config.patch(recompile_limit=4096, accumulated_recompile_limit=65536, fail_on_recompile_limit_hit=True),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield


def _take_up_again() -> None:
    """Drop what was compiled of each code that has reached Dynamo's limit: from there on it runs as it is, and for good.

    Methods of all modules go through the same few codes of torch, so eight small models compiled before are enough.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo import config, convert_frame

    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and len(_debug_get_cache_entry_list(code)) >= config.recompile_limit:
            reset_code(code)


def _up_to_kernels(take: Take) -> dict[str, Any]:
    """Return the arguments of `torch.compile` that hand each graph to `take` in the place of inductor's code."""
    from torch._inductor.compile_fx import compile_fx

    def inner(graph: torch.fx.GraphModule, example_inputs: Any, **about: Any) -> Any:
        runs = take(graph, bool(about.get("is_backward")), frozenset(about.get("static_input_idxs") or ()))
        runs._boxed_call = True  # type: ignore[attr-defined]
        return runs

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner)

    without_tensors: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [guard.guard_type != "TENSOR_MATCH" for guard in guards]
    }
    return {"backend": backend, "dynamic": False, "options": without_tensors}


def draws_at_random(target: Any) -> bool:
    """Tell whether a node of a compiled graph draws random numbers."""
    import torch._inductor.inductor_prims

    prims = torch.ops.prims
    return target in (prims.inductor_random.default, prims.inductor_randint.default)


def with_plain_random_ops(graph: torch.fx.GraphModule, is_gpu: bool) -> None:
    """Let ops that are computed again with the random state of their first run stand as the ops that they are.

    AOTAutograd wraps them, attention among them, where something else (a checkpoint inside the compiled piece) asks for a rerun:
    the forward then keeps the state, 16 bytes on a GPU.
    """
    from torch._prims import rng_prims

    size = 16 if is_gpu else torch.get_rng_state().numel()
    for node in list(graph.graph.nodes):
        if node.target is rng_prims.run_and_save_rng_state:
            with graph.graph.inserting_before(node):
                plain = graph.graph.call_function(node.args[0], node.args[1:], node.kwargs)
                for taken in list(node.users):
                    if taken.args[1] == 1:
                        plain.meta = dict(taken.meta)
                        taken.replace_all_uses_with(plain)
                        continue
                    state = graph.graph.call_function(
                        torch.ops.aten.empty.memory_format, ([size],), {"dtype": torch.uint8}
                    )
                    state.meta = {**taken.meta, "val": taken.meta["val"].new_empty(size)}
                    taken.replace_all_uses_with(state)
            for taken in list(node.users):
                graph.graph.erase_node(taken)
            graph.graph.erase_node(node)
        elif node.target is rng_prims.run_with_rng_state:
            state = node.args[0]
            state.meta["val"] = state.meta["val"].new_empty(size)
            with graph.graph.inserting_before(node):
                plain = graph.graph.call_function(node.args[1], node.args[2:], node.kwargs)
            plain.meta = dict(node.meta)
            node.replace_all_uses_with(plain)
            graph.graph.erase_node(node)


def laid_out_as_compiled(graph: torch.fx.GraphModule, is_gpu: bool) -> None:
    """Let a forward graph's images lie as inductor has them: channels last, where it takes its convolutions to be faster so.

    It decides that by rules of its own (always on a CPU with oneDNN), for all that leads to a convolution or comes of one. What
    comes in otherwise, weights and images, is copied; of what is kept for the backward it is the copy that is kept.
    """
    from torch._inductor.graph import GraphLowering

    enabled = not is_gpu and torch.backends.mkldnn.is_available()
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=enabled),
    ):  # it warns of Intel's GPUs
        if not GraphLowering.decide_layout_opt(graph, is_inference=False):
            return
    about: Any = types.SimpleNamespace(module=graph)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    visible = {returned[place] for place in output.meta.get("user_visible_output_idxs", ())}
    begin = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for node in GraphLowering.find_nodes_prefer_channels_last(about):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or node in visible or min(value.shape) == 0:
            continue
        if value.is_contiguous(memory_format=torch.channels_last):
            continue
        laid_out = value.new_empty(value.shape).contiguous(memory_format=torch.channels_last)
        if node.op == "placeholder":
            with graph.graph.inserting_before(begin):
                copied = graph.graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.channels_last}
                )
            copied.meta = {**node.meta, "val": laid_out}
            for user in [user for user in node.users if user is not copied]:
                user.replace_input_with(node, copied)
        else:
            node.meta["val"] = laid_out
    graph.graph.lint()


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return what Dynamo and its backends raise where a model cannot be compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)


def module_names(node: torch.fx.Node) -> list[str]:
    """Return the names, from Dynamo's own inwards, of the module whose forward made a node of a compiled graph.

    Of a node of the backward: of the forward's node that it belongs to. Empty where nothing is known of it.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return re.findall(r"\w+", str(list(stack.values())[-1][0])) if stack else []
