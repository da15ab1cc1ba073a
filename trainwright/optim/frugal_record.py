"""What FRUGAL keeps and holds, by the shape of a parameter and the settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .frugal import FRUGAL
from .projection import Subspace
from .record import STEP, OptimizerRecord, Options, Shape, StateTensor


def _moment_shape(name: str) -> Callable[[Shape, Options], Shape | None]:
    def shape_of(shape: Shape, options: Options) -> Shape | None:
        if not _takes_part(shape, options):
            return shape
        if name == "exp_avg_sq" and options.get("active") == "sgdm":
            return None
        if options["projection"] == "block":
            return (round(options["density"] * math.prod(shape)),)  # on average over the group
        part = Subspace.of(options["projection"], _matrix_shape(shape), options["density"])
        return part.low_shape if part.kept else None

    return shape_of


def _projector_shape(shape: Shape, options: Options) -> Shape | None:
    if not _takes_part(shape, options) or options["projection"] == "block":
        return None
    part = Subspace.of(options["projection"], _matrix_shape(shape), options["density"])
    return part.projector_shape if part.kept and not part.dense else None


def _directions_shape(shape: Shape, options: Options) -> Shape | None:
    if not _takes_part(shape, options) or options["projection"] == "block":
        return None
    part = Subspace.of(options["projection"], _matrix_shape(shape), options["density"])
    return part.projector_shape if part.kept and part.dense else None


def _takes_part(shape: Shape, options: Options) -> bool:
    chosen = options.get("projected")
    return len(shape) >= (2 if chosen is None or not shape else 1) and chosen is not False


def _matrix_shape(shape: Shape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:]) if shape[0] else 0


def _temporaries(shape: Shape, element_bytes: int, options: Options) -> int:
    """Its change, beside the part of the gradient and the direction in it while they are taken; then a working copy."""
    if options.get("fused") and element_bytes <= 4:
        drawn = _takes_part(shape, options) and options["projection"] != "block"
        return (
            8 * _num_choices(shape, options) + 4 * math.prod(_projector_shape(shape, options) or (0,)) if drawn else 4
        )
    whole = math.prod(shape) * max(element_bytes, 4)
    copies = 1 if element_bytes < 4 else int(bool(options.get("maximize")))
    moving = (copies + 1 + (element_bytes < 4)) * whole
    if not _takes_part(shape, options):
        return moving
    low = math.prod(_moment_shape("exp_avg")(shape, options) or (0,)) * max(element_bytes, 4)
    places = math.prod(_projector_shape(shape, options) or (0,))
    choice = 8 * _num_choices(shape, options) + 4 * places
    return max(moving, (copies + 1) * whole + 2 * low + 8 * places, copies * whole + choice)


def _num_choices(shape: Shape, options: Options) -> int:
    """How many places a new choice is drawn from."""
    rows, columns = _matrix_shape(shape)
    return {"columns": columns, "rows": rows, "entries": rows * columns}.get(options["projection"], min(rows, columns))


RECORD = OptimizerRecord(
    "frugal",
    FRUGAL,
    "Adam on a changing quarter of each matrix, the gradient's sign on the rest; a quarter of Adam's state",
    (
        StateTensor("exp_avg", _moment_shape("exp_avg"), wide=True),
        StateTensor("exp_avg_sq", _moment_shape("exp_avg_sq"), wide=True),
        StateTensor("projector", _projector_shape, dtype=torch.int32),
        StateTensor("projector", _directions_shape, wide=True),
        STEP,
    ),
    _temporaries,
    defaults={"projection": "columns", "density": 0.25},
    reads="row",
    whole_state=True,
    paper="Zmushko et al. 2024, arXiv:2411.07837",
    departs="columns by default, whole tensors by projection='block'; steps counted by tensor",
    groups=FRUGAL.groups,
)
