"""A step with the state of another parameter, which compiled passes refuse."""

from __future__ import annotations

import pytest
import torch


def assert_one_pass_refuses(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Step both, load the second's state into the first: the next step raises, and the parameter stays as it is."""
    params = [each.param_groups[0]["params"][0] for each in (optimizer, other)]
    for param, each in zip(params, (optimizer, other)):
        param.grad = torch.ones_like(param)
        each.step()
    optimizer.load_state_dict(other.state_dict())
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="load what was saved for this one"):
        optimizer.step()
    assert torch.equal(params[0].detach(), before)
