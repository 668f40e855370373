"""The places in a step where processes must agree, in a run that has one process only: nothing is to be done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.ir import Plan
from pipec.runtime import names, saving
from pipec.runtime.arguments import check_arguments, tell_started_alone
from pipec.runtime.asynchronous.program import Steps
from pipec.runtime.asynchronous.together import Together
from pipec.runtime.backends import Backend
from pipec.runtime.channels import Channels
from pipec.runtime.executor import Device
from pipec.runtime.fit import BACKENDS, check_asynchronous_options, check_fit
from pipec.runtime.gradients import shared_parameters
from pipec.runtime.program import Program
from pipec.runtime.randomness import Position
from pipec.runtime.result import Result
from pipec.runtime.stages import Stage
from pipec.runtime.step import Batch, Step
from pipec.spec import Spec

Path = str | os.PathLike[str]
Restoring = Callable[[dict[str, Any], Path], Callable[[], None]]  # gives what goes on from a checkpoint that fits


class Alone:
    """One process runs all devices. ``Ranks`` has the same methods for many."""

    backend: Backend | None = None
    way: str = "within this process"  # how values travel between devices

    def real(self, plan: Plan) -> list[torch.device] | None:
        """The real device of each logical one where this says so and not the runner."""
        return None

    def prepared(self, plan: Plan) -> Program | None:
        """The program of a plan, when it had to be made to prove that it can be run here."""
        return None

    @contextmanager
    def agreement(self, options: dict[str, Any], holds: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
        """Around the making of a runner: what every process must have alike is compared at the end, ``options`` and of
        the stages and optimizers that it ``holds`` those that others have as well."""
        yield

    def local(self, spec: Spec) -> Spec:
        """The stages this process holds; others are placeholders."""
        return spec

    def inputs_elsewhere(self, stages: Sequence[Stage]) -> list[int]:
        """Inputs that only other processes need."""
        return []

    def trained(self, stages: Sequence[Stage]) -> list[list[Tensor]]:
        """Per stage the tensors whose gradients are added up here."""
        return [stage.trainable() for stage in stages]

    def shared(self, trained: Sequence[list[Tensor]]) -> set[int]:
        """Ids of the parameters whose gradients are complete only when several sums are added."""
        return shared_parameters(trained)

    def leaves(self, trained: Sequence[list[Tensor]]) -> Sequence[list[Tensor]]:
        """Per stage the tensors whose gradients its backwards make: the trained ones, or what stands for them."""
        return trained

    def share(self, stages: Sequence[Stage]) -> None:
        """Make what several processes hold the same, before the first step."""

    def reduce(self, stage: int, failed: bool) -> None:
        """Begin the REDUCE of a stage."""

    def reduced(self) -> None:
        """Wait for every REDUCE that has begun."""

    def begin(self, make: Callable[[], Batch], training: bool, position: Position) -> Batch:
        """The minibatch of a call, checked."""
        return make()

    def position(self, position: Position) -> Position:
        """The random numbers of this replica."""
        return position

    def devices(
        self, plan: Plan, program: Program, stages: list[Stage], step: Step, backend: Backend
    ) -> tuple[list[Device], Any]:
        """The devices this process runs, and the channels between all."""
        channels = backend.channels(program.routes) or Channels(program.routes)
        return [Device(d, slots, stages, step, channels) for d, slots in enumerate(program.slots)], channels

    def settle(self, step: Step, channels: Any, work: Callable[[], None]) -> Result:
        """Run the tasks of a step; what it gave when they ended everywhere."""
        work()
        return step.result()

    def ready(self) -> None:
        """Before the first UPDATE: nothing has failed in other processes."""

    def updates(self, program: Program) -> Sequence[Sequence[Any]]:
        """The UPDATE tasks per device."""
        return program.updates

    def finish(self, plan: Plan, work: Callable[[], None]) -> None:
        """Commit and update; it ends when it ended everywhere."""
        work()

    def anywhere(self) -> Callable[[bool], bool] | None:
        """A function that tells whether a flag is true in any process; None where there is no other."""
        return None

    def norm(self, stages: Sequence[Stage], norm_type: float) -> Tensor:
        """The norm of all gradients, as :func:`torch.nn.utils.get_total_norm` computes it."""
        parameters = {id(p): p for stage in stages for _, p in stage.named_parameters()}.values()
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def owners(self, stages: Sequence[Stage], model: names.Model | None) -> list[names.Owner]:
        """Where the names of this process's tensors come from."""
        return names.owners(stages, model)

    def elsewhere(self, spec: Spec, stages: Sequence[Stage]) -> set[int]:
        """Ids of tensors that other processes answer for."""
        return set()

    def save(self, path: Path, state: Callable[[], dict[str, Any]]) -> None:
        """Write what ``state`` gives in every process to one folder."""
        made = saving.taken_apart(state())
        saving.begin(path)
        saving.write(path, *made, None)

    def load(
        self, path: Path, owners: Sequence[names.Owner], elsewhere: set[int], restoring: Restoring
    ) -> None:
        """Read the part of a folder that ``owners`` have names for, and go on from it."""
        restoring(saving.read(path, names.named(owners)), path)()

    def switch(self, plan: Plan, check: Callable[[], None]) -> None:
        """Raise RunError when another plan cannot take the place of this one; ``check`` raises what is wrong here."""
        check()

    def adopt(self, plan: Plan) -> None:
        """Go on with another plan."""

    def together(self, steps: Steps) -> Together:
        """How the devices here run an asynchronous plan."""
        return Together(steps)

    def flush(self, check: Callable[[], None], position: Position) -> None:
        """Before minibatches in flight are finished; ``check`` raises what is against it."""
        check()

    def left(self, error: BaseException) -> None:
        """``error`` ends a call here."""

    def elsewhere_outputs(self) -> tuple[tuple[str, int], ...]:
        """Outputs that are in the results of other processes, with their devices."""
        return ()

    def times(self, step: Step) -> tuple[list[int], list[int]]:
        """Start and end of every task in nanoseconds."""
        if step.clock is not None:
            step.clock.write(step.starts, step.ends)
        return self.gathered(step.starts, step.ends)

    def gathered(self, starts: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
        """Times of the tasks of all processes from those of the tasks here."""
        return starts, ends

    def close(self) -> None:
        """Nothing to close."""


def over_processes(backend: str | Backend | None, mesh: Any) -> bool:
    """Whether this process is to be one rank of many; also with a backend that is none, which is an error of all."""
    from pipec.runtime.distributed.group import running

    return running() and (
        backend in (None, "distributed") or gpus_of(backend) is not None or mesh is not None
        or (isinstance(backend, str) and backend not in BACKENDS)
    )


def fitting(
    many: bool, pipeline: Any, plan: Any, devices: Any, backend: Any, arguments: Mapping[str, Any], mesh: Any,
) -> Spec:
    """The spec of ``pipeline``, when a runner can be made from these arguments; over processes, when it can on all.

    ``arguments``: the others of the runner by name, without the optimizer.

    Raises:
        RankError: not on another one.
        PipecError: not here.
    """
    def check() -> Spec:
        check_arguments(backend, arguments)
        check_fit(pipeline, plan, devices, backend, many)
        check_asynchronous_options(plan, arguments["rescheduling"], arguments["delay"])
        return pipeline.spec  # type: ignore[no-any-return]

    if not many:
        tell_started_alone(backend)
        return check()
    from pipec.runtime.distributed.meeting import able, met

    met(lambda: able(check(), plan, mesh), arguments["timeout"])
    return pipeline.spec  # type: ignore[no-any-return]


def gpus_of(backend: Any) -> Any:
    """The GPUs that ``backend`` brings with it, for a distributed run on others than those torch finds."""
    return getattr(backend, "gpus", None)


def party(
    spec: Any, plan: Plan, backend: str | Backend | None, devices: Any, mesh: Any, timeout: float, outputs: str,
) -> Alone:
    """Who takes part in a run: this process alone, or one rank of many.

    Raises:
        RunError: "distributed" was asked for without a process group, or processes or devices do not fit.
    """
    many = over_processes(backend, mesh)
    if plan.data_parallel > 1 and not many:
        raise RunError(
            f"the plan has data_parallel={plan.data_parallel} replicas of {plan.devices} devices, so it runs on "
            f"{plan.devices * plan.data_parallel} processes; start the script with torchrun, or compile with "
            "data_parallel=1"
        )
    if not many and backend not in (None, "distributed") and mesh is None:
        return Alone()
    if not many:
        if backend == "distributed" or mesh is not None:
            raise RunError(
                "a distributed run needs torch.distributed.init_process_group() in several processes before; start "
                "the script with torchrun"
            )
        return Alone()
    from pipec.runtime.distributed.gpu_ranks import make_ranks
    from pipec.runtime.distributed.gpus import Accelerators

    return make_ranks(spec, plan, mesh, timeout, outputs, devices, gpus_of(backend) or Accelerators())
