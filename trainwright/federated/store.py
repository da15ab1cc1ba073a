"""A server's state in one file: arrays as safetensors, everything else as JSON in that file's header. Nothing is unpickled.

One file, replaced in one step, so that model and bookkeeping are always of the same aggregation.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import UserError
from .arrays import Sum
from .rules import FedFix, Rule
from .server import Limits, Outstanding, Server, Traffic

FORMAT_VERSION = 1
_KEY = "trainwright.federated"
_MODEL, _MEMORY = "model/", "memory/"

PathLike = str | os.PathLike[str]


def save_server(server: Server, path: PathLike, extra: dict[str, Any] | None = None) -> None:
    """Write the server's state to `path`, so that a reader never sees half of it; call it right after an aggregation.

    Changes that came since the last aggregation are not in it; their senders are, as outstanding. extra: JSON of the caller's
    own (where its clock stood, ids of messages), which `load_extra` returns.

    >>> import tempfile
    >>> from trainwright.federated import FedAvg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_server(Server({"w": np.ones(2)}, FedAvg()), folder + "/server.safetensors")
    ...     load_server(folder + "/server.safetensors", FedAvg()).arrays
    {'w': array([1., 1.])}
    """
    from safetensors.numpy import save

    arrays = {_MODEL + name: value for name, value in server.arrays.items()}
    for part, total in server.memory.items():
        arrays |= {f"{_MEMORY}{part}/{name}": value for name, value in total.values.items()}
    held = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    _replace(Path(path), save(held, metadata={_KEY: json.dumps(_header(server, extra or {}))}))


def load_server(path: PathLike, rule: Rule, **options: Any) -> Server:
    """Return the server that `save_server` wrote, to go on from its last aggregation.

    rule: the one it was made with. options: as for `Server` (`server_lr`, `trust`, `keep_journal`, `limits`). Answers to what
    was outstanding are taken; clients that had delivered since are outstanding still, until their time to live is over.

    Raises `UserError` where the file cannot be read, is of another format, or of another rule.
    """
    header, arrays = _read(path)
    saved_rule = [header["rule"], header["settings"]]
    if isinstance(rule, FedFix) and not rule.is_settled:  # the saved run has chosen its interval
        rule = replace(rule, seconds=header["settings"].get("seconds"))
    if saved_rule != [type(rule).__name__, json.loads(json.dumps(rule.settings))]:
        raise UserError(
            f"the rule that {path} was saved with is needed, {saved_rule[0]} with {saved_rule[1]}; got {rule}; take that one"
        )
    model = {name.removeprefix(_MODEL): value for name, value in arrays.items() if name.startswith(_MODEL)}
    limits = Limits(**{key: value for key, value in header["limits"].items() if value is not None})
    server = Server(model, rule, **{"limits": limits, **options})
    server.clients.restore(header["clients"])
    server.version, server.traffic = header["version"], Traffic(**header["traffic"])
    waiting = header["outstanding"] | header["arrived"]
    server.outstanding = {client: Outstanding(**work) for client, work in waiting.items()}
    server.memory = _memory(arrays, server)
    return server


def load_extra(path: PathLike) -> dict[str, Any]:
    """Return what the caller of `save_server` gave as `extra`."""
    found: dict[str, Any] = _read(path)[0]["extra"]
    return found


def _header(server: Server, extra: dict[str, Any]) -> dict[str, Any]:
    limits = {key: value for key, value in asdict(server.limits).items() if value != float("inf")}
    return {
        "format_version": FORMAT_VERSION,
        "rule": type(server.rule).__name__,
        "settings": server.rule.settings,
        "version": server.version,
        "limits": limits,
        "clients": server.clients.as_json(),
        "outstanding": {client: asdict(work) for client, work in server.outstanding.items()},
        "arrived": {client: asdict(work) for client, work in server.arrived().items()},
        "traffic": asdict(server.traffic),
        "extra": extra,
    }


def _memory(arrays: dict[str, np.ndarray], server: Server) -> dict[str, Sum]:
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, value in arrays.items():
        if name.startswith(_MEMORY):
            part, _, inner = name.removeprefix(_MEMORY).partition("/")
            parts.setdefault(part, {})[inner] = value
    return {part: Sum(server.arrays, values) for part, values in parts.items()}


def _read(path: PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"the saved state of a server is needed; {path} is not one ({error}); check the path") from None
    if header.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"a server's state of format {FORMAT_VERSION} is needed; {path} has {header.get('format_version')}; use the "
            "version of trainwright that wrote it"
        )
    return header, arrays


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"a writable path is needed for the server's state; {path} cannot be written ({error.strerror}); choose another"
        ) from None
