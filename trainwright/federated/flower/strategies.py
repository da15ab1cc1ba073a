"""Strategies for Flower's `ServerApp`: a rule of ours, its `Server`, and a loop of messages in place of rounds that wait."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import Result

from ...artifacts import check_range
from .. import rules
from ..checks import whole
from ..fedspeed import FedSpeedAverage
from ..server import Limits, Sent, Server
from ..store import load_extra, load_server, save_server
from .content import array_record, arrays_of
from .exchange import Exchange, Timing, Took

PathLike = str | os.PathLike[str]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class ServerStrategy(flower_strategies.FedAvg):
    """A Flower strategy that runs `rule`; `FedFix`, `FedBuff`, `AsyncFedAvg`, `FedAvg` and `FedSpeed` below are this with theirs.

    `start(…, num_rounds=N)` ends after N aggregations; `timeout` is each message's time to live where `limits` sets none.
    Nodes are asked once who they are (a query, which `client_app` answers): their number of examples is their importance
    p_i, and their predicted seconds give the weights; then every idle node has a message at all times. Nodes that come
    later join; a node that has gone is not waited for beyond the time to live.

    Clients answer with their change (`client_app`), or, as ordinary Flower apps do, with their model: the server then keeps the
    models of the versions that are out.

    server_lr, limits, trust: as for `Server`. min_available_nodes: to begin with. state_path: a file that holds the state
    after each aggregation; `start` goes on from it where it is there. weighted_by_key: of the nodes' answers, the
    importance. fraction_evaluate: of the nodes that evaluate the final model, by Flower's own messages. timing: of polls.
    `server` is the `Server` of the last run: its `refusals`, `traffic` and, with keep_journal, `journal`.

    Not secure aggregation, nor differential privacy: for the former use Flower's SecAgg+ workflow, which has rounds of its
    own and no asynchronous form; for the latter give Flower's client-side mods to `client_app`.

    >>> FedFix(0.5).rule
    FedFix(weighted=True, seconds=0.5, share=0.5)
    """

    def __init__(
        self, rule: rules.Rule, *, server_lr: float = 1.0, limits: Limits | None = None, trust: float = 20.0,
        min_available_nodes: int = 2, fraction_evaluate: float = 0.0, weighted_by_key: str = "num-examples",
        state_path: PathLike | None = None, timing: Timing | None = None, keep_journal: bool = False,
    ) -> None:  # fmt: skip
        check_range(
            type(self).__name__, min_available_nodes=(min_available_nodes, "whole, of at least 1", whole()),
            fraction_evaluate=(fraction_evaluate, "in [0, 1]", lambda value: 0 <= value <= 1),
            state_path=(state_path, "a path, or None", lambda value: isinstance(value, str | os.PathLike | None)),
        )  # fmt: skip
        Server(
            {"x": [0.0]}, rule, server_lr=server_lr, limits=limits, trust=trust
        )  # refuses what cannot be, before a run begins
        super().__init__(
            fraction_evaluate=fraction_evaluate, min_evaluate_nodes=1, min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
        )  # fmt: skip
        self.rule, self.limits, self.timing = rule, limits or Limits(), timing or Timing()
        self.state_path = Path(state_path) if state_path is not None else None
        self._options: dict[str, Any] = {"server_lr": server_lr, "trust": trust, "keep_journal": keep_journal}
        self.server: Server | None = None

    def summary(self) -> None:
        """Log the rule and its settings."""
        log(INFO, "\t├──> Rule: %s", self.rule)
        log(INFO, "\t└──> %s, %s", self.limits, self._options)

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:  # fmt: skip
        """Run until the model is of version `num_rounds`, that is, after as many aggregations; return arrays and metrics.

        evaluate_fn: called with the version and the model before the first aggregation and after each.
        """
        log(INFO, "Starting %s:", type(self).__name__)
        self.summary()
        server = self._server(initial_arrays, timeout)
        exchange = Exchange(grid, [server], self.timing, server.limits.ttl_s, self.weighted_by_key)
        if self._is_resumed():
            exchange.resume(load_extra(self.state_path))  # type: ignore[arg-type]
        result = Result()
        _evaluate(result, evaluate_fn, server)
        config = dict(train_config or {})
        due_s = None
        while server.version < num_rounds:
            exchange.look_for_nodes()
            if len(exchange.names) >= self.min_available_nodes:
                exchange.send(server, lambda sent: (sent.arrays, config | sent.config | {"server-round": sent.version}))
                due_s = due_s if due_s is not None else self._next_tick_s(-math.inf)
            took = exchange.take(server)
            if due_s is not None and self.timing.clock() >= due_s:
                due_s = self._next_tick_s(due_s)
                took.aggregated |= server.tick(self.timing.clock()) is not None
            self._metrics(took)
            if took.aggregated:
                self._aggregated(result, server, exchange, evaluate_fn)
            else:
                self.timing.sleep(self.timing.poll_s)
        result.arrays = array_record(server.arrays)
        self._evaluate_at_clients(grid, result, evaluate_config, timeout)
        return result

    def _server(self, initial_arrays: ArrayRecord, timeout: float) -> Server:
        limits = dataclasses.replace(self.limits, ttl_s=min(self.limits.ttl_s, timeout))
        if self._is_resumed():
            self.server = load_server(self.state_path, self.rule, limits=limits, **self._options)  # type: ignore[arg-type]
            log(INFO, "going on from %s, version %d", self.state_path, self.server.version)
        else:
            self.server = Server(arrays_of(initial_arrays), self.rule, limits=limits, **self._options)
        self._held: dict[str, dict[str, float]] = {}
        return self.server

    def _is_resumed(self) -> bool:
        return self.state_path is not None and self.state_path.exists()

    def _next_tick_s(self, last_s: float) -> float:
        """Return when to aggregate next: at the multiples of Δt since the start, those that have passed left out."""
        rule = self.server.rule if self.server is not None else self.rule
        interval_s, now_s = rule.interval_s, self.timing.clock()
        if interval_s is None:
            return math.inf
        if math.isinf(last_s):
            return now_s + interval_s
        return last_s + interval_s * max(1, math.ceil((now_s - last_s) / interval_s - 1e-9))

    def _metrics(self, took: Took) -> None:
        self._held |= took.metrics

    def _aggregated(self, result: Result, server: Server, exchange: Exchange, evaluate_fn: EvaluateFn | None) -> None:
        if self._held:
            result.train_metrics_clientapp[server.version] = _averaged(self._held, server)
            self._held = {}
        log(
            INFO,
            "version %d: %d changes taken, %d refused",
            server.version,
            server.traffic.num_received,
            len(server.refusals),
        )
        if self.state_path is not None:
            save_server(server, self.state_path, exchange.extra())
        _evaluate(result, evaluate_fn, server)

    def _evaluate_at_clients(self, grid: Grid, result: Result, config: ConfigRecord | None, timeout: float) -> None:
        if not self.fraction_evaluate or result.arrays is None or self.server is None:
            return
        version = self.server.version
        messages = self.configure_evaluate(version, result.arrays, config or ConfigRecord(), grid)
        found = self.aggregate_evaluate(version, grid.send_and_receive(messages, timeout=timeout))
        if found is not None:
            result.evaluate_metrics_clientapp[version] = found

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used: `start` sends each node its model when it is ready for it."""
        raise NotImplementedError("the messages of this strategy are sent by start")


