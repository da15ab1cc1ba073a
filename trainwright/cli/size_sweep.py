"""`profile --sweep batch-size` or `--sweep seq-len=512,1024`: how a step's cost grows."""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts import SweepPoint, UserError
from .fits import largest_that_fits
from .variants import Change, Variants

AXES = ("batch-size", "seq-len")
_EXAMPLES = "batch-size, seq-len, or with values: batch-size=1,2,4,8"
_MAX_DOUBLINGS = 12


@dataclass(frozen=True)
class Sweep:
    """The size to change and its values; without values, powers of two around the one that is given."""

    axis: str
    values: tuple[int, ...] = ()


def parse_sweep(text: str) -> Sweep:
    """Return what `--sweep TEXT` asks for.

    >>> parse_sweep("batch-size=4,1,2"), parse_sweep("seq_len")
    (Sweep(axis='batch-size', values=(1, 2, 4)), Sweep(axis='seq-len', values=()))
    """
    axis, separator, listed = text.strip().partition("=")
    axis = axis.strip().replace("_", "-").lower()
    if axis not in AXES:
        raise UserError(f"--sweep takes {_EXAMPLES}; got {text!r}; write one of these")
    try:
        values = tuple(sorted({int(value) for value in listed.split(",")})) if separator else ()
    except ValueError:
        values = (0,)
    if values and values[0] < 1:
        raise UserError(
            f"sizes of 1 or more are needed to sweep {axis}; got {listed!r}; write for example {axis}=1,2,4"
        )
    return Sweep(axis, values)


def powers_around(size: int) -> tuple[int, ...]:
    """Return the given size and five powers of two about it.

    >>> powers_around(8), powers_around(6), powers_around(1)
    ((2, 4, 8, 16, 32), (1, 2, 4, 6, 8, 16), (1, 2, 4))
    """
    power = 1 << (size.bit_length() - 1)
    return tuple(sorted({size} | {power * factor // 4 for factor in (1, 2, 4, 8, 16) if power * factor >= 4}))


class SweepRun:
    """The profiles of a sweep."""

    def __init__(self, variants: Variants, sweep: Sweep) -> None:
        self.variants, self.sweep = variants, sweep
        self._points: dict[int, SweepPoint] = {}
        for value in sweep.values or powers_around(self._given()):
            self._peak_of(value)

    @property
    def points(self) -> tuple[SweepPoint, ...]:
        """The profiles, by size."""
        return tuple(self._points[value] for value in sorted(self._points))

    def largest_that_fits(self, budget_bytes: int) -> int | None:
        """Return the largest size that fits, found between those that were tried; None where the smallest does not.

        Where all fit and no values were given, larger ones are tried; of given ones, the largest is the answer.
        """
        sizes = sorted(self._points)
        low = max((size for size in sizes if self._peak_of(size) <= budget_bytes), default=None)
        if low is None:
            return None
        high = next((size for size in sizes if size > low), None)
        for _ in range(_MAX_DOUBLINGS if not self.sweep.values else 0):
            if high is not None:
                break
            if self._peak_of(2 * low) <= budget_bytes:
                low *= 2
            else:
                high = 2 * low
        return low if high is None else largest_that_fits(self._peak_of, low, high, budget_bytes)

    def _given(self) -> int:
        size = self.variants.batch_size if self.sweep.axis == "batch-size" else self.variants.seq_len
        if size is None:
            raise UserError(
                f"--sweep needs sizes, since the batch does not show its {self.sweep.axis}; "
                f"write --sweep {self.sweep.axis}=1,2,4, or give --{self.sweep.axis}"
            )
        return size

    def _peak_of(self, value: int) -> int:
        if value not in self._points:
            self._points[value] = self._profiled(value)
        return self._points[value].peak_bytes

    def _profiled(self, value: int) -> SweepPoint:
        axis = self.sweep.axis
        found = self.variants.profile(Change(**{axis.replace("-", "_"): value}))  # type: ignore[arg-type]
        return SweepPoint(
            axis=axis,
            value=value,
            peak_bytes=found.peak_bytes,
            saved_bytes=found.saved_bytes,
            forward_flops=found.forward_flops,
            backward_flops=found.backward_flops,
            step_s=found.step_s,
        )
