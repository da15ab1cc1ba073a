"""`StrategyRecord`: what a strategy keeps, sends and assumes, stated once beside its class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StrategyRecord:
    """A strategy's class and what it declares; P is the bytes of one copy of the model's arrays.

    `server_state` and `client_state` are kept between messages, in one place each, the model's own copy at the server
    and its sums in float64 included; `up` and `down` are what one piece of a client's work sends and receives.
    """

    name: str
    cls: type
    summary: str
    server_state: str
    client_state: str
    up: str
    down: str
    assumes: str
    paper: str
    gradients: str = "1"
    """Gradients that a local step takes."""
    departs: str = ""
    """Where it departs from the paper."""

    def row(self) -> dict[str, str]:
        """Return the row of the table that lists the strategies."""
        return {
            "name": self.name,
            "what it does": self.summary,
            "server keeps": self.server_state,
            "client keeps": self.client_state,
            "up": self.up,
            "down": self.down,
            "gradients a step": self.gradients,
            "assumes": self.assumes,
            "paper": self.paper,
        }
