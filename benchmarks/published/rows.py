"""The published rows: what was run, and which of its figures say what.

    allocated   peak bytes of tensors: max_memory_allocated, active_bytes
    reserved    peak bytes that the caching allocator holds; of nvidia-smi's, less CUDA's context where the source states it

`rows.json` holds facts and figures of public repositories, each with its source; nothing in it was measured here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "rows.json"
UNITS = {"GiB": 2**30, "GB": 10**9, "MB": 10**6}
SOURCES = {
    "titan": "torchtitan", "foundry": "llm-foundry", "timm": "timm", "lambda": "lambda", "dle": "nvidia-dle",
    "litgpt": "litgpt", "torchtune": "torchtune", "hf-bert": "transformers-bert", "hf-pythia": "transformers-pythia",
    "hf-v100": "transformers-v100", "fsdpqlora": "fsdp_qlora", "tutorial": "pytorch-tutorials",
}  # fmt: skip
"""By the beginning of a row's id."""
LAPTOP = "laptop"


@dataclass(frozen=True)
class Row:
    """One published run; `data` is its entry in rows.json."""

    data: dict[str, Any]

    @property
    def id(self) -> str:
        return self.data["id"]

    @property
    def source(self) -> str:
        return next(name for start, name in SOURCES.items() if self.id.startswith(start))

    @property
    def num_gpus(self) -> int:
        return self.data["gpu"]["count"]

    @property
    def setting(self) -> str:
        """Return the setting that decides the prediction, as a text: rows of one setting are predicted once."""
        keys = ("model", "dtype_scheme", "seq_len", "image_size", "micro_batch_per_gpu", "accumulation", "compile",
                "activation_checkpointing", "attention")  # fmt: skip
        detail = str(self.data["parallelism"]["detail"])
        told = {key: self.data.get(key) for key in keys}
        told |= {
            "gpu": self.data["gpu"]["type"], "mesh": self.data["parallelism"]["mesh"], "of": self.source,
            "reshard": detail if detail.startswith(("no reshard", "reshard after forward everywhere")) else "",
            "expandable": "expandable" in str(self.data["memory"]), "recent": self.data["source"]["date"] >= "2024-06",
        }  # fmt: skip
        named = self.source in ("timm", "transformers-v100", "litgpt") or "chunked" in self.id
        return json.dumps([told, self.id if named else ""], sort_keys=True)

    @property
    def step_s(self) -> float | None:
        return (self.data["step_s"] or {}).get("value")

    @property
    def allocated_bytes(self) -> float | None:
        return self._bytes(lambda text: "allocated" in text or "active" in text)

    @property
    def reserved_bytes(self) -> float | None:
        return self._bytes(lambda text: "reserved" in text)

    @property
    def is_time_comparable(self) -> bool:
        """A laptop's clocks are unknown: its times serve for ratios alone."""
        return self.step_s is not None and LAPTOP not in self.data["gpu"]["type"]

    def _bytes(self, is_meant: Any) -> float | None:
        memory = self.data["memory"]
        if memory is None:
            return None
        for found in (memory, *memory.get("also", ())):
            if is_meant(found["measures"]) and "before" not in found["measures"]:
                return found["value"] * _unit(found)
        return None


def load(file: Path = FILE) -> list[Row]:
    """Return all rows, in the file's order."""
    return [Row(entry) for entry in json.loads(file.read_text(encoding="utf8"))["rows"]]


def _unit(figure: dict[str, Any]) -> float:
    """Units are binary for nvidia-smi's MB, which are MiB."""
    is_smi = "nvidia-smi" in figure["measures"] or "context" in figure["measures"]
    return 2**20 if is_smi and figure["unit"] == "MB" else UNITS[figure["unit"]]
