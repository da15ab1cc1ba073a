"""GPUs as their data sheets describe them: one entry a device, with the document that its rates are from.

    memory_gib   GiB that a program sees: what the driver reports, less than the number on the box
    bandwidth    GB/s of the device's memory
    tflops       dense (not sparse) TFLOP/s by dtype. fp32 is the plain rate, not tf32: torch multiplies fp32 matrices in full
                 precision unless it is told otherwise. 16-bit products accumulate in fp32, as torch's do, for which GeForce
                 cards have half of the rate with fp16 sums
    link         GB/s to the others of its node, one direction, as ring collectives reach it: about four fifths of NVLink 3, 4
                 and 5 (300, 450, 900 GB/s); cards without it go through the host's PCIe
    network      GB/s of one device's share of its node's network: an adapter of 200 (A100) or 400 Gbit/s a device in the
                 vendors' own nodes, 100 Gbit/s otherwise
    host         GB/s to pinned host memory, one direction: seven tenths of what PCIe 3, 4 or 5 signals over 16 lanes (16, 32,
                 64 GB/s), or of the link in its place

`link`, `network`, `host` and the fractions are of our own choice: no data sheet says what a program reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What torch gives cuBLAS where CUBLAS_WORKSPACE_CONFIG is not set: `:4096:2:16:8`, 32 MiB from Hopper on; hipBLAS on an
# MI300X gets 128 MiB.
_BLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * 2**10
_HOPPER_BLAS_WORKSPACE_BYTES = 32 * 2**20
_MI300_BLAS_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Kind:
    """The shares of the sheet's rates that kernels reach on one generation of devices."""

    products: float
    """Large 16-bit and TF32 products; the shape is accounted for apart."""
    wide_products: float
    """fp32 and fp64 products and convolutions."""
    convolutions: float
    """16-bit and TF32 convolutions."""
    attention: tuple[float, float]
    """Fused attention, forward and backward, long sequences, of the sheet's 16-bit rate."""
    clock: float
    """GHz."""
    cudnn: tuple[float, float] | None = None
    """The same of cuDNN's attention; None: not known, as the flash kernel."""


KINDS = {
    "volta": Kind(0.62, 0.97, 0.5, (0.3, 0.2), 1.53),
    "turing": Kind(0.5, 0.8, 0.4, (0.3, 0.2), 1.2),
    "ampere": Kind(0.76, 0.97, 0.5, (0.6, 0.48), 1.41),
    "geforce": Kind(1.1, 0.9, 0.95, (0.95, 0.72), 1.7),
    "ada": Kind(1.0, 0.9, 0.95, (0.97, 0.72), 2.5),
    "hopper": Kind(0.62, 0.8, 0.33, (0.376, 0.332), 1.9, (0.58, 0.54)),
    "blackwell": Kind(0.62, 0.8, 0.33, (0.42, 0.34), 1.9),
    "hopper-500w": Kind(0.5, 0.8, 0.33, (0.357, 0.315), 1.6, (0.47, 0.435)),
    "cdna": Kind(0.5, 0.6, 0.3, (0.3, 0.2), 2.1),
}
"""Products: fitted to the published rows of transformers-v100 (Volta), transformers-bert (Ampere), timm (GeForce, whose clock is
above the sheet's); Hopper: 0.6 of the sheet at 700 W and 0.5 at 500 W, as training runs report. Convolutions: lambda and timm.
Attention: FlashAttention-2 as measured on A100 (180 TFLOP/s forward at 1k to 4k, 32 heads of 128; github.com/liangan1/GPU_travel)
and RTX 4090 (169 and 125; tl_doc of apache/tvm); Hopper: of it and cuDNN on an H100 of 700 W, figures 5 and 6 of
arXiv:2407.08608 (370 and 322, 600 to 545 causal and 518 TFLOP/s); at 500 W cuDNN's is taken to be held back as products are, and
that of the other, which draws less, by a twentieth. Turing, Blackwell, CDNA:
guesses from their neighbours."""
REORDER_BYTES_PER_CLOCK = 6.0
"""Bytes of 16-bit elements that one multiprocessor transposes a clock, reads and writes: fitted to lambda, V100 to H100."""


