"""One rank on a GPU, and who takes part in a distributed run: the devices of all ranks, and how values travel."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from pipec.errors import PipecError, RankError
from pipec.ir import Kind, Plan
from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.carriers import Carrier, Staged, Wired
from pipec.runtime.distributed.claims import Transport, check_claims, claim, local_place
from pipec.runtime.distributed.gpus import Gpus
from pipec.runtime.distributed.group import (
    Groups,
    LostError,
    gather_objects,
    layouts,
    make_groups,
    make_pairs,
    make_totals,
    new_group,
)
from pipec.runtime.distributed.held import on_host
from pipec.runtime.distributed.local import Tied
from pipec.runtime.distributed.meeting import apart
from pipec.runtime.distributed.order import Orders
from pipec.runtime.distributed.ordered import OrderedChannels
from pipec.runtime.distributed.ranks import Ranks
from pipec.runtime.distributed.reduce import Reducer
from pipec.runtime.distributed.streams import RankStreams, StreamBackend, StreamDevice, StreamOverlappedDevice
from pipec.runtime.distributed.totals import Road, StagedRoad, Totals, WiredRoad
from pipec.runtime.distributed.watch import hang_up
from pipec.runtime.distributed.wires import Leg, Wire
from pipec.runtime.executor import Device
from pipec.runtime.program import Op, Program, Route, build_program
from pipec.runtime.result import Result
from pipec.runtime.stages import Stage
from pipec.runtime.step import Step
from pipec.spec import Spec
from pipec.tree import tree_map


def make_ranks(
    spec: Spec, plan: Plan, mesh: Any, timeout: float, outputs: str, devices: Any, gpus: Gpus
) -> Ranks:
    """This rank, on the device that is its, with the transport that all ranks share.

    Args:
        mesh: a DeviceMesh with a dimension "pp", and "dp" for replicas; None: the whole world.
        devices: as given to the Runner.

    Raises:
        RunError: the plan, the number of processes or this rank's device does not fit.
        RankError: another rank's device does not, or two of them do not fit together.
    """
    try:
        groups = make_groups(plan, mesh, plan.data_parallel, timeout)
    except LostError as error:
        raise apart(range(dist.get_world_size()), timeout, error) from error
    try:
        place, rank = groups.place, dist.get_rank()
        hosts = gather_objects(groups.everyone, socket.gethostname(), len(place.everyone))
        local = local_place(hosts, place.everyone.index(rank))
        mine, device = claim(devices, place.device, local, gpus)
        transport = check_claims(gather_objects(groups.everyone, mine, len(place.everyone)), place.everyone, rank)
        if device is None:
            return Ranks(spec, plan, groups, timeout, outputs)
        blocks = layouts(plan, mesh, plan.data_parallel)
        return GpuRanks(spec, plan, groups, timeout, outputs, transport, gpus, device, blocks)
    except LostError as error:
        hang_up(groups)  # so that nobody waits for this rank
        groups.close()
        raise apart(place.everyone, timeout, error) from error
    except BaseException:
        groups.close()
        raise


class GpuRanks(Ranks):
    """One process per device, which is a GPU; tables, headers and descriptions go between the hosts.

    Attributes:
        transport: how values travel.
        streams: this rank's.
    """

    ways = ()  # values are on GPUs

    def __init__(
        self, spec: Spec, plan: Plan, groups: Groups, timeout: float, outputs: str, transport: Transport, gpus: Gpus,
        device: torch.device, blocks: Sequence[tuple[tuple[int, ...], ...]],
    ) -> None:
        """``blocks``: of all pipelines of the world, whose processes make all groups in one order."""
        self._wires: dict[int, Wire] = {}  # by the device at the other end
        self._sums: Wire | None = None
        super().__init__(spec, plan, groups, timeout, outputs)
        try:
            self.transport, self._named, self._gpus = transport, str(device), gpus
            self.way = transport.value
            self.memory = gpus.memory(device)
            api = gpus.streams(self.memory)
            self.streams = RankStreams(api, self.memory, self.device)
            self.backend: StreamBackend = StreamBackend(self.streams, self.place.ranks[self.replica], self.device)
            self._orders = Orders(self.device, self.place.replicas)
            self._blocks, self._met = blocks, set[Route]()
            make_totals(groups, blocks, self._new)
            if transport is Transport.WIRED:
                self._meet(plan)
        except BaseException:
            self.close()
            raise

    def _new(self, ranks: Sequence[int]) -> Any:
        """A group in which tensors of this transport travel."""
        if self.transport is Transport.STAGED:
            return new_group(ranks, timedelta(seconds=self._timeout))
        return self._gpus.group(ranks, self._gpus.backends()[self._named.split(":")[0]], self._timeout)

    def _meet(self, plan: Plan) -> None:
        """Make the wires that a plan needs, and let their ends meet, in one order.

        Raises:
            RankError: they do not.
        """
        try:
            self._connect(plan)
        except RuntimeError as error:
            if isinstance(error, PipecError):
                raise
            raise RankError(f"the GPUs of the ranks do not connect: {error}") from error
        if not self.streams.ended(self._timeout):
            raise RankError(f"the GPUs of the ranks did not connect within {self._timeout:g} s")

    def _connect(self, plan: Plan) -> None:
        """Two ranks are connected by their first transfer, and their hosts wait for each other then. In a step the one
        might wait so for a transfer far ahead that the other cannot come to."""
        if self.groups.totals is not None and self._sums is None:
            self._sums = self._wire(self.groups.totals, f"sums {self.device}")
            self._sums.wait(self._sums.total("meets", torch.ones(1, device=self.memory)))
        ranks, memory = self.place.ranks[self.replica], self.memory
        pairs = [pair for pair in meetings(routes_of(plan, self._tied, self.homes)) if pair not in self._met]
        make_pairs(self.groups, self._blocks, pairs, self._new)
        self._met.update(pairs)
        for pair in pairs:
            if self.device in pair:
                peer = pair[0] if pair[1] == self.device else pair[1]
                self._wires[peer] = wire = self._wire(self.groups.pairs[peer], f"wire {self.device}-{peer}")
                wire.wait(wire.issue([
                    Leg(-1, f"meets {peer}", peer, ranks[peer], sends, None,
                        [torch.ones(1, dtype=torch.uint8, device=memory)]) for sends in (True, False)
                ]))

    def _wire(self, group: Any, name: str) -> Wire:
        return self._gpus.wire(self.streams.api, group, self.memory, name, self._timeout)

    # -- before the first step ------------------------------------------------------------------------------

    def real(self, plan: Plan) -> list[torch.device] | None:
        """Every stage that is here is on this rank's GPU."""
        return None if self.memory.type == "cpu" else [self.memory] * plan.devices

    def proved(self, ops: Sequence[Sequence[Op]]) -> None:
        """Raise RunError when the ranks cannot run these tasks of all devices in one order each."""
        self._orders.of(ops)

    def prepared(self, plan: Plan) -> Program | None:
        """The program of a synchronous plan, proved to have an order of transfers that all ranks can keep.

        Raises:
            RunError: it has none.
        """
        if plan.asynchronous:
            return None
        program = build_program(plan)
        self.proved(program.ops)
        return program

    def adopt(self, plan: Plan) -> None:
        """Go on with another plan."""
        if self.transport is Transport.WIRED:
            self._meet(plan)
        super().adopt(plan)
        self._orders = Orders(self.device, self.place.replicas)

    # -- a step ---------------------------------------------------------------------------------------------

    def rank_device(self, *args: Any) -> Device:
        """The device of this rank."""
        return StreamDevice(self.streams, self.watch, *args)

    def overlapped(self, *args: Any) -> StreamOverlappedDevice:
        """The same in an asynchronous plan."""
        return StreamOverlappedDevice(self.streams, self.watch, *args, None)

    def reducer(self, step: Step, channels: Any) -> Reducer:
        """The REDUCE tasks of one step."""
        streams = self.streams
        if self.transport is Transport.WIRED:
            road: Road = WiredRoad(self._wires, self._sums, self.place.ranks[self.replica])
        else:
            road = StagedRoad(streams.api, self.groups, streams.compute, streams.out, self._timeout)
        made = Totals(self.groups, self._tied, self.homes, step.accumulators, self._timeout, road)
        made.channels = channels
        return made

    def channels(
        self, plan: Plan, own: Traffic, forms: Sequence[Any] | None, received: dict[Route, int] | None = None
    ) -> Any:
        """The channels of this rank during one run of its tasks of ``plan``."""
        self._council.at = plan
        streams, hosts = self.streams, self.groups.pipeline
        memory = streams.hosts()
        if self.transport is Transport.WIRED:
            carrier: Carrier = Wired(streams.api, self._wires, streams.compute, self.memory, memory)
        else:
            carrier = Staged(streams.api, hosts, streams.compute, streams.out, self.memory)
        self._open = made = OrderedChannels(
            carrier, memory, hosts, self.place.ranks[self.replica], self.device, own, self._orders.of(own.ops),
            self._frames[plan.training], forms, self._timeout, self._council.lost, received,
        )
        made.waits = self._waiting
        return made

    def settle(self, step: Step, channels: Any, work: Callable[[], None]) -> Result:
        """Run this rank's tasks; losses, on this rank's GPU, and outputs when every rank has come to its end."""
        result = super().settle(step, channels, work)
        return evolve(result, losses={name: self.here(loss) for name, loss in result.losses.items()})

    def landed(self, channels: OrderedChannels | None) -> None:
        """Wait until the GPU has done what was queued.

        Raises:
            RankError: it has not in time: a rank that it exchanges values with is gone, or stands.
        """
        self._waiting.begins(-1)
        if self.streams.ended(self._timeout, lambda: self.watch.alarmed) or channels is None:
            self._waiting.ends()
            return
        channels.broken = self._council.standing(self._named)
        self.backend.farewell(channels, (channels.broken.rank, str(channels.broken)))
        raise channels.broken

    def close(self) -> None:
        """Leave the groups, and the wires over them."""
        super().close()
        self._wires.clear()
        self._sums = None

    def here(self, tensor: Any) -> Any:
        """A tensor of the host on this rank's GPU."""
        return tensor.to(self.memory) if isinstance(tensor, Tensor) else tensor

    def packed(self, outputs: Any) -> bytes:
        """Outputs as tensors of the host, for other ranks."""
        return super().packed(on_host(outputs)) if self.outputs == "all" else b""

    def everywhere(self, data: bytes) -> list[Any]:
        """What everybody has packed, in this replica, with its tensors on this rank's GPU."""
        return [tree_map(self.here, one) for one in super().everywhere(data)]

    def norm(self, stages: Sequence[Stage], norm_type: float) -> Tensor:
        """The norm of the gradients of all stages, on this rank's GPU."""
        total: Tensor = self.here(super().norm(stages, norm_type))
        return total


def routes_of(plan: Plan, tied: Sequence[Tied], homes: Sequence[int]) -> set[Route]:
    """Pairs of devices between which values travel, gradients, or sums of a parameter that stages of both share."""
    copies = (plan.table.kind == Kind.COPY) & (plan.table.device != plan.table.peer)
    found = set(zip(plan.table.device[copies].tolist(), plan.table.peer[copies].tolist(), strict=True))
    for one in tied:
        devices = {homes[stage] for stage in one.stages}
        found |= {(source, target) for source in devices for target in devices if source != target}
    return found


def meetings(routes: Collection[Route]) -> list[Route]:
    """The pairs of devices that have a route, in an order in which all can meet and many at once.

    Pairs of one distance come in two halves, in each of which a device is in one pair at most.
    """
    pairs = {(min(route), max(route)) for route in routes}
    return sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair[0] // (pair[1] - pair[0]) % 2, pair[0]))
