"""Optimizers under plans: options, groups and forms from the plan to the run; second derivatives; whole matrices."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.grids import slow_but
from tests.pool import Pool
from tests.second_derivative_cases import peak_of_target_steps, wide, words
from trainwright import optim
from trainwright.artifacts import Plan, UserError
from trainwright.cli import main
from trainwright.optim.options import checked_options, parse_options
from trainwright.planner.costs.update import Updates
from trainwright.profiler.kernels.allocator import measure, static_bytes
from trainwright.runtime.training.train import train_step
from trainwright.training import optimizer_of, step_of

FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(80, 64), nn.Linear(64, 128), nn.Linear(128, 6)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embed(x).mean(1))))

def build():
    torch.manual_seed(0)
    return Net(), (torch.randint(80, (8, 5)), torch.arange(8) % 6), nn.CrossEntropyLoss()
"""


def planned(num_ranks: int = 1, **question: Any) -> Plan:
    model, batch, loss_fn = words()
    return tw.plan(model, batch, loss_fn=loss_fn, hardware=f"cpu:{num_ranks}", **question)


# Options


def test_text_becomes_what_the_constructor_takes() -> None:
    given = parse_options(["betas=(0.9, 0.95)", "weight-decay=1e-2", "amsgrad=yes"])
    assert checked_options(optim.record("adamw"), given) == {
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "amsgrad": True,
    }
    assert checked_options(optim.record("mfac"), {"num_gradients": "16"}) == {"num_gradients": 16}
    assert checked_options(optim.record("adamw8bit"), {"min_8bit_size": "inf"}) == {"min_8bit_size": float("inf")}
    assert checked_options(optim.record("frugal"), {"projected": "none", "active": "sgdm"}) == {
        "projected": None, "active": "sgdm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "adamw",
            {"weight_decy": "1"},
            r"adamw has no option weight_decy; its options are .*did you mean weight_decay",
        ),
        ("adamw", {"lr": "1"}, r"lr is no option.*give --lr"),
        ("adamw", {"foreach": "true"}, r"give --optimizer-form foreach"),
        ("adamw", {"betas": "0.9"}, r"betas needs 2 numbers; got 0.9; write for example betas=0.9,0.999"),
        ("adamw", {"amsgrad": "maybe"}, r"amsgrad needs true or false; got maybe"),
        ("adamw", {"eps": "__import__('os')"}, r"eps needs a number; got __import__"),
        ("adamw", {"eps": True}, r"eps needs a number; got True"),
        ("mfac", {"num_gradients": "1.5"}, r"num_gradients needs a whole number; got 1.5"),
        ("mfac", {"num_gradients": "0"}, r"num_gradients of at least 1"),
        ("frugal", {"active": "sgd"}, r"active"),
    ],
)
def test_wrong_options_are_refused_with_what_there_is(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        optim.choose(name, options)


@pytest.mark.parametrize("texts", [["betas"], ["=1"], ["eps=1", "eps=2"]])
def test_wrong_texts_are_refused(texts: list[str]) -> None:
    with pytest.raises(UserError):
        parse_options(texts)


def test_a_form_that_a_method_lacks_is_refused() -> None:
    with pytest.raises(UserError, match=r"mfac has the forms loop; got 'fused'"):
        optim.choose("mfac", form="fused")
    with pytest.raises(UserError, match=r"one of fused, foreach, loop; got 'quick'"):
        optim.choose("adamw", form="quick")


# From the plan to the run


def test_the_plan_keeps_options_groups_and_form() -> None:
    plan = planned(optimizer="adamw8bit", optimizer_options={"block_size": 64})
    again = Plan.parse(plan.to_json())
    assert again == plan
    assert (again.optimizer_options, again.optimizer_form) == ({"block_size": 64}, "fused")
    chosen, notes = optimizer_of(again)
    assert not notes
    model = words()[0]
    optimizer = chosen.make(model.named_parameters())
    sizes = {
        name: group["min_8bit_size"]
        for group in optimizer.param_groups
        for name, param in model.named_parameters()
        if any(param is own for own in group["params"])
    }
    assert sizes["embed.weight"] == float("inf") > sizes["inner.weight"]
    assert all(group["block_size"] == 64 and group["fused"] for group in optimizer.param_groups)


def test_settings_inside_a_partial_are_the_plans() -> None:
    plan = planned(optimizer=functools.partial(torch.optim.AdamW, betas=(0.8, 0.9), foreach=True, lr=3.0))
    assert (plan.optimizer, plan.optimizer_options, plan.optimizer_form) == ("adamw", {"betas": [0.8, 0.9]}, "foreach")


def test_a_setting_that_takes_more_memory_is_priced() -> None:
    plans = [planned(optimizer=functools.partial(torch.optim.AdamW, amsgrad=value)) for value in (False, True)]
    sizes = [plan.predicted.breakdown["optimizer"] for plan in plans]
    assert plans[1].optimizer_options == {"amsgrad": True}
    assert sizes[1] == pytest.approx(1.5 * sizes[0], rel=0.05)


def test_a_plan_of_an_earlier_release_has_the_digest_that_it_had() -> None:
    data = json.loads(planned(optimizer_form="loop").to_json())
    for name in ("optimizer_options", "optimizer_form", "optimizer_groups", "optimizer_owned"):
        del data[name]
    assert not Plan.parse(json.dumps(data)).is_edited


def test_what_contradicts_the_plan_is_said() -> None:
    plan = planned(optimizer_options={"eps": 1e-6})
    assert optimizer_of(plan, "adamw", {"eps": 1e-6})[1] == []
    (note,) = optimizer_of(plan, options={"eps": 1e-5}, form="loop")[1]
    assert "eps=1e-06, and eps=1e-05 runs; the form fused, and loop runs" in note
    (note,) = optimizer_of(plan, "sgd")[1]
    assert "priced for adamw, and sgd runs" in note


def test_the_command_line_takes_options_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FILE)
    plan = ["plan", "net.py:build", "--hardware", "cpu:1", "--optimizer", "adamw8bit", "-o", "plan.json"]
    assert main([*plan, "--optimizer-option", "block_sise=64"]) == 2
    assert "did you mean block_size" in capsys.readouterr().err
    assert main([*plan, "--optimizer-option", "block_size=64", "--optimizer-form", "loop"]) == 0
    written = json.loads(Path("plan.json").read_text())
    assert written["optimizer_options"] == {"block_size": 64}
    assert written["optimizer_form"] == "loop"
    train = ["train", "net.py:build", "--plan", "plan.json", "--steps", "3"]
    capsys.readouterr()
    assert main([*train, "--optimizer-form", "fused"]) == 0
    assert "the form loop, and fused runs" in capsys.readouterr().err
    assert main([*train, "--schedule", "linear", "--warmup-steps", "3"]) == 2
    assert "fewer warm-up steps than the 3" in capsys.readouterr().err
    assert main([*train[:-2], "--schedule", "linear"]) == 2
    assert "add --steps" in capsys.readouterr().err


