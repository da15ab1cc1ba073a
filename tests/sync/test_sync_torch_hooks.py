"""torch's hooks behind the face of the methods: against DistributedDataParallel with the same hooks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pool import Pool
from tests.sync_cases import net
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.sync import AllReduce, simulate
from trainwright.sync.blocking import AskingGroup, as_program

CASE = "tests.sync_hook_cases:farthest"
POWER = [{"rank": 1, "start_step": 3, "warm_start": True}, {"rank": 2, "start_step": 2, "warm_start": False}]


@pytest.mark.parametrize("options", POWER)
def test_powersgd_is_what_ddp_does_with_torchs_hook(pool2: Pool, options: dict[str, Any]) -> None:
    """To rounding: DDP adds in the order of its ring."""
    assert max(pool2.run(CASE, name="powersgd", options=options)) < 1e-12


def test_post_local_sgd_is_what_ddp_does_with_torchs_hook_and_averager(pool2: Pool) -> None:
    options = {"period": 3, "shared_steps": 2, "subgroup": 1}
    assert max(pool2.run(CASE, name="post-local-sgd", options=options)) < 1e-12


def test_subgroups_and_thin_matrices_on_four_ranks(pool4: Pool) -> None:
    options = {"period": 3, "shared_steps": 2, "subgroup": 2}
    assert max(pool4.run(CASE, name="post-local-sgd", options=options)) < 1e-12
    assert max(pool4.run(CASE, name="powersgd", options=POWER[0])) < 1e-12


def test_bytes_of_subgroups_are_those_declared() -> None:
    def program(seed: int) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        joined = yield from sync.join("post-local-sgd", model, optimizer, period=2, shared_steps=1, subgroup=2)
        for step in range(6):
            model(torch.full((1, 4), float(seed + step)).double()).sum().backward()
            yield from joined.steps(0.0)
        return joined

    run = simulate([program(seed) for seed in range(4)])
    assert run.sent_bytes == run.results[0].record.sent_bytes(run.results[0].size, 6)


def test_most_bytes_are_saved_where_matrices_are_large() -> None:
    """A matrix of a thousand by a thousand at rank 1: 2,000 elements for a million, once compression has begun."""
    record = sync.record("powersgd")
    size = sync.Size((10**6,), 4, 8, {"rank": 1, "start_step": 0, "min_compression_rate": 2.0}, ((1000, 1000),))
    assert record.sent_bytes(size, 1) - record.sent_bytes(size, 0) == 2 * 2 * 7 * 8 * 125 * 4
    as_vector = sync.Size((10**6,), 4, 8, size.options)
    assert record.sent_bytes(as_vector, 1) - record.sent_bytes(as_vector, 0) == 2 * 7 * 10**6 * 4


def test_a_layer_without_gradient_stays_finite() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    joined = sync.create("powersgd", model, torch.optim.SGD(model.parameters(), lr=0.1), start_step=2)
    for _ in range(4):
        model.zero_grad()
        model[1](torch.ones(1, 8)).sum().backward()
        joined.step(0.0)
    assert torch.isfinite(joined.method.replica.read()).all()
    joined.close()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("powersgd", {"start_step": 1}, "start_step of at least 2 with error_feedback or warm_start"),
        ("powersgd", {"rank": 0}, "rank of at least 1"),
        ("post-local-sgd", {"period": 0}, "period of at least 1 step"),
        ("post-local-sgd", {"subgroup": 2}, "a subgroup that divides the number of workers; got 2 of 3"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], said: str) -> None:
    def program() -> Any:
        model = net()
        yield from sync.join(name, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(UserError, match=said):
        simulate([program() for _ in range(3)])


def test_an_error_in_blocking_code_and_one_in_its_place_end_the_program() -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(as_program(fails, []))
    group, x = AskingGroup(1), torch.ones(1)
    program = as_program(lambda: torch.distributed.all_reduce(x, group=group), [group])
    assert isinstance(next(program), AllReduce)
    with pytest.raises(ValueError, match="the peer"):
        program.throw(ValueError("the peer"))
