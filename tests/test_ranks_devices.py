"""Which device a rank runs on and how values travel between them: tables, and what is said when it does not fit."""

from __future__ import annotations

import os
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpus import RUNNER, FakeGpus
from models import chain, data, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import pipec
from pipec.errors import RankError, RunError
from pipec.runtime.distributed.claims import (
    Claim,
    Transport,
    check_claims,
    claim,
    device_for,
    local_place,
    transport_of,
)
from pipec.runtime.distributed.gpu_ranks import GpuRanks, meetings, routes_of
from pipec.runtime.distributed.gpus import Accelerators, Distributed
from pipec.runtime.distributed.group import make_groups
from pipec.runtime.distributed.local import Tied, local_spec
from pipec.runtime.distributed.sample import NOTHING, sample_of
from pipec.runtime.placement import homes, place_stages
from pipec.runtime.stages import bind

BOTH, NCCL, GLOO = {"cpu": "gloo", "cuda": "nccl"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}


# -- the table: backend of the process group x kind of device -> transport -------------------------------------------


@pytest.mark.parametrize(("kind", "backends", "transport"), [
    ("cpu", GLOO, Transport.HOST), ("cpu", NCCL, Transport.HOST), ("cpu", BOTH, Transport.HOST),
    ("cpu", {"cpu": "mpi"}, Transport.HOST),
    ("cuda", NCCL, Transport.WIRED), ("cuda", BOTH, Transport.WIRED), ("xpu", {"xpu": "xccl"}, Transport.WIRED),
    ("cuda", GLOO, Transport.STAGED), ("cuda", {"cpu": "gloo"}, Transport.STAGED), ("cuda", {}, Transport.STAGED),
])
def test_the_transport_of_a_device_and_a_backend(kind: str, backends: dict[str, str], transport: Transport) -> None:
    assert transport_of(kind, backends) is transport


def test_a_backend_that_is_not_known() -> None:
    with pytest.raises(RunError, match=r"moves tensors of cuda devices by 'ucc'.*init_process_group\('cpu:gloo,cuda:"):
        transport_of("cuda", {"cuda": "ucc"})


DEVICES: list[tuple[Any, dict[str, str], int, int, str | None]] = [
    # given, backends, logical device, place on the host -> device
    (None, GLOO, 1, 1, None), (None, BOTH, 1, 1, None), (None, NCCL, 1, 1, "cuda:1"),
    ("cpu", NCCL, 0, 0, None), (["cpu", "cpu"], NCCL, 1, 1, None),
    ("cuda", GLOO, 0, 3, "cuda:3"), ("cuda", GLOO, 0, 5, "cuda:1"), (torch.device("cuda"), BOTH, 0, 2, "cuda:2"),
    ("cuda:2", BOTH, 0, 0, "cuda:2"), (["cuda:3", "cuda:0"], BOTH, 1, 1, "cuda:0"),
    (["cuda", "cuda"], BOTH, 1, 1, "cuda:1"),
]


@pytest.mark.parametrize(("given", "backends", "logical", "local", "found"), DEVICES)
def test_the_device_of_a_rank(
    given: Any, backends: dict[str, str], logical: int, local: int, found: str | None
) -> None:
    gpus = FakeGpus(count=4, backends=backends)
    assert device_for(given, logical, local, gpus) == (None if found is None else torch.device(found))


@pytest.mark.parametrize(("given", "count", "told"), [
    ("cuda:4", 4, r"device cuda:4 is not here; torch finds cuda:0 to cuda:3. Give devices='cuda', and each rank takes"),
    ("cuda", 0, "device cuda is not here; torch finds no GPU"),
    ("xpu", 4, "device xpu is not here; torch finds 4 cuda"),
    (["cuda", "cpu"], 4, "devices must be of one kind, got cpu and cuda"),
    ("cuad", 4, "devices: 'cuad' is no torch device"),
])
def test_devices_that_are_not_there(given: Any, count: int, told: str) -> None:
    gpus = FakeGpus(count=count)
    with pytest.raises(RunError, match=told):
        device_for(given, 0, 0, gpus)
    assert told.replace(".", "")[:20] in str(claim(given, 0, 0, gpus)[0].problem).replace(".", "")


