"""Elastic averaging SGD: workers and a common centre are pulled towards each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..artifacts import check_range
from .method import Method
from .record import Message, StateVector, SyncRecord, all_reduced, every
from .replica import Worker
from .requests import Steps


class EASGD(Method):
    r"""Pull each worker towards a centre, and the centre towards the mean of the workers.

        x_i ← the optimizer's step with worker i's own gradient
        x_i, z ← x_i − α (x_i − z),  z + β ((1/n) Σ_j x_j − z)          every `period` steps

    period: steps between exchanges. pull: α, by default β/n, as in the paper. centre_pull: β. Workers may settle in different
    basins, with the centre in neither; `lsgd` follows the best of them instead. `method.centre` is the model to evaluate.

    Source: Zhang, Choromanska & LeCun 2015, Deep learning with Elastic Averaging SGD (arXiv:1412.6651), synchronous form.
    """

    bears_changes = True

    def __init__(
        self, worker: Worker, *, period: int = 8, pull: float | None = None, centre_pull: float = 0.43
    ) -> None:
        super().__init__(worker)
        check_range(
            "easgd",
            period=(period, "of at least 1 step", lambda value: value >= 1),
            pull=(pull, "in (0, 1], or None", lambda value: value is None or 0 < value <= 1),
            centre_pull=(centre_pull, "in (0, 1]", lambda value: 0 < value <= 1),
        )
        self.period, self.centre_pull = int(period), centre_pull
        self.pull = centre_pull / worker.size if pull is None else pull

    @property
    def centre(self) -> Tensor:
        """Return the centre, a vector of all parameters."""
        centre = self.state["centre"]
        assert isinstance(centre, Tensor)
        return centre

    def start(self) -> Steps[None]:
        self.state["centre"] = self.replica.read()
        yield from ()

    def step(self, loss: Any, num_samples: int) -> Steps[None]:
        self.replica.update()
        if self.num_steps % self.period == 0:
            x, centre = self.replica.read(), self.centre
            mean = yield from self.mean(x)
            self.replica.write(x - self.pull * (x - centre))
            self.state["centre"] = centre + self.centre_pull * (mean - centre)

    def finish(self) -> Steps[None]:
        """Set all workers' parameters to the centre."""
        self.replica.write(self.centre)
        yield from ()


RECORD = SyncRecord(
    "easgd",
    EASGD,
    "workers and a centre pull at each other",
    (Message("parameters", "all-reduce", all_reduced, every(lambda size: size.options["period"]), "2P/H"),),
    promises="another trajectory; other stationary points",
    assumes="workers in one basin",
    states=(StateVector("centre"),),
    paper="Zhang et al. 2015, arXiv:1412.6651",
    departs="the centre is a copy on each worker, kept equal by an all-reduce, in place of a server",
)
