"""Parameters that stages on several GPUs of one process share: one owner each, and replicas on the other GPUs.

A module holds one tensor, on one GPU. The owner is the first of the stages that train it (of those that do not, where
none does): the user's own parameter is there, and there the optimizer steps it. For the stages on each other GPU there
is a replica, which stands in their modules while a task of theirs is queued, and is never seen outside of it.

* Before each step or evaluation the owner's copy-out stream sends the values to the replicas, whatever has changed
  them since: an optimizer, a checkpoint, the script by hand.
* A stage's gradients of its replicas are added up over the microbatches on its own device; its REDUCE carries the sum
  to the owner's. When all tasks have ended the sums of the stages are added there in ascending order, as everywhere
  (see :mod:`.gradients`).

Logical devices that share a GPU share the memory, the parameter's own or one replica's, but each has a leaf of its own:
autograd ties what takes the gradients of a leaf to one stream, so a leaf in common would make one compute stream wait
for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import define, evolve, field
from torch import Tensor, nn

from pipec.errors import Problem, RunError, raise_all
from pipec.ir import Plan
from pipec.runtime.gradients import Accumulator
from pipec.runtime.stages import Stage
from pipec.runtime.walk import modules_in
from pipec.tree import tree_map


@define(eq=False)
class Replica:
    """What stands for a shared parameter on another logical device than its owner's.

    Attributes:
        parameter: the user's own.
        tensor: a leaf.
        owner, user: stages: the one that holds ``parameter``, and the first that computes with ``tensor``.
        device: the real one of ``tensor``.
        apart: whether that is another than the parameter's.
        base: another replica on that GPU, whose memory this one shares.
    """

    parameter: Tensor
    owner: int
    user: int
    device: torch.device
    apart: bool = True
    base: Replica | None = None
    tensor: Tensor = field(init=False)
    _hook: Any = None

    def __attrs_post_init__(self) -> None:
        self._make()

    def refresh(self) -> None:
        """Follow what the script did to the parameter between two steps: its type, its shape, frozen or not."""
        own, now = self.parameter, self.tensor
        if (own.shape, own.dtype) != (now.shape, now.dtype) or not (self.sent or _same_memory(self._source, now)):
            self._make()
        elif own.requires_grad != now.requires_grad:
            now.requires_grad_(own.requires_grad)
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        if own.requires_grad and own._backward_hooks:  # not else: a parameter with a hook has no backward in halves
            self._hook = self.tensor.register_hook(hooks_of(own))  # type: ignore[no-untyped-call]

    @property
    def sent(self) -> bool:
        """Whether it has memory of its own, which values are sent to."""
        return self.apart and self.base is None

    @property
    def _source(self) -> Tensor:
        return self.parameter if self.base is None else self.base.tensor

    def _make(self) -> None:
        with torch.inference_mode(False):  # an evaluation may be the first to see a new type
            nothing = torch.empty(0, dtype=self.parameter.dtype, device=self.device)
            if self.sent:
                made = torch.empty_like(self.parameter, device=self.device, requires_grad=False)
            else:  # at first the parameter is still to be moved there
                made = self._source.detach() if self._source.device == nothing.device else nothing
            self.tensor = nn.Parameter(made, requires_grad=self.parameter.requires_grad)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def hooks_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook for a replica's gradients: whatever hooks the user has set on the parameter."""
    def run(gradient: Tensor) -> Tensor:
        for hook in tuple((parameter._backward_hooks or {}).values()):
            made = hook(gradient)
            gradient = gradient if made is None else made
        return gradient

    return run


class StandIn:
    """A context in which replicas stand in one stage's modules and ``params=``; on the thread that queues all tasks."""

    def __init__(self, stage: Stage, replicas: Mapping[int, Replica]) -> None:
        """``replicas``: by the id of the parameter."""
        self.stage, self.replicas = stage, replicas
        self.refresh()

    def refresh(self) -> None:
        """Look for the parameters' places anew, between two steps."""
        self._modules = list({id(sub): sub for own in self.stage.modules for sub in modules_in(own)}.values())
        self._places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (module._parameters, name, parameter, self.replicas[id(parameter)].tensor)
            for module in self._modules for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self.replicas
        ]
        self._lists = [module for module in self._modules if isinstance(module, nn.RNNBase)]  # it lists them again
        self._spec = self._inside = self.stage.spec
        if self._spec.params is not None:
            self._inside = evolve(self._spec, params=tree_map(self.of, self._spec.params))

    def of(self, leaf: Any) -> Any:
        """What stands in for a parameter; anything else as it is."""
        found = self.replicas.get(id(leaf))
        return leaf if found is None else found.tensor

    def _list_again(self) -> None:
        for module in self._lists:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def _put(self, spec: Any, inside: bool) -> None:
        for held, name, parameter, tensor in self._places:
            held[name] = tensor if inside else parameter
        self.stage.spec, self.stage.params = spec, spec.params
        if self._lists:
            self._list_again()

    def __enter__(self) -> None:
        self._put(self._inside, True)

    def __exit__(self, *_: object) -> Literal[False]:
        self._put(self._spec, False)
        return False


