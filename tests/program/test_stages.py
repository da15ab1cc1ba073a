"""A step cut into stages: what crosses, what is run again, what is tied, and which cuts are refused."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.artifacts import UserError
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.program.program import Program, build_program
from trainwright.program.stages import boundaries, cut, tied

MODELS = ["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny", "mixtral-tiny"]


@cache
def program_of(name: str) -> Program:
    return build_program(cached_capture(*zoo.build(name, device="meta")))


@settings(max_examples=20)
@given(st.data())
@pytest.mark.parametrize("name", MODELS)
def test_any_cut_runs_every_op_once_but_for_what_the_batch_alone_makes(name: str, data: st.DataObject) -> None:
    program = program_of(name)
    names = boundaries(program)
    begins = sorted(data.draw(st.sets(st.sampled_from(names), min_size=1)), key=names.index)
    stages = cut(program, begins)
    times = {op: sum(op in stage.program.ops for stage in stages) for op in program.ops}
    assert all(times[op] == 1 for op in program.ops if op.requires_grad)
    for op in program.ops:
        if times[op] > 1:
            assert not any(tensor.role == "param" for tensor in op.inputs)
    for before, after in pairwise(stages):
        assert before.handed == after.given
    for stage in stages:
        there = {t for t in stage.program.tensors if t.role != "op"} | set(stage.given)
        for op in stage.program.ops:
            assert set(op.inputs) <= there, "what is read has been given, is a source, or was made before"
            there |= set(op.outputs)
        assert set(stage.handed) <= there
    assert not stages[0].given
    assert not stages[-1].handed
    assert program.loss in stages[-1].program.tensors
    sources = {tensor for tensor in program.tensors if tensor.role != "op"}
    assert {t for stage in stages for t in stage.program.tensors if t.role != "op"} == sources, "none is lost"


@pytest.mark.parametrize(
    ("name", "num", "crossing"),
    [
        ("gpt2-tiny", 3, 1),
        ("llama-tiny", 3, 1),
        ("bert-tiny", 3, 1),
        ("vit-tiny", 3, 1),
        ("mixtral-tiny", 3, 1),
        ("t5-tiny", 12, 3),
    ],
)
def test_few_tensors_cross(name: str, num: int, crossing: int) -> None:
    names = boundaries(program_of(name))
    assert len(names) == num
    assert max(len(stage.given) for stage in cut(program_of(name), names)) == crossing


def test_tied_parameters_are_those_of_several_stages() -> None:
    assert tied(cut(program_of("gpt2-tiny"), ["transformer.h.1"])) == {"transformer.wte.weight": (0, 1)}
    assert tied(cut(program_of("llama-tiny"), ["model.layers.1"])) == {}
    three = cut(program_of("t5-tiny"), ["encoder.final_layer_norm", "decoder.final_layer_norm"])
    assert tied(three) == {"shared.weight": (0, 1, 2)}


def test_a_name_that_is_no_boundary_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"'transformer.h.7' is none of this model; try one of transformer.h.0"):
        cut(program_of("gpt2-tiny"), ["transformer.h.7"])
    with pytest.raises(UserError, match="in the order of the model"):
        cut(program_of("gpt2-tiny"), ["transformer.h.1", "transformer.h.0"])


def test_a_forward_that_writes_buffers_is_refused() -> None:
    program = program_of("resnet-tiny")
    with pytest.raises(UserError, match="changes no buffer"):
        cut(program, boundaries(program)[:1])
