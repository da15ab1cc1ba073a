"""FZooS: federated minimisation from function values alone, of min_x Σ p_i f_i(x) with d up to a few thousand.

Each client reuses all its past queries through a Gaussian process (`surrogate`), and tells the others what it knows by M numbers,
the weights of random features, with which everybody corrects its drift anywhere. A round is two `FedAvg` rounds of the same
`Server` that trains models:

    step   x^r, w̄ to the clients; T local steps along ∇μ_i(x) + γ_t (∇φ(x)·w̄ - ∇φ(x)·w_i); x^{r+1} = x^r - η Σ p_i (x^r - x_i)
    fit    x^{r+1} to the clients; queries around it, w_i anew;                             w̄ = Σ p_i w_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..artifacts import UserError, check_range
from .arrays import Arrays
from .checks import positive, whole
from .clock import ClientUpdate, State
from .record import StrategyRecord
from .rules import FedAvg
from .server import Limits, Server
from .surrogate import GaussianProcess, RandomFeatures, default_length_scale, shared_features

Fun = Callable[[np.ndarray], float]
STEP, FIT = "step", "fit"


@dataclass(frozen=True)
class FZooSSettings:
    """What server and clients of a run agree on; travels in the messages' config.

    num_steps: T, local steps a round. optimizer: `adam`, whose steps are of `lr` in each coordinate of x whatever the values'
    scale, or `sgd`, whose steps shrink with the gradient. correction: γ_t, a number, or 0 for none; `decay`: γ_t / t, as
    the authors' code. num_features: M. length_scale: ℓ; 0: 0.63 √d `spread`. spread: over what distance, in one coordinate, the
    function varies. radius: of the box around x in which a step's queries are drawn. num_candidates, num_queries: of a local
    step; num_fit_candidates, num_fit_queries: of a fit. nearest, nearest_fit: how many of the nearest queries the process
    and the features are fitted to. noise: σ², in units of the values' variance. num_initial: queries around the start.
    seed: of the features.
    """

    num_steps: int = 10
    optimizer: str = "adam"
    lr: float = 0.01
    correction: float = 1.0
    decay: bool = False
    num_features: int = 1000
    length_scale: float = 0.0
    spread: float = 1.0
    radius: float = 0.01
    num_candidates: int = 100
    num_queries: int = 5
    num_fit_candidates: int = 200
    num_fit_queries: int = 50
    nearest: int = 150
    nearest_fit: int = 500
    noise: float = 1e-6
    num_initial: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            "num_steps",
            "num_features",
            "num_candidates",
            "num_fit_candidates",
            "nearest",
            "nearest_fit",
            "num_initial",
        )
        check_range(
            "FZooSSettings",
            **{name: (getattr(self, name), "whole, of at least 1", whole()) for name in counts},
            **{name: (getattr(self, name), "above 0 and finite", positive) for name in ("lr", "spread", "radius", "noise")},
            seed=(self.seed, "whole, of at least 0", whole(0)),
            optimizer=(self.optimizer, "adam or sgd", lambda value: value in ("adam", "sgd")),
            correction=(self.correction, "of at least 0", lambda value: value >= 0),
            length_scale=(self.length_scale, "of at least 0", lambda value: value >= 0),
            num_queries=(self.num_queries, "from 0 to num_candidates", lambda value: 0 <= value <= self.num_candidates),
            num_fit_queries=(
                self.num_fit_queries, "from 0 to num_fit_candidates", lambda value: 0 <= value <= self.num_fit_candidates
            ),
        )  # fmt: skip

    def scale_for(self, dim: int) -> float:
        """Return ℓ for points of `dim` coordinates."""
        return self.length_scale or default_length_scale(dim, self.spread)

    def features(self, dim: int, digest: str = "") -> RandomFeatures:
        """Return the run's random features; `UserError` where they are not those of the hash."""
        return shared_features(dim, self.num_features, self.scale_for(dim), self.seed, digest)


class FZooSClient:
    """A client's half of FZooS: `update(state, arrays, config) -> (delta, state)`, by `config["phase"]` a step or a fit.

    fun: x [d] → value, the client's f_i. seed: of its candidates. bounds: (low, high), where queries are kept. The state keeps
    all queries (`points` [q, d], `values` [q]) and the last weights; nothing but x_i and w_i leaves the client. Values that are
    not finite count as queries and are not kept.
    """

    def __init__(self, fun: Fun, seed: int = 0, bounds: tuple[Any, Any] | None = None) -> None:
        check_range(
            "FZooSClient", fun=(fun, "a function from x [d] to a number", callable), seed=(seed, "whole, of at least 0", whole(0)),
            bounds=(bounds, "(low, high) with low < high, or None", lambda pair: pair is None or bool(np.all(np.less(*pair)))),
        )  # fmt: skip
        self.fun, self.seed, self.bounds = fun, seed, bounds

    def __call__(self, state: State, arrays: Arrays, config: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], State]:
        """Return the change to `x` (a step) or `w` (a fit), and the state with all queries so far."""
        settings = settings_of(config)
        x = np.array(arrays["x"], np.float64)
        number = int(state.get("works", 0))
        run = _Local(
            self, settings, settings.features(len(x), str(config.get("digest", ""))), state, [self.seed, number]
        )
        if config["phase"] == STEP:
            delta = {"x": run.steps(x, np.asarray(arrays["w"])) - x}
        else:
            delta = {"w": run.fit(x) - arrays["w"]}
        return delta, run.state(number + 1)


