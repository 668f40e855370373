"""What the command line prints: tables for people, figures for programs, and comparisons."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from pipec.cli_input import Given, UsageError, compile_with, costs_of, devices_of, load_schedule
from pipec.errors import PlanError, ScheduleError
from pipec.ir import Kind
from pipec.periods import settled
from pipec.schedules import ALIASES, SCHEDULES
from pipec.timeline import Timeline, show_bytes
from pipec.tuning import RECOMPUTE, Tuning, brief, tune

Arguments = argparse.Namespace
OPTIONS = {
    "activation_bytes": "--activation-bytes SIZE",
    "output_bytes": "--output-bytes SIZE",
    "pipec.activations(": "--memory-limit 4activations",
    "chunks=": "--chunks V",
    "slices=": "--slices K",
    "memory='shares'": "--memory shares",
    "update='stage'": "--update stage",
    "weights of stage": "--weight-bytes SIZE",
}


def one_line(message: object) -> str:
    """A message of several lines in one."""
    return "; ".join(part.strip() for part in re.split(r"[\r\n]+", str(message)) if part.strip())


def told(error: object) -> str:
    """An error as people read it: a single problem in one line, several one below the other.

    Where a message speaks of arguments of Python functions, the options that set them are named below it.
    """
    text = str(error).strip()
    single = re.fullmatch(r"(.*): 1 problem\n  1\. ([^\n]*)(?:\n +(at [^\n]*))?", text)
    if single is not None:
        text = f"{single[1]}: {single[2]}" + (f" ({single[3]})" if single[3] else "")
    options = [option for argument, option in OPTIONS.items() if argument in text]
    if not options:
        return text
    hint = f"on the command line: {', '.join(options)}"
    return f"{text}\n  {hint}" if "\n" in text else f"{text} ({hint})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a head, the first column to the left and the others to the right.

    A row shorter than the head ends in free text, such as why there are no figures.
    """
    full = [row for row in rows if len(row) == len(head)]
    width = [max(len(row[i]) for row in [head, *full]) for i in range(len(head))]
    width[0] = max(len(row[0]) for row in [head, *rows])

    def line(row: Sequence[str]) -> str:
        if len(row) < len(head):
            return row[0].ljust(width[0]) + "  " + " ".join(row[1:])
        return "  ".join([row[0].ljust(width[0]), *(c.rjust(w) for c, w in zip(row[1:], width[1:], strict=True))])

    return "\n".join(line(row).rstrip() for row in [head, *rows])


def figures(timeline: Timeline) -> dict[str, Any]:
    """The figures of a timeline as plain values, for JSON."""
    plan = timeline.plan
    peaks, memory = timeline.peak_bytes, timeline.weight_memory
    return {
        "pipeline": plan.graph.name,
        "schedule": plan.schedule,
        "devices": plan.devices,
        "microbatches": plan.minibatch,
        "minibatches": plan.minibatches,
        "weights": plan.weights,
        "unit": timeline.costs.unit,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "period": timeline.period,
        "step": timeline.step,
        "bubble_time": timeline.bubble_time,
        "bubble": timeline.bubble,
        "copies": timeline.copies,
        "copy_bytes": timeline.copy_bytes,
        "per_device": [
            {
                "device": d,
                "busy": timeline.busy[d],
                "useful": timeline.useful[d],
                "recompute": timeline.recompute[d],
                "peak_share": timeline.peak_share[d],
                "peak_bytes": None if peaks is None else peaks[d],
                "weight_memory": None if memory is None else asdict(memory[d]) | {"total": memory[d].total},
            }
            for d in range(plan.devices)
        ],
    }


def heading(timeline: Timeline) -> str:
    """What a comparison is about."""
    plan = timeline.plan
    unit = f", time in {timeline.costs.unit}" if timeline.costs.unit else ""
    return f"{plan.graph.name}: {plan.devices} devices, {plan.minibatch} microbatches{unit}"


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@frozen
class Row:
    """A schedule in a comparison: its timeline, or why there is none."""

    name: str
    timeline: Timeline | None
    reason: str = ""


