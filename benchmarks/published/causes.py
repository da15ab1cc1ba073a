"""Why a row misses, where it is known, and what was fitted to what."""

from __future__ import annotations

from .rows import Row

FITTED_TO = frozenset({"timm", "lambda", "transformers-bert", "transformers-v100"})
"""Sources whose times set constants of the GPU model; memory has no fitted constant."""
MEMORY_MISS, TIME_MISS, RATIO_MISS = 0.03, 0.15, 0.1
_FSDP1 = "FSDP1, whose record_stream keeps freed blocks (the source says so); fully_shard is followed in its place"
_TORCHS_AGE = (
    "products are priced at half of the sheet on cards of 500 W; the same file went from 5250 to 7380 tokens/s in a year, and one "
    "rate serves all dates"
)
_TENSOR_PARALLEL = (
    "not known: the code of tensor parallelism of that month was not read; loss parallel is taken from pull request 112"
)
_RATIOS: dict[tuple[str, str], str] = {
    (
        "titan-8b-1881-fsdp8",
        "titan-8b-1881-fsdp64",
    ): "the rows differ in more than the layout: reserved bytes are apart by 16.4 GiB, five "
    "times what one fp32 copy of the shards is (3.27 GiB; parameters, gradients and two states are four), and another table of the "
    "source has 3 % for 128 GPUs; what else was asked of the 64 is not stated",
    (
        "foundry-760m-s2048-8xh100",
        "foundry-760m-s2048-8xa100",
    ): "the H100 row is 17 % too fast, the 7B row of its table 5 %: products of "
    "this width (1,536) on an H100 under torch 2.1 are not known",
    (
        "dle-rn50-amp-a100",
        "dle-rn50-amp-8a100",
    ): "real images decoded on the GPUs (DALI) beside the step, which is not modelled",
    (
        "torchtune-3b-full-packed",
        "torchtune-3b-full-packed-compile",
    ): "attention between packed documents, which flex attention leaves "
    "out, is priced in both and is a larger share of the compiled step",
}
"""Of pairs of rows, by the beginnings of their ids."""
_CAUSES: dict[tuple[str, str], str] = {
    (
        "torchtune-3b-full-packed-compile",
        "time",
    ): "attention: documents that are packed together are apart in torchtune's masks, whose "
    "blocks flex attention leaves out; their lengths are not stated, and the whole square is priced here",
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


def cause_of_ratio(first: Row, second: Row, error: float) -> str:
    """Return the cause of a ratio that is off by more than the limit, `not known` where it has not been found."""
    if abs(error) <= RATIO_MISS:
        return ""
    named = (text for (one, two), text in _RATIOS.items() if first.id.startswith(one) and second.id.startswith(two))
    return next(named, "not known")


def _limit(name: str) -> float:
    return TIME_MISS if name == "time" else MEMORY_MISS


def _known(row: Row, name: str) -> str:
    for (start, what), text in _CAUSES.items():
        if row.id.startswith(start) and what == name:
            return text
    return f"{name}: not known"
