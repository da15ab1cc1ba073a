"""Gradient codes and their sequential kin: what decodes, loads, straggler models, and a master that waits when it has to."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sync_problems import LeastSquares, Vector
from trainwright import sync
from trainwright.artifacts import UserError
from trainwright.sync import MSGC, SRSGC, Compute, GradientCode, Network, simulate
from trainwright.sync.sequential_codes import is_bursty

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = [(8, 1, 2, 3), (8, 2, 3, 3), (12, 2, 5, 4), (10, 3, 4, 5)]


@given(st.integers(2, 9), st.data())
def test_any_answers_but_s_give_the_whole(n: int, data: Any) -> None:
    s = data.draw(st.integers(0, n - 1))
    code = GradientCode(n, s, cyclic=data.draw(st.booleans()))
    late = data.draw(st.sets(st.integers(0, n - 1), max_size=s))
    weights = code.decoding(set(range(n)) - late)
    np.testing.assert_allclose(weights @ code.matrix, np.ones(n), atol=1e-6)
    assert not weights[sorted(late)].any()
    assert (np.count_nonzero(code.matrix, axis=1) == s + 1).all()


def test_fractional_repetition_where_it_fits() -> None:
    assert GradientCode(6, 2).repeats
    assert not GradientCode(6, 3).repeats
    assert set(GradientCode(6, 2).matrix.flat) == {0.0, 1.0}
    assert GradientCode(6, 2).decodes({0, 5})  # fewer than n - s, one in each group
    assert not GradientCode(6, 2).decodes({0, 1, 2})
    with pytest.raises(UserError, match="or of one in each group; got 3"):
        GradientCode(6, 2).decoding({0, 1, 2})
    with pytest.raises(UserError, match="stragglers from 0 to 5"):
        GradientCode(6, 6)


@pytest.mark.parametrize(("n", "s", "most"), [(8, 2, 1e-10), (64, 7, 1e-7)])
def test_residual_of_decoding(n: int, s: int, most: float) -> None:
    code = GradientCode(n, s, cyclic=True)
    for seed in range(5):
        late = set(np.random.default_rng(seed).choice(n, s, replace=False).tolist())
        weights = code.decoding(set(range(n)) - late)
        assert np.abs(weights @ code.matrix - 1).max() < most


def test_loads_are_those_of_the_formulas() -> None:
    loads = [
        [round(scheme.load, 3) for scheme in (MSGC(*model), SRSGC(*model), GradientCode(model[0], model[3]))]
        for model in MODELS
    ]
    assert loads == [[0.2, 0.375, 0.5], [0.2, 0.375, 0.5], [0.114, 0.25, 0.417], [0.171, 0.4, 0.6]]
    assert GradientCode(256, 15).load == 0.0625
    assert SRSGC(256, 2, 3, 23).code.stragglers == 12
    assert SRSGC(256, 2, 3, 23).load == pytest.approx(0.0508, abs=5e-5)
    assert MSGC(256, 1, 2, 27).load == pytest.approx(0.00754, abs=5e-6)


def bursty(model: tuple[int, int, int, int], num_rounds: int, seed: int) -> list[frozenset[int]]:
    """A random pattern of the model, as full as it gets by adding stragglers in random order."""
    n, burst, window, most = model
    rng, pattern = np.random.default_rng(seed), [frozenset[int]() for _ in range(num_rounds)]
    for index in rng.permutation(n * num_rounds):
        turn, worker = divmod(int(index), n)
        around = slice(max(0, turn - window + 1), turn + window)
        tried = [*pattern[around]]
        tried[turn - around.start] |= {worker}
        if is_bursty(tried, burst, window, most):
            pattern[turn] |= {worker}
    return pattern


def undone(scheme: Any, pattern: list[frozenset[int]], num_jobs: int = 40) -> int:
    """Jobs that are not done when their time is over."""
    late = 0
    for turn in range(1, num_jobs + scheme.delay + 1):
        tasks = scheme.tasks(turn)
        scheme.receive(turn, tasks, pattern[turn - 1] if turn <= len(pattern) else frozenset())
        due = turn - scheme.delay
        late += 1 <= due <= num_jobs and not scheme.is_done(due)
    return late


@pytest.mark.parametrize("kind", [MSGC, SRSGC])
@pytest.mark.parametrize("model", MODELS)
def test_every_job_ends_in_time_under_bursts(kind: type, model: tuple[int, int, int, int]) -> None:
    for seed in range(10):
        pattern = bursty(model, 44, seed)
        assert is_bursty(pattern, *model[1:])
        assert sum(map(len, pattern)) > 20
        assert undone(kind(*model), pattern) == 0


@pytest.mark.parametrize("model", MODELS)
def test_stragglers_outside_the_model_break_jobs(model: tuple[int, int, int, int]) -> None:
    rng = np.random.default_rng(0)
    pattern = [frozenset(np.flatnonzero(rng.random(model[0]) < 0.35).tolist()) for _ in range(44)]
    assert undone(MSGC(*model), pattern) >= 30
    assert not MSGC(*model).tolerates(pattern)


def test_sr_sgc_bears_s_stragglers_in_each_round() -> None:
    for model in MODELS:
        scheme, rng = SRSGC(*model), np.random.default_rng(1)
        s = scheme.code.stragglers
        pattern = [frozenset(rng.choice(model[0], s, replace=False).tolist()) for _ in range(44)]
        assert scheme.tolerates(pattern)
        assert undone(scheme, pattern) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SRSGC(8, 2, 4, 3), "a burst that divides the window less 1; got 2 and 4"),
        (lambda: MSGC(8, 3, 3, 3), "a burst below its window"),
        (lambda: MSGC(8, 1, 2, 9), "most from 0 to 8"),
    ],
)
def test_models_that_cannot_be_are_refused(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def coded_run(stragglers: int, paces: list[Any], num_steps: int = 12, cyclic: bool = False, n: int = 8) -> Any:
    """Run steps of which each has data of its own: one that is late must not mix those of two steps."""
    problem = LeastSquares(n, 5, 9)

    def program(rank: int) -> Any:
        model = Vector(torch.zeros(5).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options = {"stragglers": stragglers, "cyclic": cyclic, "scale": n}
        joined = yield from sync.join("gradient-coding", model, optimizer, **options)

        def closure(step: int, chunk: int) -> torch.Tensor:
            x = torch.cat(list(model.parts))
            return x @ problem.hessians[chunk] @ x / 2 - (1 + step) * problem.targets[chunk] @ x

        for step in range(num_steps):
            yield from joined.steps(functools.partial(closure, step))
            if rank == 0:
                yield Compute(0.0)
        ended = yield sync.Now()
        yield from joined.finishing()
        return model.x, ended

    done = simulate([program(rank) for rank in range(n + 1)], Network(1e-3, 1e9), [0.0, *paces])
    x = torch.zeros(5).double()
    for step in range(num_steps):
        gradients = [problem.gradient(x, rank, 0) - step * problem.targets[rank] for rank in range(n)]
        x = x - 0.5 * torch.stack(gradients).mean(0)
    for found, _ in done.results:
        torch.testing.assert_close(found, x, rtol=0, atol=1e-9)
    return done


@pytest.mark.parametrize("cyclic", [False, True])
def test_the_decoded_gradient_is_the_whole_one_and_stragglers_are_not_waited_for(cyclic: bool) -> None:
    """Two workers take 40 times as long; three chunks of eight take 3/8 of the seconds, and the round twice that."""
    slow = [1.0] * 6 + [40.0] * 2
    with_code = coded_run(3 if not cyclic else 2, slow, cyclic=cyclic)
    without = coded_run(0, slow)
    assert with_code.results[0][1] < 12 * (4 / 8) * 2 + 1
    assert without.results[0][1] > 12 * 40 / 8


@pytest.mark.parametrize("cyclic", [False, True])
def test_one_that_was_late_takes_the_data_of_the_step_that_it_answers(cyclic: bool) -> None:
    """Each is late for a while, in turn, and needed again when it is back: it skips the steps that went on without it."""

    def pace(rank: int) -> Any:
        return lambda number: 30.0 if (number + 2 * rank) % 8 == 0 else 1.0

    coded_run(2 if cyclic else 3, [pace(rank) for rank in range(8)], num_steps=30, cyclic=cyclic)


def test_the_master_waits_where_too_many_straggle() -> None:
    """Three are slow and the code bears two: every round waits for one of them, and the gradient stays the whole one."""
    assert coded_run(2, [1.0] * 5 + [10.0] * 3, num_steps=4, cyclic=True).results[0][1] > 4 * 10 * 3 / 8 - 1
