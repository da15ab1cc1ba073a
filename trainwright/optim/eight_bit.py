"""`EightBit`: a method whose moments are kept in one byte an element, and in fp32 only for as long as a part is updated.

blocks → fp32 → update → new scales → codes      `in_eight_bits`, part after part
which parameters, which states                   `EightBit`, `eight_bit_groups`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..numerics.quantise import dequantise, dynamic_codebook, num_blocks, quantise
from .base import Lists, Method, check_range
from .batch import real, working_dtype
from .compiled import Update, flat_views
from .fused_8bit import check_on_cpu, fused
from .heads import embeddings_and_heads
from .record import STEP, Options, Shape, StateTensor, Temporaries

SCALE = "_absmax"
BLOCK_SIZE = 256
MIN_8BIT_SIZE = 4096
_PART_ELEMENTS = 1 << 17
_MOST_PARTS = 32
for _signed in (True, False):
    dynamic_codebook(_signed)  # made here, for the first step may be one on tensors without values


class EightBit(Method):
    """A `Method` whose moments are quantised block by block; abstract.

    `_moments` says which states there are and whether they have a sign; `_update` is made by `in_eight_bits`. A
    parameter with fewer than `min_8bit_size` elements (whole, not a rank's shard) keeps them in fp32. Blocks are of
    consecutive elements of what a rank holds: where shards are cut between blocks, ranks together equal one.
    """

    updates_alone = True
    _fused_in_torch = False
    fused_flops = 70.0
    """Decoding, a root, a quotient and encoding: about 0.7 ns where a core reaches 100 GFLOP/s."""
    _moments: ClassVar[Mapping[str, bool]] = {}

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_range(
            type(self).__name__,
            block_size=(settings["block_size"], "of at least 16", lambda value: value >= 16),
            min_8bit_size=(settings["min_8bit_size"], "of at least 1", lambda value: value >= 1),
        )

    def _names_of(self, param: Tensor, group: dict[str, Any]) -> Iterable[str]:
        if not _is_quantised(param.numel(), group):
            return tuple(self._moments)
        return (*self._moments, *(name + SCALE for name in self._moments))

    def _prepare(self) -> None:
        check_on_cpu(self)

    def _fused_update(self) -> Update:
        return fused(type(self)._update)

    def _state_keys(self) -> tuple[str, ...]:
        return (*self._moments, *(name + SCALE for name in self._moments))

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not _is_quantised(param.numel(), group):
            return {name: torch.zeros_like(param, dtype=working_dtype(param.dtype)) for name in self._moments}
        pairs = real(param.detach())
        codes = {name: torch.zeros_like(pairs, dtype=torch.uint8) for name in self._moments}
        return codes | {name + SCALE: _scales(pairs, group["block_size"]) for name in self._moments}


def eight_bit_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for an 8-bit optimizer that keep the states of embeddings and output heads in fp32.

    A row of an embedding that is seen rarely has gradients far below the largest of its block; in 8 bits its second
    moment is rounded to zero and its step explodes. So have a head's rows, one a word. Plans and runs take these groups by
    themselves.

    >>> groups = eight_bit_groups(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)))
    >>> [(len(group["params"]), group.get("min_8bit_size")) for group in groups]
    [(2, None), (1, inf)]
    """
    apart = embeddings_and_heads(model)
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if id(param) not in apart]},
        {"params": [param for param in params if id(param) in apart], "min_8bit_size": math.inf},
    ]
    return [group for group in groups if group["params"]]


def in_eight_bits(update: Update, moments: Mapping[str, bool]) -> Update:
    """Return `update`, which takes moments in fp32, for moments in 8 bits; those without scales are given to it as are.

    Elements whose gradient is not finite are left as they are and their moments zeroed: one of them would spoil its
    whole block, for good.
    """

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if not any(name.endswith(SCALE) for name in states):
            return _guarded(update, params, grads, states, step, lr, options)
        for index, (param, grad) in enumerate(zip(params, grads)):
            own = {name: tensors[index] for name, tensors in states.items()}
            for part in _parts(param, grad, own, moments, options["block_size"]):
                wide = {name: [part.widened(name, signed)] for name, signed in moments.items()}
                _guarded(update, [part.param], [part.grad], wide, step, lr, options)
                for name, signed in moments.items():
                    part.narrow(name, signed, wide[name][0])
        return None

    return run


class _Part:
    """Some blocks of a parameter, its gradient and its states, all in one dim."""

    def __init__(self, param: Tensor, grad: Tensor, states: dict[str, Tensor], block_size: int) -> None:
        self.param, self.grad, self._states, self._block_size = param, grad, states, block_size

    def widened(self, name: str, signed: bool) -> Tensor:
        codes, scales = self._states[name], self._states[name + SCALE]
        found = dequantise(codes, scales, dynamic_codebook(signed, codes.device), self._block_size)
        return found.to(self.param.dtype)

    def narrow(self, name: str, signed: bool, values: Tensor) -> None:
        book = dynamic_codebook(signed, values.device)
        codes, scales = quantise(values.float(), book, self._block_size, keep_sign=signed)
        self._states[name].copy_(codes)
        self._states[name + SCALE].copy_(scales)


