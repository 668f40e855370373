"""The runner: a spec and a plan bound to devices, stepped by the user's own training loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import evolve

from pipec.compiler import forward_plan, with_microbatches
from pipec.errors import RunError
from pipec.ir import Kind, Plan
from pipec.runtime import names
from pipec.runtime.aliases import check_aliases
from pipec.runtime.alone import Alone, fitting, over_processes, party
from pipec.runtime.asynchronous.overlapping import Overlapping
from pipec.runtime.asynchronous.weights import StageWeights
from pipec.runtime.backends import Backend
from pipec.runtime.batchnorm import minibatch
from pipec.runtime.choose import make_backend
from pipec.runtime.claim import Claim
from pipec.runtime.context import fresh_casts
from pipec.runtime.executor import Device
from pipec.runtime.failure import Undo, annotate
from pipec.runtime.fit import check_trains
from pipec.runtime.gradients import Accumulator, commit
from pipec.runtime.group_hooks import anchor_reads, check_group_hooks, modules_are_watched
from pipec.runtime.optim import Hook, Updater, told_scaler
from pipec.runtime.placement import generators_of, homes, place_stages, real_devices
from pipec.runtime.program import Op, Program, build_program
from pipec.runtime.randomness import DeviceGenerator, Position, Randomness, Streams, generator_of
from pipec.runtime.replicas import Replicas, replicate
from pipec.runtime.result import Result, counted_minibatches
from pipec.runtime.split import tell_compiled
from pipec.runtime.spread import Spread
from pipec.runtime.stages import Stage, bind, check_means, training_flags
from pipec.runtime.state import Stateful
from pipec.runtime.step import Batch, Probe, Step
from pipec.runtime.stream_lanes import StreamLanes
from pipec.runtime.trace import measured
from pipec.timeline import Timeline


class Runner(Overlapping, Stateful):
    """Runs a plan on real devices.

    Args:
        pipeline: the Pipeline or Spec that was compiled; its modules are used as they are.
        plan: from :func:`pipec.compile`.
        devices: one torch device per logical device, all GPUs or all the CPU, the default. Several may be the same
            GPU. Stages are moved there, their parameters stay the same objects; so is every minibatch. "cuda": the GPUs
            there are in turn; in a distributed run the GPU of each rank's place on its host. See docs/streams.md and
            docs/distributed.md.
        optimizer: with ``update="stage"`` a function from a stage's parameters to an optimizer, with
            ``update="all"`` one optimizer, else nothing.
        backend: "threads" (a worker per device), "replay" (one thread), or by default "auto": one thread in the first
            step and while tasks take less than 0.2 ms on average, where threads only wait for Python's lock, else a
            worker per device. "lanes" has a worker per lane (compute, copy out, copy in of every device) and copies
            that really copy, in the order in which streams of GPUs would work. "adversarial" runs one task at a time
            in hostile orders that the plan allows, another one each step, and raises RaceError when a wait is missing.
            "cuda", the default for GPUs: lanes are streams that the calling thread fills; without ``devices`` it takes
            the GPUs there are in turn. "distributed", the default under an initialised process group of several
            processes: this process is one device, see docs/distributed.md. The numbers are the same.
        mesh: of a distributed run: a DeviceMesh with the dimensions "pp" and, for replicas, "dp"; by default all
            processes in their order.
        outputs: of a distributed run: "owner": in the results of the rank of their stage; "all": of every rank.
        timeout: of a distributed run: seconds after which a rank that does not answer is given up.
        before_update: called with all trained parameters when all gradients are there, before any UPDATE (clipping).
        scaler: a ``torch.amp.GradScaler``; with UPDATE tasks the runner unscales, skips and adjusts it.
        seed: of the random numbers that stages draw; by default ``torch.initial_seed()`` at each step, so that it makes
            a run repeatable to call ``torch.manual_seed`` before. See :mod:`pipec.runtime.randomness`.
        model: the whole module that the stages are parts of, or a dict of tensors by name: state dicts and
            checkpoints then have its names, however it was cut into stages.
        rescheduling: :class:`pipec.Rescheduling`, learning rates by staleness in asynchronous plans.
        delay: :class:`pipec.TruncatedExponential`, random delays of forwards with backend="replay" or over
            processes, for study.
        watchdog: seconds in which no task ends after which the logger "pipec" warns where every device stands.

    Raises:
        RunError: pipeline, devices or optimizer do not fit the plan.
        PlanError: the plan breaks an invariant.
    """

    def __init__(
        self,
        pipeline: Any,
        plan: Plan,
        devices: Sequence[str | torch.device] | str | torch.device | None = None,
        optimizer: Any = None,
        *,
        backend: str | Backend | None = None,
        before_update: Hook | None = None,
        scaler: Any = None,
        seed: int | None = None,
        model: names.Model | None = None,
        rescheduling: Any = None,
        delay: Any = None,
        watchdog: float | None = 300.0,
        mesh: Any = None,
        outputs: str = "owner",
        timeout: float = 300.0,
    ) -> None:
        many = over_processes(backend, mesh)
        arguments = {"rescheduling": rescheduling, "delay": delay, "scaler": scaler, "before_update": before_update,
                     "seed": seed, "model": model, "watchdog": watchdog, "outputs": outputs, "timeout": timeout}
        self.spec, self.plan = fitting(many, pipeline, plan, devices, backend, arguments, mesh), plan
        self._backend_name, self._watchdog = backend, watchdog
        self._real = None if many else real_devices(devices, backend, plan.devices)
        self._party: Alone = party(self.spec, plan, backend, devices, mesh, timeout, outputs)
        self._real = self._party.real(plan) or self._real
        self._rescheduling, self._delay, self._left = rescheduling, delay, []
        options = {"outputs option": outputs, "rescheduling": rescheduling, "delay": delay, **told_scaler(scaler),
                   "before_update": before_update is not None}
        with self._party.agreement(options, lambda: (self.stages, self._updater.optimizers)):
            self._make(backend, watchdog, optimizer, scaler, before_update, model)
            self._weights = [StageWeights(stage) for stage in self.stages]
            self._flow = self._flow_of(plan)
        self._party.share(self.stages)
        self._last: tuple[Plan, Step] | None = None
        self._closed = False
        self._turn: dict[str, object] = {}  # holds the one call that may use the workers now
        self._position = Position(seed)
        self._streams = Streams()
        self.probe: Probe | None = None

    def _make(
        self, backend: str | Backend | None, watchdog: float | None, optimizer: Any, scaler: Any, hook: Hook | None,
        model: names.Model | None,
    ) -> None:
        """What belongs to the stages of this process."""
        plan = self.plan
        self._plans: dict[tuple[bool, int, int], tuple[Plan, Program]] = {}
        if (program := self._party.prepared(plan)) is not None:
            self._plans[plan.training, plan.microbatches, plan.slices] = plan, program
        self.stages: list[Stage] = bind(self._party.local(self.spec))
        self._generators: dict[int, DeviceGenerator] = generators_of(self.stages)  # of GPUs that they are on already
        replicas: Replicas | None = None
        if (devices := self._real or getattr(backend, "devices", None)) is not None:  # recorded streams have their own
            where = homes(plan, devices)
            replicas = replicate(self.stages, where, plan, backend is None or isinstance(backend, str | StreamLanes))
            self._party = Spread(replicas) if replicas is not None else self._party
        if self._real is not None:
            place_stages(self.stages, where, replicas)
            self._generators = {stage: generator_of(device) for stage, device in enumerate(where)}
        tell_compiled(
            self.stages[s] for s in np.unique(plan.table.stage[plan.table.kind == Kind.BACKWARD_WEIGHT]).tolist()
        )
        self._backend: Backend = self._party.backend or make_backend(
            backend, self.spec.name, plan.devices, watchdog, self._real, replicas
        )
        self._updater = Updater(plan, optimizer, self.stages, scaler, hook, self._party.anywhere())
        self._owners = self._party.owners(self.stages, model)

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self, *args: Any, **inputs: Any) -> Result:
        """Train on one minibatch: forward, backward, and the plan's updates.

        Inputs are given by name or in the order of their declaration. Without UPDATE tasks the gradients are added
        to ``.grad`` of the parameters, as a plain loop would.

        Raises:
            RunError: the batch does not fit the pipeline.
            BaseException: what a stage, a loss, a hook or an optimizer raised, with a note saying where. Then
                parameters, buffers and ``.grad`` are as before the step, unless an UPDATE had begun.
        """
        with self._alone(), Claim(self.spec.name) as claim:
            return self._step(args, inputs, claim)

    def _step(self, args: Sequence[Any], inputs: dict[str, Any], claim: Claim) -> Result:
        if self._flow is not None:
            return self._overlap(args, inputs, claim)
        trained = self._party.trained(self.stages)
        used = [own for own, info in zip(trained, self.plan.graph.stages, strict=True) if info.backward]
        parameters = list({id(p): p for own in used for p in own}.values())
        updater, party, position = self._updater, self._party, self._position.pinned()

        def made() -> Batch:
            check_trains(self.plan)
            updater.check(parameters)
            check_group_hooks(self.stages, trained)
            claim.take(parameters, self.stages)
            batch = Batch(self.spec, args, inputs, self.plan.microbatches, party.inputs_elsewhere(self.stages),
                          self.plan.slices)
            batch.scale = updater.scale
            return batch

        batch = party.begin(made, True, position)
        plan, program = self._program(True, batch)
        shared = party.shared(trained)
        accumulators = [
            Accumulator(own, shared, order)
            for own, order in zip(party.leaves(trained), program.backward_order, strict=True)
        ]
        step = Step(plan, batch, accumulators, batch.scale, lambda stage: self._update(step, stage, shared),
                    self.probe, random=self._random(position), reduce=party.reduce)
        with Undo(self.stages, parameters, [*updater.others(parameters), *batch.leaves()]) as undo:
            for accumulator in accumulators:
                accumulator.begin()
                accumulator.direct &= self.probe is None
            self._split(program, accumulators)
            updater.begin()
            devices, channels = party.devices(plan, program, self.stages, step, self._backend)

            def tasks() -> None:
                with minibatch(layer for stage in self.stages for layer in stage.buffers.deferred):
                    self._run(devices, program.ops, channels, step)
                undo.check_shared_buffers()
                undo.check_lent_buffers()
                check_means(self.stages)
                check_aliases(self.stages, self.spec)

            def updates() -> None:
                party.reduced()
                if not plan.update_early:
                    commit(accumulators, shared)
                    step.backward_inputs()
                    updater.prepare(parameters)
                    party.ready()
                if any(program.updates):
                    self._run(devices, party.updates(program), channels, step)
                if plan.update_early:
                    step.backward_inputs()
                updater.finish(parameters)

            result = party.settle(step, channels, tasks)
            party.finish(plan, updates)
        self._position = self._position.advanced()
        self._last = (plan, step)
        step.forget()
        return evolve(result, skipped=True) if updater.skip else result

    def _random(self, position: Position, inference: bool = False) -> Randomness:
        return Randomness(self._streams, self._party.position(position), inference, self._generators)

    def _split(self, program: Program, accumulators: list[Accumulator]) -> None:
        """Prepare stages whose backward comes in two halves, or whose reads have hooks: gradients pass through the
        accumulator."""
        watched = modules_are_watched()
        for number, stage in enumerate(self.stages):
            anchored = watched or number in program.split
            accumulators[number].direct &= not anchored
            anchor_reads(stage, anchored)

    def _update(self, step: Step, stage: int, shared: set[int]) -> None:
        if step.plan.update_early:
            self._party.reduced()
            commit([step.accumulators[stage]], shared)
        self._updater.step(stage)

    def _run(self, devices: list[Device], ops: Sequence[Sequence[Op]], channels: Any, step: Step) -> None:
        """Run tasks; what one of them raised comes out with a note that says where."""
        failure = self._backend.run(devices, ops, channels)
        if failure is None:
            return
        step.forget()
        updated = [self.stages[s].name if s >= 0 else "all" for s in self._updater.updated]
        try:
            raise annotate(failure, step.plan.graph, updated)
        finally:
            del failure, devices, channels, step  # a caught traceback must not keep a step's tensors in a cycle

    def evaluate(self, *args: Any, **inputs: Any) -> Result:
        """Outputs and losses of a batch of any size in eval mode, without gradients; nothing is kept.

        Losses whose inputs are not given are left out. An asynchronous pipeline is flushed first: ``drained`` of the
        result has the numbers of the minibatches that this finished, and the next step's result their losses.
        """
        with self._alone(), Claim(self.spec.name, evaluates=True) as claim:
            drained = self._drain()
            return evolve(self._forward(args, inputs, True, claim), drained=drained)

    def forward(self, *args: Any, **inputs: Any) -> Result:
        """As :meth:`evaluate`, without computing any loss."""
        with self._alone(), Claim(self.spec.name, evaluates=True) as claim:
            drained = self._drain()
            return evolve(self._forward(args, inputs, False, claim), drained=drained)

    def _forward(self, args: Sequence[Any], inputs: dict[str, Any], losses: bool, claim: Claim) -> Result:
        needed = {index for stage in self.stages for index in stage.needed_inputs}
        optional = [index for index in range(len(self.spec.inputs)) if index not in needed]
        optional += self._party.inputs_elsewhere(self.stages)
        party, position = self._party, self._position.pinned()
        flags = training_flags(self.stages)

        def made() -> Batch:
            parameters = (p for stage in self.stages for _, p in stage.named_parameters())
            (claim.take if any(training for _, training in flags) else claim.look)(parameters, self.stages)
            batch = Batch(self.spec, args, inputs, self.plan.minibatch, optional, self.plan.slices)
            if not losses:
                batch.wanted_losses = set()
            return batch

        batch = party.begin(made, False, position)
        plan, program = self._program(False, batch)
        step = Step(plan, batch, [], random=self._random(position, inference=True))
        try:
            for module, _ in flags:
                module.training = False
            with Undo(self.stages, [], training=False) as undo, torch.no_grad():
                devices, channels = party.devices(plan, program, self.stages, step, self._backend)

                def tasks() -> None:
                    self._run(devices, program.ops, channels, step)
                    undo.check_shared_buffers()
                    undo.check_lent_buffers()
                    check_means(self.stages)
                    check_aliases(self.stages, self.spec)

                return party.settle(step, channels, tasks)
        finally:
            for module, training in flags:
                module.training = training

    def _program(self, training: bool, batch: Batch) -> tuple[Plan, Program]:
        key = training, batch.microbatches, batch.slices
        if key not in self._plans:
            if not training:
                plan = forward_plan(self.plan, batch.microbatches, batch.slices)
            elif (batch.microbatches, batch.slices) == (self.plan.microbatches, self.plan.slices):
                plan = self.plan
            else:
                plan = with_microbatches(self.plan, batch.microbatches, batch.slices)
            self._plans[key] = plan, build_program(plan)
        return self._plans[key]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the workers for one call. A second one at the same time would mix gradients, or wait for itself.

        One entry in a dict and no lock: an interrupt at any line leaves nothing held.
        """
        if self._closed:
            raise RunError("this runner was closed")
        mine = object()
        try:
            if self._turn.setdefault("call", mine) is not mine:
                raise RunError(
                    "this runner is still busy with another step() or evaluate(), in another thread or around this "
                    "call; make one call at a time, or a runner for each"
                )
            with fresh_casts():
                yield
        except BaseException as error:
            self._party.left(error)
            raise
        finally:
            if self._turn.get("call") is mine:
                self._turn.clear()

    @property
    def transport(self) -> str:
        """How values travel between devices; in processes on CPUs "shared memory", "sockets", both with the ranks that
        each is for, or "gloo" and why."""
        return self._party.way

    def trace(self) -> Timeline:
        """The measured timeline of the last training step, in milliseconds. Over ranks all of them call it.

        With an asynchronous plan it shows the tasks of that step only, or of the flush after it.

        Raises:
            RunError: there was no step yet.
        """
        if self._flow is not None and self._flow.measured is not None:
            return measured(*self._flow.measured_part())
        if self._last is None:
            raise RunError("nothing was measured yet: run a step first")
        plan, step = self._last
        return measured(plan, *self._party.times(step))

    def close(self) -> None:
        """End the worker threads. Also done when the runner is garbage."""
        self._closed = True
        self._backend.close()
        self._streams.close()
        self._party.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RunError(
            "a Runner cannot be copied or pickled: it holds threads and the state of its optimizers. Copy or save the "
            "pipeline and the plan, make a new Runner from them, and let it restore() this one's checkpoint()"
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = () if kind is not None or self._closed else self.in_flight
        self.close()
        if left:
            warnings.warn(
                f"{counted_minibatches(left)} in flight when the runner was closed: their gradients are dropped; call "
                "run.flush() at the end of the with block", stacklevel=2,
            )
