"""Which rank is which device of which replica, and the process groups they talk through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from pipec.errors import PipecError, RankError, RunError
from pipec.ir import Plan

SMALL = 8  # ranks: up to here everybody writes to everybody at once
TABLE = 9  # tag of exchanges


class LostError(RankError):
    """A rank has ended or does not answer: nothing more is known where this is raised."""


@frozen
class Place:
    """Where this process stands.

    Attributes:
        device: the logical device whose list it runs.
        replica: which of ``replicas`` copies of the pipeline it belongs to.
        ranks: global rank of every device of every replica, ``ranks[replica][device]``.
    """

    device: int
    replica: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def devices(self) -> int:
        return len(self.ranks[0])

    @property
    def everyone(self) -> tuple[int, ...]:
        """All global ranks, replica by replica; the order of the tables that are exchanged."""
        return tuple(rank for row in self.ranks for rank in row)


def running() -> bool:
    """Whether torch.distributed was initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own_store(prefix: str) -> Any:
    """The store of the process group under a prefix, with a connection of its own where it can have one: whoever waits
    for an answer holds up nobody else."""
    own = store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        with suppress(RuntimeError):  # what may open no more connections tells so by the one it has
            own = store.clone()
    return dist.distributed_c10d.PrefixStore(prefix, own)


def layouts(plan: Plan, mesh: Any, replicas: int) -> list[tuple[tuple[int, ...], ...]]:
    """Per pipeline of the world (one unless the mesh has other dimensions) the global ranks by replica and device.

    Raises:
        RunError: the number of processes does not fit the plan.
    """
    if mesh is None:
        world = dist.get_world_size()
        if world != plan.devices * replicas:
            what = "1 device" if plan.devices == 1 else f"{plan.devices} devices"
            what += f" x {replicas} replicas" if replicas > 1 else ""
            hint = (f"; to train {world // plan.devices} replicas compile with data_parallel={world // plan.devices}"
                    if replicas == 1 and world % plan.devices == 0 else "")
            raise RunError(
                f"the plan has {what}, so the number of processes must be {plan.devices * replicas}; torch.distributed "
                f"was initialised with {world}{hint}"
            )
        table = np.arange(world).reshape(1, replicas, plan.devices)
    else:
        names, blocks = whole_mesh(mesh)
        if "pp" not in names:
            raise RunError(f"mesh= needs a dimension named 'pp' (and 'dp' for replicas); it has {names or 'no names'}")
        sizes = dict(zip(names, blocks.shape[1:], strict=True))
        if sizes["pp"] != plan.devices or sizes.get("dp", 1) != replicas:
            raise RunError(
                f"the plan has {plan.devices} devices and {replicas} replicas; the mesh has pp={sizes['pp']}, "
                f"dp={sizes.get('dp', 1)}; compile with devices={sizes['pp']}, data_parallel={sizes.get('dp', 1)}"
            )
        order = [n for n in range(len(names)) if names[n] not in ("dp", "pp")]
        order += [names.index(name) for name in ("dp", "pp") if name in names]
        table = blocks.permute(0, *(n + 1 for n in order)).numpy().reshape(-1, replicas, plan.devices)
    return [tuple(tuple(int(r) for r in row) for row in block) for block in table]


