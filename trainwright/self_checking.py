"""Predicted against measured: the steady-state step of several models on this machine, each in a process of its own.

selfcheck(device, …)   for each model: predict on the meta device, then run it in a fresh process → `SelfCheck`
measured(…)            what that process does: two steps under the allocator's records, then some that are timed
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .artifacts import Checked, Cluster, SelfCheck, UserError

_TIMED_S, _MOST_STEPS = 2.0, 50
"""Seconds, and steps, after which the timing of one model ends."""


@dataclass(frozen=True)
class Case:
    """One model of the zoo, and the size of its batch.

    >>> Case.parse("gpt2:4:128")
    Case(name='gpt2', batch_size=4, seq_len=128, dtype='fp32', autocast=None)
    """

    name: str
    batch_size: int
    seq_len: int | None = None
    dtype: str = "fp32"
    autocast: str | None = None

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read NAME:BATCH or NAME:BATCH:SEQ, with @bf16 behind it for parameters in bf16."""
        sizes, _, dtype = text.partition("@")
        name, *numbers = sizes.split(":")
        if not 1 <= len(numbers) <= 2 or not all(number.isdigit() and int(number) for number in numbers):
            raise UserError(
                f"a model of the zoo and its batch are needed, NAME:BATCH or NAME:BATCH:LENGTH; got {text!r}; try gpt2-tiny:4:64"
            )
        batch_size, seq_len = (*map(int, numbers), None)[:2]
        assert batch_size is not None
        return cls(name, batch_size, seq_len, dtype or "fp32")

    @property
    def sizes(self) -> dict[str, Any]:
        """What `load_model` takes."""
        return {"batch_size": self.batch_size, "seq_len": self.seq_len, "dtype": self.dtype}


CPU_CASES = tuple(
    map(
        Case.parse,
        ("gpt2-tiny:32:64", "llama-tiny:32:64", "bert-tiny:32:64", "vit-tiny:32", "resnet-tiny:16", "t5-tiny:16", "mixtral-tiny:8",
         "gpt2:1:128", "vit-b-16:2", "resnet-50:2"),
    )
)  # fmt: skip
"""Small ones, bound by memory and by calls, and three of real width."""
GPU_CASES = (
    Case("gpt2-tiny", 32, 64),
    Case("llama-tiny", 32, 64, "bf16"),
    Case("mixtral-tiny", 8, None, "bf16"),
    Case("gpt2", 8, 512),
    Case("gpt2", 8, 1024, "bf16"),
    Case("bert-large", 8, 256, "fp32", "bf16"),
    Case("t5-base", 8, 256, "bf16"),
    Case("vit-b-16", 32),
    Case("resnet-50", 32),
    Case("resnet-50", 64, None, "fp32", "bf16"),
)
"""Steps bound by calls, by 16-bit and fp32 products, by attention and by convolutions; the largest takes about 8 GiB."""


def selfcheck(
    cluster: Cluster,
    device: Literal["cpu", "cuda"],
    cases: Sequence[Case] = (),
    *,
    minutes: float = 10.0,
    optimizer: str = "adamw",
    progress: Callable[[str], None] = lambda text: None,
) -> SelfCheck:
    """Return predicted and measured peak and time of a steady-state step of each of `cases`, on one device of this machine.

    cluster: what is predicted for. cases: by default ten of the zoo. minutes: after so many no further model begins, which
    the rows say. A model that does not fit, or fails, has the reason in its row; the others go on.

    Raises `UserError` where a GPU is asked for and there is none, and for minutes that are not above 0.
    """
    if not minutes > 0:
        raise UserError(f"minutes above 0 are needed for a self-check; got {minutes:g}; leave them out for 10")
    from .launch.cores import threads_each
    from .profiler.threads import threads

    named = _device_name(device)
    ends_s = time.monotonic() + 60 * minutes
    rows: list[Checked] = []
    for case in cases or (CPU_CASES if device == "cpu" else GPU_CASES):
        progress(f"{case.name}, {len(rows) + 1} of {len(cases) or 10}")
        with threads(threads_each(cluster.num_devices)):  # as in the process that measures
            row, profiled = _predicted(case, cluster, optimizer)
        if time.monotonic() >= ends_s:
            rows.append(row.model_copy(update={"not_measured": f"the {minutes:g} minutes were over"}))
        elif profiled > cluster.device.memory_bytes:
            rows.append(row.model_copy(update={"not_measured": "it takes more memory than the device has"}))
        else:
            rows.append(_measured(case, row, device, cluster.num_devices))
    return SelfCheck(
        device=named,
        num_devices=_num_devices(device),
        predicted_for=f"{cluster.name} ({cluster.source or 'by hand'})",
        versions=_versions(),
        date=time.strftime("%Y-%m-%d"),
        rows=tuple(rows),
    )


