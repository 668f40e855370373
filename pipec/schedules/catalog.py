"""The table of schedules: what each is called, where it runs by default, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import fields, frozen

LEGEND = """\
P devices, M microbatches, v chunks per device, k slices per microbatch; F, B, W: one device's forward and the input
and weight halves of its backward for one microbatch; F&B: forward and whole backward run as one; c: one hand-over
between devices. Bubble: makespan minus busy time.
Peak: activations held on the worst device, in microbatches, never more than M in synchronous schedules."""


@frozen
class ScheduleInfo:
    """One row: a schedule's name, default placement, closed forms as text, source, and a line about it."""

    name: str
    placement: str
    bubble: str
    peak: str
    source: str
    summary: str


@frozen(repr=False)
class ScheduleTable:
    """Rows by schedule, in the order of the registry; prints as a table."""

    rows: tuple[ScheduleInfo, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __iter__(self) -> Iterator[ScheduleInfo]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        names = [f.name for f in fields(ScheduleInfo)]
        cells = [names, *([getattr(row, name) for name in names] for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
                 for row in cells]
        also = [f"{name} is {other}" for name, other in self.aliases]
        return "\n".join([*lines, "", *([f"Also: {', '.join(also)}."] if also else []), LEGEND])

    __repr__ = __str__


def describe(name: str, policy: Any) -> ScheduleInfo:
    """The row of a policy: its attributes, and the first line of its docstring."""
    doc = (type(policy).__doc__ or "").strip().split("\n")[0].rstrip(".")
    placement = str(getattr(policy, "placement", "linear"))
    bubble, peak, source = (str(getattr(policy, key, "")) for key in ("bubble", "peak", "source"))
    return ScheduleInfo(name, placement, bubble, peak, source, doc)


def table_of(registry: Mapping[str, Any], aliases: Mapping[str, str]) -> ScheduleTable:
    """The table of a registry of policy makers by name, and other names of some."""
    return ScheduleTable(tuple(describe(name, make()) for name, make in registry.items()), tuple(aliases.items()))
