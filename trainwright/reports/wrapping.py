"""Where a line may be broken: between words and between the parts of a name, never between a number and its unit."""

from __future__ import annotations

import re
from typing import TextIO

_UNIT = r"(?:[KMGTP]iB|B|[nµm]?s|min|%|[kMGTPE]?FLOPs?|[kMGT])(?:/s)?"
_WORD_END = re.compile(r"(?<=\S) +(?=\S)")
_TOGETHER = re.compile(rf"\d (?:min \d+ s|{_UNIT})(?!\w)")
"""A number and its unit."""
_NAME_END = re.compile(r"(?<=[\w\]})*][./:_@,=])(?=[\w{*])(?<!\d[.,](?=\d))|(?<=[a-zA-Z]-)(?=[a-zA-Z])")
"""Where a name that is too long for a line may be broken: after a dot, a colon, an underscore, …"""


def pieces(text: str) -> list[str]:
    """Return the parts of one line between which it may be broken.

    >>> pieces("peak 40.6 MiB of 1 min 15 s")
    ['peak ', '40.6 MiB ', 'of ', '1 min 15 s']
    """
    together = [match.span() for match in _TOGETHER.finditer(text)]
    ends = [match.end() for match in _WORD_END.finditer(text)]
    ends = [end for end in ends if not any(first < end < last for first, last in together)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)]) if end > start]


def unbroken(text: str) -> str:
    """Return `text` with blanks that do not break between numbers and their units, for where others break lines.

    >>> unbroken("at most 3 % of 20 GiB").split(" ")
    ['at', 'most', '3\\xa0%', 'of', '20\\xa0GiB']
    """
    return _TOGETHER.sub(lambda match: match.group().replace(" ", "\u00a0"), text)


def name_parts(piece: str) -> list[str]:
    """Return the parts into which a piece that no line can hold is cut: those of a dotted name.

    >>> name_parts("transformer.h.0.mlp:linear"), name_parts("0.25 MiB")
    (['transformer.', 'h.', '0.', 'mlp:', 'linear'], ['0.25 MiB'])
    """
    ends = [match.start() for match in _NAME_END.finditer(piece) if match.start() > 0]
    return [piece[start:end] for start, end in zip([0, *ends], [*ends, len(piece)]) if end > start]


def least_width(text: str) -> int:
    """Return the width below which a word, a part of a name, or a number and its unit would be torn apart."""
    parts = (part for line in text.split("\n") for piece in pieces(line) for part in name_parts(piece))
    return max((len(part.rstrip()) for part in parts), default=0)


def lines(text: str, width: int) -> list[tuple[int, int]]:
    """Return the lines of `text` in `width` columns as (start, end); the blanks between them are left out."""
    found, offset = [], 0
    for line in text.split("\n"):
        found += [(offset + start, offset + end) for start, end in _lines(line, width)]
        offset += len(line) + 1
    return found


def wrapped(text: str, width: int) -> str:
    """Return `text` with line ends where it has to be broken.

    >>> print(wrapped("a peak of 900 MiB is needed", 13))
    a peak of
    900 MiB is
    needed
    """
    return "\n".join(text[start:end] for start, end in lines(text, width))


def for_stream(text: str, stream: TextIO) -> str:
    """Return `text` as it should be written to `stream`: broken at words on a terminal, unchanged elsewhere."""
    import shutil

    if not stream.isatty():
        return text
    return wrapped(text, max(20, shutil.get_terminal_size().columns))


def _lines(line: str, width: int) -> list[tuple[int, int]]:
    """Fill each line with as many pieces as it holds; a piece longer than a line is cut between the parts of a name."""
    found: list[tuple[int, int]] = []
    start = end = 0
    for piece in pieces(line):
        parts = [piece] if len(piece.rstrip()) <= width else _cut(piece, width)
        for part in parts:
            if end > start and end - start + len(part.rstrip()) > width:
                found.append((start, end))
                start = end
            end += len(part)
    found.append((start, end))
    return [(first, first + len(line[first:last].rstrip())) for first, last in found]


def _cut(piece: str, width: int) -> list[str]:
    """The parts of a long name; one that is itself too long is cut anywhere."""
    return [
        part[place : place + width]
        for part in name_parts(piece)
        for place in range(0, max(1, len(part.rstrip())), width)
    ]