# The price of the form that runs


def test_a_loop_takes_longer_than_one_pass_and_8_bits_in_a_loop_longest() -> None:
    updates, device = Updates(), tw.hardware("cpu:1").device
    seconds = {
        (name, form): updates.seconds(device, optim.choose(name, form=form), (512, 512), torch.float32)
        for name in ("adamw", "adamw8bit")
        for form in ("fused", "loop")
    }
    assert sorted(seconds, key=lambda case: seconds[case]) == [
        ("adamw8bit", "fused"), ("adamw", "fused"), ("adamw", "loop"), ("adamw8bit", "loop"),
    ]  # fmt: skip
    in_place = 1.6 * device.bandwidth_bytes_per_s
    one_pass = 7 * 512 * 512 * 4 / in_place + optim.record("adamw").calls * device.launch_s
    assert seconds["adamw", "fused"] == pytest.approx(one_pass, rel=1e-4)


def test_an_embedding_kept_in_fp32_is_priced_so() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 80, bias=False))
    chosen = optim.choose("adamw8bit", model=model)
    assert chosen.of("0.weight").state_bytes((64, 64)) == 2 * 4 * 64 * 64 + 4
    assert chosen.of("1.weight").state_bytes((80, 64)) < 3 * 80 * 64
    question = {"hardware": "cpu:1", "loss_fn": lambda out, batch: out.mean(), "optimizer": "adamw8bit"}
    plan = tw.plan(model, (torch.zeros(2, 3, dtype=torch.long),), **question)
    assert plan.predicted.breakdown["optimizer"] > 2 * 4 * 64 * 64


