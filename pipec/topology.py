"""Running order lists against what their tasks need: a clock for linear orders, and the story of a deadlock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipec.ir import Column


def clock(
    lists: Sequence[Sequence[int]], start: Column, needs: Column, durations: Sequence[int]
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Run every list in order, a task as soon as all it needs has ended.

    Args:
        lists: task ids per queue; a task may stand in several queues and then needs to be at the head of all.
        start, needs: per task the ids it needs, as in :class:`pipec.ir.Waits`.
        durations: per task, positive.

    Returns:
        End times by task (0: never ran) and the position each list reached.
    """
    size = len(start) - 1
    bounds, ids = start.tolist(), needs.tolist()
    ends = [0] * size
    places = [0] * size
    for queue in lists:
        for task in queue:
            places[task] += 1
    arrived = [0] * size
    home: list[list[int]] = [[] for _ in range(size)] if max(places, default=1) > 1 else []
    if home:
        for number, queue in enumerate(lists):
            for task in queue:
                home[task].append(number)
    position = [0] * len(lists)
    at_head = [-1] * len(lists)
    free = [0] * len(lists)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(lists) - 1, -1, -1))
    while ready:
        number = ready.pop()
        queue, length = lists[number], len(lists[number])
        at, now = position[number], free[number]
        while at < length:
            task = queue[at]
            if places[task] > 1:
                if ends[task]:  # ran when its other queue reached it
                    now = max(now, ends[task])
                    at += 1
                    continue
                if at_head[number] != task:
                    at_head[number] = task
                    arrived[task] += 1
                if arrived[task] < places[task]:
                    break
                now = max([now, *(free[q] for q in home[task] if q != number)])
            begin = now
            for k in range(bounds[task], bounds[task + 1]):
                end = ends[ids[k]]
                if end > begin:
                    begin = end
                elif not end:
                    waiting.setdefault(ids[k], []).append(number)
                    break
            else:
                now = ends[task] = begin + durations[task]
                at += 1
                if task in waiting:
                    ready.extend(waiting.pop(task))
                if places[task] > 1:
                    ready.extend(q for q in home[task] if q != number)
                continue
            break
        position[number], free[number] = at, now
    return np.asarray(ends, np.int64), position
