"""The memory panel: per device what is held over time, in activations (shares) or in bytes, and the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from pipec.costs import Activations
from pipec.errors import RenderError
from pipec.ir import Buffer
from pipec.render.dot import Box, Item, Line, Text
from pipec.render.palette import LANE, LIMIT, MEMORY, MEMORY_EDGE, PALE, mix
from pipec.timeline import Timeline, show_bytes

Floats = npt.NDArray[np.float64]
SEAM = 0.4  # points by which neighbours overlap, under the curve's own line, so that no gap shines through
FILLED = 2_500  # steps of all devices up to which the curves are filled


@frozen(eq=False)
class Memory:
    """What the panel shows of one timeline."""

    weights: Floats  # per buffer
    bytes: bool
    limit: float | None
    peaks: list[float]  # per device
    stashed: bool = False  # weight versions are among it
    host: tuple[int, ...] = ()  # per device the most bytes that it has in host memory at once, where any has

    @property
    def top(self) -> float:
        """The level at the top of every strip."""
        return max([self.limit or 0.0, *self.peaks]) or 1.0

    def show(self, level: float) -> str:
        return show_bytes(level) if self.bytes else f"{level:.3g}"

    @property
    def title(self) -> str:
        if self.bytes:
            made = "memory held: activations, values and gradients" + ", stashed weights" * self.stashed
            return made + (f"; in host memory at most {show_bytes(max(self.host))} a device" if self.host else "")
        return "activations held, in shares (1 = all that one device keeps for one microbatch)"


def choose_memory(timeline: Timeline, unit: Any, limit: Any) -> Memory | None:
    """What to show: ``unit`` is "shares", "bytes", True (bytes where they are known) or False.

    Raises:
        RenderError: bytes are wanted but unknown, or the limit is in the other unit.
    """
    if unit not in (True, False, "shares", "bytes"):
        raise RenderError(f"memory={unit!r}: expected True, False, 'shares' or 'bytes'")
    if unit is False or not len(timeline.plan.buffers):
        return None
    counted = isinstance(limit, Activations)
    if unit is True:
        unit = "shares" if counted or timeline.byte_weights is None else "bytes"
    if unit == "bytes" and timeline.byte_weights is None:
        raise RenderError(
            "memory='bytes': the costs do not say the bytes of every stage and value; give activation_bytes "
            "and output_bytes, or draw memory='shares'"
        )
    if limit is not None and counted != (unit == "shares"):
        # A limit in the other unit cannot be drawn on this scale.
        given = f"activations({limit.shares:g})" if counted else f"{limit} bytes"
        raise RenderError(
            f"memory_limit={given} cannot be drawn over memory in {unit}; draw memory="
            + ("'shares'" if counted else "'bytes', with costs that know the bytes")
        )
    level = None if limit is None else float(limit.shares if isinstance(limit, Activations) else limit)
    stashed = bool((timeline.plan.buffers.kind == Buffer.WEIGHT).any())
    if unit == "bytes":
        weights, peaks = timeline.byte_weights, [float(peak) for peak in timeline.peak_bytes or []]
    else:
        weights, peaks = timeline.share_weights, timeline.peak_share
    host = tuple(timeline.host_peak_bytes or ()) if unit == "bytes" and timeline.host_copies else ()
    return None if weights is None else Memory(weights, unit == "bytes", level, peaks, stashed, host)


def steps(timeline: Timeline, memory: Memory, device: int, begin: float, end: float) -> tuple[Floats, Floats]:
    """The curve of one device in a window of time: (times, level from that time on), from ``begin`` on."""
    times, level = timeline.memory(device, memory.weights)
    first = int(np.searchsorted(times, begin, side="right"))
    last = int(np.searchsorted(times, end, side="left"))
    before = level[first - 1] if first else 0.0
    times = np.concatenate([[begin], times[first:last]])
    level = np.concatenate([[before], level[first:last]])
    # What is freed and taken at one instant may differ by a rounding: no hairlines for that.
    seen = np.diff(times, append=end) > 1e-9 * (end - begin)
    if not seen.any():  # nothing takes time
        return times[:1], level[:1]
    return times[seen], level[seen]


def strip(
    timeline: Timeline,
    memory: Memory,
    device: int,
    top: float,
    height: float,
    left: float,
    scale: float,
    begin: float,
    end: float,
    filled: bool,
    prefix: str,
    labelled: bool,
) -> tuple[list[Item], list[Item]]:
    """One device's strip: (what is painted first, the curve and its limit on top)."""
    peak, highest = memory.peaks[device], memory.top
    times, level = steps(timeline, memory, device, begin, end)
    stops = np.append(times[1:], end)
    right = left + (end - begin) * scale
    base = top + height
    xs, xe = left + (times - begin) * scale, left + (stops - begin) * scale
    ys = base - level / highest * (height - 2)
    over = memory.limit is not None and peak > memory.limit * (1 + 1e-9)
    below: list[Item] = [
        Box(
            left,
            top,
            right - left,
            height,
            mix(LANE, "#FFFFFF", 0.4),
            id=f"{prefix}memory-{device}-lane",
            css="memory-lane",
        )
    ]
    if filled:
        for x0, x1, y in zip(xs.tolist(), xe.tolist(), ys.tolist(), strict=True):
            if y < base - 0.01 and x1 > x0:
                below.append(Box(x0, y, x1 - x0 + SEAM, base - y, MEMORY, css="memory-fill"))
    points: list[tuple[float, float]] = []
    for x0, x1, y in zip(xs.tolist(), xe.tolist(), ys.tolist(), strict=True):
        points += [(x0, y), (x1, y)]
    above: list[Item] = [
        Line(
            tuple(points),
            MEMORY_EDGE,
            1.1,
            id=f"{prefix}memory-{device}",
            css="memory",
            tooltip=(f"device {device}: peak {memory.show(peak)}",
                     *([f"in host memory at most {show_bytes(memory.host[device])}"] if memory.host else [])),
        )
    ]
    if memory.limit is not None:
        y = base - memory.limit / highest * (height - 2)
        above.append(
            Line(
                ((left, y), (right, y)),
                LIMIT,
                0.9,
                dashed=True,
                css="limit",
                tooltip=(f"limit {memory.show(memory.limit)}",),
            )
        )
        if labelled:
            above.append(Text(right + 5, y + 2, f"limit {memory.show(memory.limit)}", 8, ink=LIMIT, css="limit"))
    y = top + height / 2
    if height >= 20:
        names: list[Item] = [
            Text(left - 8, y - 5.5, f"device {device}", 9, "r"),
            Text(left - 8, y + 5.5, f"peak {memory.show(peak)}", 8, "r", ink=LIMIT if over else PALE),
        ]
    else:
        names = [
            Text(
                left - 8,
                y,
                f"device {device}: peak {memory.show(peak)}",
                min(8.0, height),
                "r",
                ink=LIMIT if over else PALE,
            )
        ]
    return below, above + names
