"""Which parameters are trained now: what several ranks add up must be trained on all of them, or a sum never ends.

Parameters are compared when a runner is made; a script may freeze some later on, which it does on every rank alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pipec.errors import RankError
from pipec.runtime.distributed.group import Place
from pipec.runtime.distributed.local import Tied
from pipec.runtime.stages import Stage

FLAGS = 2  # numbers in a row
MOST = 52  # shared parameters that one number tells of


class Trained:
    """What a rank says of its parameters in each training step.

    Args:
        homes: the device of every stage.
        names: of every stage.

    Attributes:
        stages: those of this rank, once they are made.
    """

    def __init__(self, tied: Sequence[Tied], homes: Sequence[int], place: Place, names: Sequence[str]) -> None:
        self._tied, self._homes, self._place, self._names = tied[:MOST], homes, place, names
        self.stages: Sequence[Stage] = ()

    def row(self) -> list[float]:
        """Which shared parameters are trained, and a number that differs where other parameters of replicas do."""
        shared = sum(one.parameter.requires_grad << number for number, one in enumerate(self._tied))
        if self._place.replicas == 1:
            return [float(shared), 0.0]
        flags = bytes(parameter.requires_grad for stage in self.stages for _, parameter in stage.named_parameters())
        return [float(shared), float(zlib.crc32(flags))]

    def check(self, table: Sequence[Sequence[float]], first: int) -> None:
        """Raise RankError for a parameter that is trained on one rank only; ``first``: the column of the flags."""
        place = self._place
        shared = {row[first] for row in table}
        if len(shared) == 1 and place.replicas == 1:  # as in most steps
            return
        for replica, ranks in enumerate(place.ranks):
            for device, rank in enumerate(ranks):
                flags, own = (table[n * place.devices + device][first + 1] for n in (0, replica))
                if flags != own:
                    raise RankError(
                        f"ranks {place.ranks[0][device]} and {rank} do not train the same parameters; freeze and "
                        "unfreeze them on all replicas alike, before the same step", rank,
                    )
            for number, one in enumerate(self._tied):
                holders = sorted({self._homes[stage] for stage in one.stages})
                trains = [int(table[replica * place.devices + d][first]) >> number & 1 for d in holders]
                if len(set(trains)) > 1:
                    there, not_there = (ranks[holders[trains.index(flag)]] for flag in (1, 0))
                    names = " and ".join(f"{self._names[s]!r} (as {name!r})" for s, name in one.users)
                    raise RankError(
                        f"the parameter that stages {names} share is trained on rank {there} and frozen on rank "
                        f"{not_there}; freeze and unfreeze it on all ranks alike, before the same step", not_there,
                    )