@define(eq=False)
class Replicas:
    """All replicas of a run.

    Attributes:
        made: each once.
        stand_ins: by the number of the stage.
        homes: per stage its logical device.
        due: values are to be sent before the next task.
    """

    made: list[Replica]
    stand_ins: dict[int, StandIn]
    homes: list[int]
    due: bool = False

    def refresh(self) -> None:
        """Before a step or an evaluation."""
        for one in self.made:
            one.refresh()
        for stand_in in self.stand_ins.values():
            stand_in.refresh()
        self.due = True

    def check(self, plan: Plan) -> None:
        """Raise RunError for a plan that has no use for replicas."""
        one = next((one for one in self.made if one.apart), None)
        if plan.asynchronous and one is not None:
            names = " and ".join(repr(plan.graph.stages[stage].name) for stage in (one.owner, one.user))
            raise RunError(f"stages {names} share a parameter but run on different GPUs; {no_versions(plan)}; {PLACE}")

    def routes(self) -> dict[tuple[int, int], list[Replica]]:
        """What is to be sent by (logical device of the owner, of the first that reads it)."""
        found: dict[tuple[int, int], list[Replica]] = {}
        for one in self.made:
            if one.sent:
                found.setdefault((self.homes[one.owner], self.homes[one.user]), []).append(one)
        return found

    def readers(self, sent: Sequence[Replica]) -> list[int]:
        """Stages that compute with one of these."""
        among = {id(one) for one in sent}
        return [
            stage for stage, own in self.stand_ins.items()
            if any(id(one) in among or id(one.base) in among for one in own.replicas.values())
        ]

    def leaves(self, trained: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Per stage the tensors whose gradients its backwards make."""
        return [
            list(map(self.stand_ins[stage].of, own)) if stage in self.stand_ins else own
            for stage, own in enumerate(trained)
        ]

    def owed(self, stage: int, sums: Accumulator) -> Iterator[tuple[int, Replica, Tensor]]:
        """What a stage's REDUCE carries: place among its parameters, replica, sum. Places from which nothing is to be
        carried name the user's parameter from now on."""
        by_tensor = {id(one.tensor): one for one in self.stand_ins[stage].replicas.values()}
        for place, parameter in enumerate(sums.parameters):
            one = by_tensor.get(id(parameter))
            if one is None:
                continue
            total = sums.sums[place]
            if total is None or not one.apart:
                sums.parameters[place] = one.parameter
            elif total.layout is not torch.strided:
                raise RunError(
                    f"the gradient of a parameter that stage {self.stand_ins[stage].stage.name!r} shares with a stage "
                    f"on another GPU has the layout {total.layout} and cannot leave its device; make it dense "
                    "(sparse=False)"
                )
            else:
                yield place, one, total


def replicate(
    stages: Sequence[Stage], where: Sequence[torch.device], plan: Plan, streams: bool = True
) -> Replicas | None:
    """Replicas of what stages on different devices share; None where they share nothing.

    Args:
        where: per stage its real device.
        streams: whether logical devices that share a GPU have streams of their own.

    Raises:
        RunError: the plan is asynchronous, or does not know that stages share a trained parameter.
    """
    owners: dict[int, tuple[int, str]] = {}
    for stage in sorted(stages, key=lambda stage: not plan.graph.stages[stage.index].backward):
        for name, parameter in parameters_of(stage):
            owners.setdefault(id(parameter), (stage.index, name))
    homes = [plan.stage_device(s) for s in range(len(stages))]
    made: dict[tuple[int, int], Replica] = {}
    there: dict[tuple[int, torch.device], Replica] = {}  # those with memory of their own
    own: dict[int, dict[int, Replica]] = {}
    problems = []
    for stage, device in zip(stages, where, strict=True):
        for name, parameter in parameters_of(stage):
            owner, its_name = owners[id(parameter)]
            apart = where[owner] != device
            if homes[owner] == homes[stage.index]:
                continue
            trains = any(parameter is one for _, one in stage.named_parameters())
            problem = _refusal(plan, owner, stage.index, trains)
            if not apart and (problem or not trains or not streams):
                continue  # as it is
            if problem:
                told = f"stages {stages[owner].name!r} and {stage.name!r} share {its_name!r} ({name!r} there)"
                problems.append(Problem(f"{told} but run on {where[owner]} and {device}; {problem}",
                                        stage.spec.location))
                continue
            key = id(parameter), homes[stage.index]
            if key not in made:
                base = there.get((id(parameter), device)) if apart else None
                made[key] = one = Replica(parameter, owner, stage.index, device, apart, base)
                if one.sent:
                    there[id(parameter), device] = one
            own.setdefault(stage.index, {})[id(parameter)] = made[key]
    raise_all("devices", problems, RunError)
    if not made:
        return None
    stand_ins = {number: StandIn(stages[number], replicas) for number, replicas in own.items()}
    return Replicas(list(made.values()), stand_ins, homes)


def _refusal(plan: Plan, owner: int, stage: int, trains: bool) -> str:
    """Why two stages on different GPUs cannot share a parameter."""
    if plan.asynchronous:
        return f"{no_versions(plan)}; {PLACE}"
    both = all(plan.graph.stages[one].backward for one in (owner, stage))
    if trains and both and owner not in plan.graph.stages[stage].tied:
        return ("the plan has no REDUCE for it, since they did not share it, or were not made yet, when the pipeline "
                f"was first compiled; tie made modules before that, or {PLACE}")
    return ""


PLACE = "place them on one GPU (placement=), or bind both logical devices to one (devices=)"


def no_versions(plan: Plan) -> str:
    """Why an asynchronous plan has no replicas."""
    return f"asynchronous schedule {plan.schedule!r} reads several versions of weights, and replicas have one"


def parameters_of(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """All that a stage computes with: its own, those of losses that are modules, of modules that it borrows."""
    seen: set[int] = set()
    for name, parameter in (*stage.named_parameters(), *(
        pair for module in stage.modules for pair in module.named_parameters()
    )):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
