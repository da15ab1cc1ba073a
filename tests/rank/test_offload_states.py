"""Optimizer states off the device: the same bits, the promised peak, one problem with everything else, clear refusals."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.builders import QUICK, SLOW, question, tiny_program, with_disk
from tests.grids import slow_but
from tests.pool import Pool
from trainwright import optim
from trainwright.artifacts import Plan, Tier, UserError
from trainwright.capture.cached import cached_capture
from trainwright.planner import explain
from trainwright.planner.plan import make_plan
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import build_program
from trainwright.rank.offload_states import StateOffload, updates_alone
from trainwright.runtime.offload import DiskStore, HostStore

CASES = "tests.offload_states_cases"


def states_plan(
    name: str, optimizer: str, hardware: str = "cpu:2", tier: Tier = QUICK, program=None, **options
) -> Plan:
    asked = {
        "cluster": with_disk(tier, hardware),
        "offload": "disk",
        "pins": ("*=state-offload",),
        "time_limit_s": 5.0,
        "optimizer": optimizer,
        "optimizer_cost": optim.record(optimizer),
        "make_optimizer": lambda params: optim.create(optimizer, params),
    }
    return make_plan(**question(program or tiny_program(name), hardware, **(asked | options)))


@functools.cache
def pinned(name: str, optimizer: str) -> Plan:
    return states_plan(name, optimizer)


# The step, without any plan


def weights(seed: int = 0) -> list[nn.Parameter]:
    """Of several shapes, dtypes and strides, one of them empty."""
    torch.manual_seed(seed)
    made = [torch.randn(40, 30), torch.randn(7), torch.randn(3, 50).t(), torch.randn(0, 4), torch.randn(20).double()]
    return [nn.Parameter(value) for value in (*made, torch.randn(33, 5).to(torch.bfloat16))]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for place, param in enumerate(params):
        param.grad = None if (place, step) in ((1, 0), (2, 2)) else torch.randn_like(param)


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw in lists": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "adan": lambda groups: optim.Adan(groups, lr=1e-2),
    "adabelief in lists": lambda groups: optim.AdaBelief(groups, lr=1e-2, foreach=True),
    "adamw in 8 bits": lambda groups: optim.AdamW8bit(groups, lr=1e-2, min_8bit_size=100),
    "diffgrad": lambda groups: optim.DiffGrad(groups, lr=1e-2),
    "sgdsai": lambda groups: optim.SGDSaI(groups, lr=1e-2),
}


def groups_of(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]


@pytest.mark.parametrize("make_store", [DiskStore, lambda: HostStore(torch.device("cpu"))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_the_same_bit_for_bit(name: str, make_store) -> None:
    params, others = weights(), weights()
    if name == "adamw fused" or "8 bits" in name:
        params, others = params[:3], others[:3]  # their kernels' dtypes
    optimizer, other = (OPTIMIZERS[name](groups_of(found)) for found in (params, others))
    offload = StateOffload(make_store(), [params[0], *params[2:]])
    schedules = [torch.optim.lr_scheduler.StepLR(found, 1, 0.5) for found in (optimizer, other)]
    for step in range(4):
        give_gradients(params, step)
        give_gradients(others, step)
        optimizer.step()
        other.step()
        for schedule in schedules:
            schedule.step()
        away = [offload.whole(optimizer, param).keys() - optimizer.state[param].keys() for param in params]
        assert away[0]
        assert not away[1]
    assert all(torch.equal(one, two) for one, two in zip(params, others))
    one, two = optimizer.state_dict(), other.state_dict()
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    for index, states in two["state"].items():
        assert list(one["state"][index]) == list(states)
        for key, value in states.items():
            found = one["state"][index][key]
            same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            assert same, (index, key)
            assert not isinstance(value, torch.Tensor) or found.stride() == value.stride()


def test_hooks_closures_and_the_given_groups_see_one_step() -> None:
    params = weights()[:3]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    offload = StateOffload(DiskStore(), params)
    seen: list[object] = []
    optimizer.register_step_pre_hook(lambda owner, *_: seen.append(("before", len(owner.param_groups[0]["params"]))))
    optimizer.register_step_post_hook(lambda owner, *_: seen.append(("after", len(owner.param_groups[0]["params"]))))

    def closure() -> torch.Tensor:
        seen.append(("closure", torch.is_grad_enabled()))
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    before = [param.detach().clone() for param in params]
    loss = optimizer.step(closure)
    assert float(loss.detach()) == pytest.approx(sum(float(value.square().sum()) for value in before))
    assert seen == [("before", 3), ("closure", True), ("after", 3)]
    assert all(not torch.equal(one, two) for one, two in zip(params, before))
    # Other optimizers, and this one once nothing is offloaded any more, step as ever.
    offload.close()
    alone = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    alone.param_groups[0]["params"][0].grad = torch.ones(3)
    alone.step()
    assert not alone.param_groups[0]["params"][0].any()


class Noting:
    """A store that notes what stands on the device while it is away, in bytes."""

    def __init__(self) -> None:
        self.store = HostStore(torch.device("cpu"))
        self.under_way: dict[int, int] = {}
        self.most = 0

    def write(self, data: torch.Tensor):
        ticket = self.store.write(data)
        self.under_way[id(ticket)] = data.nbytes
        self.most = max(self.most, sum(self.under_way.values()))
        return ticket

    def written(self, ticket) -> None:
        self.under_way.pop(id(ticket))

    def read(self, ticket, into: torch.Tensor) -> None:
        self.store.read(ticket, into)

    def arrived(self, ticket) -> None:
        pass


def test_one_parameters_states_are_on_their_way_out_at_most() -> None:
    params = [nn.Parameter(torch.ones(100 + place)) for place in range(6)]
    optimizer = torch.optim.AdamW(params)
    store = Noting()
    offload = StateOffload(store, params)
    for step in range(2):
        give_gradients(params, 5 + step)
        optimizer.step()
        assert store.most == 2 * 4 * 105
        assert not store.under_way
    assert all(set(optimizer.state[param]) == {"step"} for param in params)
    offload.close()


def test_optimizers_that_couple_parameters_are_refused_by_name() -> None:
    params = weights()[:2]
    offload = StateOffload(HostStore(torch.device("cpu")), params)
    give_gradients(params, 1)
    made = [
        torch.optim.LBFGS(params),
        optim.ClippedAdam(params),
        optim.FRUGAL(params),
        optim.MFAC(params),
        optim.Adan(params, max_grad_norm=1.0),
    ]
    for optimizer in made:
        name = type(optimizer).__name__
        with pytest.raises(UserError, match=f"{name} does not, or does not say so; take AdamW or SGD.*state-keep"):
            optimizer.step()
    offload.close()


def test_the_command_line_refuses_them_before_anything_runs() -> None:
    with pytest.raises(UserError, match="clippedadam does not; take adamw or sgd-momentum"):
        optim.check_plannable("clippedadam", pinned("gpt2-tiny", "adamw").offloads_states)
    optim.check_plannable("adan", alone=True)


def test_every_record_says_whether_it_updates_parameters_alone() -> None:
    alone = {name for name in optim.names() if optim.record(name).updates_alone}
    assert {"adamw", "sgd", "sgd-momentum", "adabelief", "adamw8bit", "lamb8bit"} <= alone
    assert not alone & {"clippedadam", "clippedsgd", "frugal", "mfac", "adahessian", "sophiag", "sso", "adadagradnorm"}
    for name in alone:
        entry = optim.record(name)
        assert updates_alone(entry.cls([nn.Parameter(torch.ones(2, 2))]))


# Plans on ranks


@pytest.mark.parametrize(
    ("name", "optimizer"),
    slow_but(
        [("gpt2-tiny", "adamw")],
        [(name, optimizer) for name in ("gpt2-tiny", "llama-tiny") for optimizer in ("adamw", "sgd-momentum")],
    ),
)
def test_ranks_train_the_same_and_hold_what_was_promised(pool2: Pool, name: str, optimizer: str) -> None:
    plan = pinned(name, optimizer)
    found = pool2.run(f"{CASES}:beside_states_on_the_device", plan=plan.to_json(), name=name, optimizer=optimizer)
    for rank in found:
        assert rank["difference"] == 0.0
        assert rank["num_compared"] > 40
        assert rank["held_bytes"] < 0.05 * plan.predicted.moved_state_bytes
    assert max(rank["peak_bytes"] for rank in found) == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


@pytest.mark.slow  # three runs of two plans
def test_checkpoints_go_on_with_states_on_the_device_and_off_it(pool2: Pool, tmp_path) -> None:
    plan = pinned("gpt2-tiny", "adamw").to_json()
    arguments = {"plan": plan, "name": "gpt2-tiny", "folder": str(tmp_path), "optimizer": "adamw"}
    for rank in pool2.run(f"{CASES}:goes_on_under_the_other_plan", **arguments):
        assert rank == {"away to kept": 0.0, "kept to away": 0.0, "away to away": 0.0}


def test_state_dicts_are_whole_and_can_be_loaded(pool2: Pool) -> None:
    plan = pinned("gpt2-tiny", "adamw").to_json()
    for rank in pool2.run(f"{CASES}:loads_its_own_state_dict", plan=plan, name="gpt2-tiny", optimizer="adamw"):
        assert rank == [0.0, 0.0]


def test_a_full_disk_is_said_so_and_nothing_is_left(pool2: Pool, tmp_path) -> None:
    plan = pinned("gpt2-tiny", "adamw").to_json()
    for said in pool2.run(f"{CASES}:full_disk", plan=plan, name="gpt2-tiny", room_bytes=16384, folder=str(tmp_path)):
        assert said.startswith("room for what the plan offloads is needed in ")
        assert said.endswith("or plan with --offload none")


# Planning


def deep_program():
    """Little but parameters: the peak is at the optimizer's step."""
    model = nn.Sequential(nn.Linear(64, 200), nn.Linear(200, 64), nn.Linear(64, 16))
    return build_program(cached_capture(model, (torch.ones(2, 64),), lambda out, _: out.square().mean()))


