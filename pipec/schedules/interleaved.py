"""Interleaved 1F1B on a looped placement (Megatron-LM, arXiv 2104.04473 section 2.2).

A device runs its v chunks in turn, each for a group of microbatches, forwards up and backwards down the
chunks, and alternates forward and backward after a warm-up. With groups of P microbatches and P dividing M
the bubble is (P - 1)(F + B + W)/v at c = 0 for min(M, P + (P - 1)/v) activations.

Any other M is cut into groups that are as equal as possible and none smaller than P, since a smaller one
cannot keep the loop full: the bubble stays (P - 1)(F + B + W)/v for every M >= P, and with G the largest
group min(M, (2P - 1 + (v - 1)G)/v) activations are held. Fewer microbatches than devices are one group.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.errors import ScheduleError
from pipec.schedules.base import B, F, Op, Order, Problem


def groups(microbatches: int, devices: int) -> list[range]:
    """Runs of microbatches of (almost) equal size, none smaller than ``devices`` where there are enough."""
    count = max(1, microbatches // devices)
    return [range(g * microbatches // count, (g + 1) * microbatches // count) for g in range(count)]


@frozen
class InterleavedOneFOneB:
    """1f1b over several chunks per device, a smaller bubble for more copies.

    ``chunks``: per device; None takes as many as there are stages per device.
    """

    bubble: ClassVar[str] = "(P-1)(F+B+W)/v at c=0"
    peak: ClassVar[str] = "P+(P-1)/v"
    source: ClassVar[str] = "arXiv 2104.04473"

    chunks: int | None = None
    name: str = "interleaved-1f1b"
    placement: str = "looped"

    def order(self, problem: Problem) -> Order:
        """Raises ScheduleError when the chunks do not loop over the devices."""
        check_looped(problem, self.name)
        devices, count = problem.devices, len(problem.chunks)
        loops = range(-(-count // devices))
        runs = groups(problem.microbatches, devices)
        up = [(loop, m) for run in runs for loop in loops for m in run]
        down = [(loop, m) for run in runs for loop in reversed(loops) for m in run]
        longest = max(len(run) for run in runs)
        lists = []
        for device in range(devices):
            forwards = [F(loop * devices + device, m) for loop, m in up]
            backwards = [B(loop * devices + device, m) for loop, m in down]
            warmup = 2 * (devices - 1 - device) + (len(loops) - 1) * longest
            row: list[Op] = forwards[:warmup]
            for number, backward in enumerate(backwards):
                row += forwards[warmup + number : warmup + number + 1]
                row.append(backward)
            # The last loop may lack its last devices: their tasks end the chain, so nothing needs them.
            lists.append([op for op in row if op[1] < count])
        return lists


def check_looped(problem: Problem, name: str) -> None:
    """Raise ScheduleError unless chunk c is on device c mod D, naming the first stage that breaks this."""
    for chunk in problem.chunks:
        expected = chunk.index % problem.devices
        if chunk.device != expected:
            stage = problem.stage_names[chunk.stages[0]]
            raise ScheduleError(
                f"schedule {name!r} needs chunks that loop over the devices, chunk c on device c mod "
                f"{problem.devices}, but chunk {chunk.index} (stage {stage!r}) is on device {chunk.device} "
                f"instead of {expected}; use placement='looped', or a schedule for any placement: '1f1b', "
                "'eager-1f1b', 'gpipe', 'looped-bfs'"
            )
