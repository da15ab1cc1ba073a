"""Arrays, states and descriptions as Flower's records and back; arrays travel as NumPy's own format, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..arrays import Arrays
from ..clock import State
from ..local import METRIC

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
SENDS, CHANGE = "sends", "change"
"""In a reply's config: that its arrays are the change, not the model."""
_STATE_ARRAYS, _STATE_VALUES = "trainwright.arrays", "trainwright.values"


def array_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower sends them.

    >>> arrays_of(array_record({"w": np.ones(2)}))
    {'w': array([1., 1.])}
    """
    return ArrayRecord({name: Array(np.ascontiguousarray(value)) for name, value in arrays.items()})


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a record."""
    return {name: value.numpy() for name, value in record.items()}


def config_record(values: Mapping[str, Any]) -> ConfigRecord:
    """Return numbers, text and booleans as Flower sends them."""
    return ConfigRecord(dict(values))


def only(content: RecordDict, kind: str) -> Any:
    """Return a message's one record of a kind (`array`, `config`, `metric`), `None` where it has none or several."""
    records = list(getattr(content, f"{kind}_records").values())
    return records[0] if len(records) == 1 else None


def state_of(record: RecordDict) -> State:
    """Return the client's state that a node's `Context` holds."""
    state: State = {}
    if _STATE_ARRAYS in record:
        state |= arrays_of(record.array_records[_STATE_ARRAYS])
    if _STATE_VALUES in record:
        state |= dict(record.config_records[_STATE_VALUES])
    return state


def keep_state(record: RecordDict, state: State) -> None:
    """Write a client's state into a node's `Context`.

    >>> held = RecordDict()
    >>> keep_state(held, {"works": 2, "dual.w": np.ones(1)})
    >>> state_of(held)
    {'dual.w': array([1.]), 'works': 2}
    """
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    record[_STATE_ARRAYS] = array_record(arrays)
    record[_STATE_VALUES] = config_record({name: value for name, value in state.items() if name not in arrays})


def metrics_of(state: State) -> dict[str, float]:
    """Return the numbers of a state that are reported."""
    return {name.removeprefix(METRIC): float(value) for name, value in state.items() if name.startswith(METRIC)}


def reply_with_change(message: Message, delta: Arrays, version: int, metrics: Mapping[str, float]) -> Message:
    """Return the reply to `message` that carries a change."""
    content = RecordDict(
        {
            ARRAYS: array_record(delta),
            METRICS: MetricRecord(dict(metrics)),
            CONFIG: config_record({SENDS: CHANGE, "version": version}),
        }
    )
    return Message(content, reply_to=message)