def test_the_window_of_the_update_is_in_the_peak(pool2: Pool) -> None:
    plan = states_plan("", "adamw", program=deep_program(), pins=("*=state-offload", "*=replicate@cpu"))
    whole = states_plan("", "adamw", program=deep_program(), pins=("*=state-keep", "*=replicate@cpu"))
    states = sum(tensor.num_bytes for tensor in deep_program().params) * 2
    window = plan.predicted.peak_bytes - (whole.predicted.peak_bytes - states)
    assert window > 2 * 4 * 64 * 200  # of the largest parameter
    for peak in pool2.run(f"{CASES}:peak_of_deep", plan=plan.to_json()):
        assert peak == pytest.approx(plan.predicted.peak_bytes, rel=0.001)


@pytest.mark.parametrize(("tier", "pins", "moves"), [(QUICK, ("*=keep",), True), (SLOW, (), False)])
def test_states_leave_where_memory_binds_and_the_link_is_quick(tier: Tier, pins: tuple[str, ...], moves: bool) -> None:
    """Where all activations are kept it is the states or nothing; beside a slow link they are rather recomputed."""
    program = tiny_program("gpt2-tiny")
    whole = states_plan("gpt2-tiny", "adamw", "cpu:1", pins=("*=state-keep", "*=keep"))
    budget = whole.predicted.peak_bytes - 300_000
    plan = states_plan("gpt2-tiny", "adamw", "cpu:1", tier, pins=pins, budget_bytes=budget)
    assert plan.predicted.peak_bytes <= budget
    assert (plan.predicted.moved_state_bytes > 0) == moves
    assert bool(decisions_of(program, Plan.parse(plan.to_json())).offloaded_states) == moves
    if moves:
        assert "state offloaded" in plan.table()
        assert "optimizer states" in plan.table()