def _evaluate(result: Result, evaluate_fn: EvaluateFn | None, server: Server) -> None:
    if evaluate_fn is not None and (found := evaluate_fn(server.version, array_record(server.arrays))) is not None:
        result.evaluate_metrics_serverapp[server.version] = found
        log(INFO, "version %d: %s", server.version, found)


def _averaged(metrics: dict[str, dict[str, float]], server: Server) -> MetricRecord:
    """Return the mean of the clients' metrics, by importance, of those that all of them report."""
    importance = {client: server.clients.known[client].importance for client in metrics}
    total = math.fsum(importance.values())
    shared = set.intersection(*(set(each) for each in metrics.values()))
    return MetricRecord(
        {
            key: math.fsum(importance[c] * float(each[key]) for c, each in metrics.items()) / total
            for key in sorted(shared)
        }
    )


class FedFix(ServerStrategy):
    """`trainwright.federated.FedFix` on Flower: aggregate every `seconds` of the wall clock, whoever has answered.

    Without `seconds`, the nodes' `predicted-s` say how long it is: `share` of the first `min_available_nodes` finish in it. The
    other settings are those of `ServerStrategy`.

    >>> FedFix(30.0, min_available_nodes=5).rule.interval_s
    30.0
    """

    def __init__(
        self, seconds: float | None = None, *, share: float = 0.5, weighted: bool = True, **settings: Any
    ) -> None:
        super().__init__(rules.FedFix(seconds, share, weighted=weighted), **settings)


class FedBuff(ServerStrategy):
    """`trainwright.federated.FedBuff` on Flower: aggregate at every `size` replies.

    >>> FedBuff(10).rule.is_due(10, 3)
    True
    """

    def __init__(self, size: int = 10, *, weighted: bool = True, **settings: Any) -> None:
        super().__init__(rules.FedBuff(size, weighted=weighted), **settings)


class AsyncFedAvg(ServerStrategy):
    """`trainwright.federated.AsyncFedAvg` on Flower: aggregate at each reply.

    >>> AsyncFedAvg(server_lr=0.5).rule.is_due(1, 3)
    True
    """

    def __init__(self, *, weighted: bool = True, **settings: Any) -> None:
        super().__init__(rules.AsyncFedAvg(weighted=weighted), **settings)


class FedAvg(ServerStrategy):
    """`trainwright.federated.FedAvg` on Flower: rounds, with the refusals, the saved state and the journal of the others.

    >>> FedAvg(0.5).rule.is_synchronous
    True
    """

    def __init__(self, fraction: float = 1.0, *, seed: int = 0, **settings: Any) -> None:
        super().__init__(rules.FedAvg(fraction, seed), **settings)


class FedSpeed(ServerStrategy):
    """FedSpeed on Flower: rounds, and the sum of the duals at the server; clients train with `method=FedSpeed(…)`.

    Their duals are in their nodes' `Context`.

    >>> FedSpeed(0.1).rule.takes_server_lr
    False
    """

    def __init__(self, fraction: float = 1.0, *, seed: int = 0, **settings: Any) -> None:
        super().__init__(FedSpeedAverage(fraction, seed), **settings)


__all__ = ["AsyncFedAvg", "FedAvg", "FedBuff", "FedFix", "FedSpeed", "Sent", "ServerStrategy"]
