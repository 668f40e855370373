"""Values that share memory, where a stage writes into one of them.

In the uncut model such a write shows in all of them; in a pipeline each reader has what was handed over. So it is
refused where another reader would see the difference. Which of a stage's results share memory with what it read, or
with each other, and what it writes into, is learned in its first run of each mode, on copies of all that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipec.errors import RunError
from pipec.runtime.borders import Packed
from pipec.tree import flatten

if TYPE_CHECKING:
    from pipec.runtime.stages import Stage
    from pipec.spec import Spec

# Value, leaf of it. An output of the pipeline is the value -1 - its index, an input its index after all values.
Node = tuple[int, int]


class Aliases:
    """What one stage was seen to do.

    Attributes:
        written: leaves of what it reads that it writes into.
        pairs: leaves that share memory, of what it reads and gives.
        fresh: whether something new was seen since :func:`check_aliases`.
    """

    def __init__(self) -> None:
        self.written: set[Node] = set()
        self.pairs: set[tuple[Node, Node]] = set()
        self.fresh = False

    @torch.no_grad()
    def learn(self, stage: Stage, packets: Sequence[Any], out: Any) -> None:
        """From a run on ``packets``, the stage's own copies of what it read, that gave ``out``."""
        read = [
            ((value, number), leaf)
            for value, packet in zip(stage.read_values, packets, strict=True) if value is not None
            for number, leaf in _tensors(packet.leaves if isinstance(packet, Packed) else [packet])
        ]
        results = [*stage.gives, *((-1 - index, path) for index, path in stage.outputs)]
        given = [
            ((value, number), leaf) for value, path in results
            for number, leaf in _tensors(flatten(stage.take(out, path))[0])
        ]
        written = {node for node, leaf in read if not leaf.is_inference() and leaf._version}
        pairs = {
            (one, other) for place, (other, theirs) in enumerate(given)
            for one, mine in (*read, *given[:place]) if overlap(mine, theirs)
        }
        self.fresh |= not (written <= self.written and pairs <= self.pairs)
        self.written |= written
        self.pairs |= pairs


def check_aliases(stages: Sequence[Stage], spec: Spec) -> None:
    """Look at all stages together, when one of them has shown something new.

    Raises:
        RunError: a stage writes into a value that shares memory with one that it reads too, that a later stage reads or
            that the caller is given. All is learned anew then: the script may mend its stage.
    """
    if not any(stage.aliases.fresh for stage in stages):
        return
    try:
        _check(stages, spec)
    except RunError:
        for stage in stages:
            stage.forget()
        raise
    for stage in stages:
        stage.aliases.fresh = False


def _check(stages: Sequence[Stage], spec: Spec) -> None:
    graph = spec.graph
    called = [*(value.name for value in graph.values), *(item.name for item in graph.inputs)]
    read_by = [*(value.readers for value in graph.values), *(item.readers for item in graph.inputs)]
    same: dict[Node, set[Node]] = {}  # by what stages before have made
    for stage in stages:
        for node in sorted(stage.aliases.written):
            for value, leaf in sorted(same.get(node, ())):
                readers = [r for r in read_by[value] if r >= stage.index] if value >= 0 else []
                if (value, leaf) == node or not (readers or value < 0):
                    continue
                if value < 0:
                    told = f"the output {spec.outputs[-1 - value].name!r}, which the caller is given"
                    raise _refused(stage, called[node[0]], told)
                who = "it reads as well" if stage.index in readers else f"stage {stages[readers[0]].name!r} reads later"
                link = "another part of it, which" if value == node[0] else f"{called[value]!r}, which"
                raise _refused(stage, called[node[0]], f"{link} {who}")
        for one, other in stage.aliases.pairs:
            joined = same.get(one, {one}) | same.get(other, {other})
            for node in joined:
                same[node] = joined


def _refused(stage: Stage, value: str, other: str) -> RunError:
    return RunError(
        f"stage {stage.name!r} writes in place into {value!r}; that shares memory with {other} and would change too in "
        "the uncut model; clone it in the stage before writing"
    )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    if one.layout is not torch.strided or other.layout is not torch.strided or not (one.numel() and other.numel()):
        return False
    storage = one.untyped_storage()
    if storage._cdata != other.untyped_storage()._cdata:
        return False
    if one.element_size() != other.element_size():
        return True  # one is the other's bits in another type
    marks = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    _window(marks, one).fill_(True)
    return bool(_window(marks, other).any())


def _window(marks: Tensor, tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` among those of its storage; a dimension that repeats one is taken once."""
    size = [1 if stride == 0 else length for length, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return marks.as_strided(size, tensor.stride(), tensor.storage_offset())


def _tensors(leaves: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    return ((number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
