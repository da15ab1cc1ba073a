"""Runs code with blocking all-reduces, as written for torch.distributed, as a program that yields requests.

The code gets `AskingGroup`s instead of process groups. It runs on a thread that proceeds only while the program waits for
it, so that real ranks and the simulator run it in the same way, and its bytes are counted like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from .requests import AllReduce, Members, Steps, T


class AskingGroup:
    """Stands for a process group of `size` members on which code calls `torch.distributed.all_reduce` with sums.

    members: the ranks of the workers in it; default: all.
    """

    def __init__(self, size: int, members: Members | None = None) -> None:
        self._size, self._members = size, members
        self.asked: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        """Sum a tensor over the members, in place, and wait for it, so that callbacks run on the calling thread."""
        if not tensors[0].numel():
            return _Work(tensors)
        self.asked.put(AllReduce(tensors[0], self._members))
        total = self.answers.get()
        if isinstance(total, BaseException):
            raise RuntimeError("the sum was not answered") from total
        tensors[0].copy_(total)
        return _Work(tensors)


class _Work:
    """A completed all-reduce, with the interface of torch.distributed's `Work`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def wait(self, timeout: Any = None) -> bool:
        return True


def as_program(code: Callable[[], T], groups: list[AskingGroup]) -> Steps[T]:
    """Run `code`, whose all-reduces are on one of `groups`, as a program, and return its result.

    >>> import torch.distributed as dist
    >>> from trainwright.sync import simulate
    >>> def program(rank):
    ...     group, x = AskingGroup(2), torch.tensor([float(rank + 1)])
    ...     yield from as_program(lambda: dist.all_reduce(x, group=group), [group])
    ...     return x
    >>> simulate([program(rank) for rank in range(2)]).results
    [tensor([3.]), tensor([3.])]
    """
    asked: SimpleQueue[Any] = SimpleQueue()
    answers: SimpleQueue[Any] = SimpleQueue()
    for group in groups:
        group.asked, group.answers = asked, answers
    ended: dict[str, Any] = {}
    Thread(target=_run, args=(code, asked, ended), name="collectives", daemon=True).start()
    while (request := asked.get()) is not None:
        try:
            answers.put((yield request))
        except BaseException as error:
            answers.put(error)  # the thread ends by it
            raise
    if "error" in ended:
        raise ended["error"]
    return ended["found"]  # type: ignore[no-any-return]


def _run(code: Callable[[], Any], asked: SimpleQueue[Any], ended: dict[str, Any]) -> None:
    try:
        with torch.no_grad():
            ended["found"] = code()
    except Exception as error:
        ended["error"] = error
    asked.put(None)