def whole_mesh(mesh: Any) -> tuple[tuple[str, ...], Tensor]:
    """The names of a mesh's dimensions, and the global ranks of all its siblings, shape (siblings, *sizes).

    A slice of a mesh, ``mesh["pp"]`` say, has the ranks of this process's own part only, and every process makes the
    groups of all: so its other parts are taken from the mesh that it was sliced from.

    Raises:
        RunError: it is no DeviceMesh.
    """
    from torch.distributed.device_mesh import DeviceMesh  # not in builds of torch without torch.distributed

    if not isinstance(mesh, DeviceMesh):
        raise RunError(
            f"mesh= is a torch.distributed.device_mesh.DeviceMesh with a dimension 'pp' (and 'dp' for replicas), such "
            f"as init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'pp')); got a {type(mesh).__name__}"
        )
    names = tuple(mesh.mesh_dim_names or ())
    root = mesh._get_root_mesh()
    known = tuple(root.mesh_dim_names or ())
    if root is mesh or not names:
        return names, root.mesh.unsqueeze(0)
    if not set(names) <= set(known):  # some of its dimensions are several of the other's, flattened
        return names, mesh._layout.remap_to_tensor(mesh._rank_map)
    order = [n for n, name in enumerate(known) if name not in names] + [known.index(name) for name in names]
    sizes = [root.mesh.shape[known.index(name)] for name in names]
    return names, root.mesh.permute(order).reshape(-1, *sizes)


@define(eq=False)
class Groups:
    """The process groups of one pipeline; every process of the world makes those of all, in one order."""

    place: Place
    pipeline: Any  # the devices of this replica: values travel here
    replicas: Any  # this device in all replicas: gradients are averaged here; None with one replica
    everyone: Any  # all devices of all replicas
    pairs: dict[int, Any] = field(factory=dict)  # by device of this replica: it and this one, for values on GPUs
    totals: Any = None  # this device in all replicas, for gradients on GPUs

    def made(self) -> list[Any]:
        """All of them, each once."""
        groups = (self.pipeline, self.replicas, self.everyone, self.totals, *list(self.pairs.values()))
        return list({id(g): g for g in groups if g is not None}.values())

    def close(self) -> None:
        """Leave them; nothing here holds them any more, so that they end."""
        groups = self.made()
        self.pipeline = self.replicas = self.everyone = self.totals = None
        self.pairs.clear()
        while groups:
            with suppress(RuntimeError, ValueError, AssertionError):  # torch.distributed was shut down first
                dist.destroy_process_group(groups.pop())


def make_groups(plan: Plan, mesh: Any, replicas: int, timeout: float) -> Groups:
    """The groups between hosts of the pipeline that this process belongs to.

    They are of gloo, whatever backends the default process group has: tables, headers and descriptions are the
    hosts' own.

    Raises:
        RunError: the number of processes does not fit, this process has no place in the mesh, or torch lacks gloo.
    """
    if not dist.is_gloo_available():
        raise RunError(
            "ranks agree through gloo, beside any other backend, and this build of torch has none; install one with "
            "gloo, as all builds for Linux from pytorch.org have it"
        )
    me, own = dist.get_rank(), None
    for ranks in layouts(plan, mesh, replicas):
        try:
            made = _groups(ranks, me, timedelta(seconds=timeout))
        except RuntimeError as error:
            if isinstance(error, PipecError):
                raise
            raise LostError(f"the process groups of the ranks were not made: {error}") from error
        own = made or own
    if own is None:
        raise RunError(
            f"rank {me} is in no pipeline of the mesh, so it has no Runner; it has done its part, since process groups "
            "are made by every process of the world: catch this error there and go on"
        )
    return own


def _groups(ranks: tuple[tuple[int, ...], ...], me: int, timeout: timedelta) -> Groups | None:
    """Every process makes all groups, in this order."""
    def new(members: Sequence[int]) -> Any:
        return new_group(members, timeout)

    everyone = tuple(rank for row in ranks for rank in row)
    world = new(everyone)
    rows = [new(row) for row in ranks] if len(ranks) > 1 else [world]
    columns = [new(column) for column in zip(*ranks, strict=True)] if len(ranks) > 1 else []
    if me not in everyone:
        return None
    replica, device = divmod(everyone.index(me), len(ranks[0]))
    place = Place(device, replica, ranks)
    return Groups(place, rows[replica], columns[device] if columns else None, world)


