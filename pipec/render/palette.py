"""Colours: one hue per kind of task, one shade per chunk of a device.

The hues keep apart for the common kinds of colour blindness as well (checked in the tests): they differ in
lightness where their hues come close.
"""

from __future__ import annotations

from pipec.ir import Kind

HUES: dict[Kind, str] = {
    Kind.FORWARD: "#5B9BD5",
    Kind.RECOMPUTE: "#F7E79A",
    Kind.BACKWARD: "#F2A14A",
    Kind.BACKWARD_INPUT: "#C23B22",
    Kind.BACKWARD_WEIGHT: "#8FD0A0",
    Kind.COPY: "#B4B4C0",
    Kind.REDUCE: "#2F2A26",
    Kind.UPDATE: "#6B2E85",
}
WORDS: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
    Kind.COPY: "copy",
    Kind.REDUCE: "reduce",
    Kind.UPDATE: "update",
}
STEP = "#3B3F8F"
CRITICAL, LIMIT = "#C4001A", "#C4001A"
LANE, OTHER, GRID, AXIS = "#EFEFEF", "#CFCFCF", "#D5D5D5", "#444444"
MEMORY, MEMORY_EDGE = "#BFD9C9", "#2F6B4F"
INK, PALE, WARN = "#111111", "#666666", "#8A4B00"


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(colour: str, other: str, part: float) -> str:
    """``colour`` with ``part`` of ``other`` in it."""
    made = (round(a + (b - a) * part) for a, b in zip(_parts(colour), _parts(other), strict=True))
    return "#" + "".join(f"{value:02X}" for value in made)


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a task: chunk 0 of ``chunks`` is the lightest; a single one is near its hue."""
    hue = HUES[kind]
    if chunks <= 1:
        return mix(hue, "#FFFFFF", 0.25)
    first, last = (0.0, 0.4) if luminance(hue) > 190 else (-0.55, 0.1)  # a pale hue has room towards black
    at = first + (last - first) * chunk / (chunks - 1)
    return mix(hue, "#FFFFFF", -at) if at < 0 else mix(hue, "#000000", at)


def luminance(colour: str) -> float:
    """How light a colour looks, from 0 to 255."""
    red, green, blue = _parts(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def ink_on(colour: str) -> str:
    """Black or white, whichever is read more easily on ``colour``."""
    return INK if luminance(colour) > 125 else "#FFFFFF"
