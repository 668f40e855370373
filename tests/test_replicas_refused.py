"""What stages on different GPUs cannot share."""

from __future__ import annotations

import pytest
import torch
from models import WIDTH, data, kept_streams
from test_replicas import three
from test_streams import backend
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.runtime.backends import Replay
from pipec.runtime.choose import make_backend
from pipec.runtime.placement import homes, place_stages
from pipec.runtime.replicas import replicate
from pipec.runtime.stages import bind

__all__ = ["kept_streams"]


def placed(net: pipec.Pipeline, plan: pipec.Plan) -> None:
    where = homes(plan, [torch.device(f"cpu:{number}") for number in range(plan.devices)])
    stages = bind(net.spec)
    place_stages(stages, where, replicate(stages, where, plan))


def test_shared_buffers_are_refused() -> None:
    shared = nn.BatchNorm1d(WIDTH)
    net = pipec.Pipeline("net")
    value = net.stage("b", shared, net.stage("a", shared, net.input("x")))
    net.loss("mse", F.mse_loss, value, net.input("y"))
    with pytest.raises(pipec.RunError, match=r"stages 'a' and 'b' share 'running_mean'.*give each its own"):
        placed(net, pipec.compile(net, 2, 1))


def test_asynchronous_plans_are_refused() -> None:
    net = three(frozen=True)
    plan = pipec.compile(net, 3, 2, "pipedream", update="stage")
    with pytest.raises(pipec.RunError, match=r"'s0' and 's2' share 'weight'.*'pipedream' reads several versions"):
        placed(net, plan)
    warm = pipec.compile(net, 3, 2, update="stage")
    streams = backend(3)
    with pipec.Runner(net, warm, backend=streams, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as run:
        run.step(**data(4))
        with pytest.raises(pipec.RunError, match=r"'s0' and 's2' share a parameter but run on different GPUs"):
            run.switch(plan)
        run.step(**data(4))


def test_what_was_tied_after_compiling_is_refused() -> None:
    net = three(shared=(0,))
    plan = pipec.compile(net, 3, 2)
    net.spec.stages[2].fn.weight = net.spec.stages[0].fn.weight
    with pytest.raises(pipec.RunError, match=r"stages 's0' and 's2' share 'weight'.*no REDUCE for it"):
        placed(net, plan)
    assert net.spec.stages[0].fn.weight.device.type == "cpu"


def test_a_sparse_gradient_is_refused_and_nothing_is_lost() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, WIDTH, sparse=True)
    net = pipec.Pipeline("sparse")
    ids = net.input("ids")
    net.loss("sum", lambda a, b: (a * b).mean(), net.stage("b", lambda p, t, i: F.embedding(i, p, sparse=True) + t,
             net.stage("a", table, ids), pipec.skip(ids), params=table.weight), net.input("y"))
    with pipec.Runner(net, pipec.compile(net, 2, 2), backend=backend(2)) as run, pytest.raises(
        pipec.RunError, match=r"stage 'b' shares with a stage on another GPU has the layout torch.sparse_coo"
    ):
        run.step(ids=torch.arange(4), y=torch.ones(4, WIDTH))
    assert table.weight.grad is None


def test_a_ready_backend_without_streams_is_refused() -> None:
    net = three()
    plan = pipec.compile(net, 3, 2)
    where = [torch.device(f"cpu:{number}") for number in range(3)]
    replicas = replicate(bind(net.spec), where, plan)
    with pytest.raises(pipec.RunError, match="share parameters, whose replicas only backend='cuda' keeps; got"):
        make_backend(Replay(), "three", 3, None, where, replicas)