def test_the_place_of_a_rank_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    hosts = ["a", "b", "a", "b", "a"]
    assert [local_place(hosts, rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert local_place(hosts, 0) == 7


GPU0, GPU1 = ("cuda:0", "serial 0", "WIRED"), ("cuda:1", "serial 1", "WIRED")


def test_ranks_that_fit() -> None:
    assert check_claims([Claim("a"), Claim("b")], (0, 1), 1) is Transport.HOST
    assert check_claims([Claim("a", *GPU0), Claim("a", *GPU1)], (0, 1), 0) is Transport.WIRED
    assert check_claims([Claim("a", *GPU0), Claim("b", *GPU0)], (0, 1), 0) is Transport.WIRED  # two hosts, two GPUs
    staged = Claim("a", "cuda:0", "serial 0", "STAGED")
    assert check_claims([staged, staged], (0, 1), 0) is Transport.STAGED  # through the host two may share one


def test_ranks_that_do_not_fit() -> None:
    broken = [Claim("a", *GPU0), Claim("a", problem="nothing here")]
    with pytest.raises(RankError, match="rank 3 has no device: nothing here") as caught:
        check_claims(broken, (2, 3), 2)
    assert caught.value.rank == 3
    with pytest.raises(RunError, match="nothing here"):
        check_claims(broken, (2, 3), 3)
    with pytest.raises(RankError, match=r"different kinds of devices: cpu \(.*\) on ranks 0, 2; cuda \(.*\) on rank 1"):
        check_claims([Claim("a"), Claim("a", *GPU0), Claim("b")], (0, 1, 2), 0)
    with pytest.raises(RankError) as caught:
        check_claims([Claim("a", *GPU0), Claim("a", *GPU1), Claim("a", *GPU0), Claim("b", *GPU0)], (0, 1, 2, 3), 1)
    told = str(caught.value)
    assert "ranks 0, 2 of host a all use cuda:0, which NCCL refuses" in told
    assert "torchrun --nproc-per-node" in told
    assert "init_process_group('gloo')" in told


# -- one process, and what only has to be read ------------------------------------------------------------------------


def test_torchs_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Accelerators()
    monkeypatch.setattr("pipec.runtime.distributed.gpus.dist.get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert here.backends() == BOTH
    assert here.memory(torch.device("cuda:1")) == torch.device("cuda:1")
    properties = lambda device: SimpleNamespace(uuid=f"u{device.index}")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [here.identity(torch.device("cuda", n)) for n in (0, 1)] == ["u0", "u1"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())  # an old one has none
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert here.identity(torch.device("cuda:1")) == "cuda:1 of 5,6"


def test_ranks_need_gloo_beside_any_other_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.runtime.distributed.group.dist.is_gloo_available", lambda: False)
    with pytest.raises(RunError, match="ranks agree through gloo, beside any other backend, and this build of"):
        make_groups(pipec.compile(chain(2), 2), None, 1, 10.0)


def test_every_stage_of_a_rank_is_on_its_one_device() -> None:
    plan = pipec.compile(chain(4), 2, 2)
    for name in ("cuda:1", "xpu:0"):
        device = torch.device(name)
        ranks: Any = SimpleNamespace(memory=device)
        where = GpuRanks.real(ranks, plan)
        assert where is not None
        assert homes(plan, where) == [device] * 4


def test_only_the_stages_of_a_rank_move_to_its_device() -> None:
    net = chain(4)
    plan = pipec.compile(net, 2, 2)
    meta = torch.device("meta")
    stages = bind(local_spec(net.spec, plan, 1))
    place_stages(stages, homes(plan, [meta] * 2))
    kinds = [{p.device.type for p in stage.fn.parameters()} for stage in net.spec.stages]
    assert kinds == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


def test_what_is_on_a_device_is_not_compared_between_ranks() -> None:
    assert sample_of(torch.ones(3)) != NOTHING
    assert sample_of({"a": torch.ones(3), "b": torch.ones(3, device="meta")}) == NOTHING


def test_pairs_meet_in_an_order_in_which_many_meet_at_once() -> None:
    plan = pipec.compile(pipec.chain(16), 8, 4, placement="looped")
    routes = routes_of(plan, [], [])
    assert routes == {(a, b) for a in range(8) for b in ((a - 1) % 8, (a + 1) % 8)}
    pairs = meetings(routes)
    assert pairs == [(0, 1), (2, 3), (4, 5), (6, 7), (1, 2), (3, 4), (5, 6), (0, 7)]
    every = meetings([(a, b) for a in range(8) for b in range(8) if a != b])
    assert len(every) == 28
    after: dict[int, int] = {}
    for pair in every:  # when each has met all before
        after |= dict.fromkeys(pair, 1 + max(after.get(device, 0) for device in pair))
    assert max(after.values()) <= 14
    shared = Tied(((0, "w"), (5, "w")), torch.zeros(1), 0)
    assert {(0, 2), (2, 0)} <= routes_of(pipec.compile(pipec.chain(6), 3, 2), [shared], [0, 0, 1, 1, 2, 2])


# -- over real processes ----------------------------------------------------------------------------------------------


def made(rank: int, how: str, count: int, devices: Any, local: bool) -> Any:
    """What a rank's runner is on, or what is said."""
    own = [devices[rank]] * 2 if isinstance(devices, tuple) else devices
    net = chain(4)
    if local:
        os.environ["LOCAL_RANK"] = str(1 - rank)  # the other way round
    try:
        gpus = FakeGpus(how, count, {"cuda": "nccl"} if devices is None else None)
        with RUNNER(net, pipec.compile(net, 2, 4), devices=own, backend=Distributed(gpus)) as run:
            loss = run.step(**data(8)).loss
            equal = same(loss, pipec.reference(chain(4), 4).step(**data(8)).loss)
            ranks = run._party
            return type(ranks).__name__, getattr(ranks, "_named", "cpu"), equal
    except pipec.PipecError as error:
        return type(error).__name__, str(error).splitlines()[0]
    finally:
        os.environ.pop("LOCAL_RANK", None)


CHOICES: list[tuple[str, int, Any, bool, list[tuple[str, str, bool]]]] = [
    ("wired", 2, "cuda", False, [("GpuRanks", "cuda:0", True), ("GpuRanks", "cuda:1", True)]),
    ("wired", 2, "cuda", True, [("GpuRanks", "cuda:1", True), ("GpuRanks", "cuda:0", True)]),
    ("wired", 2, None, False, [("GpuRanks", "cuda:0", True), ("GpuRanks", "cuda:1", True)]),
    ("wired", 4, ["cuda:3", "cuda:2"], False, [("GpuRanks", "cuda:3", True), ("GpuRanks", "cuda:2", True)]),
    ("wired", 2, "cpu", False, [("Ranks", "cpu", True)] * 2),
    ("staged", 1, "cuda", False, [("GpuRanks", "cuda:0", True)] * 2),
]


@pytest.mark.parametrize(("how", "count", "devices", "local", "expected"), CHOICES)
def test_ranks_find_their_devices(
    how: str, count: int, devices: Any, local: bool, expected: Any, crew2: Any
) -> None:
    assert crew2(made, how, count, devices, local) == expected


def test_two_ranks_on_one_gpu_of_nccl_are_an_error_on_both(crew2: Any) -> None:
    for kind, told in crew2(made, "wired", 1, "cuda", False):
        assert kind == "RankError"
        assert told == "two ranks on one GPU: 2 problems"


def test_a_rank_without_its_device_is_told_to_all_and_the_ranks_go_on(crew2: Any) -> None:
    first, second = crew2(made, "wired", 2, ("cuda:0", "cuda:5"), False)
    assert first == ("RankError", "rank 1 has no device: device cuda:5 is not here; torch finds cuda:0 to cuda:1. Give "
                     "devices='cuda', and each rank takes the GPU of its place on its host (LOCAL_RANK)")
    assert second[0] == "RunError"
    (kind, told), _ = crew2(made, "wired", 2, ("cuda:0", "cpu"), False)
    assert kind == "RankError"
    assert "different kinds of devices" in told
    assert crew2(made, "wired", 2, "cuda", False)[0] == ("GpuRanks", "cuda:0", True)


def unconnected(rank: int) -> str:
    def wire(*args: Any) -> Any:
        raise RuntimeError("no route to the other GPU")

    right, FakeGpus.wire = FakeGpus.wire, wire  # type: ignore[method-assign]
    net = chain(2)
    try:
        RUNNER(net, pipec.compile(net, 2), devices="cuda", backend=Distributed(FakeGpus()))
    except RankError as error:
        return str(error)
    finally:
        FakeGpus.wire = right  # type: ignore[method-assign]
    return "made"


def test_gpus_that_do_not_connect(crew2: Any) -> None:
    assert crew2(unconnected) == ["the GPUs of the ranks do not connect: no route to the other GPU"] * 2


def turned(rank: int) -> tuple[int, bool]:
    """A mesh whose ranks do not ascend."""
    net = chain(4)
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("pp",))
    with RUNNER(net, pipec.compile(net, 2, 4), mesh=mesh) as run:
        loss = run.step(**data(8)).loss
        return run._party.device, same(loss, pipec.reference(chain(4), 4).step(**data(8)).loss)


def test_a_mesh_may_have_its_ranks_in_any_order(crew2: Any) -> None:
    if "sort_ranks" in signature(dist.new_group).parameters:
        assert crew2(turned) == [(1, True), (0, True)]
        return
    for answer, value in crew2.answers(turned):  # torch 2.11 has no such groups
        assert (answer, value[0]) == ("raised", "RunError")
        assert "let them ascend along 'pp' and 'dp', or use a newer torch" in value[1]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.runtime.placement.accelerators", lambda: ("cuda", 2))


def test_in_one_process_the_same_word_means_the_gpus_in_turn(two_gpus: None) -> None:
    from pipec.runtime.placement import real_devices

    assert real_devices("cuda", None, 3) == [torch.device("cuda", n) for n in (0, 1, 0)]
    with pytest.raises(RunError, match="devices='xpu' needs a GPU, but torch finds only cuda here"):
        real_devices("xpu", None, 2)
    with pytest.raises(RunError, match="backend='threads' runs on the CPU"):
        real_devices("cuda", "threads", 2)
    net = pipec.Pipeline("net")
    net.output(net.stage("a", nn.Linear(2, 2), net.input("x")))
    with pytest.raises(RunError, match="devices= is a list of one torch device per logical device"):
        pipec.Runner(net, pipec.compile(net, 1, forward_only=True), devices="cuda:0")
