"""FZooS for Flower's `ServerApp`: two exchanges a round, of points and of the features' weights."""

from __future__ import annotations

import dataclasses
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ..fzoos import FIT, STEP, FZooSRun, FZooSSettings
from ..server import Limits
from .content import array_record, arrays_of
from .exchange import Exchange, Timing
from .strategies import EvaluateFn, ServerStrategy


class FZooS(ServerStrategy):
    """FZooS on Flower: `initial_arrays` holds one vector `x`; nodes work with an `FZooSClient`, their queries in their `Context`.

    settings: of the run. server_lr: η of x. The rest is as for `ServerStrategy`; there is no saved state.

    >>> FZooS(FZooSSettings(num_features=100)).settings.num_features
    100
    """

    def __init__(
        self, settings: FZooSSettings | None = None, *, server_lr: float = 1.0, fraction: float = 1.0,
        limits: Limits | None = None, min_available_nodes: int = 2, weighted_by_key: str = "num-examples",
        timing: Timing | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.run = settings or FZooSSettings(), None
        self._begin: dict[str, Any] = {"server_lr": server_lr, "fraction": fraction}
        probe = FZooSRun.begin(np.zeros(1), self.settings, fraction=fraction)
        super().__init__(
            probe.steps.rule, limits=limits, min_available_nodes=min_available_nodes, weighted_by_key=weighted_by_key,
            timing=timing,
        )  # fmt: skip

    run: FZooSRun | None

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:  # fmt: skip
        """Run `num_rounds` rounds; return the point as `x`, and of each round the mean value that the clients saw."""
        limits = dataclasses.replace(self.limits, ttl_s=min(self.limits.ttl_s, timeout))
        run = self.run = FZooSRun.begin(arrays_of(initial_arrays)["x"], self.settings, limits=limits, **self._begin)
        self.server = run.steps
        exchange = Exchange(grid, [run.steps, run.fits], self.timing, limits.ttl_s, self.weighted_by_key)
        result, self._held = Result(), {}
        while len(exchange.names) < self.min_available_nodes:
            self._poll(exchange, run, STEP)
        for number in range(1, num_rounds + 1):
            self._held = {}
            for phase in (STEP, FIT):
                self._phase(exchange, run, phase)
            result.train_metrics_clientapp[number] = MetricRecord(
                {"value": float(np.mean([each["value"] for each in self._held.values()] or [np.nan]))}
            )
            if evaluate_fn is not None and (found := evaluate_fn(number, array_record({"x": run.x}))) is not None:
                result.evaluate_metrics_serverapp[number] = found
            log(INFO, "round %d: %s", number, result.train_metrics_clientapp[number])
        result.arrays = array_record({"x": run.x})
        return result

    def _phase(self, exchange: Exchange, run: FZooSRun, phase: str) -> None:
        server = run.server(phase)
        version = server.version
        while server.version == version:
            self._poll(exchange, run, phase, send=True)

    def _poll(self, exchange: Exchange, run: FZooSRun, phase: str, send: bool = False) -> None:
        server = run.server(phase)
        exchange.look_for_nodes()
        if send:
            arrays, config = run.sent(phase)
            exchange.send(server, lambda sent: (arrays, config | sent.config))
        took = exchange.take(server)
        self._metrics(took)
        if not took.aggregated:
            self.timing.sleep(self.timing.poll_s)
