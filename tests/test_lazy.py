"""Stages whose modules are made only where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import WIDTH, data, of_modules, same
from torch import Tensor, nn

import pipec

made: list[str] = []


class Counted(nn.Module):
    """Notes when it is made with memory."""

    def __init__(self, name: str, norm: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        if self.layer.weight.device.type != "meta":
            made.append(name)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.norm(self.layer(x)).tanh() * scale


def net(stages: int = 4) -> pipec.Pipeline:
    return of_modules(*(pipec.lazy(Counted, f"m{n}", norm=n == 1) for n in range(stages)))


def test_a_plan_needs_no_module() -> None:
    made.clear()
    before = torch.get_rng_state()
    plan = pipec.compile(net(), 2, 4)
    assert made == []
    assert [stage.ordered for stage in plan.graph.stages] == [False, True, False, False]
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_depend_on_the_seed_and_the_place_alone() -> None:
    torch.manual_seed(3)
    first = {n: p.clone() for n, p in pipec.Runner(net(), pipec.compile(net(), 2, 4)).state_dict().items()}
    torch.manual_seed(3)
    torch.rand(7)
    again = pipec.Runner(net(), pipec.compile(net(), 1, 2)).state_dict()
    assert same(first, dict(again))
    assert not torch.equal(first["a.layer.weight"], first["c.layer.weight"])
    torch.manual_seed(4)
    assert not same(first, dict(pipec.Runner(net(), pipec.compile(net(), 2, 4)).state_dict()))


def test_runner_and_reference_have_one_module() -> None:
    lazy = net()
    run = pipec.Runner(lazy, pipec.compile(lazy, 2, 4))
    result = run.step(**data())
    for p in run.parameters():
        p.grad = None
    assert same(pipec.reference(lazy, 4).step(**data()).losses, result.losses)


def only_own(rank: int) -> tuple[list[str], float]:
    made.clear()
    torch.manual_seed(3)
    lazy = net()
    with pipec.Runner(lazy, pipec.compile(lazy, 2, 4)) as run:
        loss = float(run.step(**data()).loss)
    return made, loss


def test_a_rank_makes_its_own_stages_only(crew2: Any) -> None:
    (first, one), (second, two) = crew2(only_own)
    assert first == ["m0", "m1"]
    assert second == ["m2", "m3"]
    torch.manual_seed(3)
    lazy = net()
    with pipec.Runner(lazy, pipec.compile(lazy, 1, 4), backend="replay") as run:
        assert one == two == float(run.step(**data()).loss)


def test_mistakes() -> None:
    with pytest.raises(pipec.SpecError, match=r"an argument is a Linear that is made already"):
        pipec.lazy(Counted, nn.Linear(2, 2))
    pipe = pipec.Pipeline("wrong")
    pipe.output(pipe.stage("a", pipec.lazy(Counted, "m"), pipe.input("x"), skale=2.0))
    with pytest.raises(pipec.SpecError, match="cannot be called so"):
        _ = pipe.spec
    with pytest.raises(pipec.SpecError, match=r"must make an nn\.Module, got int"):
        of_modules(pipec.lazy(lambda: 3), nn.Linear(WIDTH, WIDTH))


def wrapped(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for wrap in (DistributedDataParallel, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2,)))):
        stages = of_modules(wrap(nn.Linear(WIDTH, WIDTH)), wrap(nn.Linear(WIDTH, WIDTH)))
        with pytest.raises(pipec.RunError) as error:
            pipec.Runner(stages, pipec.compile(stages, 2, 4))
        found.append(str(error.value))
    return found


class Reads(nn.Module):
    """Its constructor needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.rand(3).sum())


def test_a_constructor_that_needs_values_is_told_from_others() -> None:
    with pytest.raises(RuntimeError, match="meta") as error:
        pipec.Pipeline("net").stage("a", pipec.lazy(Reads), None)
    told = "\n".join(error.value.__notes__)
    assert "raised while lazy(Reads) was looked at on the meta device" in told
    assert "give such a stage a module that is made already" in told


def test_wrapped_stages_are_refused_with_what_to_use(crew2: Any) -> None:
    for rank, (first, second) in enumerate(crew2(wrapped)):
        assert f"stage {'ab'[rank]!r} is wrapped (DistributedDataParallel)" in first
        assert "compile with data_parallel=replicas, with mesh= a DeviceMesh of 'dp' and 'pp'" in first
        assert "is wrapped (FSDP" in second