def new_group(members: Sequence[int], timeout: timedelta) -> Any:
    """A group of gloo in which a rank's number is its place among ``members``.

    Raises:
        RunError: this version of torch numbers them by their ranks in the world, which are in another order.
    """
    if list(members) == sorted(members):
        return dist.new_group(list(members), timeout=timeout, backend="gloo")
    if "sort_ranks" not in signature(dist.new_group).parameters:
        raise RunError(
            f"the mesh has the ranks {', '.join(map(str, members))} in this order, and this version of torch makes "
            "groups of ascending ranks only; let them ascend along 'pp' and 'dp', or use a newer torch"
        )
    return dist.new_group(list(members), timeout=timeout, backend="gloo", sort_ranks=False)


def make_pairs(
    groups: Groups, blocks: Sequence[tuple[tuple[int, ...], ...]], pairs: Sequence[tuple[int, int]],
    new: Callable[[Sequence[int]], Any],
) -> None:
    """Add the groups in which values of GPUs travel, one for each other device. Every process of the world makes those
    of all, in one order.

    Args:
        blocks: of :func:`layouts`.
        pairs: devices that have something for each other.
        new: makes a group.
    """
    place = groups.place
    for pair in pairs:
        for ranks in blocks:
            for replica, row in enumerate(ranks):
                made = new(sorted(row[device] for device in pair))
                if ranks == place.ranks and replica == place.replica and place.device in pair:
                    groups.pairs[pair[0] if pair[1] == place.device else pair[1]] = made


def make_totals(
    groups: Groups, blocks: Sequence[tuple[tuple[int, ...], ...]], totals: Callable[[Sequence[int]], Any]
) -> None:
    """Add the group for gradients on GPUs. Every process of the world makes those of all, in one order.

    Args:
        blocks: of :func:`layouts`.
        totals: makes a group in which gradients are added up.
    """
    place = groups.place
    for ranks in blocks:
        mine = ranks == place.ranks
        for device, column in enumerate(zip(*ranks, strict=True)):
            made = totals(column) if len(ranks) > 1 else None
            if mine and device == place.device:
                groups.totals = made


def exchange(
    group: Any, row: Sequence[float], size: int, me: int, timeout: float, waits: Callable[[int], None]
) -> list[list[float]]:
    """Everybody's row of numbers, shape (size, len(row)); every rank gives one of the same length.

    Args:
        waits: told of the rank that this one waits for; -1: all.

    Raises:
        LostError: a rank has ended or does not answer in time.
    """
    mine = torch.tensor(row, dtype=torch.float64)
    if size == 1:
        return [mine.tolist()]
    limit = timedelta(seconds=timeout)
    rows = [torch.empty_like(mine) for _ in range(size)]
    rows[me] = mine
    if size > SMALL:
        waits(-1)
        try:
            dist.all_gather(rows, mine, group=group)
        except RuntimeError as error:
            raise LostError(f"a rank has ended or does not answer: {error}") from error
        return [one.tolist() for one in rows]
    peer = -1
    peers = [number for number in range(size) if number != me]
    try:
        works = [(p, group.recv([rows[p]], p, TABLE)) for p in peers]
        works += [(p, group.send([mine], p, TABLE)) for p in peers]
        for number, work in works:
            peer = number
            waits(peer)
            work.wait(limit)
    except RuntimeError as error:
        raise LostError(f"rank {peer} has ended or does not answer: {error}", peer) from error
    return [one.tolist() for one in rows]


def gather_objects(group: Any, value: Any, size: int) -> list[Any]:
    """Everybody's object, for what is told rarely.

    Raises:
        LostError: a rank has ended or does not answer in time.
    """
    made: list[Any] = [None] * size
    try:
        dist.all_gather_object(made, value, group=group)
    except RuntimeError as error:
        raise LostError(f"a rank has ended or does not answer: {error}") from error
    return made


def same_everywhere(tensor: Tensor, group: Any, root: int) -> None:
    """Give every rank of ``group`` the values of global rank ``root``, in place."""
    with torch.no_grad():
        whole = tensor.detach().cpu().contiguous()  # the groups are those of the hosts
        dist.broadcast(whole, root, group=group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)
