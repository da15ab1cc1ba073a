"""`plan --hardware a,b --price FILE`, `--batch-size auto` and `--global-batch`, on the command line and in Python."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import trainwright as tw
from tests.grids import slow_but
from trainwright.artifacts import Offers, Plan, Refusal, UserError
from trainwright.artifacts.offers import num_examples
from trainwright.batch_size import WORTH, fastest_batch
from trainwright.cli import main
from trainwright.cli.offering import ask_for_offers
from trainwright.hardware import resolve
from trainwright.prices import Prices
from trainwright.reports.offers import offers_table

MODEL = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 32), nn.Linear(32, 50)
    def forward(self, ids):
        return self.out(self.embed(ids).tanh())

def loss(out, batch):
    return out.float().pow(2).mean()

def words(batch_size=8):
    return Words(), (torch.zeros(batch_size, 16, dtype=torch.long),), loss

def images():
    return nn.Linear(7, 3), (torch.ones(6, 7),), loss
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, entered, with models and prices of a user's own."""
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "prices.toml").write_text('currency = "EUR"\n[device_hour]\na100 = 2\nh100 = 8\n[hour]\n2xh100 = 10\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_of(fixed_s: float, each_s: float, memory: int, recompute_s: float) -> Callable[[int], Any]:
    """A stand-in for a planner: convex seconds over the batch, dearer beyond `memory`, and nothing beyond twice that."""

    def plan_of(size: int) -> Any:
        if size > 2 * memory:
            raise Refusal("too large")
        plan = SimpleNamespace(
            predicted=SimpleNamespace(step_s=fixed_s + each_s * size + recompute_s * max(0, size - memory)), notes=()
        )
        plan.model_copy = lambda update: SimpleNamespace(size=size, step_s=plan.predicted.step_s, **update)
        return plan

    return plan_of


@settings(deadline=None)
@example(fixed=1, each=1, memory=1, dear=2, granule=4)  # one example a device does not fit, and two take long
@given(
    fixed=st.floats(0.01, 1000), each=st.floats(0.1, 10), memory=st.integers(1, 400), dear=st.floats(0, 50),
    granule=st.integers(1, 8),
)  # fmt: skip
def test_the_batch_is_as_fast_as_the_best_of_all_to_a_hundredth_a_halving(
    fixed: float, each: float, memory: int, dear: float, granule: int
) -> None:
    plan_of = step_of(fixed, each, memory, dear)
    sizes = range(granule, 2 * memory + 1, granule) or range(1, 2 * memory + 1)
    best = max(size / plan_of(size).predicted.step_s for size in sizes)
    found = fastest_batch(plan_of, granule)
    # a doubling that gains less than WORTH ends the search: with convex steps all further ones together gain as much
    assert found.size / found.step_s >= best * (1 - 2.1 * WORTH)
    tried = len(re.findall(r"\d+", str(found.notes).rpartition("tried were")[2]))
    assert tried <= 45


def test_where_nothing_fits_the_smallest_batch_says_why() -> None:
    def never(size: int) -> Any:
        raise Refusal(f"no room for {size}")

    with pytest.raises(Refusal, match=r"no room for 1$"):
        fastest_batch(never, 8)


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, tuple[Any, ...], Callable[[Any, Any], Any]]:
    net = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU())))
    return net, (torch.zeros(4, 64),), lambda out, batch: out.pow(2).mean()


@pytest.mark.parametrize(
    "around", [pytest.param((1 / 2, 4 / 5, 6 / 5, 2), marks=pytest.mark.slow), (4 / 5, 6 / 5)], ids=str
)
def test_a_batch_that_is_chosen_is_the_fastest_of_those_around_it(network, around: tuple[float, ...]) -> None:
    net, batch, loss_fn = network
    asked = {"loss_fn": loss_fn, "hardware": "cpu:1", "memory": "400KiB"}
    found = tw.plan(net, batch, batch_size="auto", **asked)
    size = num_examples(found)
    assert found.predicted.peak_bytes <= found.budget_bytes
    assert f"a batch of {size} was chosen" in found.notes[-1]
    for other in (round(share * size) for share in around):
        try:
            beside = tw.plan(net, batch, batch_size=other, **asked)
        except Refusal:
            continue
        assert other / beside.predicted.step_s <= (1 + 2 * WORTH) * size / found.predicted.step_s, other


def test_a_global_batch_is_cut_into_what_memory_allows(network) -> None:
    net, batch, loss_fn = network
    asked = {"loss_fn": loss_fn, "hardware": "cpu:1"}
    whole = tw.plan(net, batch, batch_size=256, **asked)
    tight = int(0.7 * whole.predicted.peak_bytes)
    found = tw.plan(net, batch, batch_size="auto", global_batch=256, memory=tight, **asked)
    assert num_examples(found) == 256
    assert found.micro_batches > 1
    assert found.predicted.peak_bytes <= tight
    assert (
        found.to_json()
        == tw.plan(net, (torch.zeros(256, 64),), micro_batches="auto", memory=tight, **asked)
        .model_copy(update={"solver": found.solver})
        .to_json()
    )


