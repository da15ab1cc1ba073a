"""The command line: what it prints where, its exit statuses, and that help needs no torch."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.models import OptionInfo

from tests import report_samples as samples
from tests.process_tree import children, ranks_of
from trainwright.artifacts import ModelRef, Profile, Refusal, UserError, parse_bytes
from trainwright.cli import main
from trainwright.cli.app import app
from trainwright.cli.errors import status_of
from trainwright.cli.model import ModelOptions, as_planned, model_of_plan, parse_settings
from trainwright.cli.output import quiet_stdout
from trainwright.cli.plan import compared_as_json, parse_mesh
from trainwright.cli.ranks import run_worker

VERBS = (
    "cache",
    "profile",
    "diff",
    "plan",
    "check",
    "explain",
    "train",
    "export",
    "verify",
    "solve",
    "sweep",
    "calibrate",
    "optimizers",
    "sync",
    "zoo",
    "examples",
    "demo",
)


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "trainwright", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])} | environment,
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("900000B", 900_000),
        ("512MiB", 512 * 2**20),
        ("24GB", 24 * 10**9),
        ("40GiB", 40 * 2**30),
        (" 1.5 gib ", 3 * 2**29),
        ("7", 7),
        (".5KB", 500),
        (123, 123),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "0", "0.1B", "1 GiBB", "40 gigs", "1,5GB", "nan", "1GiB 2"]
)
def test_what_is_no_size_is_the_users_error(text: str) -> None:
    with pytest.raises(UserError, match="40GiB"):
        parse_bytes(text)


def test_meshes() -> None:
    assert parse_mesh(None) is None
    assert parse_mesh("2x4X8") == (2, 4, 8)
    for bad in ("2x", "x2", "0x2", "two", "2*4"):
        with pytest.raises(UserError):
            parse_mesh(bad)


def test_settings() -> None:
    assert parse_settings(["a=1", "b_c=x=y", "d="]) == {"a": "1", "b_c": "x=y", "d": ""}
    for bad in ("a", "=1", "a b=1"):
        with pytest.raises(UserError, match="KEY=VALUE"):
            parse_settings([bad])


def test_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException):
        def action() -> int:
            raise error

        return action

    expected = {UserError("a; b; c"): 2, Refusal("no room"): 1, RuntimeError("odd"): 1, KeyboardInterrupt(): 130}
    for error, status in expected.items():
        assert status_of(fail(error)) == status, error
        printed = capsys.readouterr()
        assert printed.out == ""
        assert str(error) in printed.err
        assert "Traceback" not in printed.err
    assert status_of(lambda: None) == 0


def test_a_traceback_where_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_DEBUG", "1")

    def fail() -> int:
        raise UserError("a; b")

    assert status_of(fail) == 2
    assert "Traceback" in capsys.readouterr().err


NO_TORCH = [
    ("--help",),
    ("--version",),
    (),
    ("zoo",),
    ("optimizers",),
    ("federated",),
    ("sync",),
    *((verb, "--help") for verb in VERBS),
]


ANSWER_ALL = """
import contextlib, io, json, sys
from trainwright.cli import main

for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(arguments)
    heavy = {"torch", "transformers", "plotly", "scipy", "highspy", "numpy"} & set(sys.modules)
    assert status == 0, arguments
    assert said.getvalue().strip(), arguments
    assert not heavy, f"{arguments} imported {heavy}"
