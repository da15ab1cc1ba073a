"""Which meshes to lay over a cluster: its own links, all devices in one line, and two-way factorisations near them."""

from __future__ import annotations

from ..artifacts import Cluster


def mesh_shapes(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the shapes to plan for, at most two axes each, the cluster's own first.

    >>> from ..hardware import resolve
    >>> mesh_shapes(resolve("8xh100"))
    [(8,), (2, 4), (4, 2)]
    """
    own = tuple(axis.size for axis in cluster.mesh())
    num = cluster.num_devices
    shapes = [own]
    if len(own) <= 2:
        shapes += [(num,)] if len(own) == 2 and num <= 16 else []
        shapes += [(outer, num // outer) for outer in range(2, num) if num % outer == 0 and _near(outer, own)]
    return list(dict.fromkeys(shapes))


def _near(outer: int, own: tuple[int, ...]) -> bool:
    """On one link any cut will do, in moderation; on two, the link's own or one factor of two away from it."""
    if len(own) == 1:
        return outer <= 8
    return outer in (own[0] // 2, own[0] * 2)