def test_offers_are_the_plans_rates_hours_and_money(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    arguments = ["plan", "mine.py:words", "--hardware", "a100,2xh100,h100", "--price", "prices.toml", "--tokens", "2B"]
    assert main([*arguments, "-o", "plans", "--html", "page.html", "--json", "-"]) == 0
    offers = Offers.parse(capsys.readouterr().out)
    assert [offer.hardware for offer in offers.offers] == ["a100", "2xh100", "h100"]
    assert [offer.price_per_hour for offer in offers.offers] == [2, 10, 8]
    for offer in offers.offers:
        alone = tw.load_model("mine.py:words")
        plan = tw.plan(alone.model, alone.batch, loss_fn=alone.loss_fn, hardware=offer.hardware)
        assert offer.plan is not None
        assert offer.plan.modules == plan.modules
        assert Plan.from_json(f"plans/{offer.hardware}.json") == offer.plan
        tokens_per_s = 8 * 16 / offer.plan.predicted.step_s
        assert offer.tokens_per_s == pytest.approx(tokens_per_s)
        assert offer.hours == pytest.approx(2e9 / tokens_per_s / 3600)
        assert offer.cost == pytest.approx(offer.hours * offer.price_per_hour)
        assert offer.tokens_per_price == pytest.approx(2e9 / offer.cost)
    assert offers.cheapest is not None
    assert offers.cheapest.cost == min(offer.cost for offer in offers.offers)
    page = Path("page.html").read_text(encoding="utf8")
    assert all(f"<code>{offer.hardware}</code>" in page for offer in offers.offers)
    assert "tokens/EUR" in page


@pytest.mark.parametrize("columns", slow_but([80], [80, 120]))
def test_the_table_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tw.load_model("mine.py:words")
    offers = tw.offers(
        loaded.model, loaded.batch, loss_fn=loaded.loss_fn, hardware=["2x8xa100", "h100-pcie"], tokens="300B",
        prices={"device_hour": {"a100": 2, "h100-pcie": 1}},
    )  # fmt: skip
    refused = offers.offers[1].model_copy(update={"plan": None, "refusal": "a plan within 3 GiB is needed; none found"})
    offers = offers.model_copy(update={"offers": (*offers.offers, refused)})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", offers_table(offers)).splitlines()
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert all(word in text for word in ("2x8xa100", "h100-pcie", "tokens/s", "tokens/USD", "does not fit", "fastest"))


@pytest.mark.slow
def test_a_batch_size_is_found_for_each_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "mine.py:images", "--hardware", "cpu:1,cpu:2", "--memory", "20KB", "--batch-size", "auto"]
    assert main([*arguments, "--samples", "1e6", "--json", "-"]) == 0
    printed = capsys.readouterr()
    offers = Offers.parse(printed.out)
    for offer in offers.offers:
        assert offer.plan is not None
        assert "was chosen" in " ".join(offer.plan.notes)
        assert offer.hours == pytest.approx(1e6 / offer.samples_per_s / 3600)
        assert offer.tokens_per_s is None
    assert "takes no batch_size" in printed.err


def test_hardware_on_which_nothing_fits_is_a_row_and_all_of_them_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.json").write_text(
        resolve("cpu:1")
        .model_copy(update={"device": resolve("cpu:1").device.model_copy(update={"memory_bytes": 10_000})})
        .to_json()
    )
    assert main(["plan", "mine.py:words", "--hardware", "small.json,cpu:1"]) == 0
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "small.json: a plan within" in out
    assert main(["plan", "mine.py:words", "--hardware", "small.json", "--tokens", "1M"]) == 1
    assert "small.json: a plan within" in capsys.readouterr().err


WRONG = {
    "a price that is missing": (["--hardware", "a100,h200", "--price", "prices.toml"], "h200 (device_hour)"),
    "no such hardware": (["--hardware", "a100,h10"], "did you mean"),
    "no file of prices": (["--hardware", "a100", "--price", "none.toml"], "cannot be read"),
    "both counts": (["--hardware", "a100", "--tokens", "1B", "--samples", "1M"], "got both"),
    "a count that is none": (["--hardware", "a100", "--tokens", "many"], "a count above 0"),
    "a comparison of each": (["--hardware", "a100,h100", "--compare"], "ask twice"),
    "a frontier over sizes": (["--hardware", "a100", "--batch-size", "auto", "--frontier"], "ask twice"),
    "a size that is none": (["--hardware", "a100", "--batch-size", "some"], "or auto; got 'some'"),
    "a global batch alone": (["--hardware", "a100", "--global-batch", "64"], "a batch size of auto"),
    "none": (["--hardware", ","], "got none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_said_before_anything_is_planned(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[case]
    assert main(["plan", "mine.py:words", *arguments, "-o", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_tokens_of_images_cannot_be_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mine.py:images", "--hardware", "a100", "--tokens", "1B"]) == 2
    assert "say samples" in capsys.readouterr().err


BAD_PRICES = {
    "unknown key": ({"device": {"a100": 1}}, "device: Extra inputs"),
    "free": ({"device_hour": {"a100": 0}}, "device_hour.a100"),
    "not finite": ({"device_hour": {"a100": float("nan")}}, "device_hour.a100"),
    "empty": ({"currency": "EUR"}, "add device_hour or hour"),
    "no mapping": ([1], "the document"),
}


@pytest.mark.parametrize("case", BAD_PRICES)
def test_prices_that_are_none_are_refused(case: str) -> None:
    data, message = BAD_PRICES[case]
    Path("bad.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=re.escape(message)):
        Prices.read("bad.json")


def test_a_name_that_is_nearly_priced_is_named() -> None:
    with pytest.raises(UserError, match="did you mean a10g"):
        Prices(device_hour={"a10g": 1.0}).of(resolve("a100"))
    assert [name for name, _ in ask_for_offers("a100, h100,a100", None, None, None).hardware] == ["a100", "h100"]
