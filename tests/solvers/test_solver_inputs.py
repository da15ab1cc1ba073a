"""Mistakes that several families share: wrong kinds, shapes and values, oracles that fail; and scikit-learn's protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds

from trainwright.artifacts import UserError
from trainwright.selection import CRAIG, RandomSubset, selection
from trainwright.solvers import consensus, constrained, convex_nets, online
from trainwright.solvers.bilevel import BOREP, BSVRB, bilevel
from trainwright.solvers.linear import DirectionNet, PoissonGrid, TsallisINF, solve_dcdm, solve_sor, train_direction_net
from trainwright.solvers.minimax import GDA, minimax
from trainwright.solvers.outcome import Status
from trainwright.solvers.transport import sinkhorn

COST = np.array([[0.2, 1.0], [0.7, 0.1], [0.5, 0.5]])
ROWS = np.array([[0.5, 1.0], [2.0, -1.0], [3.0, 0.25], [1.0, 4.0]])


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def squares(x: Any) -> Any:
    return (x**2).sum()


def arrays(**options: Any) -> Any:
    return constrained.minimize(squares, np.ones(2), **{"jac": lambda x: 2 * x, **options})


def descend(method: Any, num: Any = 4) -> Any:
    return minimax(lambda x, y, i: x @ x - y @ y, vector(1, 2), vector(1, 2), num, method=method, max_iterations=2)


def lower(x: Any, y: Any, blocks: Any, batch: Any) -> Any:
    return ((y - x) ** 2).sum(1)


def two_levels(upper: Callable[..., Any] = lower, inner: Callable[..., Any] = lower, **options: Any) -> Any:
    method = BSVRB(step_x=0.1, step_y=0.3, num_sampled=2, version=2)
    given = {"x0": vector(1.0), "y0": torch.zeros(2, 1, dtype=torch.float64), "method": method, **options}
    return bilevel(upper, inner, given.pop("x0"), given.pop("y0"), max_iterations=4, **given)


def trained(net: DirectionNet, **options: Any) -> Any:
    return train_direction_net(net, [PoissonGrid((8, 8))], max_iterations=1, seed=torch.Generator(), **options)


def played(environment: Any, max_iterations: Any = 3, **options: Any) -> Any:
    return online.play(
        online.OGD(online.Ball(2), gradient_bound=1.0), environment, max_iterations=max_iterations, **options
    )


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: sinkhorn([], [], None, 0.1), "numbers are needed in the cost M; got NoneType"),
    (lambda: sinkhorn([], [], COST, "0.1"), "a finite reg > 0 is needed; got 0.1"),  # type: ignore[arg-type]
    (lambda: sinkhorn(0.5, [], COST, 0.1), r"a of shape \(3,\) is needed"),
    (lambda: arrays(bounds=[(0, 1)]), r"2 pairs \(low, high\) are needed, one for each variable; got 1"),
    (lambda: arrays(bounds=[0, 1]), r"pairs \(low, high\)"),
    (lambda: arrays(method="SLSQP"), "method ai-sqp or adasketch-newton is needed; got 'SLSQP'"),
    (lambda: arrays(hess=lambda x: np.eye(3)), r"hess of shape \(2, 2\) is needed; got \(3, 3\)"),
    (
        lambda: arrays(constraints={"type": "eq", "fun": lambda x: x[0] - 1, "jac": lambda x: np.ones(3)}),
        r"jac of shape \(1, 2\) is needed, a row for each of its values; got \(1, 3\)",
    ),
    (
        lambda: constrained.minimize(lambda x: x**2, np.ones(2), jac=lambda x: 2 * x),
        r"one number is needed; got shape \(2,\)",
    ),
    (
        lambda: constrained.minimize(squares, vector(1, 2), constraints={"type": "eq", "fun": lambda x: 1.0}),
        "constraints that return tensors are needed; got float",
    ),
    (lambda: solve_sor("abc", [1.0]), "a matrix of numbers is needed as A; got str"),
    (lambda: solve_dcdm(np.eye(2), np.ones(2), None), "residual to direction, is needed; got NoneType"),  # type: ignore[arg-type]
    (lambda: trained(DirectionNet(1)), r"grids of 1 dimensions are needed for this network; got \(8, 8\)"),
    (lambda: trained(DirectionNet(2), batch_size=0), "batch_size of at least 1"),
    (lambda: trained(DirectionNet(2), learning_rate=-1.0), "learning_rate above 0"),
    (lambda: descend("gda"), "a method such as .* is needed; got 'gda'"),
    (lambda: descend(GDA(0.1, 0.1), 2.5), "num_components .* got 2.5"),
    (lambda: two_levels(method="bsvrb"), r"a method such as BSVRB\(…\) is needed; got 'bsvrb'"),
    (lambda: two_levels(y0=vector(math.nan)[None]), "a finite y0 .* NaN or infinity"),
    (lambda: online.play("x", lambda t, x: (x, x), max_iterations=3), "a learner such as .* is needed; got 'x'"),  # type: ignore[arg-type]
    (
        lambda: online.play(online.OGD(online.Ball(2), strong_convexity=1.0), lambda t, x: x, max_iterations=3),  # type: ignore[arg-type,return-value]
        r"returns \(loss, gradient\) is needed; got Tensor",
    ),
    (lambda: consensus.minimize(squares, [(-1, 1)], method="cbo"), "a method such as CBO.* got 'cbo'"),  # type: ignore[arg-type]
    (lambda: consensus.minimize(squares, [(-1, 1)], num_particles=2.5), "num_particles of at least 1"),  # type: ignore[arg-type]
    (lambda: consensus.minimize(squares, x0=vector(math.nan), spread=1.0), "a finite x0"),
    (lambda: convex_nets.ReLURegressor().fit(ROWS, ["a"] * 4), "y of real numbers is needed"),
    (lambda: convex_nets.ReLURegressor().fit([["a"]], [1.0]), "X of real numbers is needed"),
    (lambda: CRAIG().fit("abc"), "features of real numbers are needed"),
    (lambda: CRAIG().fit(ROWS, [0.0, 1.0, math.nan, 0.0]), "labels of torch.float64; convert"),
    (lambda: CRAIG().fit(ROWS, torch.tensor([0.0, 1.0, 1.0, 0.0])), "labels of torch.float32"),
    (lambda: RandomSubset().fit(ROWS, np.array([0.5, 1.0, 1.0, 0.0])), "labels of torch.float64"),
    (lambda: CRAIG(budget=5).fit(ROWS), "a budget of at most the 4 examples is needed; got 5"),
    (lambda: CRAIG(budget=5, per_class="equal").fit(ROWS, [0, 0, 1, 1]), "a budget of at most the 4 examples"),
    (lambda: RandomSubset(budget=9).fit(ROWS), "a budget of at most the 4 examples is needed; got 9"),
    (lambda: two_levels(rtol=1e-3), "grad_norm is needed for rtol; got rtol=0.001 alone"),
    (
        lambda: played(lambda t, x: (x.sum(), 0.75 * torch.ones_like(x))),
        "at most gradient_bound = 1 in norm .* 1.06066",
    ),
    (lambda: CRAIG("a tenth"), r"fraction in \(0, 1\]; got 'a tenth'"),  # type: ignore[arg-type]
    (lambda: CRAIG().set_params(budgets=3), "a setting of CRAIG is needed; got 'budgets'; it has fraction, budget"),
    (lambda: RandomSubset().fit(None), "examples with a length are needed; got NoneType"),
    (lambda: RandomSubset().fit(ROWS, [0]), "one label an example is needed; got 1 for 4"),
    (lambda: CRAIG(budget=2.5), "budget whole, of at least 1; got 2.5"),  # type: ignore[arg-type]
    (lambda: RandomSubset(seed=None), "seed whole; got None"),  # type: ignore[arg-type]
    (lambda: descend(GDA(0.1, 0.1), np.int64(0)), "num_components of at least 1, a whole number, is needed; got"),
    (lambda: descend(GDA("0.1", 0.1)), "positive step sizes are needed; got step_x='0.1'"),  # type: ignore[arg-type]
    (
        lambda: minimax(None, [1j], [1.0], 4, jac=lambda x, y, i: (x, y), method=GDA(0.1, 0.1), max_iterations=2),
        "a real x0 is needed; got torch.complex128",
    ),
    (
        lambda: minimax(None, [1.0], [], 4, jac=lambda x, y, i: (x, y), method=GDA(0.1, 0.1), max_iterations=2),
        "y0 with at least one number is needed",
    ),
    (
        lambda: minimax(None, [1.0], [1.0], 4, jac=lambda x, y, i: (None, y), method=GDA(0.1, 0.1), max_iterations=2),
        "the gradient in x as numbers is needed; got NoneType",
    ),
    (lambda: solve_sor(ROWS[:2], ROWS[:2, 0] + 1j), "real numbers are needed in b and x0; got complex128"),
    (lambda: solve_sor(np.eye(2), "ab"), "real numbers are needed in b and x0; got <U2"),
    (lambda: solve_sor(np.eye(2), np.ones(2), "1"), r"omega in \(0, 2\) .* got '1'"),  # type: ignore[arg-type]
    (lambda: solve_dcdm(1j * np.eye(2), np.ones(2), squares), "a real A is needed; got complex128"),
    (lambda: solve_dcdm(lambda x: x.numpy(), np.ones(2), squares), "A gave ndarray"),
    (lambda: TsallisINF(seed=-1), "seed as a non-negative int or a numpy.random.Generator is needed; got -1"),
    (lambda: arrays(bounds=Bounds([0, 0, 0], [1, 1, 1])), "bounds for 2 variables are needed; got 3"),
    (lambda: arrays(jac=True), r"\(value, gradient\) is needed with jac=True; got float64"),
    (
        lambda: constrained.minimize(lambda x: (torch.ones(2, 2) @ x).sum(), torch.ones(2)),
        "functions of a float64 x are needed, whatever x0 is",
    ),
    (lambda: consensus.minimize(lambda x: ["a"] * len(x), [(-1, 1)]), "fun that returns numbers is needed; got list"),
    (lambda: online.OGD([0, 1], gradient_bound=1.0), "a set such as Ball.* got list"),  # type: ignore[arg-type]
    (lambda: online.OGD(online.Ball(2), gradient_bound="1"), "a positive gradient_bound .* got '1'"),  # type: ignore[arg-type]
    (lambda: played(lambda t, x: (x, x)), r"a loss of shape \(\), one number a player, is needed; got \(2,\)"),
    (lambda: played(lambda t, x: (x.sum(), x), comparator=torch.zeros(3)), r"a comparator of shape \(2,\)"),
    (lambda: played(lambda t, x: (x.sum(), x), max_iterations=1.5), "max_iterations of at least 1"),
    (lambda: convex_nets.RobustReLUClassifier(0.1).predict(ROWS), "a fitted estimator is needed"),
    (lambda: selection("crag"), "one of craig, augment, .*; got 'crag'; did you mean craig?"),
]


@pytest.mark.parametrize("place", range(len(WRONG)))
def test_mistakes_are_named_with_their_remedy(place: int) -> None:
    call, message = WRONG[place]
    with pytest.raises(UserError, match=message) as found:
        call()
    assert str(found.value).count(";") >= 2, "what is needed; what was found; what to try"


@pytest.mark.parametrize("which", ["upper", "inner"])
@pytest.mark.parametrize("method", [None, BOREP(step_x=0.1, step_y=0.1, step_z=0.1)])
def test_a_level_that_is_not_finite_ends_with_the_start(which: str, method: Any) -> None:
    options = {} if method is None else {"method": method, "y0": torch.zeros(1, 1, dtype=torch.float64)}
    result = two_levels(**{which: lambda *given: lower(*given) * math.nan}, **options)
    assert result.status is Status.NOT_FINITE
    assert not result.success
    assert result.x.tolist() == [1.0]


def test_constraints_that_nothing_meets_are_infeasible_and_repeated_ones_are_not() -> None:
    def solve(*constraints: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return constrained.minimize(squares, vector(1, 3), constraints=[{"type": "eq", "fun": c} for c in constraints])

    assert solve(lambda x: x[0] - 1, lambda x: x[0] - 2).status is Status.INFEASIBLE
    assert solve(lambda x: x[0] ** 2 + 1).status is Status.INFEASIBLE
    repeated = solve(lambda x: x[0] - 1, lambda x: 2 * x[0] - 2)
    assert repeated.status is Status.BREAKDOWN
    assert "leave out redundant constraints" in repeated.message
    assert bool(torch.isfinite(repeated.x).all())


def test_arrays_in_arrays_out() -> None:
    found = two_levels(x0=np.array([1.0]), y0=np.zeros((2, 1)))
    same = two_levels()
    assert isinstance(found.x, np.ndarray)
    assert isinstance(found.y, np.ndarray)
    assert found.x.tolist() == same.x.tolist()
    ball = online.Ball(np.zeros(2), 1.0)  # type: ignore[arg-type]
    result = online.play(
        online.OGD(ball, strong_convexity=1.0), lambda t, x: (float(x.sum()), np.ones(2)), max_iterations=3
    )  # type: ignore[arg-type,return-value]
    assert result.status is Status.COMPLETED
    assert CRAIG(0.5).fit(ROWS, np.array(["b", "a", "b", "a"])).indices_.tolist() == CRAIG(0.5).fit(
        ROWS, np.array([1, 0, 1, 0])
    ).indices_.tolist()  # fmt: skip


def test_scikit_learn_takes_the_estimators_as_its_own() -> None:
    from sklearn.base import clone, is_classifier, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    random = np.random.default_rng(0)
    X = random.normal(size=(24, 2)) * [1.0, 50.0] + 3
    y = X[:, 0] - 3
    for given in (CRAIG(0.2, metric="cosine"), RandomSubset(budget=3), convex_nets.ReLUClassifier(0.5, rho=0.2)):
        copy = clone(given)
        assert copy is not given
        assert copy.get_params() == given.get_params()
    scaled = make_pipeline(StandardScaler(), CRAIG(0.25)).fit(X)[-1]
    assert scaled.indices_.tolist() == CRAIG(0.25).fit((X - X.mean(0)) / X.std(0)).indices_.tolist()
    net = convex_nets.ReLURegressor(num_patterns=8, max_iterations=30)
    search = GridSearchCV(make_pipeline(StandardScaler(), net), {"reluregressor__beta": [1e-2, 1e3]}, cv=2)
    assert search.fit(X, y).best_params_ == {"reluregressor__beta": 1e-2}
    classifier = convex_nets.ReLUClassifier(1e-2, num_patterns=8, max_iterations=10)
    assert cross_val_score(make_pipeline(StandardScaler(), classifier), X, y > 0, cv=2).mean() > 0.8
    assert is_regressor(net)
    assert is_classifier(classifier)
