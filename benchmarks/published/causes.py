"""Why a row misses, where it is known, and what was fitted to what."""

from __future__ import annotations

from .rows import Row

FITTED_TO = frozenset({"timm", "lambda", "transformers-bert", "transformers-v100"})
"""Sources whose times set constants of the GPU model; memory has no fitted constant."""
MEMORY_MISS, TIME_MISS = 0.03, 0.15
_FSDP1 = "FSDP1, whose record_stream keeps freed blocks (the source says so); fully_shard is followed in its place"
_TORCHS_AGE = (
    "products are priced at half of the sheet on cards of 500 W; the same file went from 5250 to 7380 tokens/s in a year, and one "
    "rate serves all dates"
)
_TENSOR_PARALLEL = (
    "not known: the code of tensor parallelism of that month was not read; loss parallel is taken from pull request 112"
)
_CAUSES: dict[tuple[str, str], str] = {
    ("titan-l2-7b-fsdp4tp2", "allocated"): _TENSOR_PARALLEL,
    ("titan-l2-7b-fsdp4tp2", "reserved"): _TENSOR_PARALLEL,
    (
        "titan-8b-1881-fsdp64",
        "time",
    ): "45 % slower than on 8 GPUs, where another table of the source has 3 % for 128: its network that day is not known",
    ("titan-l2-7b-fsdp1", "allocated"): _FSDP1,
    ("titan-l2-7b-fsdp1", "reserved"): _FSDP1,
    (
        "titan-l2-7b",
        "reserved",
    ): "not known; with pools for each stream, as are simulated, the selective row of the same source is met",
    (
        "titan-8b-8a100",
        "reserved",
    ): "an older torchtitan keeps more than later ones, says the row; its code was not read",
    (
        "titan-8b",
        "reserved",
    ): "not known: streams have pools of their own in the simulation",
    ("titan-8b-1881", "time"): _TORCHS_AGE,
    ("titan-8b-8h100", "time"): _TORCHS_AGE,
    ("titan-8b-996", "time"): _TORCHS_AGE,
    ("titan-8b-reshard", "time"): _TORCHS_AGE,
    (
        "hf-v100",
        "reserved",
    ): "nvidia-smi counts what cuDNN and cuBLAS take outside torch; the Trainer's own tensors are not followed",
    (
        "timm-nhwc-swin",
        "time",
    ): "copies out of order (windows, rolls) are priced at 0.8 of the bandwidth; a 3090 does better",
    (
        "timm-nhwc-mobilenetv3",
        "time",
    ): "many small kernels of squeeze-and-excitation and depthwise layers run below the bandwidth",
    (
        "lambda-resnet50-fp32-4090",
        "time",
    ): "its 72 MB of L2 hold what one kernel hands to the next; each is priced from memory",
    (
        "lambda-resnet50-amp-4090",
        "time",
    ): "its 72 MB of L2 hold what one kernel hands to the next; each is priced from memory",
    ("dle-rn50-amp-8a100", "time"): "real images decoded on the GPUs (DALI) beside the step, which is not modelled",
    ("hf-pythia", "time"): "a laptop's card, whose clock hangs on its power; its ratios alone are compared",
}


def cause_of(row: Row, errors: dict[str, float | None]) -> str:
    """Return the cause of what is off by more than the limits, `not known` where it has not been found."""
    missed = {name for name, error in errors.items() if error is not None and abs(error) > _limit(name)}
    found = [_known(row, name) for name in sorted(missed)]
    return "; ".join(dict.fromkeys(found))


def _limit(name: str) -> float:
    return TIME_MISS if name == "time" else MEMORY_MISS


def _known(row: Row, name: str) -> str:
    for (start, what), text in _CAUSES.items():
        if row.id.startswith(start) and what == name:
            return text
    return f"{name}: not known"
