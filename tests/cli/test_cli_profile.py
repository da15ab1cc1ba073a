"""`profile --fits`, `--sweep`, `--trace`, `--sort`, and `diff` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.artifacts import Profile
from trainwright.cli import main
from trainwright.cli.fits import largest_that_fits
from trainwright.cli.size_sweep import Sweep, parse_sweep, powers_around
from trainwright.cli.variants import Change
from trainwright.models.batches import resized, shared_size

MODELS = """
import torch
from torch import nn

def loss(out, batch):
    return out.float().pow(2).mean()

def fixed():
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3)), (torch.ones(6, 7),), loss

def sized(batch_size=6, width=40):
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 3)), (torch.ones(batch_size, 7),), loss

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 3)
    def forward(self, x, y):
        return self.inner(x).sum() + y.sum()

def uneven():
    return Two(), (torch.ones(6, 7), torch.ones(5))

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(5))
        self.recompute = False
    def gradient_checkpointing_enable(self):
        self.recompute = True
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x

def blocks(batch_size=3000):
    return Blocks(), (torch.ones(batch_size, 60),), loss
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, entered, with models of a user's own."""
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def peak(function: str, **options) -> int:
    """The peak of a variant, by the Python interface."""
    loaded = tw.load_model(f"mine.py:{function}", **options)
    return tw.profile(loaded.model, loaded.batch, loss_fn=loaded.loss_fn).peak_bytes


def profiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Profile, str]:
    """Run `profile` with its JSON on standard output: the status, what was read from it, and standard error."""
    status = main(["profile", *arguments, "--json", "-"])
    printed = capsys.readouterr()
    return status, Profile.parse(printed.out), printed.err


# Does it fit?


def test_what_fits_says_so_and_tries_nothing(models, capsys) -> None:
    status, found, said = profiled(capsys, "mine.py:fixed", "--fits", "1MiB")
    assert status == 0
    assert (found.fit.fits, found.fit.remedies) == (True, ())
    assert said == ""
    assert main(["profile", "mine.py:fixed", "--fits", f"{found.peak_bytes}B"]) == 0, "exactly enough is enough"
    assert main(["profile", "mine.py:fixed", "--fits", f"{found.peak_bytes - 1}B"]) == 1


def test_each_remedy_is_what_profiling_it_gives(models, capsys) -> None:
    budget = peak("blocks") - 1
    status, found, said = profiled(capsys, "mine.py:blocks", "--fits", f"{budget}B", "--hardware", "cpu:1")
    assert status == 1
    remedies = {remedy.name: remedy for remedy in found.fit.remedies}
    assert set(remedies) >= {"gradient checkpointing", "autocast to bf16", "bf16 parameters"}
    for remedy in remedies.values():
        assert remedy.saving_bytes == found.peak_bytes - remedy.peak_bytes
        assert remedy.fits == (remedy.peak_bytes <= budget)
    loaded = tw.load_model("mine.py:blocks")
    loaded.model.gradient_checkpointing_enable()
    recomputed = tw.profile(loaded.model, loaded.batch, loss_fn=loaded.loss_fn, hardware="cpu:1")
    assert remedies["gradient checkpointing"].peak_bytes == recomputed.peak_bytes < found.peak_bytes
    assert remedies["gradient checkpointing"].step_s == pytest.approx(recomputed.step_s)
    (smaller,) = (remedy for name, remedy in remedies.items() if "batch size" in name)
    size = int(smaller.name.removeprefix("batch size "))
    assert smaller.options == (f"--batch-size {size}",)
    assert smaller.peak_bytes == peak("blocks", batch_size=size) <= budget < peak("blocks", batch_size=size + 1)
    for text in ("profiling with gradient checkpointing", "error: a peak of at most ", "try "):
        assert text in said
    halved = tw.load_model("mine.py:blocks", dtype="bf16")
    (batch,) = halved.batch
    halved_peak = tw.profile(halved.model, (batch.bfloat16(),), loss_fn=halved.loss_fn, hardware="cpu:1").peak_bytes
    assert remedies["bf16 parameters"].peak_bytes == halved_peak
    assert any("floating tensors in bf16" in note for note in found.notes)


def test_the_batch_is_the_largest_that_fits(models, capsys) -> None:
    budget = (peak("sized", batch_size=4) + peak("sized", batch_size=5)) // 2
    _, found, _ = profiled(capsys, "mine.py:sized", "--fits", f"{budget}B")
    assert [remedy.name for remedy in found.fit.remedies if "batch size" in remedy.name] == ["batch size 4"]
    assert any("gradient_checkpointing_enable" in reason for reason in found.fit.not_tried)


