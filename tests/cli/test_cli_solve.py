"""`trainwright solve`: every family from the command line, its answers as text, JSON and HTML, and every wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.artifacts import UserError
from trainwright.cli import main
from trainwright.solvers.registry import solver, solvers

PROBLEMS = """
import numpy as np
import torch
from trainwright.solvers import bilevel, minimax, online, policy
from trainwright.solvers.convex_nets import enumerate_patterns

def vector(*values):
    return torch.tensor(values, dtype=torch.float64)

def saddle(step=0.2):
    fun = lambda x, y, i: (x @ x / 2 + x @ y - y @ y / 2)
    return {"solver": "minimax", "arguments": [fun, vector(1, 2), vector(0, 1), 3],
            "options": {"method": minimax.GDA(step, step), "max_iterations": 200, "rtol": 1e-6}}

def levels():
    lower = lambda x, y, blocks, batch: ((y - x) ** 2).sum(1) / 2
    upper = lambda x, y, blocks, batch: ((y - 3) ** 2).sum(1) / 2
    method = bilevel.BSVRB(step_x=0.1, step_y=0.5, num_sampled=2)
    return {"solver": "bilevel", "arguments": [upper, lower, vector(0), torch.zeros(2, 1, dtype=torch.float64)],
            "options": {"method": method, "max_iterations": 60}}

def rounds():
    learner = online.OGD(online.Ball(2), strong_convexity=1.0)
    return {"solver": "online", "arguments": [learner, lambda t, x: (((x - 0.5) ** 2).sum() / 2, x - 0.5)],
            "options": {"max_iterations": 30}}

class Levers:
    num_envs = 4
    def reset(self, seed=None):
        return np.ones((4, 1)), {}
    def step(self, actions):
        over = np.ones(4, dtype=bool)
        return np.ones((4, 1)), (actions == 1).astype(float), over, over, {}

def levers():
    return {"solver": "policy", "arguments": [Levers(), policy.SoftmaxMLP(1, 2, hidden=())],
            "options": {"method": policy.REINFORCE(0.5), "max_iterations": 10, "batch_size": 4}}

COST = [[0.0, 1.0, 0.4], [0.6, 0.1, 0.9]]

def transport():
    return {"solver": "transport", "arguments": [[0.4, 0.6], [0.2, 0.5, 0.3], COST, 0.1]}

MATRIX = [[2.0, -1.0], [-1.0, 2.0]]

def linear():
    return {"solver": "linear.solve_sor", "arguments": [MATRIX, [1.0, 2.0]], "options": {"omega": 1.1}}

def directions():
    return {"solver": "linear.solve_dcdm", "arguments": (MATRIX, [1.0, 2.0], lambda r: r)}

def plane():
    return {"solver": "constrained", "arguments": [lambda x: (x ** 2).sum(), [3.0, 1.0], lambda x: x[:1] + x[1:] - 1]}

def bowl():
    return {"solver": "consensus", "arguments": [lambda x: (x ** 2).sum(1), [(-1, 2)] * 2], "options": {"max_iterations": 20}}

def network():
    X = torch.tensor([[-1.0, 1], [0, 1], [1, 1], [2, 1]], dtype=torch.float64)
    y = vector(1, 0, 1, 2)
    return {"solver": "convex_nets", "arguments": [X, y, enumerate_patterns(X), 1e-2]}

def own():
    from trainwright.solvers.linear import solve_ssor_pcg
    return {"solver": solve_ssor_pcg, "arguments": [MATRIX, [1.0, 2.0]]}

def nothing():
    return None

def misspelt():
    return {"solver": "transpot", "arguments": []}

def extra():
    return {"solver": "transport", "argument": []}

def bare():
    return {"solver": "transport", "arguments": COST[0][0]}

def no_function():
    return {"solver": 3}

def unknown_option():
    return {**transport(), "options": {"tolerance": 1.0}}

def too_few():
    return {"solver": "transport", "arguments": [[], []]}

def negative():
    return {"solver": "transport", "arguments": [[], [], [[-1.0, 0.0]], 0.1]}

def raises_inside():
    def fun(x, y, i):
        raise ZeroDivisionError("the oracle")
    return {**saddle(), "arguments": [fun, vector(1), vector(1), 3]}

def not_a_result():
    return {"solver": lambda x: x, "arguments": [1]}
