"""Views of a parameter whose place strides cannot tell: live rules refuse them, stashed weights take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipec


class Conjugate(nn.Module):
    """Autograd saves a conjugated view of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).real


def train(schedule: str) -> Tensor:
    torch.manual_seed(0)
    made = Conjugate()
    net = pipec.Pipeline("views")
    value = net.input("x")
    for name, module in (("a", nn.Linear(4, 4)), ("b", made), ("c", nn.Linear(4, 4))):
        value = net.stage(name, module, value)
    net.loss("loss", lambda out: out.pow(2).sum(), value, reduction="sum")
    plan = pipec.compile(net, 3, 1, schedule, update="stage")
    before = made.weight.detach().clone()
    with pipec.Runner(net, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), backend="replay") as run:
        for _ in range(4):
            run.step(x=torch.randn(2, 4))
        run.flush()
    return (made.weight.detach() - before).abs().sum()


def test_a_conjugated_parameter_is_refused_where_the_backward_reads_other_weights() -> None:
    with pytest.raises(pipec.RunError, match=r"conjugated or across several parameters.*use schedule='pipedream'"):
        train("pipemare")
    assert train("pipedream") > 0