@pytest.mark.slow
def test_several_changes_where_one_is_not_enough(models, capsys) -> None:
    status, found, said = profiled(capsys, "mine.py:blocks", "--fits", f"{peak('blocks', batch_size=1) - 1}B")
    assert status == 1
    *others, last = found.fit.remedies
    name, _, size = last.name.rpartition("batch size ")
    assert name == "gradient checkpointing, bf16 parameters, "
    assert last.fits
    assert not any(remedy.fits for remedy in others)
    for num_examples, fits in ((int(size), True), (int(size) + 1, False)):
        loaded = tw.load_model("mine.py:blocks", batch_size=num_examples, dtype="bf16")
        loaded.model.gradient_checkpointing_enable()
        (batch,) = loaded.batch
        both = tw.profile(loaded.model, (batch.bfloat16(),), loss_fn=loaded.loss_fn).peak_bytes
        assert (both <= found.fit.budget_bytes) == fits
    status, found, said = profiled(capsys, "mine.py:blocks", "--fits", "10B")
    assert not any(remedy.fits for remedy in found.fit.remedies)
    assert "trainwright plan" in said
    assert "trainwright plan" in found.table()


def test_eight_bit_states_are_tried_where_there_is_such_an_optimizer(models, capsys, monkeypatch) -> None:
    monkeypatch.setattr("trainwright.cli.fits._EIGHT_BIT", "sgd")
    _, found, _ = profiled(capsys, "mine.py:sized", "--fits", f"{peak('sized') - 1}B")
    remedy = next(remedy for remedy in found.fit.remedies if remedy.options == ("--optimizer sgd",))
    assert remedy.saving_bytes >= 0
    loaded = tw.load_model("mine.py:sized")
    other = tw.profile(loaded.model, loaded.batch, loss_fn=loaded.loss_fn, optimizer="sgd")
    assert remedy.peak_bytes == other.peak_bytes
    _, found, _ = profiled(capsys, "mine.py:sized", "--fits", "100B", "--optimizer", "sgd")
    assert not any("--optimizer" in option for remedy in found.fit.remedies for option in remedy.options)


def test_a_batch_that_no_function_makes_is_cut(models, capsys) -> None:
    budget = peak("fixed") - 1
    _, found, _ = profiled(capsys, "mine.py:fixed", "--fits", f"{budget}B")
    cut = next(remedy for remedy in found.fit.remedies if remedy.name.startswith("batch size"))
    assert cut.name == "batch size 5"
    assert cut.peak_bytes == peak("sized", batch_size=5)
    assert any("takes no batch_size" in note and "cut" in note for note in found.notes)


def test_a_batch_that_cannot_be_cut_is_named(models, capsys) -> None:
    status, found, _ = profiled(capsys, "mine.py:uneven", "--fits", "100B")
    assert status == 1
    assert any(reason.startswith("a smaller batch: ") and "--batch-size" in reason for reason in found.fit.not_tried)


@pytest.mark.slow  # on each change: its peak in tests/profiler, and each remedy above
def test_a_model_of_the_zoo_with_its_own_recomputation(capsys) -> None:
    status, found, said = profiled(capsys, "zoo:gpt2-tiny", "--fits", "2.6MiB")
    remedies = {remedy.name: remedy for remedy in found.fit.remedies}
    assert status == 1
    assert remedies["gradient checkpointing"].fits
    assert remedies["bf16 parameters"].fits
    assert not remedies["autocast to bf16"].fits
    loaded = tw.load_model("zoo:gpt2-tiny", dtype="bf16")
    assert remedies["bf16 parameters"].peak_bytes == tw.profile(loaded.model, loaded.batch).peak_bytes
    assert "deprecated" not in said


@given(st.integers(1, 50), st.integers(2, 400), st.integers(0, 9), st.integers(1, 30), st.integers(0, 3), st.data())
def test_bisection_equals_trying_them_all(low, rise, jitter, slope, square, data) -> None:
    sizes = range(low, low + rise + 1)
    peaks, total = {}, 1000
    for size in sizes:
        total += slope + square * size + (size * 7919) % (jitter + 1)
        peaks[size] = total
    budget = data.draw(st.integers(peaks[low], peaks[sizes[-1]] - 1))
    asked = []

    def peak_of(size: int) -> int:
        asked.append(size)
        return peaks[size]

    assert largest_that_fits(peak_of, low, sizes[-1], budget) == max(size for size in sizes if peaks[size] <= budget)
    assert set(asked) <= set(sizes)
    assert len(set(asked)) <= 3 * rise.bit_length() + 3, "at least every third step halves what is left"


