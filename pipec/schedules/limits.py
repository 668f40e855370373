"""A memory limit in activations, as the policies that hold to one read it."""

from __future__ import annotations

from pipec.costs import Activations
from pipec.errors import ScheduleError
from pipec.schedules.base import Problem


def share_limit(problem: Problem, most: float) -> float:
    """Activations per device in shares: ``most``, or ``problem.memory_limit`` where that is lower.

    A limit in bytes is left to the verifier, since what a byte limit leaves for activations depends on values and
    gradients that later passes place.

    Raises:
        ScheduleError: less than one activation, with which no microbatch can pass.
    """
    limit = problem.memory_limit
    if not isinstance(limit, Activations):
        return most
    if limit.shares < 1:
        raise ScheduleError(
            f"memory: the limit of {limit.shares:g} activations is below one, but a device holds all that it saves "
            "for a microbatch at once; give at least activations(1)"
        )
    return min(most, limit.shares)


def chunk_caps(problem: Problem, shares: float) -> list[int]:
    """Per device how many of its chunks' activations make ``shares``, at least one microbatch's."""
    counts = [0] * problem.devices
    for chunk in problem.chunks:
        counts[chunk.device] += 1
    return [max(count, int(shares * count + 1e-9)) for count in counts]