def test_what_moving_states_takes_is_priced_against_the_update() -> None:
    tier = Tier(write_bytes_per_s=1e8, read_bytes_per_s=2e8, latency_s=1e-5, overlap=0.5)
    plan = states_plan("gpt2-tiny", "adamw", "cpu:1", tier)
    found, away = plan.predicted, [entry for entry in plan.params.values() if entry.offloaded]
    num = len(decisions_of(tiny_program("gpt2-tiny"), plan).offloaded_states)
    assert away
    assert all(entry.offloaded == {"state": "all"} for entry in away)
    moved_s = found.moved_state_bytes * (1 / 1e8 + 1 / 2e8) + 2 * num * 1e-5
    assert found.transfer_s == pytest.approx(moved_s - 0.5 * min(moved_s, found.update_s))
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_comm_s + found.recompute_s + found.transfer_s)
    rows = explain(plan, tiny_program("gpt2-tiny"), "wte.weight", optim.record("adamw"))
    assert "offloaded  state: all" in rows.text()
    assert "to the disk and back: optimizer states" in rows.text()


def test_the_tier_holds_states_and_activations_together() -> None:
    small = QUICK.model_copy(update={"capacity_bytes": 100_000})
    with pytest.raises(UserError, match="room for the optimizer states that are pinned off the device is needed"):
        states_plan("gpt2-tiny", "adamw", "cpu:1", small)
    plan = states_plan("gpt2-tiny", "adamw", "cpu:1", small, pins=(), budget_bytes=3_200_000)
    assert plan.predicted.moved_bytes + plan.predicted.moved_state_bytes <= 100_000


