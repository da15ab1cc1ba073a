"""Functionalise: calls that write an activation in place become calls that return the new value.

A write goes to one tensor, and is seen through every other view of the same memory. So for `x[:, 1:].copy_(y)` the new
value of the slice is scattered back into a new `x`, and what is read later, of `x` or of any view of it, is read from
the new one. Writes to buffers stay: they outlast the step (`normalise_effects`). What writes no element but the shape
(`unsqueeze_`) becomes the view that it makes of its operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...artifacts import UserError
from ...torch_internals import private
from .common import (
    Context,
    aliased_parent,
    aten,
    bound,
    emit,
    is_call,
    needing_gradient,
    propagate,
    shape,
    written_operands,
)
from .effects import check_written


def functionalise(graph: fx.Graph, context: Context) -> None:
    """Rewrite in-place calls on activations out of place; those on buffers stay. `UserError` for one on a parameter."""
    _view_in_place_of_reshaping(graph, context)
    writes = [node for node in graph.nodes if node.op == "call_function" and private.is_mutating(node.target)]
    order = {node: position for position, node in enumerate(graph.nodes)}
    # settled here once: the values by which it is known who shares memory are those of the graph as it came
    views = {node for node in graph.nodes if aliased_parent(node) is not None} if writes else set()
    gradient = needing_gradient(graph) if writes else set()
    rewritten = 0
    for node in writes:
        roots = [_chain(operand, views)[-1] for operand in written_operands(node)]
        lasting = [root for root in roots if root.op == "placeholder" and root.meta["role"] != "input"]
        for root in lasting:
            check_written(node, root)
        if lasting:
            continue
        if _Write(context, node, order, views, gradient).rewrite():
            rewritten += 1
        else:
            context.notes.append(f"{private.packet(node.target)} stays in place: {node.meta['stack']}")
    if rewritten:
        propagate(graph, context)


def _view_in_place_of_reshaping(graph: fx.Graph, context: Context) -> None:
    """Let calls that reshape their operand itself return a view; what is called later reads that, as torch's trace has it."""
    rewritten = False
    for node in graph.nodes:
        if node.op == "call_function" and private.reshapes_in_place(node.target):
            operand, name = node.args[0], private.packet(node.target).removesuffix("_")
            view = SPECIAL.get(str(node.target)) or private.overload_of(node.target, name)
            if view is not None and operand.meta.get("role") not in ("param", "buffer", "const"):
                node.target, rewritten = view, True
    if rewritten:
        propagate(graph, context)


