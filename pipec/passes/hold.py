"""Hold: when a value that waits in host memory comes back to its reader's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipec.ir import Kind, Table, sends

AHEAD = 1  # tasks of the reader's device that a copy back may run beside, before its reader


def gates(table: Table, order: npt.NDArray[Any], readers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Per reader the task that ends before its value may come back, -1 where there is none.

    The copy back then runs beside the one task between that one and the reader. Tasks of an overlap group count as
    one; updates do not count: they only come with the end of a minibatch, and keep every step of a plan alike.

    Args:
        order: rows of the compute tasks of the readers' device, in the order of its lane.
        readers: rows of tasks on that device, or -1, shape (items,).
    """
    order = order[table.kind[order] != Kind.UPDATE]
    group = table.group[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (group[1:] == 0) | (group[1:] != group[:-1])
    block = np.cumsum(begins) - 1
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(order) - 1)  # per block its last place
    of_row = np.full(len(table) + 1, -1, np.int64)  # the last one for the row -1
    of_row[order] = block
    wanted = of_row[readers] - 1 - AHEAD
    return np.where((wanted >= 0) & (readers >= 0), order[last[np.maximum(wanted, 0)]], -1) if len(order) else readers


def compute_order(table: Table, device: int) -> npt.NDArray[np.int64]:
    """A device's compute tasks in a table whose rows are in order."""
    return np.flatnonzero((table.device == device) & ~sends(table) & (table.kind != Kind.COPY))