def test_pins_of_states_are_obeyed_or_refused() -> None:
    plan = states_plan("gpt2-tiny", "adamw", "cpu:1", pins=("h.*.mlp.c_fc.weight=state-offload", "wte*=state-keep"))
    assert plan.params["transformer.h.{0-1}.mlp.c_fc.weight"].offloaded == {"state": "all"}
    assert not plan.params["transformer.wte.weight"].offloaded
    with pytest.raises(UserError, match="frugal does not; take adamw or sgd-momentum"):
        states_plan("gpt2-tiny", "frugal", "cpu:1")
    with pytest.raises(UserError, match=r"optimizer states that are worth moving are needed; what 'ln_f.bias"):
        states_plan("gpt2-tiny", "adamw", "cpu:1", pins=("ln_f.bias=state-offload",))
    with pytest.raises(UserError, match="add --offload host or --offload disk"):
        states_plan("gpt2-tiny", "adamw", "cpu:1", offload="none")


def test_plans_say_which_blocks_and_are_read_back() -> None:
    plan, program = pinned("gpt2-tiny", "adamw"), tiny_program("gpt2-tiny")
    key = "transformer.h.{0-1}.mlp.c_fc.weight"
    assert '"offloaded": {"state": "all"}' in plan.to_json()

    def with_blocks(offloaded: dict[str, str]) -> Plan:
        entry = plan.params[key].model_copy(update={"offloaded": offloaded})
        return Plan.parse(plan.model_copy(update={"params": {**plan.params, key: entry}}).to_json())

    away = decisions_of(program, with_blocks({"state": "1"})).offloaded_states
    assert {tensor.key for tensor in away if "c_fc.weight" in tensor.key} == {"transformer.h.1.mlp.c_fc.weight"}
    with pytest.raises(
        UserError, match=r"state, what its optimizer keeps, and param, its values, can be offloaded; got 'grad'"
    ):
        decisions_of(program, with_blocks({"grad": "all"}))
    with pytest.raises(UserError, match="the plan's `offload`"):
        decisions_of(program, plan.model_copy(update={"offload": None}))
