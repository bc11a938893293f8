"""AdamW's state per parameter: it exists before the first step, and follows its parameter's
device."""

from typing import Any

import pytest
import torch

from weft.workers.training.moments import Moments, _HostMoments

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
SETTINGS = {"lr": 0.1, "fused": True}
KINDS = {
    "plain": lambda groups: Moments(groups, **SETTINGS),
    "host": lambda groups: _HostMoments(groups, CPU, **SETTINGS),
}


def stepped(make: Any, *, ask: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], Moments]:
    """Return a parameter and its state after a step; `ask` reads the state before the step."""
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())  # its rows are not contiguous
    optimizer = make([{"params": [parameter]}])
    if ask:
        assert optimizer.state_of(parameter) is optimizer.state_of(parameter)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter.detach(), optimizer.state_of(parameter), optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_asked_for_before_the_first_step_is_the_one_that_the_step_makes(kind: str):
    mine, kept, _ = stepped(KINDS[kind], ask=True)
    plain, made, _ = stepped(lambda groups: Moments(groups, **SETTINGS), ask=False)
    assert torch.equal(mine, plain) and list(kept) == list(made)
    for name, tensor in made.items():
        assert (kept[name].dtype, kept[name].stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(kept[name], tensor)


@pytest.mark.parametrize(("kind", "device"), [("plain", ELSEWHERE), ("host", CPU)])
def test_moments_move_with_their_parameters_or_stay_in_host_memory(kind: str, device: torch.device):
    _, kept, optimizer = stepped(KINDS[kind], ask=False)
    optimizer.replace({name: tensor.to(ELSEWHERE) for name, tensor in optimizer.held().items()})
    assert {tensor.device for tensor in kept.values()} == {device}
