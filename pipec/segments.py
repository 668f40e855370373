"""Recompute by segments: only what enters a segment of stages is kept; everything inside is computed anew, in turn.

A plan names its segments in ``recompute``: ``segments 0,4,8`` begin at the stages 0, 4 and 8. Inside a segment a
RECOMPUTE reads what the RECOMPUTE of the stage before it made, which travels between devices as any value does; what
comes from an earlier segment was kept where it is read (PipeMare, arXiv 1910.05124, appendix on recompute).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from pipec.spec import Graph

Again = dict[int, tuple[int, ...]]  # value: the stages that read it recomputed
_TEXT = re.compile(r"segments ([0-9]+(?:,[0-9]+)*)")


def segments_text(firsts: Sequence[int]) -> str:
    """How a plan names segments that begin at the stages ``firsts``."""
    return "segments " + ",".join(map(str, firsts))


def first_stages(recompute: str) -> tuple[int, ...]:
    """The first stage of each segment; none for other kinds of recompute."""
    match = _TEXT.fullmatch(recompute)
    return tuple(map(int, match[1].split(","))) if match else ()


def recomputed_values(graph: Graph, recompute: str) -> Again:
    """Per value made anew inside a segment, the readers that take it from there: those of the maker's own segment.

    Stages without a backward compute nothing anew; what they make is kept by its readers.
    """
    firsts = first_stages(recompute)
    made: Again = {}
    for number, value in enumerate(graph.values if firsts else ()):
        segment = bisect_right(firsts, value.producer)
        readers = tuple(r for r in value.readers if graph.stages[r].backward and bisect_right(firsts, r) == segment)
        if readers and graph.stages[value.producer].backward:
            made[number] = readers
    return made