@dataclass(frozen=True)
class Sheet:
    """One device, in the units of its data sheet."""

    source: str
    memory_gib: float
    bandwidth: float
    tflops: Mapping[str, float]
    link: float
    link_us: float
    """Latency of a hop within the node, in microseconds."""
    network: float
    host: float
    blas_workspace: int = _BLAS_WORKSPACE_BYTES


def _rates(fp64: float, fp32: float, half: float, bf16: float | None = None) -> dict[str, float]:
    """TFLOP/s by dtype; `bf16` where it differs from fp16: devices before Ampere have no unit for it."""
    return {"fp64": fp64, "fp32": fp32, "bf16": half if bf16 is None else bf16, "fp16": half}


_HOPPER = _rates(67.0, 67.0, 989.0)
_AMPERE = _rates(19.5, 19.5, 312.0)
_VOLTA = _rates(7.8, 15.7, 125.0, bf16=15.7)
_V100_SHEET = "NVIDIA V100 Tensor Core GPU, data sheet 2020, SXM2"
_A100_SHEET = "NVIDIA A100 Tensor Core GPU, data sheet 2021, SXM"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU, data sheet 2023"
_GA102 = "NVIDIA Ampere GA102 GPU architecture, white paper 2021, table of specifications"
_ADA = "NVIDIA Ada GPU architecture, white paper 2023, table of specifications"


def _nvlink(source: str, memory_gib: float, bandwidth: float, tflops: Mapping[str, float], host: float = 45) -> Sheet:
    """A device of Hopper or later in a node of the vendor's."""
    return Sheet(source, memory_gib, bandwidth, tflops, 360, 2, 45, host, blas_workspace=_HOPPER_BLAS_WORKSPACE_BYTES)


def _card(source: str, memory_gib: float, bandwidth: float, tflops: Mapping[str, float], pcie: int = 4) -> Sheet:
    """A card that reaches the others through the host's PCIe."""
    return Sheet(source, memory_gib, bandwidth, tflops, 12, 8, 11, {3: 11, 4: 22, 5: 45}[pcie])


