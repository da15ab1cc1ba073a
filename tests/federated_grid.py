"""A Flower `Grid` in one process, on a clock that is only counted: nodes run real `ClientApp`s on real messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from trainwright.federated.flower import Timing

START_S = 1000.0


def within_a_run() -> None:
    """Let messages be made in this process as in a ServerApp's, which newer releases of Flower ask for."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1


within_a_run()


@dataclass
class Node:
    """One SuperNode: its app, its context, how long a piece of work takes, and when it is reachable."""

    app: Any
    context: Context
    duration_s: Callable[[int], float] | float = 1.0
    away: tuple[tuple[float, float], ...] = ()
    free_s: float = START_S
    num_works: int = 0

    def takes_s(self) -> float:
        self.num_works += 1
        return self.duration_s(self.num_works - 1) if callable(self.duration_s) else self.duration_s

    def is_there(self, now_s: float) -> bool:
        return not any(begin <= now_s < end for begin, end in self.away)


def node(app: Any, number: int, duration_s: Any = 1.0, **options: Any) -> Node:
    context = Context(run_id=7, node_id=number, node_config={"partition-id": number}, state=RecordDict(), run_config={})
    return Node(app, context, duration_s, **options)


@dataclass
class CountedGrid(Grid):
    """Answers are computed when they are due, and handed over when they are pulled."""

    nodes: dict[int, Node]
    now_s: float = START_S
    run_id: int = 7
    waiting: dict[str, tuple[float, Node, Message]] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=itertools.count)
    tamper: Callable[[Message, Message], Message | None] | None = None
    """Gets a message and its reply, returns the reply that arrives; `None`: none does."""
    pushed: list[Message] = field(default_factory=list)

    def timing(self, poll_s: float = 0.01) -> Timing:
        return Timing(lambda: self.now_s - START_S, self.sleep, poll_s=poll_s, nodes_every_s=0.0)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def set_run(self, run: Any) -> None:
        self.run_id = run

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=self.run_id)

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, each in self.nodes.items() if each.is_there(self.now_s)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self.ids)}"
            target = self.nodes[message.metadata.dst_node_id]
            asked = message.metadata.message_type == "query"
            begin_s = max(self.now_s, target.free_s)
            due_s = self.now_s if asked else begin_s + target.takes_s()
            target.free_s = target.free_s if asked else due_s
            for away_s, back_s in target.away:
                due_s = back_s if away_s <= due_s < back_s else due_s
            self.waiting[message.metadata.message_id] = (due_s, target, message)
            self.pushed.append(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        due = [key for key in message_ids if key in self.waiting and self.waiting[key][0] <= self.now_s + 1e-9]
        replies = []
        for key in sorted(due, key=lambda key: self.waiting[key][0]):
            _, target, message = self.waiting.pop(key)
            reply: Message | None = answered(target, message)
            if self.tamper is not None and reply is not None:
                reply = self.tamper(message, reply)
            if reply is not None:
                replies.append(reply)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        ids = self.push_messages(messages)
        self.now_s = max([self.now_s, *(self.waiting[key][0] for key in ids)])
        return self.pull_messages(ids)


def answered(target: Node, message: Message) -> Message:
    try:
        reply: Message = target.app(message, target.context)
    except Exception as error:
        reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
    return reply
