"""The published rows: what was run, and which of its figures say what.

    allocated   peak bytes of tensors: max_memory_allocated, active_bytes
    reserved    peak bytes that the caching allocator holds; of nvidia-smi's, less CUDA's context where the source states it

`rows.json` holds facts and figures of public repositories, each with its source; nothing in it was measured here.
"""

from __future__ import annotations

import itertools
import json
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.torch_internals import private

FILE = Path(__file__).parent / "rows.json"
UNITS = {"GiB": 2**30, "GB": 10**9, "MB": 10**6}
SOURCES = {
    "titan": "torchtitan", "foundry": "llm-foundry", "timm": "timm", "lambda": "lambda", "dle": "nvidia-dle",
    "litgpt": "litgpt", "torchtune": "torchtune", "hf-bert": "transformers-bert", "hf-pythia": "transformers-pythia",
    "hf-v100": "transformers-v100", "fsdpqlora": "fsdp_qlora", "tutorial": "pytorch-tutorials",
    "thunder": "lightning-thunder", "torchao": "torchao", "nanogpt": "nanogpt",
}  # fmt: skip
"""By the beginning of a row's id."""
LAPTOP = "laptop"
LOGITS_LET_GO, DONATED, NEW_KERNELS = "2024-06-12", "2024-12", "2025-08"
"""Since when torchtitan's loop lets go of its logits before the backward (torchtitan#391), compiled backwards write into what was
saved for them (pytorch/pytorch#140113, described on 2024-11-08), and eager nn.RMSNorm is one kernel on GPUs
(pytorch/pytorch#153666) and torchtitan asks for cuDNN's attention first (attention.py; the month recalled)."""
TYPES_ALONE = "2022-03-10"
"""Since when softmax's backward is given its input's type, not the input: torch 1.11, by transformers' pytorch_utils.py."""
FUSED, ENDS_APART = "2025-02-25", "2025-08"
"""Since when torchtitan's AdamW is fused unless asked otherwise (torchtitan#881, described on 2025-02-24), and embedding and
output are gathered by themselves (torchtitan#1094, rebased to be merged on 2025-07-29)."""


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
    def first(self) -> dict[str, float] | None:
        """Return what was predicted first, for a row that had been written down before."""
        return self.data.get("first")

    @property
    def setting(self) -> str:
        """Return the setting that decides the prediction, as a text: rows of one setting are predicted once."""
        keys = ("model", "dtype_scheme", "optimizer", "seq_len", "image_size", "micro_batch_per_gpu", "accumulation", "compile",
                "activation_checkpointing", "attention")  # fmt: skip
        detail = str(self.data["parallelism"]["detail"])
        told = {key: self.data.get(key) for key in keys}
        told |= {
            "gpu": self.data["gpu"]["type"], "mesh": self.data["parallelism"]["mesh"], "of": self.source,
            "chunked": "chunked" in str(self.data["notes"]),
            "reshard": detail if detail.startswith(("no reshard", "reshard after forward everywhere")) else "",
            "expandable": "expandable" in str(self.data["memory"]),
            "since": [self.date >= date for date in (LOGITS_LET_GO, DONATED, FUSED, NEW_KERNELS, ENDS_APART)],
        }  # fmt: skip
        named = self.source in ("timm", "transformers-v100", "litgpt")
        return json.dumps([told, self.id if named else ""], sort_keys=True)

    @property
    def date(self) -> str:
        """Return when the run was measured, as far as the source says, else when it was published."""
        source = self.data["source"]
        measured = re.search(r"measured (\d{4}-\d{2})", source["locator"])
        return measured[1] if measured else source["date"]

    @property
    def document(self) -> tuple[str, ...]:
        """Return the table, log or commit that the row stands in: rows of one were run with one software."""
        source = self.data["source"]
        return tuple(str(source[key]) for key in ("repo", "path", "commit", "date"))

    @property
    def asked(self) -> dict[str, Any]:
        """Return what was asked of the run, thing by thing; the work of one device is one of them."""
        data = self.data
        layout = data["parallelism"]
        per_device = data["global_batch"] / (self.num_gpus * data["accumulation"])
        return {
            "model": data["model"]["name"],
            "dtype": data["dtype_scheme"],
            "optimizer": data["optimizer"],
            "size of an example": (data.get("seq_len"), data.get("image_size")),
            "examples a device": per_device,
            "accumulation": data["accumulation"],
            "layout": (self.num_gpus, layout["kind"], layout["mesh"]),
            "wrapper": layout["detail"]
            if layout["detail"] != "FSDP2"
            else None,  # as of the source's rows without detail
            "loss": "chunked" in str(data["notes"]),
            "recomputation": data["activation_checkpointing"],
            "compilation": data["compile"],
            "attention": data["attention"],
            "GPU": data["gpu"]["type"],
        }

    def as_compiled_then(self) -> AbstractContextManager[Any]:
        """Return the context in which torch compiles as it did when the row was measured."""
        return private.without_donation() if self.date < DONATED else nullcontext()

    @property
    def clip_norm(self) -> float | None:
        """Return the norm to which the run clips its gradients, where the row says so."""
        optimizer = str(self.data["optimizer"])
        return float(optimizer.partition("clip ")[2].split()[0]) if "clip " in optimizer else None

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


@dataclass(frozen=True)
class Pair:
    """Two rows that say what one change of what is asked does to the time of a step."""

    first: Row
    second: Row
    changed: str

    @property
    def published(self) -> float:
        """Return the second's step over the first's."""
        assert self.first.step_s is not None
        assert self.second.step_s is not None
        return self.second.step_s / self.first.step_s


def pairs(rows: list[Row]) -> list[Pair]:
    """Return all pairs of one document of which a single thing that was asked differs: `Row.asked`.

    Rows of two dates differ in their software as well, and rows that differ in several things tell none of them.
    """
    found = []
    for first, second in itertools.combinations(rows, 2):
        if first.document != second.document:
            continue
        changed = [name for name, value in first.asked.items() if value != second.asked[name]]
        if len(changed) == 1 and changed != ["model"]:
            found.append(Pair(first, second, changed[0]))
    return found


def load(file: Path = FILE) -> list[Row]:
    """Return all rows, in the file's order."""
    return [Row(entry) for entry in json.loads(file.read_text(encoding="utf8"))["rows"]]


def _unit(figure: dict[str, Any]) -> float:
    """Units are binary for nvidia-smi's MB, which are MiB."""
    is_smi = "nvidia-smi" in figure["measures"] or "context" in figure["measures"]
    return 2**20 if is_smi and figure["unit"] == "MB" else UNITS[figure["unit"]]
