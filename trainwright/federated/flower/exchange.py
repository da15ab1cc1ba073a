"""`Exchange`: a `Server`'s models out and changes in, as Flower's messages; who the nodes are, what is awaited from whom.

Nothing blocks: `step` sends what is ready, takes what has come, and lets the clock act; between two steps `Timing` sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from ...artifacts import check_range
from ..arrays import Arrays, difference, fault_of
from ..checks import positive
from ..server import Sent, Server
from .content import ARRAYS, CHANGE, CONFIG, SENDS, array_record, arrays_of, config_record, only

Content = Callable[[Sent], tuple[Arrays, dict[str, Any]]]
_NO_PREDICTION = 0.0


@dataclass
class Timing:
    """How time passes: `clock()` in seconds, `sleep(seconds)`, how often replies are asked for, and how often new nodes.

    Tests hand in a clock that is only counted.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    poll_s: float = 0.2
    nodes_every_s: float = 5.0

    def __post_init__(self) -> None:
        check_range(
            "Timing", clock=(self.clock, "a function", callable), sleep=(self.sleep, "a function", callable),
            poll_s=(self.poll_s, "above 0 and finite", positive),
            nodes_every_s=(self.nodes_every_s, "of at least 0", lambda value: value >= 0),
        )  # fmt: skip


@dataclass
class Awaited:
    """A message that was sent: to which client, with which version; `None`: it asks who the node is."""

    node: int
    version: int | None


@dataclass
class Took:
    """What a step took in: whether the server aggregated, and the metrics of the changes that it accepted, by client."""

    aggregated: bool = False
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)


