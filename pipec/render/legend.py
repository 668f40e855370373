"""The legend: swatches of what is in the picture, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from pipec.ir import Kind
from pipec.render.dot import Box, Item, Line, Text, text_width
from pipec.render.lanes import Tasks
from pipec.render.palette import CRITICAL, HUES, INK, LANE, OTHER, STEP, WORDS, shade

LEFT = 14.0


def legend_items(
    all_tasks: Sequence[Tasks],
    lanes: bool,
    copies: bool,
    y: float,
    right: float,
) -> tuple[list[Item], float]:
    """Swatches of what is in the picture, in rows that fit its width."""
    entries: list[tuple[list[tuple[str, str, float]], str, str]] = []
    kinds = [Kind(k) for k in sorted({k for tasks in all_tasks for k in tasks.kinds_shown})]
    most = max(tasks.chunks for tasks in all_tasks)
    for kind in kinds:
        chunks = most if kind is not Kind.UPDATE else 1
        swatches = [(shade(kind, c, chunks), "#555555", 0.5) for c in range(chunks)]
        word = WORDS[kind]
        if chunks > 1:
            word += f" (a device's chunks 1 to {chunks})" if kind == kinds[0] else ""
        entries.append((swatches, word, WORDS[kind].replace(", ", "-")))
    if any(t.timeline.excerpt is None for t in all_tasks):
        entries.append(([], "number: microbatch", "number"))
    excerpts = {t.timeline.plan.minibatch > 1 for t in all_tasks if t.timeline.excerpt is not None}
    words = {False: "number: minibatch", True: "5.2: microbatch 2 of minibatch 5, as in result.finished"}
    entries += [([], words[cut], "number") for cut in sorted(excerpts)]
    if lanes and any(t.has_copies for t in all_tasks):
        entries.append(([(HUES[Kind.COPY], "#555555", 0.5)], "copy", "copy"))
    if any(t.critical_shown for t in all_tasks):
        entries.append(([("#FFFFFF", CRITICAL, 1.8)], "critical path", "critical"))
    if any(t.has_groups for t in all_tasks):
        entries.append(([("#FFFFFF", INK, 1.1)], "runs as one", "group"))
    if any(t.timeline.plan.asynchronous for t in all_tasks):
        entries.append(([("#FFFFFF", STEP, 1.4)], "end of a step", "step"))
    if any(t.versions for t in all_tasks):
        entries.append(([], "w2: reads weight version 2", "version"))
    if any(t.timeline.plan.slices > 1 for t in all_tasks):
        entries.append(([], "3.1: slice 1 of microbatch 3", "slice"))
    if any(t.others_shown for t in all_tasks):
        entries.append(([(OTHER, OTHER, 0.5)], "other microbatches", "others"))
    entries.append(([(LANE, LANE, 0.5)], "bubble", "bubble"))
    items: list[Item] = []
    x, height = LEFT, 11.0
    for swatches, word, css in entries:
        wide = 15.0 * len(swatches) + 5 + text_width(word, 9.5) * 1.06 + 16
        if x > LEFT and x + wide > right:
            x, y = LEFT, y + height + 6
        for fill, border, pen in swatches:
            items.append(Box(x, y, 14, height, fill, border, pen, css=f"legend {css}"))
            x += 15
        items.append(Text(x + 4, y + height / 2, word, 9.5, css="legend"))
        x += wide - 15.0 * len(swatches)
    if copies:
        items += _legend_arrows(all_tasks, x, y, height)
    return items, y + height


def _legend_arrows(all_tasks: Sequence[Tasks], x: float, y: float, height: float) -> list[Item]:
    items: list[Item] = []
    for dashed, word in ((False, "copy"), (True, "skip")):
        if any(tasks.has_skips if dashed else tasks.has_copies for tasks in all_tasks):
            items += [
                Line(
                    ((x, y + height / 2), (x + 22, y + height / 2)),
                    "#666666",
                    0.8,
                    dashed,
                    True,
                    css="legend",
                ),
                Text(x + 27, y + height / 2, word, 9.5, css="legend"),
            ]
            x += 27 + text_width(word, 9.5) + 16
    return items
