"""`profile MODEL --hardware a,b,c`: which of these devices can train it: whole, with LoRA, with QLoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..artifacts import Cluster, FitOn, Fitting, Profile, UserError, parse_bytes
from ..hardware import resolve
from ..request import MEMORY_SHARE
from .fits import options_of
from .model import ModelOptions
from .variants import Change, Variants, described

if TYPE_CHECKING:
    from ..models.targets import Loaded

OWN_MEMORY = "auto"
WAYS = (("full", Change()), ("lora", Change(adapters="lora")), ("qlora", Change(adapters="qlora")))


def asked_devices(hardware: str | None) -> tuple[tuple[str, Cluster], ...]:
    """Return the hardware where several are named, with commas between them; nothing for one.

    >>> [name for name, _ in asked_devices("a100, h100")], asked_devices("a100")
    (['a100', 'h100'], ())
    """
    names = list(dict.fromkeys(name.strip() for name in (hardware or "").split(",") if name.strip()))
    return tuple((name, resolve(name)) for name in names) if len(names) > 1 else ()


def fitting(
    model: ModelOptions,
    loaded: Loaded,
    how: Mapping[str, Any],
    devices: tuple[tuple[str, Cluster], ...],
    memory: str | None,
    tell: Callable[[str], None],
) -> Fitting:
    """Return for each device and way whether a step fits, each answer a profile.

    Tried in turn, until one fits: as asked; with gradient checkpointing; with that and a batch of one example.
    memory: the budget; `None` or `auto`: of each device 90 % of its own, as `plan` takes.
    """
    import trainwright as tw

    rows: list[FitOn] = []
    notes: dict[str, None] = {}
    base: Profile | None = None
    for name, cluster in devices:
        asked = {**how, "hardware": cluster}
        base = tw.profile(
            loaded.model, loaded.batch, loss_fn=loaded.loss_fn, name=loaded.ref.name, capture=False, **asked
        )
        variants = Variants(model, loaded, base, asked, lambda text, on=name: tell(f"{text} on {on}"))  # type: ignore[misc]
        rows += [_row(variants, name, way, change, _budget(memory, cluster)) for way, change in WAYS]
        notes |= dict.fromkeys((*base.notes, *variants.notes))
    assert base is not None
    return Fitting(model=base.model, dtype=base.dtype, optimizer=base.optimizer, rows=tuple(rows), notes=tuple(notes))


def budget_of(memory: str, hardware: str | None) -> int:
    """Return the bytes that `--fits` states; `auto`: 90 % of the device's, which is needed then."""
    if memory.strip().lower() != OWN_MEMORY:
        return parse_bytes(memory)
    if hardware is None:
        raise UserError("a device is needed for --fits auto; got none; add --hardware H, or say how much: --fits 24GiB")
    return _budget(OWN_MEMORY, resolve(hardware))


def _budget(memory: str | None, cluster: Cluster) -> int:
    return (
        int(MEMORY_SHARE * cluster.device.memory_bytes)
        if memory is None or memory.strip().lower() == OWN_MEMORY
        else parse_bytes(memory)
    )


def _row(variants: Variants, device: str, way: str, change: Change, budget_bytes: int) -> FitOn:
    """The first of the changes that fits; the last that could be profiled where none does."""
    row = FitOn(device=device, way=way, budget_bytes=budget_bytes, fits=False)
    for more in _changes(variants):
        try:
            found = variants.profile(change | more)
        except UserError as error:
            row = row if row.peak_bytes is not None else row.model_copy(update={"problem": str(error)})
            continue
        row = _answer(row, variants, found, more)
        if row.fits:
            break
    return row


def _changes(variants: Variants) -> Iterator[Change]:
    yield Change()
    yield Change(checkpointing=True)
    if (variants.batch_size or 1) > 1:
        yield Change(batch_size=1)
        yield Change(batch_size=1, checkpointing=True)


def _answer(row: FitOn, variants: Variants, found: Profile, more: Change) -> FitOn:
    size = more.batch_size or variants.batch_size
    return FitOn(
        device=row.device,
        way=row.way,
        budget_bytes=row.budget_bytes,
        fits=found.peak_bytes <= row.budget_bytes,
        peak_bytes=found.peak_bytes,
        changes=tuple(described(more).split(", ")) if more != Change() else (),
        options=tuple(options_of(more)),
        step_s=found.step_s,
        samples_per_s=size / found.step_s if size and found.step_s else None,
    )