def own_gpu() -> str:
    """Return the preset of this machine's first GPU; `UserError` where there is no GPU, or no preset of it."""
    import torch

    from .hardware.presets import preset_called

    name = _device_name("cuda")
    return preset_called(name, torch.cuda.get_device_properties(0).total_memory)


def _predicted(case: Case, cluster: Cluster, optimizer: str) -> tuple[Checked, int]:
    import trainwright as tw

    loaded = tw.load_model(f"zoo:{case.name}", **case.sizes)
    found = tw.profile(
        loaded.model,
        loaded.batch,
        loss_fn=loaded.loss_fn,
        optimizer=optimizer,
        autocast=case.autocast,
        hardware=cluster,
    )
    row = Checked(
        model=case.name,
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        dtype=case.dtype,
        autocast=case.autocast,
        optimizer=optimizer,
        predicted_peak_bytes=found.peak_bytes,
        predicted_reserved_bytes=found.reserved_bytes,
        predicted_step_s=found.step_s,
    )
    return row, found.reserved_bytes or found.peak_bytes


def _measured(case: Case, row: Checked, device: Literal["cpu", "cuda"], num_devices: int) -> Checked:
    """Fill in what a process of its own measures; on a CPU with the threads that one of `num_devices` processes has."""
    from .launch import WorkerError, run_processes

    payload = {"case": asdict(case), "device": device, "optimizer": row.optimizer, "num_processes": num_devices}
    try:
        (found,) = run_processes(f"{__name__}:measured", payload, 1, device=device)
    except WorkerError as error:
        return row.model_copy(update={"not_measured": str(error).strip().splitlines()[-1]})
    return row.model_copy(update=found)


def measured(case: dict[str, Any], device: str, optimizer: str, num_processes: int) -> dict[str, Any]:
    """Run the steps of one model in this process, and return the measured fields of its row."""
    import torch

    import trainwright as tw

    from . import optim
    from .launch.cores import threads_each
    from .profiler import reference_step
    from .runtime.batch import to_device

    chosen = Case(**case)
    torch.set_num_threads(threads_each(num_processes))
    torch.manual_seed(0)
    loaded = tw.load_model(f"zoo:{chosen.name}", device="cpu", **chosen.sizes)
    model, batch = loaded.model.to(device), to_device(loaded.batch, torch.device(device))
    made = optim.create(optimizer, model.parameters(), lr=1e-4)

    def step(observer: Any = None) -> None:
        reference_step(model, made, batch, loaded.loss_fn, autocast=chosen.autocast, observer=observer)

    memory = _on_gpu(step, model, made) if device == "cuda" else _on_cpu(step, model)
    return {**memory, "measured_step_s": _median_s(step, torch.cuda.synchronize if device == "cuda" else lambda: None)}


def _on_cpu(step: Callable[[], None], model: Any) -> dict[str, int]:
    """Return the peak of the second of two steps, from the allocator's own records."""
    from .profiler import measure, static_bytes

    return {"measured_peak_bytes": static_bytes(model) + measure(step).peak_of_step(1)}


def _on_gpu(step: Callable[[], None], model: Any, optimizer: Any) -> dict[str, int]:
    """The same by the caching allocator's counters, and what it took from the GPU for both steps."""
    import torch

    from .profiler import peak_on_gpu

    step()
    peak_bytes = peak_on_gpu(step, model, optimizer)
    return {"measured_peak_bytes": peak_bytes, "measured_reserved_bytes": torch.cuda.max_memory_reserved()}


def _median_s(step: Callable[[], None], wait: Callable[[], None]) -> float:
    """Return the median seconds of at least five steps, after one that is not counted."""
    from .runtime.training.train import Timer

    step()
    wait()
    timer = Timer()
    while len(timer.seconds) < 5 or (math.fsum(timer.seconds) < _TIMED_S and len(timer.seconds) < _MOST_STEPS):
        with timer:
            step()
            wait()
    return timer.median_s


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        from .hardware.machine import cpu_name

        return cpu_name()
    if not torch.cuda.is_available():
        raise UserError(
            f"a GPU is needed with --gpu; torch {torch.__version__} sees none here; install a build of torch "
            "for its driver, or leave --gpu out"
        )
    return str(torch.cuda.get_device_name())


def _num_devices(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 1


def _versions() -> dict[str, str]:
    import torch

    import trainwright as tw

    found = {"trainwright": tw.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found
