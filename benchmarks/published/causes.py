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
    "torch of that month held more where fully_shard and tensor parallelism met: pytorch/torchtitan#191, a week later, has 16 GiB "
    "more than FSDP1 for 13B, checkpointed whole or in part; on one axis the same commit is met, and so is this row's time"
)
_DECODED = (
    "real images decoded by DALI beside the step, whose end and loss each step waits for (training.py): not modelled"
)
_PACE = "of the fitting half: published to 2 digits, and its times are bound by the host below some 25 ms"
_RATIOS: dict[tuple[str, str], str] = {
    (
        "titan-8b-1881-fsdp8",
        "titan-8b-1881-fsdp64",
    ): "64 GPUs were bound by their network: 64 GB of gathers and reductions in a step of 1.6 s are 40 GB/s a GPU, where "
    "NCCL's rings over 8 adapters of 400 Gbit/s a node reach 300 and more (304 at 100 MB, 435 at 1 GB over two nodes of H100s, "
    "drmysore/nebius-h100-16gpu-benchmark), and the source's 128 GPUs of 2024-12 lose 3 %; a run's network that falls short is in "
    "no configuration (a file of `--hardware` with its bandwidth says it). Reserved bytes are apart by 16.4 GiB, too: the "
    "shards of parameters, gradients and states are 13.1",
    (
        "foundry-760m-s2048-8xh100",
        "foundry-760m-s2048-8xa100",
    ): "the H100 row is the source's outlier: its table has 63,147 tokens/s a GPU on 8 and 68,551 and 67,971 on 16 and 32, which "
    "exchange more; to those the ratio is 2.1",
    ("dle-rn50-amp-a100", "dle-rn50-amp-8a100"): _DECODED,
    (
        "dle-rn50-amp-a100",
        "dle-rn50-amp-v100",
    ): "16-bit convolutions of a V100 are known from the fitting half by one row, whose images are reordered first, so that "
    "its two rates are known together only; here images are channels last",
    ("hf-bert-", "hf-bert-"): _PACE,
    (
        "hf-v100-fp32",
        "hf-v100-",
    ): "of the fitting half: the fp32 step is 8 to 13 % too long by the host's pace and fp32 elementwise kernels",
}
"""Of pairs of rows, by the beginnings of their ids."""
_TRITON = (
    "attention's share grows with the sequence and shrinks with the model, as the miss does: the default of a stored "
    "submit_benchmarks.py is Triton's kernel, 1.3 to 2.5 times slower than flash-attn 2 (arXiv:2307.08691), which the row names; "
    "1.8 for all rows helps those of 8,192 tokens and harms those of 2,048, so it is not taken"
)
_CAUSES: dict[tuple[str, str], str] = {
    ("foundry-7b-s8192", "time"): _TRITON,
    ("foundry-760m-s8192", "time"): _TRITON,
    ("foundry-125m", "time"): _TRITON,
    (
        "torchtune-3b-full-packed-compile",
        "allocated",
    ): "one more copy of the fp32 logits (3.9 GiB) would close it; the eager row and the chunked one are met, so it is in the "
    "compiled loss of torch 2.5",
    (
        "torchtune-3b-lora",
        "allocated",
    ): "the rank is the configuration's, not stated; how long copies to and from the host are held depends on their timing",
    (
        "fsdpqlora",
        "reserved",
    ): "FSDP1, whose record_stream keeps freed blocks; the row of 512 tokens has more reserved than that of 2,048",
    ("foundry-760m-s2048-8xh100", "time"): "the source's outlier: 8 % slower than on 16 and 32 GPUs in the same table",
    ("titan-l2-7b-fsdp4tp2", "allocated"): _TENSOR_PARALLEL,
    ("titan-l2-7b-fsdp4tp2", "reserved"): _TENSOR_PARALLEL,
    (
        "titan-8b-1881-fsdp64",
        "time",
    ): "45 % slower than on 8 GPUs, where another table of the source has 3 % for 128: bound by its network (see the ratio)",
    ("titan-l2-7b-fsdp1", "allocated"): _FSDP1,
    ("titan-l2-7b-fsdp1", "reserved"): _FSDP1,
    (
        "titan-l2-7b",
        "reserved",
    ): "not known; with pools for each stream, as are simulated, the selective row of the same source is met",
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
    ("dle-rn50-amp-8a100", "time"): _DECODED,
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
