"""What a Runner can do with an asynchronous plan: its steps, ``flush()``, ``switch()``, and what there is to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor

from pipec.errors import Problem, RunError, raise_all
from pipec.ir import Plan
from pipec.runtime import names
from pipec.runtime.alone import Alone
from pipec.runtime.asynchronous.delays import TruncatedExponential
from pipec.runtime.asynchronous.flow import Flow
from pipec.runtime.asynchronous.reads import OnRead
from pipec.runtime.asynchronous.rescheduling import Rescheduling
from pipec.runtime.asynchronous.result import CLIP, IDLE, SYNCHRONOUS, AsynchronousResult, Finished, result_of
from pipec.runtime.asynchronous.weights import StageWeights, named
from pipec.runtime.backends import Backend
from pipec.runtime.choose import make_backend
from pipec.runtime.claim import Claim
from pipec.runtime.context import no_kept_casts
from pipec.runtime.fit import check_trains
from pipec.runtime.group_hooks import anchor_reads, check_group_hooks, modules_are_watched
from pipec.runtime.optim import Updater
from pipec.runtime.placement import check_places
from pipec.runtime.randomness import Position, Randomness, Streams
from pipec.runtime.stages import Stage
from pipec.runtime.step import Batch, Probe
from pipec.spec import Spec
from pipec.tree import flatten


class Overlapping:
    """The part of a Runner that knows asynchronous plans."""

    spec: Spec
    plan: Plan
    stages: list[Stage]
    probe: Probe | None
    _backend: Backend
    _updater: Updater
    _owners: list[names.Owner]
    _position: Position
    _streams: Streams
    _flow: Flow | None
    _left: list[Finished]  # what a switch to a synchronous plan finished, for flush()
    _party: Alone
    _weights: list[StageWeights]
    _rescheduling: Rescheduling | None
    _delay: TruncatedExponential | None
    _backend_name: str | Backend | None
    _watchdog: float | None
    _real: list[torch.device] | None
    _plans: dict[tuple[bool, int, int], Any]
    _on_read: OnRead | None = None

    if TYPE_CHECKING:
        def _alone(self) -> AbstractContextManager[None]: ...
        def _random(self, position: Position, inference: bool = False) -> Randomness: ...

    def flush(self) -> AsynchronousResult:
        """Finish every minibatch in flight in an asynchronous pipeline. The next step begins with an empty one.

        Returns:
            What was finished, the flushes of ``evaluate()``, ``checkpoint()`` and ``switch()`` since the last result
            included; with a synchronous plan what the switch to it finished.
        """
        with self._alone():
            self._drain()
            if self._flow is not None:
                return evolve(self._flow.result(), empty=IDLE)
            found, self._left = self._left, []
            elsewhere = self._party.elsewhere_outputs()
            return evolve(result_of(self.spec, self.plan.minibatch, found, elsewhere), empty=SYNCHRONOUS)

    def switch(self, plan: Plan) -> None:
        """Go on with another plan of the same pipeline, on the same weights and optimizers.

        A synchronous warm-up before an asynchronous plan, say (PipeMare's T3). What is in flight is flushed first.

        Raises:
            RunError: the plan does not fit; then nothing has changed.
        """
        made: list[Flow | None] = []

        def check() -> None:
            check_switch(plan, self.plan, self.spec)
            check_places(self._real, self.plan, plan)
            made.append(self._flow_of(plan))

        with self._alone():
            self._party.switch(plan, check)
            (flow,) = made
            self._drain()
            self._party.adopt(plan)
            left = self._left if self._flow is None else self._flow.pending
            if flow is not None:
                flow.pending, left = left, []
            before, self.plan, self._flow, self._plans, self._left = self.plan, plan, flow, {}, left
            if plan.devices != before.devices:
                self._backend.close()
                self._backend = make_backend(self._backend_name, self.spec.name, plan.devices, self._watchdog)

    def _flow_of(self, plan: Plan) -> Flow | None:
        """What runs ``plan``, when it is asynchronous.

        Raises:
            RunError: listing what asynchronous plans cannot do.
        """
        if not plan.asynchronous:
            return None
        raise_all(f"asynchronous schedule {plan.schedule!r}", refusals(self), RunError)
        flow = Flow(self.spec, plan, self._weights, self._updater.per_stage, self._rescheduling, self._delay,
                    self._party)
        flow.on_read = self._on_read
        return flow

    def _overlap(self, args: Sequence[Any], inputs: dict[str, Any], claim: Claim) -> AsynchronousResult:
        """A step of an asynchronous plan."""
        flow, party, position = self._flow, self._party, self._position.pinned()
        assert flow is not None

        def made() -> Batch:
            check_trains(self.plan)
            batch = Batch(self.spec, args, inputs, self.plan.minibatch, party.inputs_elsewhere(self.stages))
            check_gradient(batch)
            check_rows(batch, self.plan)
            if flow.window is None:
                infos = zip(self.stages, self.plan.graph.stages, strict=True)
                used = [stage.trainable() for stage, info in infos if info.backward]
                self._updater.check(list({id(p): p for own in used for p in own}.values()))
                for weights in self._weights:
                    weights.refresh()
            trained = [weights.parameters for weights in self._weights]
            check_group_hooks(self.stages, trained)
            claim.take((p for own in trained for p in own), self.stages)
            flow.ready()
            return batch

        batch = party.begin(made, True, position)
        check_rows(batch, self.plan)  # of all ranks
        watched = modules_are_watched()
        for stage in self.stages:
            anchor_reads(stage, watched)
        with no_kept_casts():
            result = flow.step(batch, self._random(position), self.probe, self._backend)
        self._position = self._position.advanced()
        return result

    def _drain(self) -> tuple[int, ...]:
        """Flush an asynchronous pipeline; the next result tells what that finished."""
        if self._flow is None or self._flow.window is None:
            return ()
        with Claim(self.spec.name) as claim, no_kept_casts():
            claim.take((p for weights in self._weights for p in weights.parameters), self.stages)
            return self._flow.drain(self._backend, self._position)

    # -- to be read and plotted -----------------------------------------------------------------------------

    def watch_weights(self, on_read: OnRead | None) -> None:
        """Have ``on_read`` called with a :class:`pipec.WeightsRead` by every FORWARD, RECOMPUTE and BACKWARD of
        asynchronous plans, in the thread that runs the task; None ends it. What it raises is a failure of the task.

        Raises:
            RunError: ``on_read`` cannot be called.
        """
        if on_read is not None and not callable(on_read):
            raise RunError(f"watch_weights takes a function of a pipec.WeightsRead, or None; got {on_read!r}")
        with self._alone():
            self._on_read = on_read
            if self._flow is not None:
                self._flow.on_read = on_read

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Numbers of the minibatches that were fed and have not updated every stage yet."""
        return () if self._flow is None else tuple(flight.number for flight in self._flow.in_flight)

    @property
    def staleness(self) -> dict[str, float]:
        """Per stage how many updates old the weights of a forward are, on average, when its gradient is made.

        Counted from the plan's steady period, and with ``delay=`` its average added; 0 for every stage of a synchronous
        plan.
        """
        if self._flow is None:
            return dict.fromkeys((stage.name for stage in self.stages), 0.0)
        return dict(zip((stage.name for stage in self.stages), self._flow.staleness, strict=True))

    @property
    def learning_rates(self) -> dict[str, list[Any]]:
        """Per stage the learning rates of its last asynchronous update, one per parameter group."""
        return {weights.stage.name: list(weights.rates) for weights in self._weights if weights.rates}

    @property
    def deltas(self) -> dict[str, dict[str, Tensor]]:
        """Per stage what discrepancy correction keeps: the mean change of each parameter per update, by name."""
        return {
            weights.stage.name: named(weights, weights.buffers["delta"])
            for weights in self._weights if "delta" in weights.buffers
        }

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _saved_rules(self) -> dict[str, dict[str, Any]]:
        """Per parameter the updates it had, the last one's learning rate, and what the weight rule keeps of it."""
        called, made = names.aliases(self._owners), {}
        for weights in (weights for weights in self._weights if weights.updates or weights.buffers):
            rates = {
                id(p): rate for group, rate in zip(self._groups(weights), weights.rates, strict=False)
                for p in group["params"]
            }
            for place, parameter in enumerate(weights.parameters):
                own: dict[str, Any] = {key: kept[place].clone() for key, kept in weights.buffers.items()}
                own |= {"rate": rates[id(parameter)]} if id(parameter) in rates else {}
                made[called[id(parameter)][0]] = {"updates": weights.updates, **own}
        return made

    def _load_rules(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from :meth:`_saved_rules`, whatever stages the parameters are in now."""
        called = names.aliases(self._owners)
        for weights in self._weights:
            weights.refresh()
            found = [next((saved[name] for name in called[id(p)] if name in saved), {}) for p in weights.parameters]
            weights.updates = max((own.get("updates", 0) for own in found), default=0)
            weights.buffers = {}
            for key in {key for own in found for key in own} - {"updates", "rate"}:
                weights.buffers[key] = [
                    own[key].detach().to(p.device, copy=True) if key in own
                    else torch.zeros_like(p, requires_grad=False)
                    for own, p in zip(found, weights.parameters, strict=True)
                ]
            rates = {id(p): own["rate"] for own, p in zip(found, weights.parameters, strict=True) if "rate" in own}
            weights.rates = [
                next((rates[id(p)] for p in group["params"] if id(p) in rates), group.get("lr"))
                for group in self._groups(weights)
            ] if rates else []

    def _groups(self, weights: StageWeights) -> list[dict[str, Any]]:
        """The parameter groups of a stage's optimizer."""
        optimizer = self._updater.per_stage.get(weights.stage.index)
        return [] if optimizer is None else optimizer.param_groups


def refusals(run: Any) -> list[Problem]:
    """What an asynchronous plan cannot do, of what this runner was asked for."""
    problems = []
    if run._updater.hook is not None:
        problems.append(Problem(
            f"before_update sees all gradients at once, but every stage updates on its own; {CLIP}; or use a "
            "synchronous schedule"
        ))
    if run._updater.scaler is not None:
        problems.append(Problem(
            "scaler= must know of every stage's inf before any update, but every stage updates on its own; use "
            "bfloat16, which needs no loss scaling, or a synchronous schedule"
        ))
    users: dict[int, tuple[str, str]] = {}
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            first = users.setdefault(id(parameter), (stage.name, name))
            if first[0] != stage.name and parameter.requires_grad:
                problems.append(Problem(
                    f"stages {first[0]!r} and {stage.name!r} share the parameter {first[1]!r} ({name!r} there), whose "
                    "versions would differ from stage to stage; give each its own, or use a synchronous schedule"
                ))
    if any(stage.buffers.deferred for stage in run.stages):
        problems.append(Problem(
            "deferred_batch_norm needs whole minibatches, which overlap here; use plain BatchNorm or GroupNorm"
        ))
    if run._delay is not None and run._backend_name != "replay" and run._party.backend is None:
        problems.append(Problem("delay= is for backend='replay' in one process, where every run is repeatable"))
    return problems


def check_rows(batch: Batch, plan: Plan) -> None:
    """Raise RunError for a minibatch that has too few rows to be fed; nothing is lost then."""
    if batch.microbatches < plan.minibatch:
        raise RunError(
            f"the minibatch has {batch.rows} rows, fewer than its {plan.minibatch} microbatches; in an asynchronous "
            "plan every minibatch has as many. Leave it out (drop_last=True), or compile with fewer microbatches"
        )


def check_gradient(batch: Batch) -> None:
    """Raise RunError for inputs that require a gradient."""
    given = [
        item.name for item, value in zip(batch.spec.inputs, batch.values, strict=True)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(value)[0])
    ]
    if given:
        raise RunError(
            f"input {given[0]!r} requires a gradient, which would be there only steps later, when what made the input "
            "has changed; make that a stage of the pipeline, or detach the input"
        )


def check_switch(plan: Plan, now: Plan, spec: Spec) -> None:
    """Raise RunError for a plan that a runner cannot go on with."""
    problems = []
    if not isinstance(plan, Plan):
        raise RunError(f"switch(plan): expected a Plan from pipec.compile, got {type(plan).__name__}")
    if plan.graph != spec.graph:
        problems.append(Problem("it was compiled for another pipeline; compile this one with the other schedule"))
    if plan.update != now.update:
        problems.append(Problem(
            f"it was compiled with update={plan.update!r}, the runner's plan with update={now.update!r}: its "
            "optimizers would be others; compile both with update='stage'"
        ))
    if not plan.training:
        problems.append(Problem("it was compiled with forward_only=True"))
    raise_all("switch(plan)", problems, RunError)
