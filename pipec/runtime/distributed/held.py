"""What ranks hold together: names, checkpoints of all their parts, the norm of all gradients, times of all tasks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from time import perf_counter_ns, time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime import names, saving
from pipec.runtime.alone import Alone, Path, Restoring
from pipec.runtime.distributed.council import ANYWHERE, CALLS, LOAD, NORM, SAVE, TRACE, Council
from pipec.runtime.distributed.group import Groups, Place, same_everywhere
from pipec.runtime.distributed.local import Tied, check_dtensors, check_wrappers, elsewhere_of, owners_of
from pipec.runtime.distributed.results import packed
from pipec.runtime.distributed.trained import Trained
from pipec.runtime.gradients import shared_parameters
from pipec.runtime.stages import Stage
from pipec.spec import Spec
from pipec.tree import tree_map

ONE_CLOCK = 1_000_000  # nanoseconds: ranks whose clocks differ by less are on one host


class Held(Alone):
    """The part of :class:`pipec.runtime.distributed.ranks.Ranks` that knows of other ranks' parameters.

    Attributes:
        homes: the device of every stage.
        outputs: "owner": an output is in the result of the rank of its stage; "all": in everybody's.
    """

    groups: Groups
    place: Place
    device: int
    replica: int
    homes: list[int]
    spec: Spec
    outputs: str
    _hooked: bool  # whether any rank has a before_update
    flags: Trained
    _tied: list[Tied]
    _council: Council

    def here(self, tensor: Any) -> Any:
        """A tensor of the host where this rank's tensors are; anything else as it is."""
        return tensor

    def share(self, stages: Sequence[Stage]) -> None:
        """Give parameters that several ranks hold the values of one: shared ones, and those of all replicas."""
        place, self.flags.stages = self.place, stages
        for one in self._tied:
            owner = place.ranks[self.replica][self.homes[one.stages[0]]]
            same_everywhere(one.parameter, self.groups.pipeline, owner)
        if self.groups.replicas is not None:
            held = {id(t): t for stage in stages for _, t in stage.named_parameters()}
            held |= {id(t): t for stage in stages for module in stage.modules for t in module.buffers()}
            for tensor in held.values():
                same_everywhere(tensor, self.groups.replicas, place.ranks[0][self.device])

    def trained(self, stages: Sequence[Stage]) -> list[list[Tensor]]:
        """Of other ranks' stages the shared parameters that are held here too."""
        made = [stage.trainable() for stage in stages]
        here = {id(parameter) for own in made for parameter in own}
        for number, device in enumerate(self.homes):
            if device != self.device:
                made[number] = [t.parameter for t in self._tied if number in t.stages and id(t.parameter) in here]
        return made

    def shared(self, trained: Sequence[list[Tensor]]) -> set[int]:
        """With replicas, all: each REDUCE adds up what this step made, and nothing that was there before."""
        if self.place.replicas > 1:
            return {id(parameter) for own in trained for parameter in own}
        return shared_parameters(trained)

    def gather(self, value: Any, call: int) -> list[Any]:
        """Every device's object of this replica."""
        self._council.table(call, [], None)
        return self._council.gather(self.groups.pipeline, value, CALLS[call])

    def owners(self, stages: Sequence[Stage], model: names.Model | None) -> list[names.Owner]:
        """Shared parameters have the names of their stages on other ranks too."""
        check_wrappers(stages)
        if self.place.replicas > 1 or self._tied:
            check_dtensors(stages)
        return owners_of(stages, model, self._tied, [device == self.device for device in self.homes])

    def elsewhere(self, spec: Spec, stages: Sequence[Stage]) -> set[int]:
        """What stages of other ranks hold, as far as this process has made it too."""
        return elsewhere_of(spec, stages)

    def save(self, path: Path, state: Callable[[], dict[str, Any]]) -> None:
        """The first replica writes, each rank what its stages hold."""
        flat, rest = self._told(lambda: checked(*saving.taken_apart(state()), path))
        rest = saving.merged(self._council.gather(self.groups.pipeline, on_host(rest), CALLS[SAVE]))
        self._told(lambda: saving.begin(path) if self.place.everyone[0] == dist.get_rank() else None)
        self._told(lambda: saving.write(path, flat, rest, self.groups.pipeline) if self.replica == 0 else None)

    def load(
        self, path: Path, owners: Sequence[names.Owner], elsewhere: set[int], restoring: Restoring
    ) -> None:
        """Every rank reads what its stages need; none goes on from it unless it fits on all."""
        state = self._told(lambda: saving.read(path, names.named(owners)))
        live = names.live(owners)
        known = {name for name, value in live.items() if id(value) not in elsewhere}
        anywhere = set[str]().union(*self._council.gather(self.groups.pipeline, list(live), CALLS[LOAD]))
        state["model"] = {name: value for name, value in state["model"].items() if name in live or name not in anywhere}
        state["optimizer"]["groups"] = [
            {**group, "names": [name for name in group["names"] if name in known or name not in anywhere]}
            for group in state["optimizer"]["groups"]
        ]
        self._told(self._told(lambda: restoring(state, path)), LOAD)

    def _told(self, work: Callable[[], Any], call: int = SAVE) -> Any:
        """What ``work`` gives; when it fails on one rank, it fails on all."""
        failure: BaseException | None = None
        made = None
        try:
            made = work()
        except BaseException as error:
            failure = error
        self._council.table(call, [], failure)
        if failure is not None:
            raise failure
        return made

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
            order[id(p)]: whole(torch.linalg.vector_norm(p.grad, norm_type)).cpu()
            for stage in stages for _, p in stage.named_parameters() if p.grad is not None
        }
        found: dict[tuple[int, int], Tensor] = {}
        for part in self.gather(own, NORM):
            found |= part
        if not found:
            return torch.zeros(())
        norms = torch.stack([self.here(found[key]) for key in sorted(found)])
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        return total

    def packed(self, outputs: Any) -> bytes:
        """This rank's outputs for other ranks, nothing where they do not want them."""
        return packed(outputs) if self.outputs == "all" else b""

    def everywhere(self, data: bytes) -> list[Any]:
        """What everybody has packed, in this replica, with its tensors where this rank's are."""
        rows = self._council.gather(self.groups.pipeline, data, "the outputs of all ranks")
        return [pickle.loads(one) for one in rows]

    def left(self, error: BaseException) -> None:
        """``error`` ends a call here: others that wait for this rank, as they have not ended theirs, are told."""
        if not (self._council.settled or self._council.broken):
            self._council.leave(error)

    def elsewhere_outputs(self) -> tuple[tuple[str, int], ...]:
        """Outputs that are in the results of other ranks, with their devices."""
        if self.outputs == "all":
            return ()
        placed = [(out.name, self.homes[out.ref.index]) for out in self.spec.outputs]
        return tuple((name, device) for name, device in placed if device != self.device)

    def anywhere(self) -> Callable[[bool], bool]:
        """A function that tells whether a flag is true on any rank; all of them call it."""
        return lambda flag: any(row[2] > 0 for row in self._council.table(ANYWHERE, [float(flag)], None))

    def ready(self) -> None:
        """Before the first UPDATE: no rank's hook has failed.

        Raises:
            RankError: one has; nothing is updated anywhere.
        """
        if self._hooked:
            self._council.table(ANYWHERE, [], None)

    def gathered(self, starts: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
        """Start and end of every task on every device, on this rank's clock as far as the hosts' clocks agree; the
        differences are the same on every rank."""
        rows = self.gather((time_ns() - perf_counter_ns(), starts, ends), TRACE)
        shifts = [row[0] for row in rows]
        clocks = [next(one for one in shifts if abs(one - shift) <= ONE_CLOCK) for shift in shifts]
        starts, ends = list(starts), list(ends)
        for clock, (_, own_starts, own_ends) in zip(clocks, rows, strict=True):
            move = clock - clocks[self.device]
            for task, (start, end) in enumerate(zip(own_starts, own_ends, strict=True)):
                if start:
                    starts[task], ends[task] = start + move, end + move
        return starts, ends


def whole(tensor: Tensor) -> Tensor:
    """A DTensor as the plain tensor that it stands for, which all processes of its mesh ask for; others as they are."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def checked(flat: saving.Flat, rest: dict[str, Any], path: Path) -> tuple[saving.Flat, dict[str, Any]]:
    """A checkpoint's parts, of which this pipeline's ranks have all.

    Raises:
        RunError: they have not: other pipelines of the mesh hold the rest of a DTensor.
    """
    parted = [name for name, value in flat.items() if hasattr(value, "full_tensor")]
    if parted:
        raise RunError(
            f"save: {', '.join(parted[:3])}{' and more' if len(parted) > 3 else ''} are DTensors, of which this "
            "pipeline's ranks may have a part; save the model on all ranks of the world with torch.distributed."
            f"checkpoint.save({{'model': run.state_dict()}}, checkpoint_id={str(path)!r})"
        )
    return flat, rest


def on_host(value: Any) -> Any:
    """A value of containers and tensors with all its tensors on the host, for another process."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, value)
