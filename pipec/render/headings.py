"""What a timeline picture says in words: its title, the figures, what tells several timelines apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipec.errors import RenderError
from pipec.render.dot import shorten, text_width
from pipec.render.palette import INK, WARN
from pipec.render.window import View
from pipec.timeline import Timeline, show_bytes

MARGIN = 14.0  # points around the picture


def summary(timeline: Timeline) -> str:
    """The figures of a timeline in one line."""
    unit = f" {timeline.costs.unit}" if timeline.costs.unit else ""
    parts = [f"makespan {timeline.makespan:.5g}{unit}", f"bubble {timeline.bubble:.1%}"]
    if timeline.plan.asynchronous:
        parts = [f"period {timeline.period:.5g}{unit}", f"bubble of a period {timeline.bubble:.1%}"]
    if len(timeline.plan.buffers):
        sizes = timeline.peak_bytes
        peak = f"{max(timeline.peak_share):.3g} activations" if sizes is None else show_bytes(max(sizes))
        parts.append(f"peak {peak} {_where(timeline.peak_share if sizes is None else sizes)}")
    if timeline.copies:
        size = "" if timeline.copy_bytes is None else f" of {show_bytes(timeline.copy_bytes)}"
        parts.append(f"{timeline.copies:,} copies{size}")
    return " · ".join(parts)


def name_of(timeline: Timeline) -> str:
    """What tells a timeline from others beside it."""
    schedule = timeline.plan.schedule
    if timeline.excerpt is not None:
        return f"{schedule}, measured {timeline.excerpt.name}"
    return f"{schedule}, measured" if timeline.measured else schedule


def check_units(timelines: Sequence[Timeline], titles: Sequence[str] | None) -> None:
    """Raise RenderError when timelines have other units of time: one axis shows one."""
    units: dict[str, list[str]] = {}
    for number, timeline in enumerate(timelines):
        units.setdefault(timeline.costs.unit, []).append(titles[number] if titles else name_of(timeline))
    if len(units) < 2:
        return
    told = "; ".join(f"{', '.join(map(repr, own))} {f'in {unit}' if unit else 'without a unit'}"
                     for unit, own in units.items())
    advice = "give all Costs the same unit="
    if "ms" in units and "" in units:  # a measured timeline beside one that was simulated without measured costs
        advice = "for times in ms profile first, costs = pipec.profile(...), then compile(..., costs=costs) or " \
                 "plan.simulate(costs); Costs of your own in ms take unit='ms'"
    raise RenderError(f"one time axis cannot show different units of time: {told}; {advice}")


def _where(peaks: Sequence[float]) -> str:
    """The device with the largest peak, or that all have it."""
    if len(peaks) > 1 and max(peaks) - min(peaks) <= 1e-9 * max(peaks):
        return "on every device"
    return f"(device {int(np.argmax(peaks))})"


def summary_left(title: str, left: float) -> float:
    """Where the figures stand behind a panel's title."""
    return max(MARGIN + text_width(shorten(title, 60), 11) * 1.1 + 14, left)


def headline(timelines: Sequence[Timeline], views: Sequence[View], several: bool) -> list[tuple[str, float, str, str]]:
    plan, plans = timelines[0].plan, [t.plan for t in timelines]
    parts = [", ".join(dict.fromkeys(shorten(p.graph.name, 60 // min(len(plans), 3)) for p in plans[:3]))]
    if not several:
        parts.append(shorten(plan.schedule))
    if len({p.devices for p in plans}) == 1:
        parts.append(f"{plan.devices} device{'s' * (plan.devices > 1)}")
    if len({p.minibatch for p in plans}) == 1:
        each = " a minibatch" if any(t.whole.asynchronous for t in timelines) else ""
        parts.append(f"{plan.minibatch} microbatch{'es' * (plan.minibatch > 1)}{each}")
    if plan.slices > 1 and len({p.slices for p in plans}) == 1:
        parts.append(f"{plan.slices} slices")
    if timelines[0].whole.asynchronous and not several:
        parts.append(f"weights {shorten(timelines[0].whole.weights)}")
    if plan.recompute != "never" and not several:
        parts.append(f"recompute {shorten(plan.recompute.replace('_', ' '))}")
    if plan.update and not several and not timelines[0].whole.asynchronous:
        parts.append("one update" if plan.update == "all" else f"update per {plan.update}")
    excerpt = None if several else timelines[0].excerpt
    if excerpt is None and all(t.measured for t in timelines):
        parts.append("measured")
    rows = [(" · ".join(parts), 15.0, INK, "title")]
    if excerpt is not None:
        rows.append((f"one measured step of an asynchronous plan: {excerpt.name}", 12.0, INK, "title"))
    if not several:
        rows.append((summary(timelines[0]), 11.0, "#333333", "summary"))
    notes = list(dict.fromkeys(v.note for v in views if v.note))
    return rows + [(note, 10.0, WARN, "note") for note in notes[:3]]