class Exchange:
    """Drives one or several servers that share their clients (FZooS has two) through one Flower `Grid`."""

    def __init__(self, grid: Grid, servers: Iterable[Server], timing: Timing, ttl_s: float, weighted_by: str) -> None:
        self.grid, self.servers, self.timing, self.ttl_s, self.weighted_by = (
            grid,
            list(servers),
            timing,
            ttl_s,
            weighted_by,
        )
        self.awaited: dict[str, Awaited] = {}
        self.names: dict[int, str] = {}
        self.present: set[int] = set()
        self.ignored: set[int] = set()
        """Nodes that described themselves as no client can be."""
        self.sent_arrays: dict[int, Arrays] = {}
        """The models of the versions that are out, for clients that answer with a model."""
        self._looked_s = -float("inf")

    def look_for_nodes(self) -> None:
        """Ask nodes that are new who they are; note those that have gone."""
        now_s = self.timing.clock()
        if now_s - self._looked_s < self.timing.nodes_every_s and len(self.names) > 0:
            return
        self._looked_s = now_s
        self.present = set(self.grid.get_node_ids())
        asked = {each.node for each in self.awaited.values() if each.version is None}
        new = sorted(self.present - self.names.keys() - self.ignored - asked)
        messages = [
            Message(RecordDict({CONFIG: ConfigRecord({})}), node, MessageType.QUERY, ttl=self.ttl_s) for node in new
        ]
        self._push(messages, [Awaited(node, None) for node in new])

    def send(self, server: Server, content: Content) -> None:
        """Send the model to every client that is ready and connected."""
        nodes = {name: node for node, name in self.names.items() if node in self.present}
        now_s = self.timing.clock()
        works = [server.send(name, now_s) for name in server.ready(nodes)]
        if not works:
            return
        arrays, _ = content(works[0])
        self.sent_arrays[works[0].version] = server.arrays
        record = array_record(arrays)
        messages = [
            Message(
                RecordDict({ARRAYS: record, CONFIG: config_record(content(work)[1])}), nodes[work.client],
                MessageType.TRAIN, ttl=self.ttl_s, group_id=str(work.version),
            )
            for work in works
        ]  # fmt: skip
        self._push(messages, [Awaited(nodes[work.client], work.version) for work in works], server)

    def _push(self, messages: list[Message], awaited: list[Awaited], server: Server | None = None) -> None:
        if not messages:
            return
        ids = list(self.grid.push_messages(messages))
        for message_id, each in zip(ids + [None] * (len(messages) - len(ids)), awaited):
            if message_id is not None:
                self.awaited[message_id] = each
            elif server is not None and each.version is not None:
                server.refuse(self.names[each.node], each.version, "the message could not be sent", self.timing.clock())

    def take(self, server: Server) -> Took:
        """Take what has come, in the order of the nodes' ids; let the server's clock act."""
        took, before = Took(), server.version
        replies = list(self.grid.pull_messages(list(self.awaited))) if self.awaited else []
        for reply in sorted(replies, key=lambda reply: self._node_of(reply)):
            awaited = self.awaited.pop(reply.metadata.reply_to_message_id, None)
            if awaited is None:
                log(WARNING, "a reply to no message of ours came from node %d", reply.metadata.src_node_id)
            elif awaited.version is None:
                self._enroll(awaited.node, reply)
            else:
                self._receive(server, awaited, reply, took)
        server.expire(self.timing.clock())
        took.aggregated = server.version > before
        self._forget(server)
        return took

    def _node_of(self, reply: Message) -> int:
        awaited = self.awaited.get(reply.metadata.reply_to_message_id)
        return awaited.node if awaited is not None else -1

    def _receive(self, server: Server, awaited: Awaited, reply: Message, took: Took) -> None:
        client, version, now_s = self.names[awaited.node], awaited.version, self.timing.clock()
        assert version is not None
        if reply.has_error():
            reason = (reply.error.reason or f"error {reply.error.code}").strip().splitlines()[-1]
            server.refuse(client, version, f"its app failed: {reason}", now_s)
            return
        config = only(reply.content, "config") or {}
        if (stated := config.get("version", version)) != version:
            server.refuse(client, version, f"it answers version {stated}, which is not the one it was sent", now_s)
            return
        delta = self._change(server, reply.content, config, version)
        num_accepted = server.traffic.num_received
        server.receive(delta, version, client, now_s)
        if server.traffic.num_received > num_accepted:
            metrics = only(reply.content, "metric") or {}
            took.metrics[client] = {key: value for key, value in metrics.items() if not isinstance(value, list)}

    def _change(self, server: Server, content: RecordDict, config: Mapping[str, Any], version: int) -> Any:
        record = only(content, "array")
        if record is None:
            return None
        try:
            arrays = arrays_of(record)
        except (TypeError, ValueError):  # of another library, or not NumPy's format
            return None
        if config.get(SENDS) == CHANGE:
            return arrays
        sent = self.sent_arrays.get(version, server.arrays)
        return arrays if fault_of(arrays, sent) is not None else difference(arrays, sent)

    def _enroll(self, node: int, reply: Message) -> None:
        found: dict[str, Any] = {}
        if reply.has_content():
            found = dict(only(reply.content, "metric") or {}) | dict(only(reply.content, "config") or {})
        name = str(found.get("name", f"node-{node}"))
        if name in self.names.values():
            gone = [other for other, known in self.names.items() if known == name and other not in self.present]
            if gone:
                del self.names[gone[0]]  # the client has come back as another node
            else:
                name = f"{name}-{node}"
        try:
            importance = float(found.get(self.weighted_by, 1.0))
            predicted_s = float(found.get("predicted-s", _NO_PREDICTION)) or None
            for server in self.servers:
                server.enroll(name, importance, predicted_s)
        except (TypeError, ValueError) as error:
            self.ignored.add(node)
            self.servers[0].refuse(name, -1, f"what it says of itself cannot be: {error}", self.timing.clock())
            return
        self.names[node] = name
        log(INFO, "client %s: importance %g, predicted time %s", name, importance, predicted_s)

    def _forget(self, server: Server) -> None:
        """Drop models that nobody's answer needs any more, and messages past their time to live."""
        out = {work.version for work in server.outstanding.values()}
        self.sent_arrays = {version: arrays for version, arrays in self.sent_arrays.items() if version in out}

    def resume(self, extra: Mapping[str, Any]) -> None:
        """Go on with the messages of a run that was interrupted; those of another run cannot be asked for."""
        server = self.servers[0]
        self.names = {int(node): name for node, name in extra.get("names", {}).items()}
        if extra.get("run_id") != self.grid.run.run_id:
            server.outstanding.clear()
            return
        self.awaited = {key: Awaited(**value) for key, value in extra.get("awaited", {}).items()}
        known = {self.names[each.node] for each in self.awaited.values() if each.version is not None}
        for client in [client for client in server.outstanding if client not in known]:
            del server.outstanding[client]

    def extra(self) -> dict[str, Any]:
        """Return what `resume` takes, as JSON."""
        awaited = {key: vars(value) for key, value in self.awaited.items() if value.version is not None}
        return {"run_id": self.grid.run.run_id, "names": {str(k): v for k, v in self.names.items()}, "awaited": awaited}
