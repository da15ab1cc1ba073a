"""Parameters that travel in buckets: fewer collectives, issued early and waited for late, the same gradients."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainwright as tw
from tests.builders import decisions, logged, program
from tests.grids import slow_but
from tests.plans import random_decisions
from tests.pool import Pool
from trainwright.launch import run_processes
from trainwright.program.decisions import OVERLAPS, Overlap
from trainwright.program.layout import REPLICATE, Slot, local_shape
from trainwright.program.transition import transition
from trainwright.rank.buckets import Bucket, _JoinedGather
from trainwright.rank.instructions import Close, Open
from trainwright.rank.local import LocalProgram, build_local
from trainwright.rank.reruns import Rerun, gathering_before, reruns_of
from trainwright.rank.reshard import Route, SimulatedCommunicator


def products_in_flight(events: list[str]) -> list[int]:
    """For each collective, the matrix products between its issue and its wait."""
    found = []
    for place, event in enumerate(events):
        if event.startswith("issue"):
            behind = events[place : events.index(event.replace("issue", "wait"))]
            found.append(behind.count("product"))
    return found


def buckets(local: LocalProgram) -> list[Bucket]:
    return [found.bucket for found in local.instructions if isinstance(found, Open)]


@pytest.mark.parametrize("overlap", ["buckets", "ahead"])
def test_gradients_are_reduced_together_beside_the_backward(monkeypatch: pytest.MonkeyPatch, overlap: Overlap) -> None:
    monkeypatch.setattr("trainwright.rank.travel.ENOUGH_BYTES", 0)
    alone, _ = logged(decisions("ddp"), "none")
    log, local = logged(decisions("ddp"), overlap)
    num_regions = len({found.region for found in local.instructions if isinstance(found, (Open, Close))})
    assert log.num_bytes == alone.num_bytes, "no byte more or less"
    assert log.num_calls["all_reduce"] < alone.num_calls["all_reduce"] / 2
    flights = [num for num in products_in_flight(log.events) if num]
    assert len(flights) - 1 >= num_regions - 2, "all but the first region's run beside a backward"
    assert len(products_in_flight(alone.events)) == 1, "the number of labels, and nothing else"


def test_small_gradients_of_several_regions_share_a_collective() -> None:
    log, local = logged(decisions("ddp"), "buckets")
    (bucket,) = buckets(local)
    assert len(bucket.reductions) == 1 < len({member.region for member in bucket.members})
    backward = log.events[log.events.index("forward ends") :]
    assert backward.index("product") < next(place for place, event in enumerate(backward) if event.startswith("issue"))


def test_parameters_are_gathered_beside_the_forward() -> None:
    log, _ = logged(decisions("fsdp"), "ahead")
    forward = log.events[: log.events.index("forward ends")]
    gathers = products_in_flight(forward)
    assert len(gathers) >= 4, "small ones go together, one or more a region"
    assert sum(num > 0 for num in gathers) >= len(gathers) / 2
    assert len(products_in_flight(logged(decisions("fsdp"), "none")[0].events)) == 1, "the number of labels"


def test_what_is_gathered_again_is_gathered_ahead() -> None:
    """Where the backward gathers anew, it does so while the region behind is still computing."""
    loose = tw.plan(*tw.zoo.build("llama-tiny"), hardware="cpu:2", mesh=(2,), solver="fsdp")
    chosen = decisions("fsdp", int(0.8 * loose.predicted.peak_bytes))
    again = [key for key in chosen.recomputed if ".in1" in key]
    assert again, "a plan that keeps every gathered weight would test nothing"
    log, _ = logged(chosen, "ahead")
    backward = log.events[log.events.index("forward ends") :]
    kept, _ = logged(decisions("fsdp"), "ahead")
    assert log.num_calls["all_gather"] > kept.num_calls["all_gather"]
    assert any(
        products_in_flight([event for event in backward if "issue" in event or "wait" in event or event == "product"])
    )


def test_only_the_region_directly_before_is_gathered_ahead() -> None:
    """What is gathered sooner is held while the regions between run, which gather nothing again."""
    gathering, other = (Rerun(gathers={Bucket((), ahead): {}}) for ahead in (True, False))
    reruns = {0: gathering, 2: gathering, 3: gathering, 4: other, 5: gathering}
    segments = [(region, region, region + 1) for region in range(6)]
    assert gathering_before(reruns, segments) == {3: 2}


@pytest.mark.parametrize("overlap", slow_but(["buckets"], OVERLAPS))
def test_a_parameter_that_the_loss_does_not_reach(pool2: Pool, overlap: str) -> None:
    """A buffer that never fills is sent all the same: the other gradients in it are right, and nobody hangs."""
    errors = pool2.run("tests.overlap_cases:unreached", overlap=overlap)
    assert max(errors) < 1e-12


def test_a_bucket_is_waited_for_by_its_own_run_alone(pool2: Pool) -> None:
    """Two forwards before their backwards, and gradients that add up, give what one after the other gives."""
    assert max(pool2.run("tests.overlap_cases:two_forwards")) < 1e-12


@pytest.mark.parametrize("solver", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_weight_that_is_alone_in_its_buffer_is_reduced_without_a_copy(pool2: Pool, solver: str) -> None:
    for found, error in pool2.run("tests.overlap_cases:in_place", solver=solver):
        assert any(found)
        assert error < 1e-6


def test_only_a_gradient_that_nothing_else_holds_is_reduced_in_place() -> None:
    """The gradients of a sum's operands are one tensor: reduced for the parameter, it would be wrong for the activation."""
    local = build_local(program(), replace(decisions("ddp"), overlap="buckets"), SimulatedCommunicator((2,)))
    (bucket,) = buckets(local)
    results = {found.place: found.result for found in local.instructions if isinstance(found, Close)}
    names = {local.values[results[k]].tensor.key: member.is_new for k, member in enumerate(bucket.members)}
    assert names["model.embed_tokens.weight"]
    assert names["model.layers.0.mlp.up_proj.weight"]
    assert not names["model.layers.0.input_layernorm.weight"], "a product's operand, whose gradient is summed"


