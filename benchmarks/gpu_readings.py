"""What the GPU checks read out of measurements: pure functions of a profiler's trace and of numbers of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

Span = tuple[float, float]


@frozen
class Row:
    """One line of the table; ``ok`` None: for information only."""

    name: str
    measured: str
    goal: str = ""
    ok: bool | None = None


def device_spans(trace: Mapping[str, Any]) -> tuple[list[Span], list[Span]]:
    """Begin and end, in microseconds, of the copies and of the kernels in a Chrome trace of torch.profiler.

    Copies count where no kernel runs: on the streams of copy lanes. What a compute stream takes over into its own
    memory is a copy too, but in its own order. Ranges that a script names (a task's, say) stand in such a trace as
    events of the GPU, around the kernels; they are neither.
    """
    events = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    computing = {_stream(event) for event in kernels}
    return _spans(event for event in copies if _stream(event) not in computing), _spans(kernels)


def _stream(event: Mapping[str, Any]) -> tuple[Any, Any]:
    told = event.get("args", {})
    return told.get("device", event.get("pid")), told.get("stream", event.get("tid"))


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]


def overlapping(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """The share of the copies' time in which a kernel runs as well."""
    busy, sent = merged(kernels), merged(copies)
    total = sum(end - start for start, end in sent)
    beside = sum(max(0.0, min(end, until) - max(start, since)) for start, end in sent for since, until in busy)
    return beside / total if total else 0.0


def merged(spans: Sequence[Span]) -> list[Span]:
    """The time that the spans cover, in spans that do not touch each other."""
    made: list[Span] = []
    for start, end in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((start, end))
    return made


def overlap_row(trace: Mapping[str, Any], least: float = 0.5) -> Row:
    """The line about copies beside compute; it fails where the trace shows none of either."""
    copies, kernels = device_spans(trace)
    name, goal = "copies beside compute", f"over {least:.0%}"
    if not copies or not kernels:
        return Row(name, f"the trace has {len(copies)} copies and {len(kernels)} kernels", goal, ok=False)
    share = overlapping(copies, kernels)
    return Row(name, f"{share:.0%} of the time of {len(copies)} copies", goal, share > least)


def memory_row(before: int, peak: int, gradients: int, predicted: float | None, most: float = 0.05) -> Row:
    """The line about peak memory, from bytes.

    Args:
        before: in use when the step began, ``.grad`` included.
        peak: most in use in the step.
        gradients: of all parameters: a step adds to copies of ``.grad``, so that a failure leaves it alone.
        predicted: by the simulator for activations, values and gradients; None where it does not know.
    """
    name, goal = "peak memory of activations", f"{most:.0%}"
    if not predicted:
        return Row(name, "the simulator does not know the bytes", goal, ok=False)
    error = (peak - before - gradients) / predicted - 1
    return Row(name, f"{error:+.1%} of the predicted {predicted / 2**20:.0f} MiB", goal, abs(error) <= most)
