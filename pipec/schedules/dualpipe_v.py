"""DualPipeV: microbatches enter a V at its top while gradients come back down it, and the two meet as one task.

DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) sends microbatches through the devices from both ends and
overlaps the forward of one with the backward of another, which hides the communication inside both. Cut in half
(DualPipeV) it needs no second copy of the weights: chunks lie in a V, so each device has one chunk of the way down
and one of the way up, and the forward of either overlaps with the backward of the other.

Per device, d counted from 0 of P, with a the chunk on the way down and b the one on the way up:

1. 2(P-d-1) forwards of a, then d+1 times a forward of a and one of b;
2. P-d-1 times the input half of b, the weight half that has waited longest, and a forward of b;
3. M-2P+d+1 times a forward of a overlapped with a backward of b, and a forward of b with a backward of a;
4. P-d-1 times a backward of b, and a forward of b overlapped with a backward of a;
5. d+1 times a backward of b and one of a, the second half of them split, the weight halves left for later;
6. P-d-1 times a weight half and the input half of a; then the weight halves that are left.

In times of a whole device, F&B being a forward and a backward overlapped, the bubble is (P-1)(F&B + B - 2W)/2 at c = 0,
counted on the last device, which overlaps most; that is for F near B, with an F in place of the B it is exact. 2P+1
chunk activations are held, P + 1/2 shares. The form is stated for M >= 2P; with fewer microbatches it is that of 2P
with the others left out.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.errors import ScheduleError
from pipec.schedules.base import B, F, I, Op, Order, Overlap, Problem, W, overlap


@frozen
class DualPipeV:
    """Forwards overlapped with backwards in a V: a pair costs what ``Costs.overlap`` says."""

    bubble: ClassVar[str] = "(P-1)(F&B+B-2W)/2 at c=0"
    peak: ClassVar[str] = "P+1/2"
    source: ClassVar[str] = "arXiv 2412.19437"
    split: ClassVar[bool] = True

    name: str = "dualpipe-v"
    placement: str = "v"

    def order(self, problem: Problem) -> Order:
        """Raises ScheduleError when the chunks do not lie in a V."""
        check_v(problem, self.name)
        return (_Device(problem, device).ops() for device in range(problem.devices))


class _Device:
    """One device's list being written: microbatches are taken in order, per chunk and direction."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.devices, self.device, self.microbatches = problem.devices, device, problem.microbatches
        self.down, self.up = device, 2 * problem.devices - 1 - device
        self.next = {(kind, chunk): 0 for kind in "FB" for chunk in (self.down, self.up)}
        self.late: list[Op] = []  # weight halves that have not run
        self.made: list[Op | Overlap] = []

    def ops(self) -> list[Op | Overlap]:
        devices, device, down, up = self.devices, self.device, self.down, self.up
        after = devices - device - 1
        for _ in range(2 * after):
            self.forward(down)
        for _ in range(device + 1):
            self.forward(down)
            self.forward(up)
        for _ in range(after):
            self.backward(up, split=True)
            self.weight()
            self.forward(up)
        for turn in range(max(self.microbatches, 2 * devices) - 2 * devices + device + 1):
            self.both(down, up, apart=turn == 0 and not after)  # the last device has nothing to hide there
            self.both(up, down)
        for _ in range(after):
            self.backward(up)
            self.both(up, down)
        for turn in range(device + 1):
            half = (device + 1) // 2
            self.backward(up, split=turn > half or (turn == half and device % 2 == 1))
            self.backward(down, split=turn >= half)
        for _ in range(after):
            self.weight()
            self.backward(down, split=True)
        while self.late:
            self.weight()
        return self.made

    def forward(self, chunk: int) -> None:
        self.put(F(chunk, self.take("F", chunk)))

    def backward(self, chunk: int, split: bool = False) -> None:
        m = self.take("B", chunk)
        if split:
            self.late.append(W(chunk, m))
        self.put(I(chunk, m) if split else B(chunk, m))

    def weight(self) -> None:
        self.put(self.late.pop(0))

    def both(self, forward: int, backward: int, apart: bool = False) -> None:
        """A forward of one chunk and a backward of the other, as one task unless ``apart``."""
        pair = F(forward, self.take("F", forward)), B(backward, self.take("B", backward))
        there = [op for op in pair if op[2] < self.microbatches]
        if len(there) == 2 and not apart:
            self.made.append(overlap(*there))
        else:
            self.made += there

    def take(self, kind: str, chunk: int) -> int:
        self.next[kind, chunk] += 1
        return self.next[kind, chunk] - 1

    def put(self, op: Op) -> None:
        if op[2] < self.microbatches:  # a microbatch that there is not is left out
            self.made.append(op)


def check_v(problem: Problem, name: str) -> None:
    """Raise ScheduleError unless chunk c is on device c, or 2P-1-c on the way back, naming the first that is not."""
    count = 2 * problem.devices
    for chunk in problem.chunks:
        expected = min(chunk.index, count - 1 - chunk.index)
        if chunk.device != expected or len(problem.chunks) != count:
            stage = problem.stage_names[chunk.stages[0]]
            raise ScheduleError(
                f"schedule {name!r} needs {count} chunks in a V, chunk c on device c and back up, but there are "
                f"{len(problem.chunks)}, and chunk {chunk.index} (stage {stage!r}) is on device {chunk.device}; use "
                "placement='v', or a schedule for any placement: '1f1b', 'zb-v', 'gpipe'"
            )