def test_lists_hold_the_temporaries_of_all_parameters() -> None:
    peaks = [planned(optimizer_form=form).predicted.peak_bytes for form in ("foreach", "loop", "fused")]
    assert peaks[0] > peaks[1] > peaks[2]


# On ranks

STEPS = [
    ("rprop", {}, 0.01), ("adafactor", {}, 0.05), ("muon", {}, 0.02), ("mfac", {"num_gradients": 4}, 0.05),
    ("sophiah", {"update_period": 1}, 0.05), ("sophiag", {"update_period": 1}, 0.05),
    ("adahessian", {"update_period": 1}, 0.05), ("sso", {}, 1.0), ("gradnormsmoothnewton", {}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "lr"), slow_but(STEPS[:6], STEPS))
def test_two_ranks_step_as_one_process_does(pool2: Pool, name: str, options: dict[str, Any], lr: float) -> None:
    plan = planned(2, optimizer=name, optimizer_options=options, optimizer_form="loop", solver="fsdp")
    assert any(param.layout != ("R",) for param in plan.params.values())
    for found in _stepped(pool2, plan, lr):
        assert found["moved"] > 5e-3
        assert found["worst"] < (1e-8 if name == "gradnormsmoothnewton" else 1e-13)
        assert found["num_steps"] == 3


