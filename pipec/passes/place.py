"""Placement: which stages form a chunk and on which device each chunk lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipec.costs import Costs
from pipec.errors import Problem as SpecProblem
from pipec.errors import ScheduleError, SpecError, raise_all
from pipec.given import meant
from pipec.ir import Chunk, Kind
from pipec.spec import Spec

PLACEMENTS = ("linear", "looped", "v")


def place(
    spec: Spec, devices: int, placement: Any = None, chunks: int | None = None, costs: Costs | None = None,
    default: str | tuple[int, ...] = "linear",
) -> tuple[Chunk, ...]:
    """Cut the stages into chunks and give each a device.

    Args:
        placement: "linear" (one chunk a device), "looped" (chunk c on device c mod D), "v" (two chunks a device,
            down and back up), a mapping from stage names to devices, or one device per stage. None: the
            ``device=`` of the stages if there are any, else ``default``, a name or the device of every chunk.
        chunks: chunks per device for "looped".
        costs: neighbours are grouped so that the dearest chunk is as cheap as possible.

    Raises:
        ScheduleError: too few stages, an unknown placement, or a device without a stage.
    """
    own = [stage.device for stage in spec.stages]
    if placement is None:
        if any(device is not None for device in own):
            return _mapped(spec, devices, _inherit(own))
        if isinstance(default, tuple):
            return _listed(spec, devices, default, costs or Costs())
        placement = default
    elif any(device is not None for device in own):
        raise ScheduleError(
            f"pipeline {spec.name!r}: stages carry device=, so placement={placement!r} cannot be given as well; "
            "drop one of the two"
        )
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise ScheduleError(
                f"unknown placement {placement!r}; known are {', '.join(PLACEMENTS)}, a mapping from stage names to "
                "devices, or one device per stage"
            )
        return _regular(spec, devices, placement, chunks, costs or Costs())
    if isinstance(placement, Mapping):
        problems = [f"stage {s.name!r} has no device" for s in spec.stages if s.name not in placement]
        names = {s.name for s in spec.stages}
        problems += [f"{name!r} is no stage{meant(name, names)}" for name in placement if name not in names]
        if problems:
            raise ScheduleError(f"placement of pipeline {spec.name!r}: " + "; ".join(problems))
        return _mapped(spec, devices, [placement[s.name] for s in spec.stages])
    if isinstance(placement, Sequence):
        if len(placement) != len(spec.stages):
            raise ScheduleError(
                f"placement lists {len(placement)} devices, but pipeline {spec.name!r} has {len(spec.stages)} stages"
            )
        return _mapped(spec, devices, list(placement))
    raise ScheduleError(f"placement must be a name, a mapping or a list of devices, got {placement!r}")


def _inherit(own: list[int | None]) -> list[int]:
    """Stages without ``device=`` join the stage before them (the first one: device 0)."""
    filled, last = [], 0
    for device in own:
        last = last if device is None else device
        filled.append(last)
    return filled


def _mapped(spec: Spec, devices: int, of_stage: Sequence[Any]) -> tuple[Chunk, ...]:
    problems = []
    for stage, device in zip(spec.stages, of_stage, strict=True):
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < devices:
            problems.append(
                SpecProblem(f"stage {stage.name!r}: device {device!r} is not one of 0..{devices - 1}", stage.location)
            )
    for device in range(devices):
        if device not in of_stage:
            problems.append(SpecProblem(f"device {device} of {devices} has no stage; compile for fewer devices"))
    raise_all(f"placement of pipeline {spec.name!r}", problems, ScheduleError)
    chunks: list[Chunk] = []
    for number, device in enumerate(of_stage):
        if chunks and chunks[-1].device == device:
            last = chunks.pop()
            chunks.append(Chunk(last.index, device, (*last.stages, number)))
        else:
            chunks.append(Chunk(len(chunks), device, (number,)))
    return tuple(chunks)


def _regular(spec: Spec, devices: int, placement: str, chunks: int | None, costs: Costs) -> tuple[Chunk, ...]:
    stages = len(spec.stages)
    if chunks is not None and chunks < 1:
        raise ScheduleError(f"chunks must be at least 1 per device, got {chunks}")
    per_device = 1
    if placement == "v":
        per_device = 2
    elif placement == "looped":
        per_device = chunks or max(1, stages // devices)
    if chunks is not None and chunks != per_device:
        raise ScheduleError(f"placement {placement!r} has {per_device} chunks per device, but chunks={chunks}")
    count = devices * per_device
    if stages < count:
        each = "" if per_device == 1 else f" with {per_device} chunks each"
        most = stages // per_device
        advice = (
            f"compile for at most {most} device{'s' * (most > 1)}" if stages >= per_device
            else "choose a linear placement"
        )
        raise ScheduleError(
            f"pipeline {spec.name!r} has {stages} stages, too few for {devices} devices{each}, which need {count}; "
            f"{advice} or declare more stages"
        )
    folded = [2 * devices - 1 - c if placement == "v" and c >= devices else c % devices for c in range(count)]
    return _cut(spec, folded, costs)


def _listed(spec: Spec, devices: int, of_chunk: tuple[int, ...], costs: Costs) -> tuple[Chunk, ...]:
    """As many chunks as a schedule lists devices for."""
    written = 1 + max(of_chunk)
    if written != devices:
        raise ScheduleError(f"the schedule is written for {written} devices, but devices={devices}; leave devices out")
    if len(spec.stages) < len(of_chunk):
        raise ScheduleError(
            f"pipeline {spec.name!r} has {len(spec.stages)} stages, too few for the {len(of_chunk)} chunks that the "
            "schedule is written for; declare more stages"
        )
    return _cut(spec, of_chunk, costs)


def _cut(spec: Spec, of_chunk: Sequence[int], costs: Costs) -> tuple[Chunk, ...]:
    """Chunks of neighbouring stages on the given devices, balanced by what the stages cost."""
    weights = [
        costs.duration(Kind.FORWARD, s.name) + costs.duration(Kind.BACKWARD, s.name) for s in spec.stages
    ]
    made = []
    first = 0
    for index, (device, size) in enumerate(zip(of_chunk, balance(weights, len(of_chunk)), strict=True)):
        made.append(Chunk(index, device, tuple(range(first, first + size))))
        first += size
    return tuple(made)


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Sizes of ``parts`` non-empty runs of ``weights`` whose heaviest is as light as possible.

    Among equals, runs are as even in number as a left-to-right fill allows. Dynamic programming, O(n^2 parts).
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise SpecError(f"cannot cut {count} stages into {parts} non-empty parts")
    if len(set(weights)) == 1:
        return [count // parts + (part < count % parts) for part in range(parts)]
    before = [0.0]
    for weight in weights:
        before.append(before[-1] + weight)
    best = list(before)  # heaviest run of the first n weights in one part
    cuts: list[list[int]] = []
    for part in range(2, parts + 1):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(part, count + 1):
            for at in range(part - 1, end):
                heaviest = max(best[at], before[end] - before[at])
                if heaviest < row[end]:
                    row[end], cut[end] = heaviest, at
        best = row
        cuts.append(cut)
    sizes, end = [], count
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(sizes)]
