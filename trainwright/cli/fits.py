"""`profile --fits M`: whether a step fits into M, and if not what would make it fit, each change really profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from ..artifacts import Fit, Remedy, UserError
from .variants import Change, Variants, described

_EIGHT_BIT = "adamw8bit"


def answer_fits(variants: Variants, budget_bytes: int) -> Fit:
    """Return whether the model's step fits into `budget_bytes`, and if not what each remedy saves.

    Tried by themselves: gradient checkpointing, autocast to bf16, bf16 parameters, 8-bit optimizer states, a smaller
    batch. Where none of them is enough, combinations, the fewest changes first; at last all, with a smaller batch.
    """
    base = variants.base
    if base.peak_bytes <= budget_bytes:
        return Fit(budget_bytes=budget_bytes, fits=True)
    search = _Search(variants, budget_bytes)
    search.singles()
    search.smaller_batch(Change())
    if not any(remedy.fits for remedy in search.remedies):
        search.combinations()
    return Fit(
        budget_bytes=budget_bytes, fits=False, remedies=tuple(search.remedies), not_tried=tuple(search.not_tried)
    )


def largest_that_fits(peak_of: Callable[[int], int], low: int, high: int, budget_bytes: int) -> int:
    """Return the largest size in [low, high) whose peak is within the budget; that of `low` is, that of `high` is not.

    Bisection, of which two of three steps guess from a straight line through the two ends instead: peaks are nearly
    straight over the batch size, which then takes about two profiles. The peak must grow with the size.

    >>> largest_that_fits(lambda size: 100 + 7 * size, 1, 1000, 1234)
    162
    """
    step = 0
    while high - low > 1:
        middle = (low + high) // 2
        rise = (peak_of(high) - peak_of(low)) / (high - low)
        if step % 3 < 2 and rise > 0:
            middle = low + int((budget_bytes - peak_of(low)) / rise)
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if peak_of(middle) <= budget_bytes else (low, middle)
        step += 1
    return low


class _Search:
    """What was tried so far, and what could not be."""

    def __init__(self, variants: Variants, budget_bytes: int) -> None:
        self.variants, self.budget_bytes = variants, budget_bytes
        self.remedies: list[Remedy] = []
        self.not_tried: list[str] = []
        self.usable: dict[Change, int] = {}
        """What each single change, but for the batch, saves."""

    def singles(self) -> None:
        """Try each change by itself."""
        for change in _single_changes(self.variants):
            try:
                remedy = self._tried(change)
            except UserError as error:
                self.not_tried.append(f"{described(change)}: {error}")
                continue
            self.remedies.append(remedy)
            if remedy.saving_bytes > 0:
                self.usable[change] = remedy.saving_bytes

    def smaller_batch(self, change: Change) -> None:
        """Look for the largest batch that fits together with `change`, all else as it is."""
        size = self.variants.batch_size
        if size is None:
            self.not_tried.append("a smaller batch: its tensors do not share their first dim; give --batch-size")
        elif size > 1:
            try:
                self.remedies.append(self._tried(change | Change(batch_size=self._largest_batch(change, size))))
            except UserError as error:
                self.not_tried.append(f"a smaller batch: {error}")

    def combinations(self) -> None:
        """Try several changes at once, the fewest first; those first that by their savings alone should be enough."""
        excess = self.variants.base.peak_bytes - self.budget_bytes
        changes = list(self.usable)
        for count in range(2, len(changes) + 1):
            chosen = [group for group in combinations(changes, count) if _compatible(group)]
            chosen.sort(key=lambda group: -sum(self.usable[change] for change in group))
            for group in chosen:
                if sum(self.usable[change] for change in group) >= excess and self._fits(_merged(group)):
                    return
        best = _merged(_strongest(self.usable))
        if best == Change() or not self._fits(best):
            self.smaller_batch(best)

    def _fits(self, change: Change) -> bool:
        remedy = self._tried(change)
        if remedy not in self.remedies:
            self.remedies.append(remedy)
        return remedy.fits

    def _largest_batch(self, change: Change, size: int) -> int:
        """The largest batch below `size` that fits; 1 where none does."""

        def peak_of(num_examples: int) -> int:
            return self.variants.profile(change | Change(batch_size=num_examples)).peak_bytes

        return largest_that_fits(peak_of, 1, size, self.budget_bytes) if peak_of(1) <= self.budget_bytes else 1

    def _tried(self, change: Change) -> Remedy:
        found = self.variants.profile(change)
        base = self.variants.base
        return Remedy(
            name=described(change),
            peak_bytes=found.peak_bytes,
            saving_bytes=base.peak_bytes - found.peak_bytes,
            fits=found.peak_bytes <= self.budget_bytes,
            step_s=found.step_s,
            options=tuple(options_of(change)),
        )


def _single_changes(variants: Variants) -> Iterator[Change]:
    """The changes that make sense for this model, the ones that change the result least first."""
    from .. import optim

    base = variants.base
    yield Change(checkpointing=True)
    if base.optimizer.startswith("adam") and base.optimizer != _EIGHT_BIT and _EIGHT_BIT in optim.names():
        yield Change(optimizer=_EIGHT_BIT)
    if base.dtype in ("fp32", "fp64"):
        if variants.model.autocast is None:
            yield Change(autocast="bf16")
        yield Change(dtype="bf16")


def _compatible(changes: tuple[Change, ...]) -> bool:
    """bf16 parameters leave nothing for autocast to do."""
    merged = _merged(changes)
    return not (merged.dtype and merged.autocast)


def _strongest(usable: dict[Change, int]) -> tuple[Change, ...]:
    """All changes that go together, of each pair that does not the one that saves more."""
    chosen: tuple[Change, ...] = ()
    for change in sorted(usable, key=lambda each: -usable[each]):
        if _compatible((*chosen, change)):
            chosen = (*chosen, change)
    return chosen


def _merged(changes: tuple[Change, ...]) -> Change:
    merged = Change()
    for change in changes:
        merged |= change
    return merged


def options_of(change: Change) -> Iterator[str]:
    """Yield how the command line or the model's code says the change."""
    if change.checkpointing:
        yield "model.gradient_checkpointing_enable()"
    for name, value in (("autocast", change.autocast), ("dtype", change.dtype), ("optimizer", change.optimizer)):
        if value:
            yield f"--{name} {value}"
    if change.batch_size:
        yield f"--batch-size {change.batch_size}"
