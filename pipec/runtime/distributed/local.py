"""The part of a pipeline that one rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import evolve, frozen
from torch import Tensor, nn

from pipec.errors import Problem, RunError, raise_all
from pipec.ir import Plan
from pipec.runtime import names
from pipec.runtime.stages import Stage
from pipec.spec import Spec, owner_of, parameters_of


def local_spec(spec: Spec, plan: Plan, device: int) -> Spec:
    """The spec with placeholders in place of stages and losses of other devices, so that nothing there is made."""
    here = [plan.stage_device(s) == device for s in range(len(spec.stages))]
    stages = tuple(
        stage if mine else evolve(stage, fn=None, params=None) for stage, mine in zip(spec.stages, here, strict=True)
    )
    losses = tuple(loss if here[loss.home] else evolve(loss, fn=None) for loss in spec.losses)
    return evolve(spec, stages=stages, losses=losses)


@frozen(eq=False)
class Tied:
    """One parameter of stages on several devices: ``users`` are (stage, name) in ascending order of stages."""

    users: tuple[tuple[int, str], ...]
    parameter: Tensor
    place: int  # among the parameters of the first stage

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.users)


def tied_parameters(spec: Spec, devices: Sequence[int]) -> list[Tied]:
    """Parameters that stages on more than one device use, in the order of their first use.

    Every process makes the whole of a model whose stages share parameters, so each finds the same.
    """
    users: dict[int, list[tuple[int, str]]] = {}
    found: dict[int, Tensor] = {}
    first: dict[int, int] = {}
    for number, stage in enumerate(spec.stages):
        for place, (name, parameter) in enumerate(parameters_of(stage)):
            first.setdefault(id(parameter), place)
            if all(stage != number for stage, _ in users.get(id(parameter), [])):
                users.setdefault(id(parameter), []).append((number, name))
            found[id(parameter)] = parameter
    apart = {key: own for key, own in users.items() if len({devices[stage] for stage, _ in own}) > 1}
    return [Tied(tuple(own), found[key], first[key]) for key, own in apart.items()]


def check_wrappers(stages: Sequence[Stage]) -> None:
    """Raise RunError for stages that add up or shard their gradients themselves, behind the plan's back."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    problems = [
        Problem(f"stage {stage.name!r} is wrapped ({type(part).__name__})")
        for stage in stages for module in stage.modules
        for part in [next((m for m in module.modules() if isinstance(m, wrappers)), None)] if part is not None
    ]
    if problems:
        problems.append(Problem(
            "give the bare modules and compile with data_parallel=replicas, with mesh= a DeviceMesh of 'dp' and 'pp' "
            "where ranks are in another order than replica by replica: the plan's REDUCE tasks add up gradients over "
            "replicas, after the last microbatch and beside other stages' backwards. What fully_shard would save in "
            "memory, more stages save"
        ))
    raise_all("stages in DistributedDataParallel or fully_shard", problems, RunError)


def check_dtensors(stages: Sequence[Stage]) -> None:
    """Raise RunError for parameters and buffers that REDUCE tasks cannot add up, nor a rank give to another."""
    problems = [
        Problem(f"stage {stage.name!r}: {', '.join(own)}") for stage in stages
        if (own := [name for name, value in stage.named_parameters() if hasattr(value, "full_tensor")])
    ]
    if problems:
        problems.append(Problem("tensors that are parted over a dimension 'tp' of the mesh go with data_parallel=1 and "
                                "without parameters that stages of several ranks share"))
    raise_all("DTensors in stages whose gradients REDUCE tasks add up", problems, RunError)


def owners_of(
    stages: Sequence[Stage], model: names.Model | None, tied: Sequence[Tied], here: Sequence[bool]
) -> list[names.Owner]:
    """Where the names of this rank's tensors come from; shared ones have those of stages on other ranks too."""
    if model is not None:
        return names.owners([stage for stage in stages if here[stage.index]], model)
    found: list[names.Owner] = []
    held = {id(t) for stage in stages for _, t in stage.named_parameters()}
    for stage in stages:
        found += names.stage_owners([stage])
        if not here[stage.index]:
            shared = {
                name: one.parameter for one in tied if id(one.parameter) in held
                for number, name in one.users if number == stage.index
            }
            found += [names.Owner(f"{stage.name}.", shared)] if shared else []
    names.check_names(found)
    return found


def elsewhere_of(spec: Spec, stages: Sequence[Stage]) -> set[int]:
    """Ids of what stages of other ranks hold, as far as this process has made it too."""
    here = {id(t) for t in _tensors(stage.fn for stage in stages)}
    here |= {id(t) for stage in stages for _, t in stage.named_parameters()}
    others = {id(t) for t in _tensors(stage.fn for stage in spec.stages)}
    others |= {id(t) for stage in spec.stages for _, t in parameters_of(stage)}
    return others - here


def _tensors(fns: Iterable[Any]) -> Iterator[Tensor]:
    """Parameters and buffers of the modules among ``fns``."""
    for owner in map(owner_of, fns):
        if isinstance(owner, nn.Module):
            yield from owner.parameters()
            yield from owner.buffers()
