"""The places in a step where ranks must agree; the same methods as :class:`pipec.runtime.alone.Alone`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns, time_ns
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import TO_HOST, Plan
from pipec.runtime import names, saving
from pipec.runtime.alone import Alone, Path
from pipec.runtime.backends import Backend
from pipec.runtime.distributed.agree import compare, lengths_of, rows_of, same_call, summary, where_of
from pipec.runtime.distributed.backend import RankBackend, RankDevice, Traffic, traffic
from pipec.runtime.distributed.channels import RankChannels
from pipec.runtime.distributed.council import ANYWHERE, BEGIN, FINISH, FIXED, NORM, SAVE, SETTLE, Council
from pipec.runtime.distributed.group import gather_objects, make_groups, same_everywhere
from pipec.runtime.distributed.local import (
    check_inputs,
    check_wrappers,
    elsewhere_of,
    local_spec,
    owners_of,
    tied_parameters,
)
from pipec.runtime.distributed.reduce import Reducer
from pipec.runtime.distributed.results import LOSS_WIDTH, gathered_result, loss_row
from pipec.runtime.distributed.sample import check_samples, sample_of
from pipec.runtime.distributed.watch import Watch
from pipec.runtime.distributed.wire import Frame
from pipec.runtime.executor import Device
from pipec.runtime.failure import told
from pipec.runtime.gradients import shared_parameters
from pipec.runtime.program import Op, Program
from pipec.runtime.randomness import Position
from pipec.runtime.result import Result
from pipec.runtime.stages import Stage
from pipec.runtime.step import Batch, Step
from pipec.spec import Spec
from pipec.verify.flow import issue_deadlock


class Ranks(Alone):
    """One process per device; this one runs the list of ``place.device``.

    Args:
        plan, spec: the same on every rank.
        mesh: a DeviceMesh with a dimension "pp", and "dp" for replicas; None: the whole world.
        timeout: seconds after which a rank that does not answer is given up.
        outputs: "owner": an output is in the result of the rank of its stage; "all": in everybody's.
    """

    def __init__(self, spec: Spec, plan: Plan, mesh: Any, timeout: float, outputs: str) -> None:
        if outputs not in ("owner", "all"):
            raise RunError(f"outputs must be 'owner' or 'all', got {outputs!r}")
        hosted = plan.table.value[plan.table.gradient == TO_HOST]
        held = {plan.graph.values[value].name for value in hosted.tolist()}
        if held:
            raise RunError(
                f"skip(hold='host') of {', '.join(map(repr, sorted(held)))}: values wait in host memory in runs of one "
                "process only; leave hold= out, and compile again"
            )
        if plan.asynchronous:
            raise RunError(
                f"schedule {plan.schedule!r} is asynchronous; asynchronous plans run in one process so far: give "
                "backend='threads', or choose a synchronous schedule for several"
            )
        story = issue_deadlock(plan)
        if story is not None:
            raise RunError(f"the plan does not run over several processes: {story}")
        self._devices = [plan.stage_device(stage) for stage in range(len(spec.stages))]
        self._tied = tied_parameters(spec, self._devices)
        if self._tied and plan.update_early:
            names = " and ".join(f"{spec.stages[s].name!r} (as {name!r})" for s, name in self._tied[0].users)
            raise RunError(f"stages {names} share a parameter, which must wait for the gradients of all, but the plan "
                           "was compiled with update_early=True; compile without it")
        self._spec, self._plan, self._timeout, self._outputs = spec, plan, timeout, outputs
        self._groups = make_groups(plan, mesh, plan.data_parallel, timeout)
        self.place = place = self._groups.place
        self.device, self.replica = place.device, place.replica
        self.me = place.everyone.index(dist.get_rank())
        name = gather_objects(self._groups.everyone, f"{time_ns()}", len(place.everyone))[0]
        self._watch = Watch(name, self.me, len(place.everyone))
        self.backend = RankBackend(place.ranks[place.replica], place.device)
        self._traffic: dict[int, tuple[Program, Traffic]] = {}
        self._frames: dict[bool, dict[Any, Frame]] = {True: {}, False: {}}
        self._closed = False
        losses = len(spec.losses)
        width = FIXED + max(LOSS_WIDTH * losses, losses + len(spec.inputs))
        self._council = Council(self._groups, self._watch, plan, width, timeout)
        self._reducer: Reducer | None = None

    # -- before the first step ------------------------------------------------------------------------------

    def local(self, spec: Spec) -> Spec:
        """The stages this rank holds; others are placeholders."""
        return local_spec(spec, self._plan, self.device)

    @contextmanager
    def agreement(self, options: dict[str, Any]) -> Iterator[None]:
        """Around the making of a runner: at its end every rank compares what it has with the others.

        Raises:
            RankError: naming what differs on which rank, or what went wrong on another one.
        """
        try:
            try:
                yield
            except BaseException as error:
                self._agree(error, options)
                raise
            self._agree(None, options)
        except BaseException:
            self.close()
            raise

    def _agree(self, failure: BaseException | None, options: dict[str, Any]) -> None:
        own = {"failed": told(failure)} if failure is not None else summary(self._spec, self._plan, options)
        rows = gather_objects(self._groups.everyone, own, len(self.place.everyone))
        compare(rows, self.place.everyone, dist.get_rank())

    def share(self, stages: Sequence[Stage]) -> None:
        """Give parameters that several ranks hold the values of one: shared ones, and those of all replicas."""
        place = self.place
        for one in self._tied:
            owner = place.ranks[self.replica][self._devices[one.stages[0]]]
            same_everywhere(one.parameter, self._groups.pipeline, owner)
        if self._groups.replicas is not None:
            held = {id(t): t for stage in stages for _, t in stage.named_parameters()}
            held |= {id(t): t for stage in stages for module in stage.modules for t in module.buffers()}
            for tensor in held.values():
                same_everywhere(tensor, self._groups.replicas, place.ranks[0][self.device])

    def trained(self, stages: Sequence[Stage]) -> list[list[Tensor]]:
        """Of other ranks' stages the shared parameters that are held here too."""
        made = [stage.trainable() for stage in stages]
        here = {id(parameter) for own in made for parameter in own}
        for number, device in enumerate(self._devices):
            if device != self.device:
                made[number] = [t.parameter for t in self._tied if number in t.stages and id(t.parameter) in here]
        return made

    def shared(self, trained: Sequence[list[Tensor]]) -> set[int]:
        """With replicas, all: each REDUCE adds up what this step made, and nothing that was there before."""
        if self.place.replicas > 1:
            return {id(parameter) for own in trained for parameter in own}
        return shared_parameters(trained)

    def reduce(self, stage: int, failed: bool) -> None:
        """Begin the REDUCE of a stage."""
        if self._reducer is not None:
            self._reducer.start(stage, failed)

    def reduced(self) -> None:
        """Wait for every REDUCE that has begun."""
        if self._reducer is not None:
            self._reducer.finish()

    def inputs_elsewhere(self, stages: Sequence[Stage]) -> list[int]:
        """Inputs that no stage of this rank reads; they may be left out here."""
        here = {index for stage in stages if stage.fn is not None for index in stage.inputs}
        return [index for index in range(len(self._spec.inputs)) if index not in here]

    def position(self, position: Position) -> Position:
        """The random numbers of this replica: each draws its own, the first as one process would."""
        if self.replica == 0 or position.seed is None:
            return position
        return evolve(position, seed=(position.seed + self.replica * 0x9E3779B97F4A7C15) % (1 << 63))

    # -- a step ---------------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], Batch], training: bool, position: Position) -> Batch:
        """The minibatch of a call, when every rank has one that fits.

        Raises:
            RankError: the ranks are not at the same call, or another one's inputs are wrong.
            RunError: the inputs are wrong here.
        """
        self._council.ready()
        self._council.settled = False
        failure: BaseException | None = None
        seed = position.seed or 0
        row = [float(training), 0.0, -1.0, float(seed >> 32), float(seed & 0xFFFFFFFF), float(position.step), -1.0]
        counts, samples = [0.0] * len(self._spec.losses), [0.0] * len(self._spec.inputs)
        try:
            batch = make()
            check_inputs(self._spec, batch.values)
            row[1:3] = [float(self._plan.microbatches), -1.0 if batch.rows is None else float(batch.rows)]
            row[6] = -1.0 if batch.length is None else float(batch.length)
            counts, samples = batch.counts, [float(sample_of(value)) for value in batch.values]
        except BaseException as error:
            failure = error
        self._watch.begin()
        table = self._council.table(BEGIN, [*row, *counts, *samples], failure)
        if failure is not None:
            raise failure
        same_call(table, self.place.everyone)
        rows = rows_of(table, self.place.ranks, self._plan.microbatches)
        length = lengths_of(table, self.place.ranks, self._plan.slices)[self.replica]
        check_samples(table, FIXED + len(counts), self._spec, self.place.ranks, where_of(table))
        total = sum(max(r or 0, 0) for r in rows) if all(r is not None for r in rows) else None
        first = [table[n * self.place.devices : (n + 1) * self.place.devices] for n in range(self.place.replicas)]
        counts = [
            sum(max(own[FIXED + index] for own in block) for block in first) for index in range(len(counts))
        ]
        batch.measure(self._plan.microbatches, rows[self.replica], total, counts, length, self.place.replicas)
        self._watch.runs(batch.microbatches, training)
        return batch

    def devices(
        self, plan: Plan, program: Program, stages: list[Stage], step: Step, backend: Backend
    ) -> tuple[list[Device], Any]:
        """This rank's device, and its channels."""
        if id(program) not in self._traffic:
            self._traffic[id(program)] = program, traffic(plan, program, self.device)
        own = self._traffic[id(program)][1]
        self._council.at = plan
        self._reducer = None
        if plan.training and (self._tied or self.place.replicas > 1):
            self._reducer = Reducer(self._groups, self._tied, self._devices, step.accumulators, self._timeout)
        channels = RankChannels(
            self._groups.pipeline, self.device, own.incoming, own.outgoing, self._frames[plan.training],
            step.batch.forms, self._timeout, torch.device("cpu"), self._council.lost,
        )
        return [RankDevice(self._watch, self.device, program.slots[self.device], stages, step, channels)], channels

    def settle(self, step: Step, channels: RankChannels, work: Callable[[], None]) -> Result:
        """Run this rank's tasks; losses and outputs when every rank has come to its end.

        Raises:
            RankError: another rank failed.
            BaseException: what a task raised here.
        """
        failure: BaseException | None = None
        row: list[float] = [0.0] * LOSS_WIDTH * len(self._spec.losses)
        try:
            work()
            row = loss_row(step, self._council.at, self.device)
        except BaseException as error:
            failure = error
        if channels.broken is not None:
            self._council.broken = True
            raise failure or channels.broken
        try:
            table = self._council.table(SETTLE, [0.0] * (FIXED - 2) + row, failure)
            if failure is not None:
                raise failure
        except BaseException:
            self._frames[step.plan.training].clear()
            if self._reducer is not None and not self._council.broken:
                self._reducer.finish(discard=True)
            raise
        finally:
            del failure  # this frame is in its traceback: a cycle
        self._frames[step.plan.training].update(channels.learned)
        replica = table[self.replica * self.place.devices : (self.replica + 1) * self.place.devices]
        outputs = None
        if self._outputs == "all":
            group = self._groups.pipeline
            outputs = lambda own: gather_objects(group, own, self.place.devices)  # noqa: E731
        self._council.settled = not step.plan.training
        return gathered_result(step, self._council.at, self.device, [row[FIXED:] for row in table],
                               [row[FIXED:] for row in replica], outputs)

    def updates(self, program: Program) -> Sequence[Sequence[Op]]:
        """The UPDATE tasks per device; the one of all stages runs on every rank, each on its own parameters."""
        if self._plan.update != "all":
            return program.updates
        return tuple(tuple(op for row in program.updates for op in row) for _ in program.updates)

    def finish(self, plan: Plan, work: Callable[[], None]) -> None:
        """Commit and update; it ends when every rank's did.

        Raises:
            RankError: another rank failed; what it has not updated differs from what others have.
        """
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failure = error
            if self._council.settled or self._council.broken:
                raise
        try:
            if plan.update is not None:
                self._council.table(FINISH, [], failure)
            self._council.settled = True
            if failure is not None:
                raise failure
        finally:
            del failure

    # -- agreement ------------------------------------------------------------------------------------------

    def anywhere(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return any(row[2] > 0 for row in self._council.table(ANYWHERE, [float(flag)], None))

    def gather(self, value: Any, call: int) -> list[Any]:
        """Every device's object of this replica."""
        self._council.table(call, [], None)
        return gather_objects(self._groups.pipeline, value, self.place.devices)

    def times(self, step: Step) -> tuple[list[int], list[int]]:
        """Start and end of every task on every device, on this rank's clock as far as the hosts' clocks agree."""
        shift = time_ns() - perf_counter_ns()
        rows = gather_objects(self._groups.pipeline, (shift, step.starts, step.ends), self.place.devices)
        starts, ends = list(step.starts), list(step.ends)
        for other_shift, own_starts, own_ends in rows:
            move = other_shift - shift if abs(other_shift - shift) > 1_000_000 else 0  # one host: one clock
            for task, (start, end) in enumerate(zip(own_starts, own_ends, strict=True)):
                if start:
                    starts[task], ends[task] = start + move, end + move
        return starts, ends

    def owners(self, stages: Sequence[Stage], model: names.Model | None) -> list[names.Owner]:
        """Shared parameters have the names of their stages on other ranks too."""
        check_wrappers(stages)
        return owners_of(stages, model, self._tied, [device == self.device for device in self._devices])

    def elsewhere(self, spec: Spec, stages: Sequence[Stage]) -> set[int]:
        """What stages of other ranks hold, as far as this process has made it too."""
        return elsewhere_of(spec, stages)

    def save(self, path: Path, state: Callable[[], dict[str, Any]]) -> None:
        """The first replica writes, each rank what its stages hold."""
        flat, rest = saving.taken_apart(self._told(state))
        rest = saving.merged(gather_objects(self._groups.pipeline, rest, self.place.devices))
        self._told(lambda: saving.write(path, flat, rest, self._groups.pipeline) if self.replica == 0 else None)

    def load(
        self, path: Path, owners: Sequence[names.Owner], elsewhere: set[int], restore: Callable[[dict[str, Any]], None]
    ) -> None:
        """Every rank reads what its stages need."""
        state = self._told(lambda: saving.read(path, names.named(owners)))
        known = {name for name, value in names.live(owners).items() if id(value) not in elsewhere}
        groups = state["optimizer"]["groups"]
        state["model"] = {name: value for name, value in state["model"].items() if name in names.live(owners)}
        state["optimizer"]["groups"] = [
            {**group, "names": kept} for group in groups if (kept := [n for n in group["names"] if n in known])
        ]
        self._told(lambda: restore(state))

    def _told(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives; when it fails on one rank, it fails on all."""
        failure: BaseException | None = None
        made = None
        try:
            made = work()
        except BaseException as error:
            failure = error
        self._council.table(SAVE, [], failure)
        if failure is not None:
            raise failure
        return made

    def switch(self) -> None:
        raise RunError("over several ranks a runner keeps its plan; make another runner on the same modules")

    def norm(self, stages: Sequence[Stage], norm_type: float) -> Tensor:
        """The norm of the gradients of all stages: every parameter once, in the order of one process."""
        order: dict[int, tuple[int, int]] = {}
        for number, stage in enumerate(stages):
            for place, (_, parameter) in enumerate(stage.named_parameters()):
                order.setdefault(id(parameter), (number, place))
        for one in self._tied:  # counted where one process meets it first
            if id(one.parameter) in order:
                order[id(one.parameter)] = (one.stages[0], one.place)
        own = {
            order[id(p)]: torch.linalg.vector_norm(p.grad, norm_type)
            for stage in stages for _, p in stage.named_parameters() if p.grad is not None
        }
        found: dict[tuple[int, int], Tensor] = {}
        for part in self.gather(own, NORM):
            found |= part
        if not found:
            return torch.zeros(())
        norms = torch.stack([found[key] for key in sorted(found)])
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total

    def close(self) -> None:
        """Leave the groups."""
        if not self._closed:
            self._closed = True
            self._watch.close()
            self._groups.close()
