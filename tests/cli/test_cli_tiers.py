"""`train --tier` as a user runs it: the same losses, going on, what the disks did, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import PLAIN
from trainwright.artifacts import Plan, Tier, UserError
from trainwright.cli import main
from trainwright.cli.tiers import check_tier, tier_lines, with_place
from trainwright.hardware import resolve

GIVEN = {"window": "1MiB", "keep": None, "update": None, "commit_every": None, "rate": None, "clip": None}


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    assert main(["plan", PLAIN, "--hardware", "cpu:1", "-o", path]) == 0
    return path


def losses_of(plan_path: str, metrics: Path, *options: str) -> list[float]:
    command = ["train", PLAIN, "--plan", plan_path, "--lr", "1e-2", "--metrics", str(metrics), *options]
    assert main(command) == 0
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_a_run_on_disks_goes_on_as_in_memory(
    plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for each in folders:
        each.mkdir()
    place = ",".join(map(str, folders))
    expected = losses_of(plan_path, tmp_path / "0.jsonl", "--steps", "4")
    capsys.readouterr()
    first = losses_of(plan_path, tmp_path / "1.jsonl", "--steps", "2", "--tier", place)
    assert "a day at this pace" in capsys.readouterr().out
    further = losses_of(plan_path, tmp_path / "2.jsonl", "--steps", "4", "--tier", place, "--resume")
    assert [*first, *further] == expected


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tier": "{}/absent"}, "is not there"),
        ({"tier": "{}/used"}, "an empty folder"),
        ({"tier": "{}/free,{}/free"}, "one twice"),
        ({"rate": "1MB,2MB,3MB"}, "one rate"),
        ({"rate": "0"}, "at least one byte"),
        ({"update": "before"}, "during or after"),
        ({"clip": -1.0}, "norm above 0"),
        ({"beside": {"--checkpoint": True}}, "without --checkpoint"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_is_written(
    plan_path: str, tmp_path: Path, change: dict[str, object], match: str
) -> None:
    (tmp_path / "free").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("")
    change = {
        key: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value for key, value in change.items()
    }
    given = {"tier": str(tmp_path / "free"), **GIVEN, "resume": False, "beside": {}, **change}
    with pytest.raises(UserError, match=match):
        check_tier(**given, plan=Plan.from_json(plan_path))  # type: ignore[arg-type]
    assert not any((tmp_path / "free").iterdir())


def test_exit_status_of_a_wrong_folder(plan_path: str, tmp_path: Path) -> None:
    command = ["train", PLAIN, "--plan", plan_path, "--tier", str(tmp_path / "absent")]
    assert main(command) == 2


def test_the_line_of_the_disks() -> None:
    step = {"tier_read_bytes": 2**20, "tier_write_bytes": 2**21, "tier_planned_read_bytes": 2**20,
            "tier_planned_write_bytes": 2**21, "tier_waited_s": 0.5,
            "tier_rates": {"read": [0.0, 2**20], "write": [2**21, 0.0]}}  # fmt: skip
    told = tier_lines([step, step], 2.0)
    assert "read 1 MiB a step" in told
    assert "84.4 GiB a day" in told
    assert "read   ▁▅  512 KiB/s over the last step, 1 MiB/s at most" in told
    assert "write  █▁  1 MiB/s over the last step, 2 MiB/s at most" in told


@pytest.fixture(scope="module")
def host_plan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("host")
    cluster = resolve("cpu:1")
    tier = Tier(write_bytes_per_s=5e8, read_bytes_per_s=5e8)
    cluster.model_copy(update={"offload": {"host": tier}}).to_json(folder / "hardware.json")
    path = str(folder / "plan.json")
    command = ["plan", PLAIN, "--hardware", str(folder / "hardware.json"), "--memory", "1.5MiB", "-o", path]
    assert main([*command, "--tier", "host", "--tier-window", "128KiB"]) == 0
    return path


@pytest.mark.slow
def test_a_run_in_the_hosts_memory_goes_on_from_a_checkpoint(
    plan_path: str, host_plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = losses_of(plan_path, tmp_path / "0.jsonl", "--steps", "4")
    saving = ("--checkpoint", str(tmp_path / "run"))
    capsys.readouterr()
    first = losses_of(host_plan_path, tmp_path / "1.jsonl", "--steps", "2", *saving)
    told = capsys.readouterr().out
    assert "host   read" in told
    assert "a day" not in told
    further = losses_of(host_plan_path, tmp_path / "2.jsonl", "--steps", "4", *saving, "--resume")
    assert [*first, *further] == pytest.approx(expected, rel=1e-6)  # the plans recompute and split the loss differently


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--tier", "{}"], "the tier that was planned is needed, host; got disk"),
        (["--on-nan", "skip"], "without --on-nan skip"),
        (["--resume"], "--resume needs the directory of the checkpoints"),
        (["--tier-commit-every", "2"], "the commit_every that was planned"),
        (["--tier-update", "after"], "the update that was planned"),
    ],
)
def test_what_the_hosts_memory_cannot_do_is_refused(
    host_plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str
) -> None:
    given = [option.replace("{}", str(tmp_path)) for option in options]
    assert main(["train", PLAIN, "--plan", host_plan_path, *given]) == 2
    assert match in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--tier"], ["--tier", "disk"]),
        (["--tier", "--memory", "1GiB"], ["--tier", "disk", "--memory", "1GiB"]),
        (["--tier", "zoo:gpt2"], ["--tier", "disk", "zoo:gpt2"]),
        (["--tier", "host", "zoo:gpt2"], ["--tier", "host", "zoo:gpt2"]),
        (["--pin", "x", "--", "--tier"], ["--pin", "x", "--", "--tier"]),
    ],
)
def test_the_option_alone_is_of_disks(args: list[str], expected: list[str]) -> None:
    assert with_place(args) == expected
