"""Linear maps that keep some rows, as a plan runs them: unbiased under every split, and the same draw in a rerun."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import slow_but
from tests.pool import Pool
from tests.sampled_cases import build, program_of, sample_all
from trainwright.ops.sampled import rows_kept
from trainwright.program.decisions import Decisions
from trainwright.program.program import Program
from trainwright.program.sampling import SampledSplit, sampled_params, share_of
from trainwright.rank.execute import Executor
from trainwright.rank.instructions import Compute
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator
from trainwright.rank.run_state import RunState
from trainwright.runtime.verification.reference import unsplit


def gradients(program: Program, decisions: Decisions, state: RunState) -> dict[str, Tensor]:
    """The gradients of one step on one process."""
    model, batch, _ = build()
    executor = Executor(build_local(program, decisions, SimulatedCommunicator(decisions.mesh)))
    tensors = dict(model.named_parameters()) | {"0": batch[0], "1": batch[1]}
    sources = {t: t.value if t.role == "const" else tensors[t.key] for t in program.tensors if t.role != "op"}
    executor.run(sources, state)[program.captured.loss_index].backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def recomputing(program: Program, decisions: Decisions) -> Decisions:
    """Let every block rederive what may be rederived, the chosen rows among it."""
    for op in program.ops:
        if op.region is not None and op.region.region_class.multiplicity > 1 and op.kind != "view":
            inside = all(consumer.region is op.region for tensor in op.outputs for consumer in tensor.consumers)
            decisions.recomputed |= {tensor.key for tensor in op.outputs if inside} | {f"{op.key}.internal"}
    return decisions


def test_a_sampled_map_keeps_its_rows_in_place_of_its_operand() -> None:
    program = program_of()
    decisions = sample_all(program, unsplit(program, 1))
    local = build_local(program, decisions, SimulatedCommunicator((1,)))
    found = [i for i in local.instructions if isinstance(i, Compute) and i.sampled is not None]
    assert [i.path for i in found] == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]
    assert sampled_params(program, decisions.splits) == {f"{i.path}.weight" for i in found}
    up = next(i for i in found if i.path == "blocks.0.up")
    x = torch.randn(4, 16, 8)
    saved: list[Tensor] = []
    weight, bias = (torch.randn(32, 8).requires_grad_(), torch.randn(32).requires_grad_())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = up.sampled(x, weight, bias)
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))
    k = rows_kept(64, 0.4)
    own = [t for t in saved if t.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()]
    assert sum(t.untyped_storage().nbytes() for t in own) == k * (8 * 4 + 8)


def test_a_rerun_draws_what_the_first_run_drew_and_another_step_does_not() -> None:
    program = program_of()
    kept = gradients(program, sample_all(program, unsplit(program, 1)), RunState(step=3))
    rerun = gradients(program, recomputing(program, sample_all(program, unsplit(program, 1))), RunState(step=3))
    later = gradients(program, sample_all(program, unsplit(program, 1)), RunState(step=4))
    exact = gradients(program, unsplit(program, 1), RunState())
    names = sampled_params(program, sample_all(program, unsplit(program, 1)).splits)
    for name, value in kept.items():
        assert torch.equal(value, rerun[name]), name
        assert torch.equal(value, later[name]) == (name not in names), name
        if name not in names:
            assert torch.equal(value, exact[name]), name


def test_all_rows_in_evaluation_without_gradients_and_for_comparisons() -> None:
    program = program_of()
    decisions = sample_all(program, unsplit(program, 1))
    exact = gradients(program, unsplit(program, 1), RunState())
    for state in (RunState(training=False), RunState(sampling=False)):
        found = gradients(program, decisions, state)
        assert all(torch.equal(value, exact[name]) for name, value in found.items())


@pytest.mark.parametrize("seed", slow_but([1], [0, 1, 2]))
def test_random_plans_on_two_ranks_are_unbiased(pool2: Pool, seed: int) -> None:
    report = pool2.run("tests.sampled_cases:verified", mesh=[2], seed=seed)[0]
    assert report["passed"], report
    assert report["max_relative_error_gradient"] < 1e-12
    assert 0.01 < report["sampled_variance"] < 10.0
    assert "estimates 5 gradients" in " ".join(report["notes"])


@pytest.mark.slow  # random plans split maps too
@pytest.mark.parametrize("loop", ["b0", "b1", "o", "i"])
def test_every_split_of_a_map_on_two_ranks_is_unbiased(pool2: Pool, loop: str) -> None:
    report = pool2.run("tests.sampled_cases:split_alike", loop=loop)[0]
    assert report["passed"], report


@pytest.mark.slow  # it tests the check of the tests below
def test_a_biased_estimate_is_found(pool2: Pool) -> None:
    report = pool2.run("tests.sampled_cases:without_weights")[0]
    assert not report["passed"]
    assert report["max_relative_error_bias"] > 4.0


def test_forms_are_told_apart_and_survive() -> None:
    split = SampledSplit((0, -1), 0.3)
    assert split != (0, -1)
    assert split != (0, -1)
    assert [(0, -1), split].index(split) == 1
    assert [split, (0, -1)].index((0, -1)) == 1
    assert len({split, (0, -1), SampledSplit((0, -1), 0.3), SampledSplit((0, -1), 0.4)}) == 3
    assert copy.deepcopy(split) == pickle.loads(pickle.dumps(split)) == split
    assert share_of(copy.deepcopy(split)) == 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": 2, "mesh": 1, "pipeline_schedule": "1f1b"},
        {"pipeline": 2, "mesh": 1, "pipeline_schedule": "zero-bubble"},
    ],
)
def test_micro_batches_and_stages_draw_too(pool2: Pool, options: dict[str, Any]) -> None:
    report = pool2.run("tests.sampled_cases:in_parts", timeout_s=250, **options)[0]
    assert report["passed"], report
    assert len(report["sampled"]) == 3
    assert report["max_relative_error_gradient"] < 1e-12
    for peak, promised in zip(report["peak_bytes"], report["promised"]):
        assert peak == pytest.approx(promised, rel=1e-3)
