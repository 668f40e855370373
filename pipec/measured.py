"""From a measured timeline back to costs: what tasks took, and what it took to hand values over."""

from __future__ import annotations

from statistics import median

import numpy as np
from attrs import evolve

from pipec.costs import Costs, StageCosts
from pipec.errors import SpecError
from pipec.ir import BACKWARDS, TO_HOST, Kind, Lane
from pipec.rescaled import at
from pipec.timeline import Floats, Timeline

NAMES = {
    Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward_input", Kind.BACKWARD_WEIGHT: "backward_weight", Kind.UPDATE: "update",
}


def measured_costs(timeline: Timeline, base: Costs | None = None) -> Costs:
    """Costs with which the plan simulates as it ran: per stage and kind the median over the microbatches, and the
    latency between devices. See :meth:`pipec.Timeline.to_costs`."""
    if not timeline.measured:
        raise SpecError("to_costs() is for a measured timeline, run.trace(); this one was simulated from costs: "
                        "timeline.costs")
    if base is not None and base.unit not in ("", "ms"):
        raise SpecError(f"to_costs(base=): times are measured in ms, but base is in {base.unit}; convert it, or give "
                        "it sizes only")
    base = at(base or timeline.costs, timeline.plan.minibatch)
    base.check(timeline.plan.graph)
    spent = stage_times(timeline)
    stages = {
        stage.name: _stage(base, stage.name, spent[number])
        for number, stage in enumerate(timeline.plan.graph.stages)
    }
    found = latency(timeline, base)
    return evolve(base, stages=stages, latency=base.latency if found is None else found, unit="ms",
                  microbatches=timeline.plan.minibatch)


def stage_times(timeline: Timeline) -> list[dict[str, float]]:
    """Per stage by kind what a whole microbatch took, the median over all that ran; an UPDATE of all stages is shared
    out evenly."""
    plan, table = timeline.plan, timeline.plan.table
    took = timeline.end - timeline.start
    trained = sorted({int(s) for s in table.stage[np.isin(table.kind, BACKWARDS)]})
    samples: list[dict[str, dict[tuple[int, int], float]]] = [{} for _ in plan.graph.stages]
    for task in np.flatnonzero(took > 0).tolist():
        name = NAMES.get(Kind(table.kind[task]))
        if name is None:
            continue
        stage, item = int(table.stage[task]), (int(table.replica[task]), int(table.microbatch[task]))
        users = [stage] if stage >= 0 else trained
        for user in users:
            own = samples[user].setdefault(name, {})
            own[item] = own.get(item, 0.0) + float(took[task]) / len(users)  # slices of a microbatch add up
    return [{name: median(own.values()) for name, own in each.items()} for each in samples]


def _stage(base: Costs, name: str, found: dict[str, float]) -> StageCosts:
    """What was measured of a stage. Of a backward that ran whole the halves are known by their proportion in ``base``,
    or as equal; one that ran in halves takes as much whole."""
    own = base.stages.get(name, StageCosts())
    made = dict(found)
    halves = [made.get("backward_input"), made.get("backward_weight")]
    if "backward" in made and halves == [None, None]:
        known = [base.duration(kind, name) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        whole = base.duration(Kind.BACKWARD, name)
        scale = made["backward"] / whole if whole else 0.0
        made["backward_input"], made["backward_weight"] = (part * scale for part in known)
    elif "backward" not in made and (halves[0] or halves[1]):
        made["backward_input"], made["backward_weight"] = (half or 0.0 for half in halves)
        made["backward"] = made["backward_input"] + made["backward_weight"]
    return evolve(own, **made)  # type: ignore[arg-type]  # all are durations


def latency(timeline: Timeline, base: Costs) -> float | None:
    """What passes between the end of a task and the start of one on another device that does nothing but wait for its
    value, beyond the transfer at ``base.bandwidth``. None where no task waited so.

    The median per direction; both directions of a pair of devices are averaged, so that clocks which differ between
    hosts cancel; the median over the pairs.
    """
    from pipec.simulate import durations

    plan, table = timeline.plan, timeline.plan.table
    transfer: Floats = durations(plan, base) if base.bandwidth is not None else np.zeros(len(table))
    gaps: dict[tuple[int, int], list[float]] = {}
    for device in range(plan.devices):
        free = 0.0
        for task in plan.lanes[device][Lane.COMPUTE].tolist():
            found = _awaited(timeline, task, free)
            if found is not None:
                producer, copy = found
                gap = float(timeline.start[task] - timeline.end[producer] - transfer[copy])
                gaps.setdefault((int(table.device[producer]), device), []).append(gap)
            free = max(free, float(timeline.end[task]))
    pairs: dict[tuple[int, int], list[float]] = {}
    for (source, target), own in gaps.items():
        pairs.setdefault((min(source, target), max(source, target)), []).append(median(own))
    return max(0.0, median(sum(both) / len(both) for both in pairs.values())) if pairs else None


def _awaited(timeline: Timeline, task: int, free: float) -> tuple[int, int] | None:
    """The (producer, COPY) that ``task`` waited for last, on a device ``free`` before; None where it did not."""
    plan, table = timeline.plan, timeline.plan.table
    last, best = free, None
    for need in plan.waits.of(task):
        if table.kind[need] != Kind.COPY:
            last, best = (float(timeline.end[need]), None) if timeline.end[need] > last else (last, best)
            continue
        before = plan.waits.of(int(need))
        if table.gradient[need] >= TO_HOST or len(before) != 1:
            return None  # by way of the host: another latency
        producer = int(before[0])
        if timeline.end[producer] > last:
            last, best = float(timeline.end[producer]), (producer, int(need))
    return best
