"""Meshes of every shape: slices, dimensions of one, dimensions in any order, ranks that are in none."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import WIDTH, chain, data, of_modules, parameters
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pipec


def trained(mesh: DeviceMesh, pp: int, dp: int, replica: int, seed: int = 0) -> list[Any]:
    """A step on a mesh: whether loss and gradients are those of one process with the data of all replicas."""
    net, plain = chain(4), chain(4)
    parts = [data(8, seed + number) for number in range(dp)]
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    with pipec.Runner(net, pipec.compile(net, pp, 4, data_parallel=dp), mesh=mesh, timeout=20) as run:
        own = {id(p) for p in run.parameters()}
        result = run.step(**parts[replica])
    expected = pipec.reference(plain, 4 * dp).step(**whole)
    pairs = [(p, q) for p, q in zip(parameters(net), parameters(plain), strict=True) if id(p) in own]
    assert pairs
    return [torch.allclose(result.loss, expected.loss)] + [torch.allclose(p.grad, q.grad, atol=1e-6) for p, q in pairs]


def made(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shaped(rank: int) -> list[list[Any]]:
    found = []
    for sizes in ({"dp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"pp": 4}, {"dp": 1, "pp": 4}, {"dp": 4, "pp": 1},
                  {"pp": 2, "tp": 1, "dp": 2}, {"tp": 2, "dp": 1, "pp": 2}):
        mesh = made(**sizes)
        at = dict(zip(sizes, mesh.get_coordinate() or (), strict=True))
        found.append(trained(mesh, sizes["pp"], sizes.get("dp", 1), at.get("dp", 0)))
    ranks = [[3, 1], [0, 2]]
    turned = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp", "pp"))
    if "sort_ranks" in signature(dist.new_group).parameters:  # torch 2.11 has ascending groups only
        found.append(trained(turned, 2, 2, next(n for n, row in enumerate(ranks) if rank in row)))
    return found


def test_dimensions_of_any_size_in_any_order(crew4: Any) -> None:
    assert all(all(own) for answers in crew4(shaped) for own in answers)


def sliced(rank: int) -> list[list[Any]]:
    """Slices of meshes: each part trains a pipeline of its own, on data of its own, more than once."""
    two, three, turned = made(dp=2, pp=2), made(tp=2, dp=1, pp=2), made(pp=2, tp=2)
    split = made(outer=2, inner=1, pp=2)
    split["outer", "inner"]._flatten("dp")
    found = [trained(two["pp"], 2, 1, 0, 10 * (rank // 2) + turn) for turn in range(2)]
    found.append(trained(three["dp", "pp"], 2, 1, 0, rank // 2))
    found.append(trained(turned["pp"], 2, 1, 0, rank % 2))
    found.append(trained(split["dp", "pp"], 2, 2, rank // 2))
    return [*found, trained(two, 2, 2, rank // 2)]


def test_a_slice_of_a_mesh_is_one_of_several_pipelines(crew4: Any) -> None:
    assert all(all(own) for answers in crew4(sliced) for own in answers)


def outside(rank: int) -> tuple[str, list[Any]]:
    """A mesh of two ranks; the others go on, and all four meet afterwards."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("pp",))
    told = ""
    try:
        assert all(trained(mesh, 2, 1, 0))
    except pipec.RunError as error:
        told = str(error)
    return told, trained(made(dp=2, pp=2), 2, 2, rank // 2)


def test_ranks_that_are_in_no_pipeline_are_told_and_go_on(crew4: Any) -> None:
    answers = crew4(outside)
    assert all(all(own) for _, own in answers)
    told = ("rank {} is in no pipeline of the mesh, so it has no Runner; it has done its part, since process groups "
            "are made by every process of the world: catch this error there and go on")
    assert [text for text, _ in answers] == [told.format(0), "", "", told.format(3)]


def wrong(rank: int) -> list[str]:
    net, told = chain(4), list[str]()
    for mesh in (
        init_device_mesh("cpu", (2, 2)), made(dp=4), made(pp=4), [0, 1, 2],
    ):
        with pytest.raises(pipec.RunError) as error:
            pipec.Runner(net, pipec.compile(net, 2, 4), mesh=mesh)
        told.append(str(error.value))
    return told


def test_meshes_that_do_not_fit(crew4: Any) -> None:
    assert crew4(wrong) == [[
        "mesh= needs a dimension named 'pp' (and 'dp' for replicas); it has no names",
        "mesh= needs a dimension named 'pp' (and 'dp' for replicas); it has ('dp',)",
        "the plan has 2 devices and 1 replicas; the mesh has pp=4, dp=1; compile with devices=4, data_parallel=1",
        "mesh= is a torch.distributed.device_mesh.DeviceMesh with a dimension 'pp' (and 'dp' for replicas), such as "
        "init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'pp')); got a list",
    ]] * 4


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def parted(rank: int, folder: str) -> list[Any]:
    """Stages whose weights are parted over "tp": losses, norm and weights of one process; what ends with an error."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = made(tp=2, pp=2)
    pipelines, plain = [], of_modules(*seeded(4))
    for _ in range(2):
        parts = [parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                 for module in seeded(4)]
        pipelines.append(of_modules(*parts))
    loop, found = pipec.reference(plain, 4), list[Any]()
    other = torch.optim.Adam(parameters(plain), lr=0.01)
    with pipec.Runner(pipelines[0], pipec.compile(pipelines[0], 2, 4), mesh=mesh, timeout=20) as run:
        optimizer = torch.optim.Adam(list(run.parameters()), lr=0.01)
        for step in range(3):
            result, expected = run.step(**data(8, step)), loop.step(**data(8, step))
            norms = run.clip_grad_norm_(0.05), torch.nn.utils.clip_grad_norm_(parameters(plain), 0.05)
            found += [torch.allclose(result.loss, expected.loss), torch.allclose(*norms)]
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
        with pytest.raises(pipec.RunError) as error:
            run.save(folder)
        dcp.save({"model": run.state_dict()}, checkpoint_id=folder)
    sizes = FileSystemReader(folder).read_metadata().state_dict_metadata
    found.append(sizes["model.a.up.weight"].size == (2 * WIDTH, WIDTH))
    again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(pipec.RunError) as refused:
        pipec.Runner(pipelines[1], pipec.compile(pipelines[1], 2, 4, data_parallel=2), mesh=again, timeout=20)
    return [all(found), str(error.value).split(": ", 1)[1], str(refused.value).splitlines()[1]]


def seeded(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Wide() for _ in range(count)]


def test_tensors_parted_over_another_dimension(crew4: Any, tmp_path: Any) -> None:
    for rank, (right, save, refused) in enumerate(crew4(parted, str(tmp_path))):
        assert right
        stage = "ac"[rank % 2]
        first = ", ".join(f"model.{stage}.{name}" for name in ("up.weight", "up.bias", "down.weight"))
        assert save.startswith(f"{first} and more are DTensors, of which this pipeline's ranks may have a part; save "
                               "the model on all ranks of the world with torch.distributed.checkpoint.save(")
        assert refused == f"  1. stage {stage!r}: up.weight, up.bias, down.weight, down.bias"
