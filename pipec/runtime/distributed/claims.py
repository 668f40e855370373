"""Which device every rank runs on, and how values travel between them: found by each, judged by all alike.

Every rank says what it found, and each looks at all of it. So all of them raise the same error, or none does, and all
choose the same transport.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from attrs import frozen

from pipec.errors import Problem, RankError, RunError, raise_all
from pipec.runtime.distributed.gpus import Gpus
from pipec.runtime.placement import named_device

IN_ORDER = ("nccl", "xccl", "rccl")  # backends that run what a rank issues one after another, on the device
BY_HOST = ("gloo",)  # backends that move memory of the host


class Transport(Enum):
    """How values travel between ranks."""

    HOST = "tensors of the CPU"
    STAGED = "tensors of GPUs, through pinned host memory and gloo"
    WIRED = "tensors of GPUs, from device to device in one order per rank"


def transport_of(kind: str, backends: Mapping[str, str]) -> Transport:
    """The transport for stages on devices of a kind, from the process group's backend for each kind.

    Between CPUs values go through what pipec makes itself, so any process group will do. On GPUs the backend that the
    process group has for them decides; where it has none, it is gloo.

    Raises:
        RunError: no transport is known for the backend.
    """
    if kind == "cpu":
        return Transport.HOST
    backend = backends.get(kind, "gloo")
    if backend in IN_ORDER:
        return Transport.WIRED
    if backend in BY_HOST:
        return Transport.STAGED
    raise RunError(
        f"the process group moves tensors of {kind} devices by {backend!r}, which pipec does not know; use "
        f"init_process_group('cpu:gloo,{kind}:nccl') for transfers between GPUs, or 'gloo' to go through host memory"
    )


def device_for(devices: Any, logical: int, local: int, gpus: Gpus) -> torch.device | None:
    """The GPU of a rank, None for the CPU.

    Args:
        devices: as given to the Runner: None, one for every rank, or a list with one per logical device. A kind
            without a number means the GPU of the rank's place on its host.
        logical: the rank's logical device.
        local: the rank's place on its host.

    Raises:
        RunError: there is no such device here.
    """
    kind, there = gpus.found()
    if devices is None:
        backends = gpus.backends()
        if "cpu" in backends or kind not in backends:
            return None
        devices = kind  # a process group that is for GPUs alone
    several = isinstance(devices, Sequence) and not isinstance(devices, str)
    given = list(devices) if several else [devices]
    asked = [named_device(one) for one in given]
    kinds = sorted({one.type for one in asked})
    if len(kinds) > 1:
        raise RunError(
            f"devices must be of one kind, got {' and '.join(kinds)}; stages on the host beside GPUs are not supported"
        )
    device = asked[logical] if several else asked[0]
    if device.type == "cpu":
        return None
    if device.type != kind or not there:
        raise RunError(f"device {device} is not here; torch finds {f'{there} {kind}' if there else 'no GPU'}")
    if device.index is None:
        return torch.device(kind, local % there)
    if device.index >= there:
        raise RunError(
            f"device {device} is not here; torch finds {kind}:0 to {kind}:{there - 1}. Give devices={kind!r}, and each "
            "rank takes the GPU of its place on its host (LOCAL_RANK)"
        )
    return device


def local_place(hosts: Sequence[str], me: int) -> int:
    """The place of a rank on its host: LOCAL_RANK, as torchrun sets it, else counted among all ranks there."""
    told = os.environ.get("LOCAL_RANK", "")
    return int(told) if told.isdigit() else list(hosts[:me]).count(hosts[me])


@frozen
class Claim:
    """What a rank found.

    Attributes:
        identity: of its GPU, the same in every process of the host.
        transport: the name of its :class:`Transport`.
        problem: why it has none.
    """

    host: str
    device: str = "cpu"
    identity: str = ""
    transport: str = Transport.HOST.name
    problem: str | None = None


def claim(devices: Any, logical: int, local: int, gpus: Gpus) -> tuple[Claim, torch.device | None]:
    """What this rank found, and its GPU."""
    host = socket.gethostname()
    try:
        device = device_for(devices, logical, local, gpus)
        if device is None:
            return Claim(host), None
        transport = transport_of(device.type, gpus.backends())
        return Claim(host, str(device), gpus.identity(device), transport.name), device
    except RunError as error:
        return Claim(host, problem=str(error)), None


def check_claims(claims: Sequence[Claim], ranks: Sequence[int], me: int) -> Transport:
    """The transport of all ranks; ``ranks[i]`` is the rank of ``claims[i]``, ``me`` this one's.

    Raises:
        RunError: what is wrong on this rank.
        RankError: it is wrong on another one, or the ranks do not fit together.
    """
    by_rank = dict(zip(ranks, claims, strict=True))
    mine = by_rank[me].problem
    if mine is not None:
        raise RunError(mine)
    wrong = next((rank for rank, one in by_rank.items() if one.problem is not None), None)
    if wrong is not None:
        raise RankError(f"rank {wrong} has no device: {by_rank[wrong].problem}", wrong)
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, one in by_rank.items():
        kinds.setdefault((one.device.split(":")[0], one.transport), []).append(rank)
    if len(kinds) > 1:
        told = "; ".join(f"{kind} ({Transport[name].value}) on {_told(own)}" for (kind, name), own in kinds.items())
        raise RankError(f"the ranks are on different kinds of devices: {told}; give devices= alike on all of them")
    transport = Transport[claims[0].transport]
    if transport is Transport.WIRED:
        raise_all("two ranks on one GPU", _shared(by_rank), RankError)
    return transport


def _shared(by_rank: Mapping[int, Claim]) -> list[Problem]:
    """NCCL has one rank per GPU at most."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, one in by_rank.items():
        users.setdefault((one.host, one.identity), []).append(rank)
    problems = [
        Problem(f"{_told(own)} of host {host} all use {by_rank[own[0]].device}, which NCCL refuses")
        for (host, _), own in users.items() if len(own) > 1
    ]
    if problems:
        problems.append(Problem(
            "start as many processes per host as it has GPUs (torchrun --nproc-per-node) and give devices='cuda', so "
            "that each takes the GPU of its LOCAL_RANK; or init_process_group('gloo'), with which ranks may share a "
            "GPU and values go through host memory"
        ))
    return problems


def _told(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
