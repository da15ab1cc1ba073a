"""Numbers as people read them; shared by the terminal and the HTML reports."""

from __future__ import annotations

import math

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SI = ("", "k", "M", "G", "T", "P", "E")
_CATEGORY_NAMES = {
    "param": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer state",
    "grad": "gradients",
    "saved": "saved for the backward",
    "other": "other",
}
_COUNTS = ("", "k", "M", "B", "T")


def format_bytes(num_bytes: float | None) -> str:
    """Return a size with a binary unit and three digits; `–` for `None`.

    >>> format_bytes(900), format_bytes(1536), format_bytes(6.7e9), format_bytes(None)
    ('900 B', '1.50 KiB', '6.24 GiB', '–')
    """
    return "–" if num_bytes is None else _scaled(num_bytes, _BINARY, 1024)


def format_bytes_up(num_bytes: int) -> str:
    """Return a size that is at least `num_bytes`, to the next hundredth of a binary unit.

    >>> format_bytes_up(900), format_bytes_up(2**20), format_bytes_up(2**20 + 1)
    ('900 B', '1.00 MiB', '1.01 MiB')
    """
    power = max(0, min(len(_BINARY) - 1, (int(num_bytes).bit_length() - 1) // 10))
    if power == 0:
        return f"{num_bytes} B"
    return f"{math.ceil(100 * num_bytes / 1024**power) / 100:.2f} {_BINARY[power]}"


def format_s(seconds: float | None) -> str:
    """Return a duration; `–` for `None`.

    >>> format_s(0.00123), format_s(2.5), format_s(75), format_s(0.0)
    ('1.23 ms', '2.50 s', '1 min 15 s', '0 s')
    """
    if seconds is None:
        return "–"
    if seconds == 0:
        return "0 s"
    if seconds >= 60:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60} s"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def format_flops(num_flops: float | None) -> str:
    """Return a number of floating-point operations.

    >>> format_flops(2.5e12), format_flops(0)
    ('2.50 TFLOP', '0 FLOP')
    """
    return "–" if num_flops is None else _scaled(num_flops, tuple(f"{unit}FLOP" for unit in _SI), 1000)


def format_count(count: float | None) -> str:
    """Return a number of parameters or ops.

    >>> format_count(124439808), format_count(8.03e9), format_count(331)
    ('124 M', '8.03 B', '331')
    """
    return "–" if count is None else _scaled(count, _COUNTS, 1000).strip()


def format_ratio(found: float | None, wanted: float | None) -> str:
    """Return how far `found` is from `wanted`, in per cent.

    >>> format_ratio(1.1, 1.0), format_ratio(0.999, 1.0), format_ratio(None, 1.0)
    ('+10.0 %', '-0.1 %', '–')
    """
    if found is None or not wanted:
        return "–"
    percent = 100 * (found / wanted - 1)
    return f"{percent:+.1f} %" if abs(percent) < 1000 else f"×{found / wanted:.0f}"


def category_name(key: str) -> str:
    """Return how a category of memory is called in a report.

    >>> category_name("saved"), category_name("buffer"), category_name("pinned")
    ('saved for the backward', 'buffers', 'pinned')
    """
    return _CATEGORY_NAMES.get(key, key)


def axis_name(axis: str) -> str:
    """Return how an axis of a sweep is called in a report.

    >>> axis_name("batch-size"), axis_name("seq-len")
    ('batch size', 'sequence length')
    """
    return axis.replace("-", " ").replace("seq len", "sequence length")


def _scaled(value: float, units: tuple[str, ...], step: int) -> str:
    for unit in units[:-1]:
        if abs(value) < step - 0.5:
            return f"{_three_digits(value)} {unit}"
        value /= step
    return f"{_three_digits(value)} {units[-1]}"


def _three_digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
