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
    "collectives of tensor parallelism recorded streams in torch of that time: what the processor frees while it runs ahead counts "
    "as active until the GPU has passed it, and FSDP2 does not hold the processor back as FSDP1 did (pytorch/torchtitan#735, #737; "
    "#191, a week after the row, has 16 GiB more for 13B, however it is checkpointed); here 1.07 GB a layer, for as many as "
    "the processor is ahead by, which no program says; on one axis the same commit is met, and so is this row's time"
)
_DECODED = (
    "real images decoded by DALI beside the step, whose end and loss each step waits for (training.py): not modelled"
)
_PACE = "of the fitting half: published to 2 digits, and its times are bound by the host below some 25 ms"
_RATIOS: dict[tuple[str, str], str] = {
    (
        "titan-8b-1881-fsdp8",
        "titan-8b-1881-fsdp64",
    ): "64 GPUs were bound by their network: 64 GB of gathers and reductions in a step of 1.6 s are 40 GB/s a GPU. Nodes with an "
    "adapter of 400 Gbit/s a GPU, as the source's other tables state theirs, reach 300 and more (345 GB/s for a reduce-scatter "
    "on 8 nodes of H100s, NVIDIA/nccl#1229), and lose 3 % on 128 GPUs (2024-12) and 1.7 % from 32 to 64 H200s (2025-06, "
    "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md). With a quarter of that network (`8x8xh100-96gb@800Gbit`) the row is "
    "met to 2.5 %, and the one of 128 GPUs missed by 13: so these nodes were connected otherwise, which no configuration says. "
    "Reserved bytes are apart by 16.4 GiB, too: the shards of parameters, gradients and states are 13.1",
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
_CAUSES: dict[tuple[str, str], str] = {
    (
        "torchtune-3b-lora",
        "allocated",
    ): "parameters, the table of rotations and the chunks of logits with one gradient are 8.25 GiB without LoRA, so that LoRA and "
    "its states have 0.3 at most; at rank 64, which all stored configurations have, they take 0.5; the table's QLoRA, 4.6 GiB, "
    "is as far below, and a rank of 16 would meet both; the configuration of the README's commit is not stored, so that it would "
    "be a fit",
    (
        "fsdpqlora",
        "reserved",
    ): "FSDP1, whose record_stream keeps freed blocks; the row of 512 tokens has more reserved than that of 2,048",
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
    (
        "nanogpt-124m",
        "time",
    ): "112 ms a micro-batch with a night of torch 2.0: the source does not say whether that had a flash kernel, without which the "
    "prediction is 108; with it, 73",
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
