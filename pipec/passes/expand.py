"""Expand: the ordered tasks of chunks become those of their stages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipec.ir import Chunk, Kind, Table, make_table
from pipec.spec import Graph

Ints = npt.NDArray[np.int64]


def expand(
    graph: Graph, chunks: tuple[Chunk, ...], device: int, ops: Ints, groups: Ints, slices: int = 1
) -> Table:
    """The stage tasks of one device.

    A chunk's forward runs its stages in order, its backward in reverse; stages that no loss depends on have no
    backward. A task without a slice stands for those of all slices, in order for forwards and in reverse for
    backwards. Chunk tasks that run as one take turns: their first stage tasks become one group, then the second ones;
    a task that is left over alone is in no group.

    Args:
        ops: (tasks, 3): kind, chunk, microbatch; or (tasks, 4): and slice.
        groups: per task the number of its overlap group, 0 for none.
    """
    if not len(ops):
        return make_table(0)
    kinds, owners, microbatches = ops.T[:3]
    forward = kinds == Kind.FORWARD
    times = slices if ops.shape[1] == 3 else 1
    lists = [list(chunk.stages) for chunk in chunks]
    back = [[s for s in reversed(stages) if graph.stages[s].backward] for stages in lists]
    again = [stages[::-1] for stages in back]
    flat = np.asarray([s for stages in lists + back + again for s in stages], np.int32)
    sizes = np.asarray([len(stages) for stages in lists + back + again])
    first = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    key = owners + len(chunks) * np.select([forward, kinds == Kind.RECOMPUTE], [0, 2], 1)
    repeat = sizes[key] * times
    rows = np.repeat(np.arange(len(ops)), repeat)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    group = np.zeros(len(rows), np.int64)
    if groups.any():
        rows, offset, group = _take_turns(rows, offset, groups, int(sizes.max()) * times)
    turn, place = np.divmod(offset, sizes[key[rows]])
    slice_ = np.where(forward[rows], turn, times - 1 - turn) if times > 1 else ops.T[3:][:, rows].sum(axis=0)
    return make_table(
        len(rows), kind=kinds[rows], stage=flat[first[key[rows]] + place], microbatch=microbatches[rows],
        slice=slice_, group=group, device=device,
    )


def _take_turns(rows: Ints, offset: Ints, groups: Ints, most: int) -> tuple[Ints, Ints, Ints]:
    """Rows and offsets as the tasks of a group take turns, at most ``most`` each, and the group of each turn."""
    _, index, which = np.unique(groups, return_index=True, return_inverse=True)
    leader = np.where(groups > 0, index[which], np.arange(len(groups)))
    order = np.lexsort((rows, offset, leader[rows]))
    rows, offset = rows[order], offset[order]
    turn = np.where(groups[rows] > 0, groups[rows] * most + offset, 0)
    _, inverse, counts = np.unique(turn, return_inverse=True, return_counts=True)
    return rows, offset, np.where(counts[inverse] > 1, turn, 0)
