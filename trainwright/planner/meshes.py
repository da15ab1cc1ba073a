"""Lists the meshes to plan for: the cluster's own links, links cut into several axes, and links joined into one axis.

On one link the order of two axes means nothing, so 2×4 stands for 4×2 too; not so where the last axis has a part of its
own to play (Megatron), hence `ordered`.
"""

from __future__ import annotations

import itertools
import math

from ..artifacts import Cluster

MAX_AXES = 3
Shape = tuple[int, ...]


def mesh_shapes(cluster: Cluster, ordered: bool = False) -> list[Shape]:
    """Return the shapes to plan for, the cluster's own first, then those of few axes.

    >>> from ..hardware import resolve
    >>> mesh_shapes(resolve("8xh100"))
    [(8,), (2, 4), (2, 2, 2)]
    >>> mesh_shapes(resolve("2x4xh100"))
    [(2, 4), (8,), (4, 2), (2, 2, 2)]
    >>> mesh_shapes(resolve("8xh100"), ordered=True)
    [(8,), (2, 4), (4, 2)]
    """
    own = tuple(axis.size for axis in cluster.mesh())
    limit = max(MAX_AXES - ordered, len(own))
    cut = [sum(cuts, ()) for cuts in itertools.product(*(factorisations(size, ordered) for size in own))]
    found = [*_joined(own), *(shape for shape in cut if len(shape) <= limit)]
    return list(dict.fromkeys([own, *sorted(found, key=len)]))


def factorisations(size: int, ordered: bool = False) -> list[Shape]:
    """Return the ways to write `size` as a product of at most three factors above 1, in ascending order or in any.

    >>> factorisations(8), factorisations(12, ordered=True)[:5], factorisations(1)
    ([(8,), (2, 4), (2, 2, 2)], [(12,), (2, 6), (3, 4), (4, 3), (6, 2)], [(1,)])
    """
    if size == 1:
        return [(1,)]
    factors = [factor for factor in range(2, size + 1) if size % factor == 0]
    ways = [
        way
        for length in range(1, MAX_AXES + 1)
        for way in itertools.product(factors, repeat=length)
        if math.prod(way) == size
    ]
    return ways if ordered else [way for way in ways if list(way) == sorted(way)]


def _joined(own: Shape) -> list[Shape]:
    """Return the mesh of one axis, and for two links those with the border between them moved by a factor of two."""
    if len(own) < 2:
        return []
    found: list[Shape] = [(math.prod(own),)]
    if len(own) == 2:
        found += [(outer, math.prod(own) // outer) for outer in (own[0] // 2, own[0] * 2)]
    return [shape for shape in found if min(shape) > 1 and math.prod(shape) == math.prod(own)]