class _Local:
    """One piece of a client's work."""

    def __init__(
        self, client: FZooSClient, settings: FZooSSettings, features: RandomFeatures, state: State, seed: list[int]
    ) -> None:
        self.client, self.settings, self.features = client, settings, features
        self.rng = np.random.default_rng(seed)
        self.points = list(state.get("points", ()))
        self.values = list(state.get("values", ()))
        self.num_queries = int(state.get("num_queries", 0))
        self.weights = state.get("weights")
        self.scale = 0.0

    def state(self, number: int) -> State:
        kept: State = {"points": np.array(self.points), "values": np.array(self.values), "works": number,
                       "num_queries": self.num_queries}  # fmt: skip
        if self.weights is not None:
            kept["weights"] = self.weights
        return kept | {"metric.num_queries": float(self.num_queries), "metric.value": float(self.values[-1])}

    def steps(self, x: np.ndarray, shared: np.ndarray) -> np.ndarray:
        self._begin(x)
        adam = _Adam(self.settings.lr, len(x)) if self.settings.optimizer == "adam" else None
        for t in range(1, self.settings.num_steps + 1):
            self.query(x)
            self._query_around(x, self.settings.radius, self.settings.num_candidates, self.settings.num_queries)
            direction = self._direction(x, shared, t)
            x = self._inside(adam.step(x, direction) if adam else x - self.settings.lr * direction)
        return x

    def fit(self, x: np.ndarray) -> np.ndarray:
        self._begin(x)
        near = np.abs(np.array(self.points[-self.settings.nearest :]) - x).mean() / 2
        self.query(x)
        self._query_around(
            x, max(near, self.settings.radius), self.settings.num_fit_candidates, self.settings.num_fit_queries
        )
        points, values = self._nearest(x, self.settings.nearest_fit)
        self.weights = self.features.weights(points, values, self.settings.noise)
        return self.weights

    def query(self, x: np.ndarray) -> None:
        self.num_queries += 1
        value = float(self.client.fun(np.array(x)))
        if math.isfinite(value):
            self.points.append(np.array(x))
            self.values.append(value)

    def _begin(self, x: np.ndarray) -> None:
        self.scale = self.settings.scale_for(len(x))
        if not self.points:
            self.query(x)
            for point in self._drawn(x, self.settings.spread / 10, self.settings.num_initial - 1):
                self.query(point)
        if not self.points:
            raise UserError(
                "a function with finite values is needed; all of the first were not; start from another point"
            )

    def _direction(self, x: np.ndarray, shared: np.ndarray, t: int) -> np.ndarray:
        own = GaussianProcess(*self._nearest(x, self.settings.nearest), self.scale, self.settings.noise).gradient(x)
        gamma = self.settings.correction / (t if self.settings.decay else 1)
        if not gamma or self.weights is None:
            return own
        return own + gamma * self.features.gradient(shared - self.weights, x)

    def _query_around(self, x: np.ndarray, radius: float, num_candidates: int, num_queries: int) -> None:
        """Query, of random candidates in a box, those where the gradient is least known."""
        if not num_queries:
            return
        candidates = self._drawn(x, radius, num_candidates)
        process = GaussianProcess(*self._nearest(x, self.settings.nearest), self.scale, self.settings.noise)
        for place in np.argsort(-process.gradient_variance(candidates), kind="stable")[:num_queries]:
            self.query(candidates[place])

    def _drawn(self, x: np.ndarray, radius: float, count: int) -> np.ndarray:
        return self._inside(x + self.rng.uniform(-radius, radius, (count, len(x))))

    def _inside(self, points: np.ndarray) -> np.ndarray:
        return points if self.client.bounds is None else np.clip(points, *self.client.bounds)

    def _nearest(self, x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        points, values = np.array(self.points), np.array(self.values)
        if len(points) > count:
            chosen = np.sort(np.argsort(((points - x) ** 2).sum(1), kind="stable")[:count])
            points, values = points[chosen], values[chosen]
        return points, values


class _Adam:
    def __init__(self, lr: float, dim: int, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.lr, self.betas, self.first, self.second, self.count = lr, betas, np.zeros(dim), np.zeros(dim), 0

    def step(self, x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.count += 1
        one, two = self.betas
        self.first = one * self.first + (1 - one) * gradient
        self.second = two * self.second + (1 - two) * gradient**2
        scale = np.sqrt(self.second / (1 - two**self.count)) + 1e-8
        return x - self.lr * (self.first / (1 - one**self.count)) / scale


class FZooS(FedAvg):
    """The server's half of FZooS: two FedAvg servers, of x and of w̄, that take turns; `FZooSClient` is the client's.

    Not for functions with cheap gradients, nor for d beyond a few thousand: time O(q³) a local step and M·d numbers at every
    client (drawn from the seed, not sent). Values are taken as they are: noisy functions want a larger `noise`.

    Source: Shu et al. 2023, Federated Zeroth-Order Optimization using Trajectory-Informed Surrogate Gradients (arXiv:2308.04077).
    """


@dataclass
class FZooSRun:
    """The server of a run: `x`, `w`, and what the next messages carry; whoever drives it alternates `STEP` and `FIT`.

    >>> settings = FZooSSettings(num_features=100, optimizer="sgd", lr=0.1, radius=0.3, num_candidates=8, num_fit_candidates=8,
    ...                          num_fit_queries=8, num_steps=5, spread=2.0)
    >>> run = FZooSRun.begin([3.0, -2.0], settings)
    >>> clients = {name: FZooSClient(lambda x, c=c: float(((x - c) ** 2).sum())) for name, c in (("a", 0.0), ("b", 2.0))}
    >>> for _ in range(8):
    ...     _ = run.round(clients)
    >>> run.x.round(1)
    array([1., 1.])
    """

    settings: FZooSSettings
    steps: Server
    fits: Server
    digest: str
    states: dict[str, State] = field(default_factory=dict)
    """The clients' states, of a run in one process (`round`)."""

    @classmethod
    def begin(
        cls, x0: Any, settings: FZooSSettings | None = None, *, server_lr: float = 1.0, fraction: float = 1.0,
        limits: Limits | None = None,
    ) -> FZooSRun:  # fmt: skip
        """Return a run from x0 [d]. server_lr: η. fraction, limits: as for `FedAvg` and `Server`."""
        check_range(
            "FZooSRun.begin", x0=(x0, "one vector [d] of finite numbers", _is_vector),
            settings=(settings, "FZooSSettings(…), or None", lambda value: value is None or isinstance(value, FZooSSettings)),
        )  # fmt: skip
        settings, x = settings or FZooSSettings(), np.array(x0, np.float64)
        digest = RandomFeatures(len(x), settings.num_features, settings.scale_for(len(x)), settings.seed).digest
        steps = Server({"x": x}, FZooS(fraction=fraction), server_lr=server_lr, limits=limits)
        fits = Server({"w": np.zeros(settings.num_features)}, FZooS(fraction=fraction), limits=limits)
        return cls(settings, steps, fits, digest)

    @property
    def x(self) -> np.ndarray:
        """The present point."""
        return self.steps.arrays["x"]

    def enroll(self, client: str, importance: float = 1.0) -> None:
        """Add a client, with its p_i."""
        self.steps.enroll(client, importance)
        self.fits.enroll(client, importance)

    def server(self, phase: str) -> Server:
        """Return the server that asks and aggregates in a phase."""
        return self.steps if phase == STEP else self.fits

    def sent(self, phase: str) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays and the config of the messages of a phase; the version is the server's to add."""
        return {**self.steps.arrays, **self.fits.arrays}, config_of(self.settings, phase, self.digest)

    def round(self, clients: Mapping[str, ClientUpdate]) -> np.ndarray:
        """Run a round with clients of this process, one after the other; return the new x."""
        for name in clients:
            if name not in self.steps.clients.known:
                self.enroll(name)
        for phase in (STEP, FIT):
            server = self.server(phase)
            arrays, config = self.sent(phase)
            for sent in [server.send(name) for name in server.ready()]:
                update, state = clients[sent.client], self.states.get(sent.client, {})
                delta, self.states[sent.client] = update(state, arrays, config | sent.config)
                server.receive(delta, sent.version, sent.client)
        return self.x

    def rounds(self, clients: Mapping[str, ClientUpdate], count: int) -> Iterator[np.ndarray]:
        """Yield x after each of `count` rounds."""
        return (self.round(clients) for _ in range(count))


def _is_vector(x0: Any) -> bool:
    x = np.array(x0, np.float64)
    return x.ndim == 1 and x.size > 0 and bool(np.isfinite(x).all())


def config_of(settings: FZooSSettings, phase: str, digest: str) -> dict[str, Any]:
    """Return what the messages of a phase say beside the arrays.

    >>> config_of(FZooSSettings(), STEP, "")["fzoos.num_steps"]
    10
    """
    return {f"fzoos.{name}": value for name, value in vars(settings).items()} | {"phase": phase, "digest": digest}


def settings_of(config: Mapping[str, Any]) -> FZooSSettings:
    """Return the settings that a message's config states."""
    named = {key.removeprefix("fzoos."): value for key, value in config.items() if key.startswith("fzoos.")}
    return FZooSSettings(**named)


RECORDS = (
    StrategyRecord(
        name="fzoos", cls=FZooS, summary="from function values alone, by shared surrogates", server_state="8 (d + M) B",
        client_state="8 (q (d + 1) + M) B", up="8 (d + M) B a round", down="16 (d + M) B a round", gradients="0",
        assumes="d up to a few thousand; clients that keep their queries; one release of numpy",
        paper="Shu et al. 2023, arXiv:2308.04077",
        departs="analytic gradients, one kernel throughout, ℓ grows with √d, σ² > 0, constant γ; no step back where F rises",
    ),
)  # fmt: skip