def compare_rows(given: Sequence[Given], arguments: Arguments) -> list[Row]:
    """A row per saved plan, or per schedule for one pipeline."""
    if all(item.plan is not None for item in given):
        plans = [(item, compile_with(item, arguments, arguments.schedule or "")) for item in given]
        return [Row(item.name, plan.simulate(costs_of(arguments, item))) for item, plan in plans]
    if len(given) > 1:
        raise UsageError("compare takes one pipeline, or several plans")
    names = [part.strip() for part in arguments.schedule.split(",")] if arguments.schedule else list(SCHEDULES)
    if not all(names):
        raise UsageError(f"--schedule {arguments.schedule!r} has no name between, before or after its commas")
    rows = []
    for name in names:
        try:
            rows.append(Row(name, compile_with(given[0], arguments, name).simulate(costs_of(arguments, given[0]))))
        except (ScheduleError, PlanError) as error:
            if name not in SCHEDULES | ALIASES:
                raise
            rows.append(Row(name, None, brief(error)))
    return rows


def tuned(given: Given, arguments: Arguments) -> Tuning:
    """What the options try."""
    if given.spec is None:
        raise UsageError(f"{given.name} is a plan already; tune takes a pipeline")
    devices = arguments.devices or devices_of(given.spec)
    names = [part.strip() for part in arguments.schedule.split(",")] if arguments.schedule else None
    options = {name: getattr(arguments, name) for name in ("placement", "chunks", "slices", "update")
               if getattr(arguments, name) not in (None, "none")}
    return tune(
        given.spec, devices, arguments.try_microbatches or (devices, 2 * devices, 4 * devices),
        schedules=None if names is None else [load_schedule(name) for name in names],
        recompute=RECOMPUTE if arguments.recompute is None else [arguments.recompute.replace("-", "_")],
        costs=costs_of(arguments, given), costs_at=arguments.microbatches or 2 * devices, overhead=arguments.overhead,
        memory_limit=arguments.memory_limit, **options, forward_only=arguments.forward_only,
    )


def copies_of_step(timeline: Timeline) -> int:
    """The copies of one step, of a steady one in an asynchronous plan."""
    plan = timeline.plan
    if not plan.asynchronous:
        return timeline.copies
    return int((plan.table.kind[settled(plan).ids(plan.minibatches - 1)] == Kind.COPY).sum())


def comparison(rows: Sequence[Row]) -> str:
    """The table of a comparison: times and copies of one step, a steady one of asynchronous schedules."""
    weighed = any(row.timeline is not None and row.timeline.weight_memory is not None for row in rows)
    known = any(row.timeline is not None and row.timeline.peak_bytes is not None for row in rows)
    head = [
        "schedule",
        "step time",
        "bubble",
        "bubble %",
        "peak activations",
        *(["peak memory"] if known else []),
        *(["weights, optimizer"] if weighed else []),
        "copies",
    ]
    made, refused = [], dict[str, str]()
    for row in rows:
        if row.timeline is None:
            first = refused.setdefault(str(row.reason), row.name)
            made.append([row.name, f"- {row.reason}" if first == row.name else f"- as {first}"])
            continue
        t = row.timeline
        mark = " *" if t.plan.asynchronous else ""
        weights = [show_bytes(max(own.total for own in t.weight_memory or []))] if weighed else []
        peak = [] if not known else ["unknown" if t.peak_bytes is None else show_bytes(max(t.peak_bytes))]
        made.append(
            [
                f"{row.name}{mark}",
                f"{t.step:.6g}",
                f"{t.bubble_time:.6g}",
                f"{t.bubble:.1%}",
                f"{max(t.peak_share):.4g}",
                *peak,
                *weights,
                f"{copies_of_step(t):,}",
            ]
        )
    steady = any(row.timeline is not None and row.timeline.plan.asynchronous for row in rows)
    note = "\n* asynchronous: of a steady step; bubble of the period, devices not joined" if steady else ""
    return table(head, made) + note


def pictured(rows: Sequence[Row], named: bool) -> list[Row]:
    """The rows that one picture shows: all that were asked for by name, else the synchronous ones.

    An asynchronous plan lays out several minibatches, on whose time axis those of single ones would be too small.
    """
    good = [row for row in rows if row.timeline is not None]
    short = [row for row in good if row.timeline is not None and not row.timeline.plan.asynchronous]
    return good if named or not short else short
