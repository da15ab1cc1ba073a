"""Models whose parameters lie in files while they are built: the same values, in no memory of the process's own."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.tiers import TierFault, parameters_in_files, release_pages

WIDTH = 1024


class Tied(nn.Module):
    """A model that ties, converts and initialises its parameters after they are registered."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_parameter("own", weight)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.layers[-1].weight = self.first.weight
        nn.init.normal_(weight)  # by the reference that it was made with
        self.layers[0].half()


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def anonymous_bytes() -> int:
    return status_bytes("RssAnon")


def test_values_and_ties_are_those_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = Tied(2)
    torch.manual_seed(3)
    with parameters_in_files(tmp_path):
        found = Tied(2)
    assert found.layers[-1].weight is found.first.weight
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert not any(tmp_path.iterdir())  # the files have no names
    torch.manual_seed(3)
    assert torch.equal(Tied(2).own, expected.own)  # nothing is left of the block


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what the process holds")
def test_memory_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    before = anonymous_bytes()
    with parameters_in_files(tmp_path):
        model = Tied(24)
    assert sum(param.numel() for param in model.parameters()) * 4 > 24 * 4 * WIDTH**2
    assert anonymous_bytes() - before < 6 * 4 * WIDTH**2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what the process holds")
def test_pages_leave_the_process_and_values_stay(tmp_path: Path) -> None:
    before = status_bytes("RssFile")
    with parameters_in_files(tmp_path):
        model = Tied(24)
    assert status_bytes("RssFile") - before < 6 * 4 * WIDTH**2
    value = model.layers[3].weight.detach()
    total = float(value.double().sum())
    release_pages(value)
    assert float(value.double().sum()) == total
    release_pages(torch.ones(3))  # lies in memory, and stays there


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", is_full)
    with pytest.raises(TierFault, match="fault: full"), parameters_in_files(tmp_path):
        nn.Linear(WIDTH, WIDTH)


def test_models_of_the_zoo_are_the_same(tmp_path: Path) -> None:
    expected = tw.load_model("zoo:gpt2-tiny", device="cpu", seed=0).model.state_dict()
    with parameters_in_files(tmp_path):
        found = tw.load_model("zoo:gpt2-tiny", device="cpu", seed=0).model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