def _parts(
    param: Tensor, grad: Tensor, states: dict[str, Tensor], moments: Mapping[str, bool], block_size: int
) -> Iterator[_Part]:
    """Yield parts small enough to stay in the processor's cache, in the order of memory."""
    views = flat_views([param, grad, *(states[name] for name in moments)])
    if views is None:
        copies = [tensor.reshape(-1) for tensor in (param, grad, *(states[name] for name in moments))]
        yield from _cut(copies, states, moments, block_size)
        for tensor, copied in zip((param, *(states[name] for name in moments)), (copies[0], *copies[2:])):
            tensor.copy_(copied.view(tensor.shape))
    else:
        yield from _cut(views, states, moments, block_size)


def _cut(
    flat: list[Tensor], states: dict[str, Tensor], moments: Mapping[str, bool], block_size: int
) -> Iterator[_Part]:
    num_elements = flat[0].numel()
    length = part_elements(num_elements, block_size)
    for start in range(0, num_elements, length):
        stop = min(start + length, num_elements)
        blocks = slice(start // block_size, num_blocks(stop, block_size))
        own = {name: codes[start:stop] for name, codes in zip(moments, flat[2:])}
        own |= {name + SCALE: states[name + SCALE][blocks] for name in moments}
        yield _Part(flat[0][start:stop], flat[1][start:stop], own, block_size)


def _guarded(
    update: Update, params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Update the elements with finite gradients; of the others, zero the moments."""
    finite = [torch.isfinite(grad) for grad in grads]
    before = [param.clone() for param in params]
    clean = [torch.where(mask, grad, 0.0) for mask, grad in zip(finite, grads)]
    update(params, clean, states, step, lr, options)
    for param, old, mask in zip(params, before, finite):
        torch.where(mask, param, old, out=param)
    for own in states.values():
        torch._foreach_mul_(own, finite)


def part_elements(num_elements: int, block_size: int) -> int:
    """Return how many elements are updated at once: whole blocks, and not too many parts where a model is only planned."""
    wanted = max(_PART_ELEMENTS, -(-num_elements // _MOST_PARTS))
    return num_blocks(wanted, block_size) * block_size


def _is_quantised(num_elements: int, options: Options) -> bool:
    return bool(num_elements >= options.get("min_8bit_size", MIN_8BIT_SIZE))


def _scales(param: Tensor, block_size: int) -> Tensor:
    """Zeros, one a block; of a sharded parameter a shard a rank, each as long as the longest rank's."""
    if not isinstance(param, DTensor):
        return torch.zeros(num_blocks(param.numel(), block_size), device=param.device)
    longest, places = list(param.shape), [Shard(0) if place.is_shard() else Replicate() for place in param.placements]
    for size, place in zip(param.device_mesh.shape, param.placements):
        if isinstance(place, Shard):
            longest[place.dim] = -(-longest[place.dim] // size)
    local = torch.zeros(num_blocks(math.prod(longest), block_size), device=param.to_local().device)
    return DTensor.from_local(local, param.device_mesh, places)


def eight_bit_states(moments: Mapping[str, bool]) -> tuple[StateTensor, ...]:
    """Return what such a method keeps: codes and scales of large parameters, fp32 of small ones."""
    return (*(state for name in moments for state in _states_of(name)), STEP)


def _states_of(name: str) -> Iterator[StateTensor]:
    def large(shape: Shape, options: Options) -> Shape | None:
        return shape if _is_quantised(math.prod(shape), options) else None

    def scales(shape: Shape, options: Options) -> Shape | None:
        blocks = num_blocks(math.prod(shape), options.get("block_size", BLOCK_SIZE))
        return (blocks,) if _is_quantised(math.prod(shape), options) else None

    def small(shape: Shape, options: Options) -> Shape | None:
        return None if _is_quantised(math.prod(shape), options) else shape

    yield StateTensor(name, large, dtype=torch.uint8)
    yield StateTensor(name + SCALE, scales, dtype=torch.float32)
    yield StateTensor(name, small, wide=True)


def part_temporaries(num_copies: float, num_whole: int = 0) -> Temporaries:
    """Return temporaries of `num_copies` of a part and its new scales, beside `num_whole` copies of the parameter."""

    def temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
        num_elements, bytes_each = math.prod(shape), max(element_bytes, 4)
        if options.get("fused") and element_bytes <= 4:
            return 0  # of fp16, as much as in a loop; the record does not tell it from bf16
        whole = num_whole + (2 if element_bytes < 4 else int(bool(options.get("maximize"))))
        part, block_size = num_elements, options.get("block_size", BLOCK_SIZE)
        if _is_quantised(num_elements, options):
            part = min(num_elements, part_elements(num_elements, block_size))
        return int(whole * num_elements + num_copies * part + part / block_size) * bytes_each

    return temporaries
