"""One process whose stages share parameters over several GPUs: what :class:`.alone.Alone` does, and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pipec.ir import Plan
from pipec.runtime.alone import Alone
from pipec.runtime.randomness import Position
from pipec.runtime.replicas import Replicas
from pipec.runtime.step import Batch


class Spread(Alone):
    """One process, and replicas of parameters on other GPUs than the parameters' own."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def begin(self, make: Callable[[], Batch], training: bool, position: Position) -> Batch:
        """The minibatch of a call; the replicas are due for the parameters' values."""
        batch = super().begin(make, training, position)
        self.replicas.refresh()
        return batch

    def shared(self, trained: Sequence[list[Tensor]]) -> set[int]:
        """Ids of the parameters whose gradients are complete only when several sums are added, and their replicas'."""
        return super().shared(trained) | {id(one.tensor) for one in self.replicas.made}

    def leaves(self, trained: Sequence[list[Tensor]]) -> Sequence[list[Tensor]]:
        """Per stage the tensors whose gradients its backwards make."""
        return self.replicas.leaves(trained)

    def switch(self, plan: Plan, check: Callable[[], None]) -> None:
        """Raise RunError when another plan cannot take the place of this one."""
        super().switch(plan, check)
        self.replicas.check(plan)

    def adopt(self, plan: Plan) -> None:
        """Go on with another plan; stages may be on other logical devices of the same GPU."""
        super().adopt(plan)
        self.replicas.homes = [plan.stage_device(stage) for stage in range(len(plan.graph.stages))]
