"""`client_app`: a `ClientApp` around a client's work, its state in the node's `Context`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from ...artifacts import check_range
from ..clock import ClientUpdate
from .content import (
    ARRAYS,
    CONFIG,
    METRICS,
    arrays_of,
    config_record,
    keep_state,
    metrics_of,
    reply_with_change,
    state_of,
)

MakeUpdate = Callable[[Context], ClientUpdate]
Describe = Callable[[Context], Mapping[str, Any]]


def client_app(
    make_update: MakeUpdate, describe: Describe | None = None, *, mods: list[Any] | None = None
) -> ClientApp:
    """Return a Flower `ClientApp` whose nodes do the work that `make_update(context)` returns.

    make_update: from a node's `Context` (its `node_config["partition-id"]`, say) to `update(state, arrays, config) ->
    (delta, state)`: a `LocalTraining`, an `FZooSClient`, a function. It is called for each message, so let it keep what is
    expensive (`functools.cache`). describe: from a `Context` to what the server should know before any work is done:
    `num-examples` (the importance), `predicted-s` (seconds of a piece of work, `predicted_work_s(plan, …)`), and
    `name`, under which the server speaks of the client; without, its partition or node id. mods: Flower's, such as its
    client-side differential privacy.

    What is returned by the work goes back as the *change*; the state stays in the node's `Context`.

    >>> app = client_app(lambda context: lambda state, arrays, config: ({"w": 1 - arrays["w"]}, state))
    >>> type(app).__name__
    'ClientApp'
    """
    check_range(
        "client_app", make_update=(make_update, "a function from a Context to a client's work", callable),
        describe=(describe, "a function from a Context, or None", lambda value: value is None or callable(value)),
    )  # fmt: skip
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return message_update(make_update(context), message, context)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        found = {"name": name_of(context), **(describe(context) if describe is not None else {})}
        numbers = {key: value for key, value in found.items() if not isinstance(value, str)}
        text = {key: value for key, value in found.items() if isinstance(value, str)}
        return Message(RecordDict({METRICS: MetricRecord(numbers), CONFIG: config_record(text)}), reply_to=message)

    return app


def name_of(context: Context) -> str:
    """Return how a server is to call a node: by its partition where it has one."""
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def message_update(update: ClientUpdate, message: Message, context: Context) -> Message:
    """Do the work that a server's message asks for and return the reply, for a `ClientApp` of your own."""
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    arrays = arrays_of(message.content.array_records[ARRAYS])
    delta, state = update(state_of(context.state), arrays, config)
    keep_state(context.state, state)
    return reply_with_change(message, delta, int(config.get("version", 0)), metrics_of(state))