# How does it grow?


def test_a_sweep_is_the_profiles_of_its_sizes(models, capsys) -> None:
    status, found, _ = profiled(capsys, "mine.py:sized", "--sweep", "batch-size=9,2", "--hardware", "cpu:1")
    assert status == 0
    assert [(point.axis, point.value) for point in found.sweep] == [("batch-size", 2), ("batch-size", 9)]
    for point in found.sweep:
        loaded = tw.load_model("mine.py:sized", batch_size=point.value)
        alone = tw.profile(loaded.model, loaded.batch, loss_fn=loaded.loss_fn, hardware="cpu:1")
        assert (point.peak_bytes, point.saved_bytes) == (alone.peak_bytes, alone.saved_bytes)
        assert (point.forward_flops, point.backward_flops) == (alone.forward_flops, alone.backward_flops)
        assert point.step_s == pytest.approx(alone.step_s)
    assert found.fit is None


def test_the_largest_size_between_those_that_were_tried(models, capsys) -> None:
    budget = peak("sized", batch_size=13)
    _, found, _ = profiled(capsys, "mine.py:sized", "--sweep", "batch-size=8,16", "--fits", f"{budget}B")
    assert found.fit.largest_that_fits == {"batch-size": 13}
    assert {8, 13, 14, 16} <= {point.value for point in found.sweep}, "what was tried on the way is in the table"
    _, found, _ = profiled(capsys, "mine.py:sized", "--sweep", "batch-size=8,16", "--fits", "99B")
    assert found.fit.largest_that_fits == {}
    _, found, _ = profiled(capsys, "mine.py:sized", "--sweep", "batch-size=8,16", "--fits", "1GiB")
    assert found.fit.largest_that_fits == {"batch-size": 16}, "of those that were asked for"
    _, found, _ = profiled(
        capsys, "mine.py:sized", "--sweep", "batch-size", "--fits", f"{peak('sized', batch_size=77)}B"
    )
    assert found.fit.largest_that_fits == {"batch-size": 77}, "beyond those that were chosen for the user"


def test_a_fixed_batch_is_cut_and_repeated(models, capsys) -> None:
    _, found, _ = profiled(capsys, "mine.py:fixed", "--sweep", "batch-size=3,6,15")
    assert [point.peak_bytes for point in found.sweep] == [peak("sized", batch_size=size) for size in (3, 6, 15)]
    assert any("cut or repeated" in note for note in found.notes)


def test_sequences_are_swept_too(capsys) -> None:
    _, found, _ = profiled(capsys, "zoo:gpt2-tiny", "--set", "n_layer=1", "--sweep", "seq-len=8,16")
    assert [point.value for point in found.sweep] == [8, 16]
    for point in found.sweep:
        loaded = tw.load_model("zoo:gpt2-tiny", seq_len=point.value, settings={"n_layer": "1"})
        assert point.peak_bytes == tw.profile(loaded.model, loaded.batch).peak_bytes


def test_the_plot_and_the_table_of_a_sweep(models, capsys) -> None:
    assert main(["profile", "mine.py:sized", "--sweep", "batch-size=1,2", "--html", "p.html"]) == 0
    assert "batch size       peak" in capsys.readouterr().out
    assert "peak and time over batch size" in Path("p.html").read_text(encoding="utf8")


# What the command line says


