"""Finds where a local program reads the contents of its parameters, of which those that rest elsewhere must be in memory there.

A bucket's `Open` reads the parameters that it gathers. One whose gradient alone travels is only handed on; its `Close` reads it.
"""

from __future__ import annotations

from .instructions import Close, Open
from .local import LocalProgram


def params_read(local: LocalProgram) -> list[tuple[int, ...]]:
    """Return, for each instruction, the values of the parameters whose contents it reads, in order."""
    params = {value for tensor, value in local.sources.items() if tensor.role == "param"}
    handed: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for instruction in local.instructions:
        read = instruction.inputs
        if isinstance(instruction, Open):
            gathers = [member.there.moves for member in instruction.bucket.members]
            places = zip(instruction.params, instruction.tokens, gathers, strict=True)
            handed.update((token, param) for param, token, is_gathered in places if not is_gathered)
            read = tuple(param for param, is_gathered in zip(read, gathers, strict=True) if is_gathered)
        elif isinstance(instruction, Close):
            read = (handed.get(instruction.token, instruction.token),)
        found.append(tuple(value for value in read if value in params))
    return found