@pytest.mark.parametrize("solver", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_matrices_with_one_owner_each(pool2: Pool, name: str, solver: str) -> None:
    plan = planned(2, optimizer=name, solver=solver)
    owned = plan.model_copy(update={"optimizer_owned": ("embed.weight", "inner.weight", "norm.weight", "head.weight")})
    for found in _stepped(pool2, owned, 0.02):
        assert found["moved"] > 5e-3
        assert found["worst"] < 1e-13


def _stepped(pool: Pool, plan: Plan, lr: float) -> list[dict[str, Any]]:
    return pool.run("tests.second_derivative_cases:trains_like_one_process", plan=plan.to_json(), lr=lr)


def test_an_owner_is_chosen_where_it_is_quicker() -> None:
    """A large matrix takes longer than it takes to send it, where the link is quick."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 8))
    quick = tw.hardware("cpu:2")
    (link,) = quick.links
    question: dict[str, Any] = {"loss_fn": lambda out, batch: out.mean(), "optimizer": "muon", "solver": "ddp"}
    plans = [
        tw.plan(model, (torch.ones(4, 256),), hardware=quick.model_copy(update={"links": (found,)}), **question)
        for found in (
            link.model_copy(update={"bandwidth_bytes_per_s": 1e12, "latency_s": 1e-9}),
            link.model_copy(update={"bandwidth_bytes_per_s": 1e6}),
        )
    ]
    assert [plan.optimizer_owned for plan in plans] == [("0.weight", "1.weight"), ()]


@pytest.mark.parametrize("seed", [0, 3])
def test_hessian_vector_products_of_drawn_layouts(pool2: Pool, seed: int) -> None:
    """Batch norm, convolutions and a split vocabulary among them."""
    for found in pool2.run("tests.second_derivative_cases:products", model="normed", mesh=[2], seed=seed):
        assert found["size"] > 0.1
        assert max(found["gradient"], found["product"]) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny", "bert-tiny", "vit-tiny"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hessian_vector_products_of_architectures(pool2: Pool, model: str, seed: int) -> None:
    for found in pool2.run("tests.second_derivative_cases:products", timeout_s=280, model=model, mesh=[2], seed=seed):
        assert found["size"] > 0
        assert max(found["gradient"], found["product"]) < 1e-9


# What cannot run is refused before anything does


def test_a_plan_for_a_method_that_takes_the_loss_keeps_everything() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    question: dict[str, Any] = {"loss_fn": lambda out, batch: out.mean(), "hardware": "cpu:2"}
    plan = tw.plan(model, (torch.ones(64, 64),), optimizer="sophiah", **question)
    assert plan.overlap == "none"
    assert not any(op.recomputed or op.offloaded for op in plan.modules.values())
    with pytest.raises(UserError, match=r"one micro-batch is needed for sophiah"):
        tw.plan(model, (torch.ones(64, 64),), optimizer="sophiah", micro_batches=2, **question)


def _by_gradients(module: Any, optimizer: Any, part: Any, batch: Any) -> None:
    train_step(module, optimizer, part)


@pytest.mark.parametrize(
    ("name", "options", "width", "rows"),
    slow_but(
        [("sso", {}, 256, 32), ("mfac", {"num_gradients": 8}, 96, 64)],
        [("gradnormsmoothnewton", {}, 96, 256), ("gradnormsmoothnewton", {}, 256, 32), ("sso", {}, 256, 32),
         ("mfac", {"num_gradients": 8}, 96, 64)],
    ),
)  # fmt: skip
def test_vectors_of_the_whole_model_are_in_the_promised_peak(
    name: str, options: dict[str, Any], width: int, rows: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)), nn.Linear(width, 6))
    batch, loss_fn = (torch.randn(rows, width), torch.arange(rows) % 6), nn.CrossEntropyLoss()
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1", optimizer=name, optimizer_options=options)
    module = tw.parallelize(model, plan, loss_fn=loss_fn)
    chosen = optim.of_plan(plan)
    optimizer, step = chosen.make(module.named_parameters(), lr=1e-2), step_of(chosen, model, loss_fn) or _by_gradients
    static, part = static_bytes(module), plan.shard_batch(batch)
    record = measure(lambda: step(module, optimizer, part, batch=batch), num_steps=2)
    assert plan.predicted.peak_bytes == pytest.approx(static + record.peak_delta_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("squares", "lr"),
    slow_but([(True, 1e-2), (False, 30.0)], [(squares, lr) for squares in (False, True) for lr in (1e-2, 30.0)]),
)
def test_copies_of_large_outputs_are_in_the_promised_peak(squares: bool, lr: float) -> None:
    """SSO's peak is at most the promise, which is at most one more copy of the outputs above it."""
    width, outputs, rows = 32, 256, 256
    sizes = {"width": width, "outputs": outputs, "rows": rows, "squares": squares}
    model, batch, loss_fn = wide(**sizes)
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1", optimizer="sso")
    peak = peak_of_target_steps(plan.to_json(), lr, **sizes)
    assert peak <= plan.predicted.peak_bytes <= peak + 4 * rows * outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "squares"),
    [("fsdp", True), ("ddp", False), ("ddp", True), ("fsdp", False)],
)
def test_whole_copies_of_outputs_that_ranks_hold_parts_of_are_in_the_promised_peak(
    pool2: Pool, solver: str, squares: bool
) -> None:
    """SSO needs the outputs of all examples on every rank: what is gathered counts, beside the rank's own part."""
    sizes = {"width": 48, "outputs": 512, "rows": 128, "squares": squares}
    model, batch, loss_fn = wide(**sizes)
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:2", optimizer="sso", solver=solver)
    peaks = pool2.run("tests.second_derivative_cases:peak_of_target_steps", plan=plan.to_json(), lr=30.0, **sizes)
    assert max(peaks) <= plan.predicted.peak_bytes <= 1.2 * max(peaks)