def test_a_trace_of_a_machine_that_nobody_named(models, capsys) -> None:
    assert main(["profile", "mine.py:sized", "--trace", "step.json", "--json", "p.json"]) == 0
    assert "cpu:1" in capsys.readouterr().err
    events = json.loads(Path("step.json").read_text(encoding="utf8"))["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert steps[0]["dur"] == pytest.approx(1e6 * Profile.from_json("p.json").step_s, abs=1e-3)


def test_depth_and_sort_change_the_tree(models, capsys) -> None:
    assert main(["profile", "mine.py:sized", "--set", "width=900", "--sort", "params", "--depth", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if "Linear" in line] == ["0", "2"]
    assert main(["profile", "mine.py:sized", "--sort", "time", "--hardware", "cpu:1", "--depth", "0"]) == 0
    assert "Linear" not in capsys.readouterr().out


def test_micro_batches_are_part_of_the_question(models, capsys) -> None:
    _, one, _ = profiled(capsys, "mine.py:sized")
    status, found, _ = profiled(capsys, "mine.py:sized", "--accumulate", "2", "--sweep", "batch-size=12")
    assert status == 0
    assert found.forward_flops == 2 * one.forward_flops
    assert found.sweep[0].forward_flops == 4 * one.forward_flops


def test_diff_on_the_command_line(models, capsys) -> None:
    for size in (6, 12):
        main(["profile", "mine.py:sized", "--batch-size", str(size), "--json", f"{size}.json"])
    capsys.readouterr()
    assert main(["diff", "6.json", "12.json", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {row["name"]: row for row in found["totals"]}
    assert totals["forward_flops"]["after"] == 2 * totals["forward_flops"]["before"]
    assert main(["diff", "6.json", "12.json"]) == 0
    assert "+100.0 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "mine.py:fixed", "--fits", "much"], "40GiB"),
        (["profile", "mine.py:fixed", "--fits", "0"], "at least one byte"),
        (["profile", "mine.py:fixed", "--sweep", "depth"], "batch-size, seq-len"),
        (["profile", "mine.py:fixed", "--sweep", "batch-size="], "sizes of 1 or more"),
        (["profile", "mine.py:fixed", "--sweep", "batch-size=2,0"], "sizes of 1 or more"),
        (["profile", "mine.py:fixed", "--sweep", "batch-size=two"], "batch-size=1,2,4"),
        (["profile", "mine.py:fixed", "--sweep", "seq-len"], "does not show its seq-len"),
        (["profile", "mine.py:fixed", "--sweep", "seq-len=4,8"], "parameter seq_len"),
        (["profile", "mine.py:uneven", "--sweep", "batch-size"], "give --batch-size"),
        (["profile", "mine.py:uneven", "--sweep", "batch-size=2"], "share their first dim"),
        (["profile", "mine.py:fixed", "--sort", "size"], "memory, time, flops, params"),
        (["profile", "mine.py:fixed", "--sort", "time"], "--hardware"),
        (["profile", "mine.py:fixed", "--depth", "-1"], "depth"),
        (["profile", "mine.py:fixed", "--trace", "."], "cannot be written"),
        (["profile", "mine.py:fixed", "--html", "missing/p.html"], "cannot be written"),
        (["profile", "mine.py:fixed", "--optimizer", "sgdd"], "sgd"),
        (["diff", "mine.py", "mine.py"], "is not JSON"),
        (["diff", "missing.json", "missing.json"], "missing.json cannot be read"),
        (["diff", ".", "."], "Is a directory"),
        (["diff", "mine.py"], "B.json"),
    ],
)
def test_mistakes_have_status_2_and_one_line(models, capsys, arguments, said) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err.splitlines()[-1]
    assert line.startswith("error: ")
    assert said in line


# Parts


def test_what_a_sweep_may_be() -> None:
    assert parse_sweep(" Batch_Size = 4, 2,4 ") == Sweep("batch-size", (2, 4))
    assert parse_sweep("seq-len") == Sweep("seq-len")
    assert powers_around(5) == (1, 2, 4, 5, 8, 16)
    assert 1 not in powers_around(64)


def test_batches_are_resized_with_all_that_is_in_them() -> None:
    rows = torch.arange(6).reshape(3, 2)
    batch = {"x": rows, "more": (rows + 1, [rows + 2]), "scale": torch.tensor(2.0), "flag": True}
    small, large = resized(batch, 2), resized(batch, 7)
    assert torch.equal(small["x"], rows[:2])
    assert torch.equal(large["more"][1][0], (rows + 2)[torch.tensor([0, 1, 2, 0, 1, 2, 0])])
    assert (small["scale"], small["flag"]) == (torch.tensor(2.0), True)
    assert shared_size(batch) == 3
    assert shared_size({"x": rows, "y": torch.ones(2)}) is None
    small["x"][0] = 9
    assert rows[0, 0] == 0, "the batch itself is untouched"


def test_changes_add_up() -> None:
    both = Change(dtype="bf16", batch_size=4) | Change(batch_size=2, checkpointing=True)
    assert both == Change(batch_size=2, dtype="bf16", checkpointing=True)
