"""`StreamPlan`: which blocks of a model rest off the device while MeZO trains it, and what a step then takes."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from .plan import ModelRef
from .record import Artifact, Record, UserError


class StreamPredicted(Record):
    """The seconds of a streamed step: two forwards with their directions, beside which blocks come in and go out."""

    step_s: float
    """The seconds in the run's own order of reads, updates and writes; at least the longest of the three below."""
    compute_s: float
    read_s: float
    written_s: float
    read_bytes: int
    written_bytes: int
    peak_bytes: int
    """The device's peak, simulated on fakes: three blocks, what stays, and the activations of two forwards."""


class StreamPlan(Artifact):
    """The answer of `trainwright plan MODEL --optimizer mezo --stream …`; `train --stream` follows it.

    Blocks that are not named, and all that is in no block, stay on the device.
    """

    format_version: Literal[1] = 1
    kind: Literal["stream"] = "stream"
    model: ModelRef
    fingerprint: str
    """A digest of the names, shapes and types of the parameters."""
    hardware: str
    place: Literal["host", "disk"]
    storage: str | None = None
    """The type at rest; None: the model's own."""
    blocks: tuple[str, ...] = Field(min_length=1)
    """The blocks that rest there."""
    num_blocks: int
    """The number of all blocks of the model."""
    block_bytes: int
    """The bytes at rest of the largest that does."""
    budget_bytes: int | None
    predicted: StreamPredicted

    def table(self) -> str:
        """Return the decision and the prediction for the terminal."""
        from ..reports.streaming import stream_table

        return stream_table(self)

    @classmethod
    def parse(cls, text: str, where: str = "the text") -> StreamPlan:
        """Read the plan from JSON; `UserError` where it is none."""
        try:
            data: Any = json.loads(text)
            return cls.model_validate(data)
        except json.JSONDecodeError as error:
            raise UserError(
                f"a plan in JSON is needed; {where} is not JSON (line {error.lineno}: {error.msg})"
            ) from None
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(str(part) for part in problem["loc"])
            raise UserError(
                f"a plan of streamed blocks is needed beside --stream; {where} is none: {place}: {problem['msg']}; make it with "
                "plan --optimizer mezo --stream host"
            ) from None
