"""Rows of timm's, Lambda's and NVIDIA's image classifiers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Program, images
from .rows import Row

_GPUS = {
    "RTX3090-24GB": "rtx3090", "V100-SXM2-16GB": "v100-16gb", "A100-PCIe-40GB": "a100-40gb", "A100-SXM4-80GB": "a100",
    "RTX4090": "rtx4090", "H100-PCIe-80GB": "h100-pcie", "H100-SXM5-80GB": "h100",
}  # fmt: skip


def classifier(row: Row) -> Program:
    import timm

    name = row.id.rpartition("-")[2] if row.source == "timm" else "resnet50"
    timm.layers.set_fused_attn(False)
    with torch.device("meta"):
        model = timm.create_model(name)
    channels_last = row.source == "timm" or (row.source == "nvidia-dle" and "amp" in row.id)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    micro = row.data["micro_batch_per_gpu"]
    batch = (images(micro, row.data["image_size"], channels_last), torch.zeros(micro, dtype=torch.long, device="meta"))
    options: dict[str, Any] = {"keep_grads": True}
    if "fp16" in row.data["dtype_scheme"]:
        options["autocast"] = "fp16"
    elif "TF32" in row.data["dtype_scheme"]:
        options["tf32"] = "all"
    read = (
        "timm's own models, attention by scores as in timm of 2022"
        if row.source == "timm"
        else "timm's resnet50 is v1.5"
    )
    if row.num_gpus > 1:
        return _in_processes(row, model, batch, options)
    return Program(Classifier(model), batch, _GPUS[row.data["gpu"]["type"]], read, _cross_entropy, _sgd(row), options)


def _in_processes(row: Row, model: nn.Module, batch: Any, options: dict[str, Any]) -> Program:
    def make() -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(Scored(model))

    hardware = f"{row.num_gpus}x{_GPUS[row.data['gpu']['type']]}"
    options |= {"processes": row.num_gpus}
    return Program(make, batch, hardware, "DDP with its default buckets", None, _sgd(row), options)


def linears(row: Row) -> Program:
    """The tutorial's twenty linear layers under DDP."""

    def make() -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(20)]))

    x = torch.zeros(20, 2000, device="meta")
    options = {"processes": row.num_gpus, "keep_grads": True}
    read = "Adam before torch's loops over lists; mean squared error; the GPU is not stated, so no time (an A100's is priced)"
    return Program(make, (x, x), "2xa100", read, F.mse_loss, _adam, options)


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, foreach=False)


class Scored(nn.Module):
    """A model with its loss, since DDP's forward takes whatever it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), target)


class Classifier(nn.Module):
    """A model that is called with images alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def _cross_entropy(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch[-1])


def _sgd(row: Row) -> Any:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=row.source == "timm", foreach=False)

    return make
