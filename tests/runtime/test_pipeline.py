"""Plans with stages on real ranks: gradients, peaks, the user's loop, checkpoints, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from trainwright.launch import WorkerError

CASES = "tests.pipeline_cases:"
BAR = 1e-12


def case(
    name: str = "gpt2-tiny", layers: int = 3, num_stages: int = 2, num_micro: int = 4, **more: Any
) -> dict[str, Any]:
    given = {"depth": "1f1b", "seed": 0, "recompute": False, "inner": [1], **more}
    return {"name": name, "layers": layers, "num_stages": num_stages, "num_micro": num_micro, **given}


def check(pool: Pool, options: dict[str, Any], update: bool = False) -> None:
    report = pool.run(CASES + "verified", timeout_s=280, options=options, update=update)[0]
    assert report["passed"], report
    for what in ("loss", "gradient", "evaluation"):
        assert report[f"max_relative_error_{what}"] < BAR, report
    assert report["max_relative_error_gradient"] != 0.0 or options["num_micro"] == 1, "something was computed otherwise"


@pytest.mark.parametrize(
    "options",
    [
        case(recompute=True),
        pytest.param(case(depth="gpipe", seed=2), marks=pytest.mark.slow),
        pytest.param(case(depth="zero-bubble", layers=4, num_micro=8, recompute=True, seed=1), marks=pytest.mark.slow),
        pytest.param(case(depth="interleaved2", layers=4, recompute=True, seed=1), marks=pytest.mark.slow),
        case(num_micro=4, recompute=True, offload=0.7, seed=4),
        pytest.param(case(depth="gpipe", offload=0.7, seed=5), marks=pytest.mark.slow),
        pytest.param(case(depth="zero-bubble", layers=4, num_micro=8, offload=0.7, seed=6), marks=pytest.mark.slow),
        pytest.param(case(depth="interleaved2", layers=4, recompute=True, offload=0.7, seed=7), marks=pytest.mark.slow),
        pytest.param(case("t5-tiny", 2, seed=3), marks=pytest.mark.slow),
        pytest.param(case("llama-tiny", 2, depth="deeper"), marks=pytest.mark.slow),
        pytest.param(case("bert-tiny", 2), marks=pytest.mark.slow),
        pytest.param(case("vit-tiny", 2, num_micro=8), marks=pytest.mark.slow),
        pytest.param(case("mixtral-tiny", 2, recompute=True), marks=pytest.mark.slow),
        pytest.param(case(num_micro=1), marks=pytest.mark.slow),
    ],
    ids=lambda o: f"{o['name']}-{o['num_micro']}-{o['depth']}{'-offload' if 'offload' in o else ''}",
)
def test_two_stages_compute_what_one_process_does(pool2: Pool, options: dict[str, Any]) -> None:
    check(pool2, options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(case("gpt2-tiny", 4, 4, 2, recompute=True), marks=pytest.mark.slow),
        pytest.param(case("gpt2-tiny", 2, 2, 4, inner=[2], recompute=True, seed=5), marks=pytest.mark.slow),
        case("gpt2-tiny", 2, 2, 4, depth="zero-bubble", inner=[2], recompute=True, seed=5),
        *(
            pytest.param(case(name, 2, depth=depth, inner=[2], recompute=True, offload=0.6, seed=seed), marks=pytest.mark.slow)
            for seed, (name, depth) in enumerate(
                [("gpt2-tiny", "1f1b"), ("t5-tiny", "gpipe"), ("mixtral-tiny", "1f1b"), ("llama-tiny", "zero-bubble")]
            )
        ),
        *(
            pytest.param(case(name, 8 if depth == "interleaved2" else 4, 4, num_micro, depth=depth, seed=seed,
                              recompute=bool(seed % 2)), marks=pytest.mark.slow)
            for seed, (name, num_micro, depth) in enumerate(
                (name, num_micro, depth)
                for name in ("gpt2-tiny", "llama-tiny", "t5-tiny", "mixtral-tiny")
                for num_micro, depth in ((2, "zero-bubble"), (8, "zero-bubble"), (4, "interleaved2"), (8, "interleaved2"))
            )
        ),
        *(
            pytest.param(case(name, 4 if name != "t5-tiny" else 2, 4, num_micro, depth=depth, seed=seed, recompute=bool(seed % 2)),
                         marks=pytest.mark.slow)
            for seed, (name, num_micro, depth) in enumerate(
                (name, num_micro, depth)
                for name in ("gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny", "mixtral-tiny")
                for num_micro, depth in ((2, "1f1b"), (4, "deeper"), (8, "1f1b"), (8, "gpipe"))
            )
        ),
        *(
            pytest.param(case(name, 2, 2, 4, inner=[2], recompute=True, seed=seed), marks=pytest.mark.slow)
            for seed, name in enumerate(["gpt2-tiny", "llama-tiny", "bert-tiny", "t5-tiny", "vit-tiny"])
        ),
    ],
    ids=lambda o: f"{o['name']}-{o['num_stages']}x{o['inner'][0]}-{o['num_micro']}-{o['depth']}-{o['seed']}"
    f"{'-offload' if 'offload' in o else ''}",
)  # fmt: skip
def test_four_ranks_compute_what_one_process_does(pool4: Pool, options: dict[str, Any]) -> None:
    check(pool4, options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(case(num_micro=8, recompute=True), marks=pytest.mark.slow),
        pytest.param(case(num_micro=8, recompute=True, layers=4, depth="zero-bubble"), marks=pytest.mark.slow),
        pytest.param(case(num_micro=8, layers=4, depth="interleaved2", seed=1), marks=pytest.mark.slow),
        case(num_micro=4, layers=2, recompute=True, offload=0.7, seed=1),
        pytest.param(case(num_micro=8, recompute=True, offload=0.7, seed=1), marks=pytest.mark.slow),
        pytest.param(case(num_micro=8, layers=4, depth="zero-bubble", offload=0.9, seed=2), marks=pytest.mark.slow),
        pytest.param(case(num_micro=8, layers=4, depth="interleaved2", offload=0.9, seed=1), marks=pytest.mark.slow),
        pytest.param(case("llama-tiny", 4, depth="gpipe", recompute=True, offload=0.7, seed=3), marks=pytest.mark.slow),
        pytest.param(case("t5-tiny", 2, offload=0.7, seed=4), marks=pytest.mark.slow),
        pytest.param(case(depth="gpipe", seed=1), marks=pytest.mark.slow),
        pytest.param(case("llama-tiny", 4, num_micro=8, depth="deeper"), marks=pytest.mark.slow),
        pytest.param(case("t5-tiny", 2, seed=4), marks=pytest.mark.slow),
    ],
    ids=lambda o: f"{o['name']}-{o['depth']}{'-offload' if 'offload' in o else ''}",
)
def test_peaks_are_those_that_were_simulated(pool2: Pool, options: dict[str, Any]) -> None:
    for (found,) in pool2.run(CASES + "peaks", timeout_s=280, options=options):
        assert found["measured"] == pytest.approx(found["simulated"], rel=1e-3)


def test_the_users_loop_trains_as_one_process_does(pool2: Pool) -> None:
    first, last = pool2.run(CASES + "training", options=case(begins=["transformer.h.1"]), clip=0.5)
    for found in (first, last):
        assert found["losses"] == pytest.approx(found["expected"], rel=2e-5), "norms before clipping, and losses"
        assert found["weights"] < 2e-4
        assert found["num_own"] < found["num_all"]
    assert first["names"] == last["names"]
    assert first["evaluated"] == last["evaluated"]
    assert (first["has_logits"], last["has_logits"]) == (False, True)
    assert (first["on_rank_0"], last["on_rank_0"]) == (len(first["names"]), 0)


def test_checkpoints_load_under_other_cuts_and_without_stages(pool2: Pool, tmp_path: Path) -> None:
    own = case(begins=["transformer.h.1"])
    others = [case(begins=["transformer.ln_f"], depth="gpipe"), case(begins=["transformer.h.0"], num_micro=2)]
    others.append(case(num_stages=1, inner=[2], seed=4))
    for found in pool2.run(CASES + "resumed", options=own, folder=str(tmp_path), others=others):
        assert found["step"] == 1
        assert found["plan 0"] == found["uninterrupted"]
        for other in ("plan 1", "plan 2", "plan 3"):
            assert found[other] == pytest.approx(found["uninterrupted"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("depth", ["1f1b", "zero-bubble"])
def test_checkpoints_of_four_stages_load_in_two_and_in_one(pool4: Pool, tmp_path: Path, depth: str) -> None:
    own = case(layers=4, num_stages=4, depth=depth)
    others = [
        case(layers=4, num_stages=2, inner=[2], seed=4),
        case(layers=4, num_stages=1, inner=[4], seed=5),
        case(layers=4, num_stages=2, num_micro=2, inner=[2], depth="interleaved2", seed=6),
    ]
    for found in pool4.run(CASES + "resumed", timeout_s=280, options=own, folder=str(tmp_path), others=others):
        assert found["plan 0"] == found["uninterrupted"]
        for other in ("plan 1", "plan 2", "plan 3"):
            assert found[other] == pytest.approx(found["uninterrupted"], rel=1e-5)


def test_dropout_draws_what_it_draws_without_stages(pool2: Pool) -> None:
    for found in pool2.run(CASES + "dropout", options=case(num_micro=2, recompute=True, begins=["transformer.h.1"])):
        assert found["gradient"] < 1e-5
        assert found["loss"] < 1e-5 < 1e-3 < found["effect"]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("dropped", r"rank 1 hung: it has been at step 0 in take activation 1 from rank 0 \([\d,]+ bytes\)"),
        pytest.param(
            "swapped",
            r"rank 0 hung: .* in sent activation 1 to rank 1 \([\d,]+ bytes\) .*rank 1 hung: .* in take activation 0 from rank 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "slow",
            r"rank 0 hung: it has been at step 0 in the forward.*waiting: rank 1 in take activation 1 from rank 0",
            marks=pytest.mark.slow,
        ),
        pytest.param("killed", r"rank 0 of 2 was ended by SIGKILL", marks=pytest.mark.slow),
    ],
    ids=["dropped", "swapped", "slow", "killed"],
)
def test_what_goes_wrong_between_stages_is_named(pool2: Pool, kind: str, named: str) -> None:
    with pytest.raises(WorkerError, match=named):
        pool2.run(CASES + "fault", timeout_s=100, options=case(begins=["transformer.h.1"]), kind=kind, limit_s=3.0)


def test_gradients_are_those_of_torchs_own_schedule(pool2: Pool) -> None:
    for found in pool2.run(CASES + "against_torch", num_micro=4):
        assert found["num"] == found["own"] == 12
        assert found["error"] < BAR