def test_vectors_that_every_rank_holds_whole_do_not_shrink_with_the_parts() -> None:
    """GradNormSmoothNewton's ten vectors of the model are in the promise of a sharded plan as in that of a replicated one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 6))
    num_bytes = sum(param.numel() * 4 for param in model.parameters())
    batch, loss_fn = (torch.randn(8, 96), torch.arange(8) % 6), nn.CrossEntropyLoss()
    peaks = [
        tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:2", optimizer="gradnormsmoothnewton", solver=solver)
        .predicted.peak_bytes
        for solver in ("ddp", "fsdp")
    ]  # fmt: skip
    assert min(peaks) > 10 * num_bytes


@pytest.mark.parametrize("name", slow_but(["adahessian"], ["sophiah", "adahessian"]))
def test_the_graph_of_the_gradient_is_in_the_promised_peak(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(3)), nn.Linear(96, 6))
    batch, loss_fn = (torch.randn(256, 96), torch.arange(256) % 6), nn.CrossEntropyLoss()
    plan = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1", optimizer=name)
    once = tw.plan(model, batch, loss_fn=loss_fn, hardware="cpu:1", optimizer="adamw")
    assert plan.predicted.peak_bytes > 1.5 * once.predicted.peak_bytes
    module = tw.parallelize(model, plan, loss_fn=loss_fn)
    chosen = optim.of_plan(plan)
    optimizer, step = chosen.make(module.named_parameters(), lr=1e-3), step_of(chosen, model, loss_fn)
    for group in optimizer.param_groups:
        group["update_period"] = 1
    static, part = static_bytes(module), plan.shard_batch(batch)
    record = measure(lambda: step(module, optimizer, part, batch=batch), num_steps=2)
    assert plan.predicted.peak_bytes == pytest.approx(static + record.peak_delta_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"overlap": "buckets"}, "sends gradients in buckets"), ({"micro_batches": 2}, "runs 2 micro-batches")],
)
def test_another_plan_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    plan = planned(2, optimizer="adamw").model_copy(update={"overlap": "none", **change})
    with pytest.raises(UserError, match=rf"{reason}; plan with --optimizer sophiah"):
        optimizer_of(plan, "sophiah")


def test_on_one_rank_nothing_travels_and_nothing_is_refused() -> None:
    plan = planned(optimizer="adamw")
    run = tw.train(words, plan, steps=2, optimizer="sophiah", optimizer_options={"update_period": 1}, lr=0.01)
    assert run.losses[1] != run.losses[0]


def test_a_plan_that_recomputes_is_refused() -> None:
    plan = planned(optimizer="adamw")
    key, op = next(iter(plan.modules.items()))
    modules = {**plan.modules, key: op.model_copy(update={"recomputed": {"out": "all"}})}
    changed = plan.model_copy(update={"modules": modules, "overlap": "none"})
    with pytest.raises(UserError, match=r"this one recomputes"):
        optimizer_of(changed, "sophiah")


def test_targets_need_a_loss_of_their_own() -> None:
    plan = planned(optimizer="adamw").model_copy(update={"loss_fn": "", "overlap": "none"})
    with pytest.raises(UserError, match=r"a loss_fn beside the model is needed for sso"):
        optimizer_of(plan, "sso")


# Groups


@pytest.mark.parametrize("name", ["adamw8bit", "frugal"])
def test_embeddings_and_heads_are_apart_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(FILE, encoding="utf8")
    plans = {}
    for told in ("true", "false"):
        command = ["plan", "net.py:build", "--hardware", "cpu:1", "--optimizer", name, "-o", f"{told}.json"]
        assert main([*command, "--optimizer-option", f"groups={told}"]) == 0
        plans[told] = Plan.from_json(f"{told}.json")
    apart = plans["true"].optimizer_groups
    assert {"embed.weight", "head.weight"} <= {
        key for group in apart for key in group.params if group.options != {"projected": True}
    }
    assert plans["false"].optimizer_groups == ()
    assert plans["true"].predicted.breakdown["optimizer"] > plans["false"].predicted.breakdown["optimizer"]
    assert not any("groups" in plan.optimizer_options for plan in plans.values())
    chosen, contradictions = optimizer_of(plans["true"], options={"groups": "false"})
    assert chosen.groups == ()
    assert "groups of its own" in contradictions[0]
    with pytest.raises(UserError, match=r"adamw treats all parameters alike"):
        optim.choose("adamw", {"groups": False})