@dataclass(eq=False)
class _Write:
    """One in-place call, and how to live without it."""

    context: Context
    node: fx.Node
    order: dict[fx.Node, int]
    views: set[fx.Node]
    gradient: set[fx.Node]

    def rewrite(self) -> bool:
        """Replace the call; False, and nothing changed, when it or a view on the way is of a kind not known."""
        operands = written_operands(self.node)
        if len(operands) != 1 or operands[0] is not self.node.args[0]:
            return False
        chain = _chain(operands[0], self.views)
        if not all(_step(view) in SCATTERS for view in chain[:-1]):
            return False
        self._check_history(chain)
        new = self._new_value(operands[0], is_owner=len(chain) == 1)
        if new is None:
            return False
        renewed = {chain[-1]: self._scatter(chain, new)}
        self._regenerate(chain[-1], renewed)
        # what the call returned is the operand: a view like others, through which later calls may write again
        self.node.replace_all_uses_with(self._renew(operands[0], renewed))
        self.node.graph.erase_node(self.node)
        return True

    def _check_history(self, chain: list[fx.Node]) -> None:
        """Raise `UserError` for a write past autograd to an activation that is read later, gradient and all.

        The gradient then is that of the value before the write, which no new value has.
        """
        if not any(_step(view) == "detach" and source in self.gradient for view, source in itertools.pairwise(chain)):
            return
        written_at = self.order[self.node]
        for alias in self._aliases(chain[-1], written_at):
            if alias in self.gradient and any(self.order[user] > written_at for user in alias.users):
                raise UserError(
                    f"activations that are written under autograd are needed; {self.node.meta['stack']} writes one by "
                    f"{private.packet(self.node.target)} under torch.no_grad() or by its .data, and it is read afterwards; write "
                    "x = x + (new - x).detach(), which has the same value and gradient"
                )

    def _emit(self, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
        node = emit(self.context, self.node, target, args, like, **kwargs)
        self.order[node] = self.order[self.node]
        return node

    def _new_value(self, operand: fx.Node, is_owner: bool) -> fx.Node | None:
        """The written tensor's new value, in its own shape and type."""
        name = private.packet(self.node.target).removesuffix("_")
        if name == "copy":
            new = self.node.args[1]
            if is_owner:  # a tensor of its own: later writes to it do not reach what it was copied from
                new = self._emit(aten.clone.default, (new,), self.node)
        else:
            target = SPECIAL.get(str(self.node.target)) or private.overload_of(self.node.target, name)  # type: ignore[arg-type]
            if target is None:
                return None
            new = self._emit(target, self.node.args, self.node, **self.node.kwargs)
        assert isinstance(new, fx.Node)
        if new.meta["val"].dtype != operand.meta["val"].dtype:
            new = self._emit(aten.to.dtype, (new, operand.meta["val"].dtype), self.node)
        if shape(new) != shape(operand):
            new = self._emit(aten.expand.default, (new, list(shape(operand))), self.node)
        return new

    def _scatter_along(
        self, target: Callable[..., Any], source: fx.Node, new: fx.Node, dim: int, *where: Any
    ) -> fx.Node:
        """Emit a scatter into a dimension of `source`; complex numbers as pairs of real ones, which torch differentiates."""
        if not source.meta["val"].is_complex():
            return self._emit(target, (source, new, dim, *where), self.node)
        pairs = [self._pairs(each) for each in (source, new)]
        return self._complex(self._emit(target, (*pairs, dim % source.meta["val"].ndim, *where), self.node))

    def _pairs(self, number: fx.Node) -> fx.Node:
        if number.meta["val"].is_conj():  # a mark on memory that holds other numbers
            number = self._emit(aten.clone.default, (number,), self.node)
        return self._emit(aten.view_as_real.default, (number,), self.node)

    def _complex(self, pairs: fx.Node) -> fx.Node:
        return self._emit(aten.view_as_complex.default, (self._adjacent(pairs),), self.node)

    def _adjacent(self, pairs: fx.Node) -> fx.Node:
        """Return the pairs, copied where what was written has strides that complex numbers cannot have."""
        val = pairs.meta["val"]
        *outer, last = val.stride()
        if last == 1 and not any(distance % 2 for distance in (*outer, val.storage_offset())):
            return pairs
        copied = self._emit(aten.contiguous.default, (pairs,), self.node)
        self.views.add(copied)  # later writes go on to the pairs
        return copied

    def _scatter(self, chain: list[fx.Node], new: fx.Node) -> fx.Node:
        """Carry the new value back to the owner of the memory, view by view."""
        for view, source in itertools.pairwise(chain):
            new = SCATTERS[_step(view)](self, view, source, new)
        return new

    def _regenerate(self, root: fx.Node, renewed: dict[fx.Node, fx.Node]) -> None:
        """Let later readers of the memory, by whatever view made before the write, read the new value."""
        written_at = self.order[self.node]
        for alias in self._aliases(root, written_at):
            later = [user for user in alias.users if self.order[user] > written_at]
            if later:
                fresh = self._renew(alias, renewed)
                for user in later:
                    user.replace_input_with(alias, fresh)

    def _renew(self, alias: fx.Node, renewed: dict[fx.Node, fx.Node]) -> fx.Node:
        if alias not in renewed:
            operand = alias.args[0]
            assert isinstance(operand, fx.Node)
            parent = self._renew(operand, renewed)
            if _step(alias) == "view_as_complex":
                parent = self._adjacent(parent)
            renewed[alias] = self._emit(alias.target, (parent, *alias.args[1:]), alias, **alias.kwargs)  # type: ignore[arg-type]
            self.views.add(renewed[alias])
        return renewed[alias]

    def _aliases(self, root: fx.Node, before: int) -> list[fx.Node]:
        """The root and the views of it made before a position, the tuples of `split` included."""
        found = {root: None}
        queue = [root]
        for node in queue:
            for user in node.users:
                made = user in self.views and user.args[:1] == (node,) and self.order[user] < before
                if made and user not in found:
                    found[user] = None
                    queue.append(user)
        return queue


def _chain(node: fx.Node, views: set[fx.Node]) -> list[fx.Node]:
    """The node, what it is a view of, and so on to the owner of the memory."""
    chain = [node]
    while chain[-1] in views:
        writes = private.is_mutating(chain[-1].target)  # gives back what it has written
        source = aliased_parent(chain[-1]) if writes else chain[-1].args[0]
        assert isinstance(source, fx.Node)
        # a piece of `split` is a view of what was split
        chain.append(source.args[0] if _step(chain[-1]) == "piece" else source)  # type: ignore[arg-type]
    return chain


def _step(view: fx.Node) -> str:
    """The name of the view op that made `view`."""
    if getattr(view.target, "__name__", "") == "getitem":
        return "piece"
    return private.packet(view.target)


def _into_slice(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    named = bound(view)
    return write._scatter_along(
        aten.slice_scatter.default, source, new, named["dim"], named["start"], named["end"], named["step"]
    )


def _into_select(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    named = bound(view)
    return write._scatter_along(aten.select_scatter.default, source, new, named["dim"], named["index"])


def _into_diagonal(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    named = bound(view)
    args = (source, new, named["offset"], named["dim1"], named["dim2"])
    return write._emit(aten.diagonal_scatter.default, args, write.node)


def _into_piece(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    """`view` is one of the pieces that `split`, `chunk` or `unbind` gave."""
    split: Any = view.args[0]
    index: Any = view.args[1]
    dim = bound(split)["dim"]
    if is_call(split, "unbind"):
        return write._scatter_along(aten.select_scatter.default, source, new, dim, index)
    sizes = [piece.shape[dim] for piece in split.meta["val"]]
    start = sum(sizes[:index])
    return write._scatter_along(aten.slice_scatter.default, source, new, dim, start, start + sizes[index])


def _into_reshape(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    del view
    return write._emit(aten.reshape.default, (new, list(shape(source))), write.node)


def _into_transpose(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    del source
    return write._emit(view.target, (new, *view.args[1:]), write.node)  # type: ignore[arg-type]


def _into_permute(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    rank = len(shape(source))
    dims = [dim % rank for dim in bound(view)["dims"]]
    return write._emit(aten.permute.default, (new, [dims.index(dim) for dim in range(rank)]), write.node)


def _into_pairs(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    del view, source
    return write._complex(new)


def _into_complex(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    del view, source
    return write._pairs(new)


def _into_part(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    """`view` is the real or the imaginary part of all numbers."""
    val = source.meta["val"]
    if not val.is_complex():
        return new
    part = int(_step(view) == "imag")
    args = (write._pairs(source), new, val.ndim, part)
    return write._complex(write._emit(aten.select_scatter.default, args, write.node))


def _into_same(write: _Write, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    del write, view, source
    return new


SPECIAL: dict[str, Any] = {
    "aten.bernoulli_.float": aten.bernoulli.p,
    "aten.normal_.default": aten.normal_functional.default,
    "aten.transpose_.default": aten.transpose.int,
}

SCATTERS: dict[str, Callable[[_Write, fx.Node, fx.Node, fx.Node], fx.Node]] = {
    "slice": _into_slice,
    "select": _into_select,
    "diagonal": _into_diagonal,
    "piece": _into_piece,
    "transpose": _into_transpose,
    "t": _into_transpose,
    "permute": _into_permute,
    **dict.fromkeys(("real", "imag"), _into_part),
    "view_as_real": _into_pairs,
    "view_as_complex": _into_complex,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _into_reshape),
    **dict.fromkeys(("alias", "detach", "detach_", "to", "contiguous", "view_as", "lift_fresh"), _into_same),
}
"""View op → how a new value of the view becomes a new value of what it looks into."""