"""
FAMILIES = {"saddle": "minimax.minimax", "levels": "bilevel.bilevel", "rounds": "online.play", "levers": "policy.learn",
            "transport": "transport.solve_sns", "linear": "linear.solve_sor", "directions": "linear.solve_dcdm",
            "plane": "constrained.solve_ai_sqp", "bowl": "consensus.minimize",
            "network": "convex_nets.solve_relu_programme", "own": "solve_ssor_pcg"}  # fmt: skip


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("solve") / "problems.py"
    path.write_text(PROBLEMS, encoding="utf8")
    return path


@pytest.mark.parametrize("function", FAMILIES)
def test_every_family_runs_and_tells(function: str, problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = problems.with_name(f"{function}.html")
    assert main(["solve", f"{problems}:{function}", "--json", "-", "--html", str(html)]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert record["solver"] == FAMILIES[function]
    assert record["success"]
    assert record["status"] in ("CONVERGED", "COMPLETED")
    assert record["history"]["nit"][-1] == record["nit"]
    assert len({len(column) for column in record["history"].values()}) == 1
    page = html.read_text(encoding="utf8")
    assert record["message"] in page
    assert FAMILIES[function] in page
    assert "chart0" in page


def test_all_solvers_are_there_by_name_and_family() -> None:
    assert len(solvers()) == 12
    for each in solvers():
        assert solver(each.name) is each
        assert each.function.__name__ == each.name.partition(".")[2]
        assert solver(each.family).family == each.family
    with pytest.raises(UserError, match="did you mean minimax"):
        solver("minmax")


def test_the_answer_in_words(problems: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", f"{problems}:plane"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("constrained.solve_ai_sqp: converged: the residual met the tolerance\n")
    assert " objective                  0.5\n" in text
    assert " iterations " in text
    assert " x  [0.5, 0.5]\n" in text


def test_settings_go_to_the_function_and_options_to_the_solver(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{problems}:saddle"
    assert main(["solve", spec, "--set", "step=0.01", "--option", "max_iterations=3", "--json", "-"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["nit"], record["status"], record["success"]) == (3, "MAX_ITERATIONS", False)
    slow = record["history"]["residual"]
    assert main(["solve", spec, "--option", "max_iterations=3", "--option", "rtol=0.0", "--json", "-"]) == 0
    quick = json.loads(capsys.readouterr().out)
    assert quick["status"] == "COMPLETED"
    assert quick["history"]["residual"][-1] < 0.9 * slow[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([":nothing"], "a dict with solver, arguments, options is needed; .* returned NoneType"),
        ([":misspelt"], "a solver is needed, one of minimax.minimax, .*; got 'transpot'; did you mean transport"),
        ([":extra"], "the keys solver, arguments, options are needed; .* returned 'argument'"),
        ([":bare"], "arguments as a list and options as a dict are needed"),
        ([":no_function"], "a solver's name or function is needed; .* returned int"),
        ([":unknown_option"], "transport.solve_sns has no option 'tolerance'; it takes rtol, atol, max_iterations"),
        ([":too_few"], "the arguments of transport.solve_sns are needed"),
        ([":negative"], "costs ≥ 0 are needed"),
        ([":raises_inside"], "minimax.minimax failed: ZeroDivisionError: the oracle, at .*problems.py:"),
        ([":not_a_result"], "a solver that returns a Result is needed; <lambda> returned int"),
        ([":absent"], "a function 'absent' is needed"),
        ([":saddle", "--set", "steps=1"], "has no parameter 'steps'; it accepts step"),
        ([":saddle", "--set", "step"], "--set needs KEY=VALUE"),
        ([":saddle", "--option", "max_iterations=many"], "max_iterations of at least 0, a whole number"),
        ([""], "a problem is needed as FILE.py:function"),
    ],
)
def test_wrong_input_exits_with_2_and_writes_nothing(
    arguments: list[str], message: str, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, record = tmp_path / "a.html", tmp_path / "a.json"
    given = ["solve", f"{problems}{arguments[0]}", *arguments[1:], "--html", str(html), "--json", str(record)]
    assert main(given) == 2
    shown = capsys.readouterr()
    assert not shown.out
    text = " ".join(shown.err.split())
    import re

    assert re.search(message, text), text
    assert "Traceback" not in text
    assert not html.exists()
    assert not record.exists()


def test_ctrl_c_returns_what_there_is(
    problems: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainwright.solvers.minimax import GDA

    step, calls = GDA.step, []

    def interrupted(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *given)

    monkeypatch.setattr(GDA, "step", interrupted)
    assert main(["solve", f"{problems}:saddle", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "STOPPED"
