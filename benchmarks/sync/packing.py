"""Processor time of the one-bit methods' mean beside the fp32 all-reduce that it replaces, and what each sends.

python -m benchmarks.sync.packing     writes benchmarks/results/sync-packing.{md,json}
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.solvers.record import CPU_SECONDS, write
from trainwright.sync import AllGather, AllToAll, Steps
from trainwright.sync.signs import Segments, compressed_mean
from trainwright.sync.sums import ordered_sum
from trainwright.sync.traffic import all_reduce_bytes

GPT2_BLOCK = (768, 768, 2304 * 768, 2304, 768 * 768, 768, 768, 768, 3072 * 768, 3072, 768 * 3072, 768)
SHAPES = {"one tensor of 4,000,000": (4_000_000,), "a block of GPT-2, 12 tensors": GPT2_BLOCK}
ROUNDS = 7
REMARKS = (
    CPU_SECONDS,
    "one-bit ns: all that one worker computes for a mean: momentum and error added, scales, signs packed, errors kept, the other "
    "workers' chunks opened and added, the answer unpacked; a median of 7. Messages are at hand, nothing is sent",
    "fp32 ns: what the same worker does around an fp32 all-reduce: parts laid out, the own part summed in the order of ranks, the "
    "answer copied; passes: that of one-bit over one read and write of a vector of fp32 in memory, `copy_`",
    "saves below: the link on which the bytes that are not sent take as long as the processor takes longer; on faster ones "
    "fp32 is faster, by this worker's one thread",
)


def answered(program: Steps[Any], answers: Callable[[Any], Tensor]) -> float:
    """Run a program whose requests are answered by what is at hand; return the processor's seconds that it took itself."""
    took_s, answer = 0.0, None
    while True:
        began_s = time.thread_time()
        try:
            request = program.send(answer)
        except StopIteration:
            return took_s + time.thread_time() - began_s
        took_s += time.thread_time() - began_s
        answer = answers(request)


def one_bit(lengths: tuple[int, ...], n: int) -> Iterator[float]:
    cut = Segments(lengths, n)
    vector, error = torch.randn(sum(lengths)), torch.zeros(sum(lengths))
    server_error = torch.zeros(cut.chunk_length)
    for _ in range(ROUNDS):
        yield answered(compressed_mean(cut, 0, vector, error, server_error), _all_alike(n))


def _all_alike(n: int) -> Callable[[Any], Tensor]:
    """What the others send is what this worker does."""

    def answers(request: Any) -> Tensor:
        match request:
            case AllToAll(tensor):
                return tensor[:1].expand(n, -1).contiguous()
            case AllGather(tensor):
                return tensor.expand(n, -1).contiguous()
        raise AssertionError(request)

    return answers


def whole(lengths: tuple[int, ...], n: int) -> Iterator[float]:
    vector = torch.randn(sum(lengths))
    length = -(-vector.numel() // n)

    def program() -> Steps[Tensor]:
        parts = vector.new_zeros(n * length)
        parts[: vector.numel()] = vector
        own = ordered_sum((yield AllToAll(parts.view(n, length))))
        return (yield AllGather(own)).view(-1)[: vector.numel()].clone()

    for _ in range(ROUNDS):
        yield answered(program(), _all_alike(n))


def copied(num: int) -> Iterator[float]:
    x, y = torch.randn(num), torch.empty(num)
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        y.copy_(x)
        yield time.thread_time() - began_s


def row(title: str, lengths: tuple[int, ...], n: int) -> dict[str, Any]:
    num = sum(lengths)
    bit_s, whole_s, copy_s = (
        statistics.median(list(times)[1:]) for times in (one_bit(lengths, n), whole(lengths, n), copied(num))
    )
    bit_bytes = Segments(lengths, n).total_bytes(4) / n
    whole_bytes = all_reduce_bytes(num, 4, n) / n
    return {
        "elements": title,
        "workers": n,
        "one-bit ns": 1e9 * bit_s / num,
        "fp32 ns": 1e9 * whole_s / num,
        "passes": bit_s / copy_s,
        "one-bit B sent": bit_bytes / num,
        "fp32 B sent": whole_bytes / num,
        "saves below Gbit/s": 8e-9 * (whole_bytes - bit_bytes) / (bit_s - whole_s),
    }


def main(keep: Annotated[bool, typer.Option(help="Write the record.")] = True) -> None:
    """Measure each size on 2, 4 and 8 workers."""
    torch.set_num_threads(1)
    rows = [row(title, lengths, n) for title, lengths in SHAPES.items() for n in (2, 4, 8)]
    write("sync-packing", {"an element": rows}, REMARKS, keep=keep)


if __name__ == "__main__":
    typer.run(main)
