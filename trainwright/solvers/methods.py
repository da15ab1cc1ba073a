"""The check that what a user gives as `method` has what its family's protocol asks for."""

from __future__ import annotations

from typing import Any

from ..artifacts import UserError


def need_method(method: Any, protocol: type, examples: str, remedy: str) -> None:
    """Raise `UserError` where `method` is no instance that has the protocol's functions.

    protocol: a `typing.Protocol` that can be checked at run time. examples: methods of the family, in words.

    >>> from trainwright.solvers.bilevel import BOREP
    >>> from trainwright.solvers.bilevel.problem import Method
    >>> need_method(BOREP(0.1, 0.1, 0.1), Method, "BOREP(…)", "make one")
    >>> need_method(BOREP, Method, "BOREP(…)", "make one with its steps")
    Traceback (most recent call last):
        ...
    trainwright.artifacts.record.UserError: a method BOREP(…) is needed; got the class BOREP; make one with its steps
    """
    if isinstance(method, type) or not isinstance(method, protocol):
        found = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise UserError(f"a method {examples} is needed; got {found}; {remedy}")
