"""The price of an hour of hardware, from a file of the user's, JSON or TOML. None is shipped."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from .artifacts import Cluster, Record, UserError

_EXAMPLE = '{"currency": "EUR", "device_hour": {"a100": 1.5}, "hour": {"2x8xh100": 40}}'
_Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Prices(Record):
    """Prices of an hour, of one device or of the whole.

    >>> prices = Prices(device_hour={"a100": 1.5}, hour={"8xh100": 20.0})
    >>> from trainwright.hardware import resolve
    >>> prices.of(resolve("8xa100")), prices.of(resolve("8xh100"))
    (12.0, 20.0)
    """

    currency: str = Field(default="USD", min_length=1, max_length=8)
    device_hour: dict[str, _Price] = Field(default={})
    """The price of one device for an hour, by its name: `a100`."""
    hour: dict[str, _Price] = Field(default={})
    """The price of the whole for an hour, by the name of the hardware: `8xh100`; it goes before a device's."""

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Prices) -> Prices:
        """Return the prices of a file, `.toml` or JSON, or of a mapping; `UserError` where they are none."""
        if isinstance(source, Prices):
            return source
        where = "the mapping" if isinstance(source, Mapping) else os.fspath(source)
        data = source if isinstance(source, Mapping) else _parsed(Path(source))
        try:
            found = cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the document"
            raise UserError(
                f"prices are needed, such as {_EXAMPLE}; {where} has none: {place}: {first['msg']}"
            ) from None
        if not found.device_hour and not found.hour:
            raise UserError(f"a price is needed, such as {_EXAMPLE}; {where} has none; add device_hour or hour")
        return found

    def of(self, cluster: Cluster, text: str = "") -> float:
        """Return the price of an hour of all devices of `cluster`, asked for as `text`; `UserError` where there is none."""
        for name in (text, cluster.name):
            if name in self.hour:
                return self.hour[name]
        if cluster.device.name in self.device_hour:
            return cluster.num_devices * self.device_hour[cluster.device.name]
        wanted = f"{cluster.name} (hour), or of {cluster.device.name} (device_hour),"
        near = difflib.get_close_matches(cluster.device.name, self.device_hour, n=1)
        hint = f"did you mean {near[0]}?" if near else "add one, or leave that hardware out"
        known = ", ".join([*self.hour, *self.device_hour])
        raise UserError(f"a price of {wanted} is needed; there are those of {known}; {hint}")

    def check(self, clusters: Sequence[tuple[str, Cluster]]) -> None:
        """Raise `UserError` for the first hardware without a price, before anything is planned."""
        for text, cluster in clusters:
            self.of(cluster, text)


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf8")
        return tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"a file of prices is needed; {path} cannot be read ({error}); check the path") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise UserError(f"prices in {kind} are needed, such as {_EXAMPLE}; {path} cannot be read: {error}") from None
