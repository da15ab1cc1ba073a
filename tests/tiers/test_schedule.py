"""Traffic and time of a step: bounds, limits, and a schedule worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.artifacts import UserError
from trainwright.tiers import Layer, Policy, Rates, bound_s, held_beside, placed, simulate, traffic

PAGE = 4096


def layer(
    pages: int, trained: bool = True, forward_s: float = 1.0, backward_s: float = 2.0, update_s: float = 0.5
) -> Layer:
    size = pages * PAGE
    return Layer(size, (size, size) if trained else (), size, forward_s, backward_s, update_s, trained)


def with_fates(layers: list[Layer], fates: list[tuple[bool, bool]]) -> list[Layer]:
    return [
        replace(each, param_stays=param, states_stay=states)
        for each, (param, states) in zip(layers, fates, strict=False)
    ]


PLAIN = st.lists(st.builds(layer, st.integers(1, 6), st.booleans()), min_size=1, max_size=8)
FATES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=8, max_size=8)
LAYERS = st.builds(with_fates, PLAIN, FATES)
POLICIES = st.builds(
    Policy,
    window_bytes=st.integers(1, 60).map(lambda n: n * PAGE),
    keep_bytes=st.integers(0, 30).map(lambda n: n * PAGE),
    commit_every=st.sampled_from([1, 3]),
    update=st.sampled_from(["during", "after"]),
)
RATES = st.builds(Rates, read=st.floats(1e3, 1e6), write=st.floats(1e3, 1e6))


@given(layers=LAYERS, policy=POLICIES, rates=RATES)
def test_the_schedule_is_never_faster_than_the_bound(layers: list[Layer], policy: Policy, rates: Rates) -> None:
    found = simulate(layers, policy, rates)
    # What the backward reads ahead may come during the forward: only the sum over both is a bound of every order.
    moved = traffic(layers, policy)
    assert found.step_s >= found.compute_s - 1e-9
    assert found.step_s >= moved.read_bytes / rates.read - 1e-6
    assert found.step_s >= moved.written_bytes / rates.write - 1e-6
    assert bound_s(layers, policy, rates) >= found.compute_s - 1e-9


@given(layers=LAYERS, policy=POLICIES)
def test_a_disk_without_limits_costs_the_last_update_alone(layers: list[Layer], policy: Policy) -> None:
    still = [replace(each, update_s=0.0) for each in layers]
    assert simulate(still, policy, Rates(1e15, 1e15)).exposed_s == pytest.approx(0.0, abs=1e-6)


@given(layers=PLAIN, policy=POLICIES)
def test_what_is_kept_fits_and_nothing_more_would(layers: list[Layer], policy: Policy) -> None:
    assert policy.keep_bytes is not None
    found = placed(layers, policy)
    used = sum(each.held_bytes for each in found if each.param_stays)
    assert used <= policy.keep_bytes
    assert all(each.states_stay == each.param_stays for each in found)
    assert all(each.held_bytes > policy.keep_bytes - used for each in found if each.is_trained and not each.param_stays)


@given(layers=LAYERS, policy=POLICIES)
def test_every_byte_has_one_fate(layers: list[Layer], policy: Policy) -> None:
    """Tensors that stay are never read; trained ones are written with every step, or with those that are committed."""
    moved = traffic(layers, policy)
    held = held_beside(layers, policy, read_at_once=6 * PAGE, reread_at_once=9 * PAGE)
    away = sum(each.param_bytes for each in layers if not each.param_stays)
    states = sum(each.state_bytes for each in layers if each.is_trained and not each.states_stay)
    trained = [each for each in layers if each.is_trained]
    grads = sum(each.grad_bytes for each in trained) if policy.update == "after" else 0
    assert moved.forward_read <= away
    assert states + grads <= moved.backward_read <= 2 * away + states + grads
    assert moved.written + moved.kept_bytes == sum(each.param_bytes + each.state_bytes for each in trained) + grads
    assert held.forward_values <= held.backward_values <= away
    assert held.updates <= sum(each.grad_bytes for each in trained) + states


def test_two_layers_by_hand() -> None:
    """Window: one parameter ahead. Rates: a page a second each way."""
    layers = [layer(1), layer(1)]
    policy = Policy(
        window_bytes=4 * PAGE
    )  # a parameter stays at each end; one update at a time: it has three pages of two
    # Forward: layer 0 has stayed (0..1), layer 1 arrives at 1 (1..2) and stays.
    # Backward: layer 1 2..4, its states are read 4..6, it is updated 6..6.5 and written 6.5..9.5; layer 0 4..6. Its update
    # begins when that of layer 1 is written: read 9.5..11.5, updated ..12, written ..15.
    found = simulate(layers, policy, Rates(PAGE, PAGE))
    assert (found.step_s, found.compute_s) == (15.0, 6.0)
    wide = simulate(layers, Policy(window_bytes=12 * PAGE), Rates(PAGE, PAGE))
    # Both parameters stay. Both updates at once: states read 4..6 and 6..8, updated 6..6.5 and 8..8.5, written ..9.5, ..12.5.
    assert wide.step_s == 12.5
    assert traffic(layers, policy).written_a_day(12.5) == 6 * PAGE * 86_400 / 12.5


def test_a_commit_counts_by_its_share_of_the_steps() -> None:
    """A page a second; what stays is written with every third step alone, behind an update of half a second."""
    stays = [replace(layer(1), param_stays=True, states_stay=True)]
    rates, steps = Rates(PAGE, PAGE), []
    for every in (1, 3):
        steps.append(simulate(stays, Policy(PAGE, commit_every=every), rates).step_s)
    assert steps == pytest.approx([3.5 + 3.0, 3.5 + 1.0])


def test_rates_of_nothing_are_refused() -> None:
    for read, write in ((0.0, 1.0), (1.0, -1.0)):
        with pytest.raises(UserError, match="bytes a second"):
            Rates(read, write)


@given(
    layers=st.lists(st.builds(layer, st.integers(1, 6), st.just(True), *[st.floats(0.0, 3.0)] * 3), min_size=1, max_size=6),
    window=st.integers(4, 60), every=st.sampled_from([1, 4]), rates=RATES,
)  # fmt: skip
def test_of_all_amounts_that_stay_the_largest_takes_the_least(
    layers: list[Layer], window: int, every: int, rates: Rates
) -> None:
    """The search over the amount, brute force: so what fits is kept, and half of it is never faster."""
    amounts = [0]
    for each in reversed(layers):
        amounts.append(amounts[-1] + each.held_bytes)
    policies = [Policy(window * PAGE, keep, commit_every=every) for keep in amounts]
    steps = [simulate(placed(layers, policy), policy, rates).step_s for policy in policies]
    assert steps[-1] == pytest.approx(min(steps), rel=1e-9)


def test_a_commit_is_waited_for_where_there_is_one() -> None:
    layers = [Layer(4096, (4096, 4096), 4096, forward_s=1.0, backward_s=2.0)] * 4
    without, rates = Rates(1e6, 1e6), Rates(1e6, 1e6, commit_s=0.5)
    for policy, share in (
        (Policy(2**14), 1.0),
        (Policy(2**14, commit_every=4), 0.25),
        (Policy(2**14, place="host"), 0.0),
    ):
        longer = simulate(layers, policy, rates).step_s - simulate(layers, policy, without).step_s
        assert longer == pytest.approx(0.5 * share)


def test_the_host_moves_the_bytes_themselves_and_has_nothing_to_commit() -> None:
    layers = [Layer(1000, (1000, 1000), 1000)] * 3 + [Layer(500, (500, 500), 500, param_stays=True, states_stay=True)]
    disk, host = (traffic(layers, Policy(4000, place=place)) for place in ("disk", "host"))
    assert (host.written, host.kept_bytes) == (9000, 0)
    assert (disk.written, disk.kept_bytes) == (9 * 4096, 3 * 4096)
    assert host.written_bytes == 9000
    after = traffic(layers, Policy(4000, place="host", update="after"))
    assert after.written == host.written + 3500