SHEETS: dict[str, Sheet] = {
    "v100": Sheet(_V100_SHEET, 31.7, 900, _VOLTA, 120, 3, 10, 11),
    "v100-16gb": Sheet(_V100_SHEET, 15.7, 900, _VOLTA, 120, 3, 10, 11),
    "t4": _card("NVIDIA T4, data sheet 2019", 14.7, 320, _rates(0.25, 8.1, 65.0, bf16=8.1), pcie=3),
    "a100": Sheet(_A100_SHEET, 79.1, 2039, _AMPERE, 240, 2, 22, 22),
    "a100-40gb": Sheet(_A100_SHEET, 39.4, 1555, _AMPERE, 240, 2, 22, 22),
    "a10g": _card("NVIDIA A10G, data sheet 2021 (Amazon EC2 G5)", 22.1, 600, _rates(0.55, 35.0, 70.0)),
    "a6000": _card("NVIDIA RTX A6000, data sheet 2020", 47.5, 768, _rates(0.6, 38.7, 154.8)),
    "rtx3080ti": _card(_GA102, 11.7, 912, _rates(0.53, 34.1, 68.0)),
    "rtx3080ti-laptop": _card(
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU, specifications 2022: 7424 cores at 1590 MHz (the most; less below 150 W), "
        "256 bits of GDDR6 at 16 Gbit/s", 15.7, 512, _rates(0.37, 23.6, 47.2),
    ),
    "rtx3090": _card(_GA102, 23.7, 936, _rates(0.56, 35.6, 71.0)),
    "h100": _nvlink(f"{_H100_SHEET}, SXM", 79.1, 3350, _HOPPER),
    "h100-96gb": _nvlink(
        f"{_H100_SHEET}, SXM; memory: 96 GB HBM2e at 2.4 TB/s, pytorch/torchtitan, benchmarks, 2025", 95.0, 2400, _HOPPER
    ),
    "h100-pcie": Sheet(
        f"{_H100_SHEET}, PCIe", 79.1, 2000, _rates(51.0, 51.0, 756.0), 40, 5, 22, 45, _HOPPER_BLAS_WORKSPACE_BYTES
    ),
    "gh200": _nvlink("NVIDIA GH200 Grace Hopper Superchip, data sheet 2023, 96 GB HBM3", 94.5, 4000, _HOPPER, host=315),
    "h200": _nvlink("NVIDIA H200 Tensor Core GPU, data sheet 2024, SXM", 139.8, 4800, _HOPPER),
    "b200": Sheet(
        "NVIDIA DGX B200, data sheet 2024", 178.3, 7700, _rates(37.0, 75.0, 2250.0), 720, 2, 45, 50,
        _HOPPER_BLAS_WORKSPACE_BYTES,
    ),
    "rtx4070ti": _card(_ADA, 11.7, 504, _rates(0.63, 40.1, 80.2)),
    "rtx4090": _card(_ADA, 23.6, 1008, _rates(1.3, 82.6, 165.2)),
    "l4": _card("NVIDIA L4 Tensor Core GPU, data sheet 2023", 22.0, 300, _rates(0.47, 30.3, 121.0)),
    "l40s": Sheet("NVIDIA L40S, data sheet 2023", 44.4, 864, _rates(1.4, 91.6, 362.0), 18, 8, 11, 22),
    "rtx5090": _card(
        "NVIDIA RTX Blackwell GPU architecture, white paper 2025, table of specifications", 31.4, 1792,
        _rates(1.64, 104.8, 209.5), pcie=5,
    ),
    "mi300x": Sheet(
        "AMD Instinct MI300X, data sheet 2023", 191.9, 5300, _rates(163.4, 163.4, 1307.0), 320, 4, 45, 45,
        _MI300_BLAS_WORKSPACE_BYTES,
    ),
}  # fmt: skip
"""By the name of the preset."""


@dataclass(frozen=True)
class Units:
    """A device's multiprocessors."""

    kind: Kind
    count: int
    tf32: float = 0.0
    """TFLOP/s of products that round fp32 operands to TF32, by the sheet; 0: there is no such unit."""


_UNITS: dict[str, tuple[str, int, float]] = {
    "v100": ("volta", 80, 0), "v100-16gb": ("volta", 80, 0), "t4": ("turing", 40, 0),
    "a100": ("ampere", 108, 156), "a100-40gb": ("ampere", 108, 156),
    "a10g": ("geforce", 80, 35), "a6000": ("geforce", 84, 77.4), "rtx3080ti": ("geforce", 80, 34),
    "rtx3080ti-laptop": ("geforce", 58, 23.6), "rtx3090": ("geforce", 82, 35.6),
    "h100": ("hopper", 132, 494), "h100-96gb": ("hopper-500w", 132, 494), "h100-pcie": ("hopper-500w", 114, 378),
    "gh200": ("hopper", 132, 494), "h200": ("hopper", 132, 494), "b200": ("blackwell", 148, 1125),
    "rtx4070ti": ("ada", 60, 40), "rtx4090": ("ada", 128, 82.6), "l4": ("ada", 58, 60), "l40s": ("ada", 142, 183),
    "rtx5090": ("ada", 170, 104.8), "mi300x": ("cdna", 304, 0),
}  # fmt: skip
UNITS = {name: Units(KINDS[kind], count, tf32) for name, (kind, count, tf32) in _UNITS.items()}
