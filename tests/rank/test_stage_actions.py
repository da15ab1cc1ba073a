"""The actions of a pipeline's stages: in which order they come, and that they end whatever the transport."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.artifacts import UserError
from trainwright.rank.stage_actions import (
    Action,
    Schedule,
    action_lists,
    check_order,
    default_in_flight,
    forward_actions,
    interleaved_in_flight,
    most_in_flight,
)

FALLING = [
    (num_micro, depths)
    for num_stages in (2, 3)
    for num_micro in range(1, 7)
    for depths in product(range(1, num_micro + 1), repeat=num_stages)
    if all(later <= earlier for earlier, later in pairwise(depths))
]


def test_depths_that_do_not_rise_always_end() -> None:
    for num_micro, depths in FALLING:
        lists = action_lists(len(depths), num_micro, depths)
        assert len(check_order(lists)) == sum(map(len, lists))


def test_depths_that_rise_never_end() -> None:
    rising = [d for d in product(range(1, 5), repeat=3) if any(b > a for a, b in pairwise(d))]
    for depths in rising:
        with pytest.raises(UserError, match="waits for"):
            check_order(action_lists(3, 4, depths))


@pytest.mark.parametrize(("num_stages", "num_micro"), [(2, 1), (4, 2), (4, 3), (3, 8)])
def test_each_stage_does_all_micro_batches_and_keeps_its_depth(num_stages: int, num_micro: int) -> None:
    depths = default_in_flight(num_stages)
    for stage, actions in enumerate(action_lists(num_stages, num_micro, depths)):
        for kind in ("forward", "backward"):
            assert [a.micro for a in actions if a.kind == kind] == list(range(num_micro))
        held = most = 0
        for action in actions:
            held += {"forward": 1, "backward": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most == min(depths[stage], num_micro)


def test_interleaved_stages_and_split_backwards_always_end() -> None:
    for num_stages, virtual, groups in product((2, 3, 4, 8), (2, 3, 4), (1, 2, 3)):
        num = num_stages * groups
        depths = interleaved_in_flight(num_stages, virtual, num)
        lists = action_lists(num_stages, num, depths, virtual)
        assert len(check_order(lists)) == sum(map(len, lists))
        for stage, actions in enumerate(lists):
            for kind in ("forward", "backward"):
                own = [(a.micro, a.chunk) for a in actions if a.kind == kind]
                assert sorted(own) == sorted(product(range(num), range(virtual)))
            most = most_in_flight(Schedule(num, depths, virtual))[stage]
            assert depths[stage] <= sum(most)
    for num_stages, num in product((2, 3, 4, 8), (1, 2, 5, 8, 17)):
        for depth in (1, num_stages, 2 * num_stages - 1, num):
            lists = action_lists(num_stages, num, (min(depth, num),) * num_stages, 1, True)
            check_order(lists)
            for actions in lists:
                held = 0
                for action in actions:
                    held += (action.kind == "forward") - (action.kind == "weight")
                    assert held <= depth
                assert held == 0


def test_groups_that_are_not_whole_are_refused_where_they_would_wait_for_ever() -> None:
    with pytest.raises(UserError, match="waits for send activation 9 of stage 7"):
        check_order(action_lists(8, 12, interleaved_in_flight(8, 2, 12), 2))
    with pytest.raises(UserError, match="not both"):
        action_lists(2, 4, (2, 1), 2, True)


def test_evaluation_ends() -> None:
    interleaved = [forward_actions(stage, 3, 4, 2) for stage in range(3)]
    assert len(check_order(interleaved)) == sum(map(len, interleaved))
    lists = [forward_actions(stage, 3, 4) for stage in range(3)]
    assert {a.kind for a in check_order(lists)} == {"forward", "post", "take", "send", "sent"}


@given(st.sampled_from([f for f in FALLING if f[0] > 2]), st.data())
def test_a_list_that_was_tampered_with_ends_or_is_refused(
    case: tuple[int, tuple[int, ...]], data: st.DataObject
) -> None:
    """The proof holds every list against its neighbours: whatever it lets pass, every transfer meets its other side."""
    num_micro, depths = case
    lists = action_lists(len(depths), num_micro, depths)
    actions = lists[data.draw(st.integers(0, len(lists) - 1))]
    place = data.draw(st.integers(0, len(actions) - 1))
    taken = actions.pop(place)
    if data.draw(st.booleans()):
        actions.insert(data.draw(st.integers(0, len(actions))), taken)
    try:
        order = check_order(lists)
    except UserError:
        return
    done: set[Action] = set()
    for action in order:
        other = {"take": "send", "sent": "post"}.get(action.kind)
        if other is not None:
            assert Action(other, action.peer, action.micro, action.what) in done  # type: ignore[arg-type]
        done.add(action)


def test_a_dropped_send_is_named() -> None:
    lists = action_lists(2, 2, (2, 1))
    lists[0] = [a for a in lists[0] if not (a.kind == "send" and a.micro == 1)]
    with pytest.raises(UserError, match=r"stage 1 in take activation 1 waits for send activation 1 of stage 0"):
        check_order(lists)


def test_depths_that_are_not_one_a_stage_are_refused() -> None:
    with pytest.raises(UserError, match=r"try \[2, 1\]"):
        action_lists(2, 4, (1,))