"""


def test_help_and_listings_answer_without_torch() -> None:
    """One process answers them in turn: what one of them imports is seen after it."""
    command = [sys.executable, "-c", ANSWER_ALL, json.dumps(NO_TORCH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_verb_is_in_the_help_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        line = next(line for line in text.splitlines() if f" {verb} " in line)
        assert len(line.split()) > 4, line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["profile"], "MODEL"),
        (["profile", "zoo:gpt2-tiny", "--batch-size", "0"], "batch-size"),
        (["profile", "zoo:gpt2-tiny", "--frobnicate"], "frobnicate"),
        (["profile", "zoo:gpt3"], "gpt2"),
        (["profile", "gpt2-tiny"], "zoo:gpt2-tiny"),
        (["profile", "missing.py:build"], "missing.py"),
        (["profile", "zoo:gpt2-tiny", "--set", "n_layer"], "KEY=VALUE"),
        (["plan", "zoo:gpt2-tiny"], "hardware"),
        (["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "--solver", "magic"], "joint"),
        (["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "--mesh", "a"], "mesh"),
        (["plan", "zoo:gpt2-tiny", "--hardware", "9xh2000"], "h200"),
        (["plan", "zoo:gpt2-tiny", "--hardware", "cpu:2", "--memory", "lots"], "40GiB"),
        (["check", "missing.json"], "missing.json"),
        (["train", "zoo:gpt2-tiny", "--plan", "missing.json"], "missing.json"),
        (["train", "zoo:gpt2-tiny", "--plan", "missing.json", "--resume"], "a plan file is needed"),
        (["demo", "--data", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_are_told_on_standard_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_options_whose_metavar_is_their_name_in_capitals_are_named() -> None:
    """Typer 0.27 takes such a metavar for the name of an option that says none: `--DTYPE`."""
    for command in app.registered_commands:
        assert command.callback is not None
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            for info in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(info, OptionInfo) and info.metavar == parameter.name.upper():
                    assert str(info.default).startswith("--"), f"{command.callback.__name__}: {parameter.name}"


def test_a_model_option_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    samples.plan().to_json(tmp_path / "plan.json")
    assert main(["check", str(tmp_path / "plan.json"), "--batch-size", "4"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_users_model_is_never_run_from_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    spec = f"{tmp_path}/mine.py:build"
    samples.plan(model=ModelRef(name="build", spec=spec)).to_json(tmp_path / "plan.json")
    assert main(["check", str(tmp_path / "plan.json")]) == 2
    printed = capsys.readouterr().err
    assert "--model" in printed
    assert "it ran" not in printed


def test_what_the_plan_was_made_with_holds_unless_said_otherwise(tmp_path: Path) -> None:
    ref = ModelRef(name="x", spec="zoo:gpt2-tiny", options={"batch_size": 8, "n_layer": 3, "resid_pdrop": 0.0})
    plan = samples.plan(model=ref)
    found = model_of_plan(plan, None)
    assert (found.spec, found.batch_size, found.dtype) == ("zoo:gpt2-tiny", 8, None)
    assert parse_settings(found.settings) == {"n_layer": "3", "resid_pdrop": "0.0"}
    said = as_planned(plan, ModelOptions("zoo:gpt2-tiny", batch_size=2, settings=["n_layer=1"]))
    assert said.batch_size == 2
    assert parse_settings(said.settings) == {"n_layer": "1", "resid_pdrop": "0.0"}
    other = ModelOptions("zoo:llama-tiny")
    assert as_planned(plan, other) == other


def test_the_same_file_written_two_ways_is_the_same_model(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = samples.plan(model=ModelRef(name="x", spec="mine.py:build", options={"seq_len": 64}))
    assert as_planned(plan, ModelOptions(f"{tmp_path}/mine.py:build")).seq_len == 64
    assert as_planned(plan, ModelOptions("mine.py:other")).seq_len is None


def test_the_comparison_in_json() -> None:
    data = compared_as_json(samples.comparison(), 1000)
    assert data["budget_bytes"] == 1000
    keys = {
        "feasible",
        "fits_device",
        "step_s",
        "comm_s",
        "exposed_comm_s",
        "recompute_s",
        "peak_bytes",
        "fits_in_bytes",
        "plan_s",
    }
    assert all(set(row) == keys for row in data["plans"].values())
    assert data["plans"]["joint"]["step_s"] == 0.2
    assert data["plans"]["ddp"] == {**dict.fromkeys(keys), "feasible": False, "fits_device": False}
    json.dumps(data)


def test_work_that_prints_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_stdout():
        print("from python")
        os.write(1, b"from below\n")
        subprocess.run(["echo", "from a child"], check=True)
    print("the answer")
    printed = capfd.readouterr()
    assert printed.out == "the answer\n"
    for text in ("from python", "from below", "from a child"):
        assert text in printed.err


def test_profile_as_json_on_standard_output_is_json_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import os\nimport torch\nprint('importing')\n\n"
        "def build(width=8):\n"
        "    os.system('echo building')\n"
        "    return torch.nn.Linear(width, 3), (torch.ones(5, width),), lambda out, batch: out.sum()\n"
    )
    done = run("profile", "chatty.py:build", "--set", "width=16", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_params"] == 16 * 3 + 3
    assert found["param_bytes"] == 4 * found["num_params"]
    assert "importing" in done.stderr


def test_profile_writes_files_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = [str(tmp_path / name) for name in ("p.json", "p.html")]
    assert main(["profile", "zoo:gpt2-tiny", "--batch-size", "2", "--json", out[0], "--html", out[1]]) == 0
    profile = Profile.from_json(out[0])
    assert profile.table() == capsys.readouterr().out.removesuffix("\n")
    assert profile.model == "gpt2-tiny"
    assert Path(out[1]).read_text(encoding="utf8").startswith("<!doctype html>")


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizers", "--json", "-"]) == 0
    assert any(row["name"] == "adamw" for row in json.loads(capsys.readouterr().out))
    assert main(["optimizers"]) == 0
    assert "adamw" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error() -> None:
    """`trainwright optimizers | head -1`"""
    writer = subprocess.Popen(
        [sys.executable, "-m", "trainwright", "optimizers", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    writer.wait(timeout=60)
    assert b"Traceback" not in writer.stderr.read()


def test_ctrl_c_ends_it_with_a_word_and_no_process_stays() -> None:
    command = [sys.executable, "-m", "trainwright", "calibrate", "--nproc", "2"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks: list[int] = []
    deadline = time.monotonic() + 60
    while len(ranks) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        ranks = ranks_of(running.pid)
    started = [*children(running.pid), *ranks]
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert len(ranks) == 2
    assert not [child for child in started if Path(f"/proc/{child}").exists()]


def test_the_number_of_processes_is_the_plans(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="4 processes"):
        run_worker("x:y", {}, samples.plan(), 3, lambda event: None)


def test_a_gpu_plan_is_not_run_on_this_cpu_unasked() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    cluster = samples.cluster()
    gpus = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kind": "gpu"})})
    with pytest.raises(UserError, match=r"4 GPUs.*--nproc 4"):
        run_worker("x:y", {}, samples.plan(cluster=gpus), None, lambda event: None)


def test_torchrun_with_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun started 2"):
        run_worker("x:y", {}, samples.plan(), None, lambda event: None)


def test_events_come_from_the_first_rank_alone() -> None:
    events = []
    plan = samples.plan(mesh={"cpu": 2})
    found = run_worker("tests.cli.test_cli:_emitting", {"factor": 3}, plan, 2, events.append)
    assert found == 0
    assert events == [{"kind": "step", "value": 3}]


def _emitting(factor: int) -> int:
    from trainwright.launch import emit, rank

    emit({"kind": "step", "value": factor + rank()})
    return rank()