def test_parameters_that_share_a_gradient_are_clipped_once() -> None:
    ours, eager = run_processes("tests.overlap_cases:clipped", {}, 1)[0]
    assert ours == pytest.approx(eager)


def test_large_buffers_are_cut() -> None:
    local = build_local(program(), replace(decisions("ddp"), overlap="buckets"), SimulatedCommunicator((2,)))
    (bucket, *_) = [found for found in buckets(local) if len(found.members) > 4]
    large = [replace(member, num_bytes=20 * 2**20) for member in bucket.members]
    assert len(Bucket(large, False).reductions) == len(large)
    assert len(Bucket(bucket.members, False).reductions) == 1


@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.slow), "ahead"])
def test_a_compiled_module_computes_the_same(pool2: Pool, overlap: str) -> None:
    for error, num_graphs in pool2.run("tests.overlap_cases:compiled", overlap=overlap):
        assert error < 1e-12
        assert 1 <= num_graphs <= 3, "what only computes is one graph, not one an op"


def test_one_graph_for_all_is_refused_with_a_reason(pool2: Pool) -> None:
    for message in pool2.run("tests.overlap_cases:compiled_whole"):
        assert "trainwright communicates between the pieces" in message


class Calls(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "split"), [((6, 4), 1), ((6, 4), 0), ((2,), 0), ((5, 3), 1)])
def test_what_shared_a_gather_is_copied_out_once(shape: tuple[int, ...], split: int) -> None:
    """Into memory of its own, so that what was gathered can go."""
    slots = tuple(Slot(dim, size) for dim, size in enumerate(shape))
    routes = [Route(transition((split,), (REPLICATE,)), shape, slots, SimulatedCommunicator((2,))) for _ in range(2)]
    part = torch.ones(local_shape(shape, slots, (split,), (2,), (0,)))
    first = _JoinedGather(routes, [part, part]).of(0)
    with Calls() as calls:
        taken = first.wait()
    assert taken.shape == shape
    assert taken.untyped_storage().nbytes() == 4 * math.prod(shape)
    assert calls.num["aten::clone"] + calls.num["aten::cat"] == 1


def test_where_a_region_runs_again_what_is_on_its_way_to_others_has_no_gradient() -> None:
    """All sums share a bucket, which opens in the first region: zeros for its tokens would be as large as all parameters."""
    whole, again = decisions("ddp"), random_decisions(program(), (2,), 0, 1.0).recomputed
    embedding = next(tensor for tensor in whole.params if tensor.key == "model.embed_tokens.weight")
    # it is scattered, so the first sum is one of a block, and the bucket of all sums opens there
    chosen = replace(whole, params=whole.params | {embedding: (0,)}, recomputed=again)
    num_zeros = {}
    for overlap in OVERLAPS:
        with Calls() as calls:
            _, local = logged(chosen, overlap)
        num_zeros[overlap] = calls.num["aten::zeros"]
    assert any(rerun.instructions for rerun in reruns_of(local).values())
    assert len({*num_zeros.values()}) == 1, num_zeros
