"""What several examples use: the GPUs there are, a progress bar and a fair timer."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch


def gpus(count: int, most: int | None = None) -> list[str] | None:
    """A GPU for each of ``count`` logical devices, ``most`` different ones, in turn; None where there is no GPU."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator().type
    there = min(torch.accelerator.device_count(), most or count)
    return [f"{kind}:{number % there}" for number in range(count)]


def progress(steps: int, say: Callable[[], str] = str) -> Iterator[int]:
    """Count to ``steps`` and draw a bar with what ``say`` returns; on a terminal it stays on one line."""
    live, began, shown = sys.stderr.isatty(), time.perf_counter(), 0.0
    for step in range(steps):
        yield step
        now, done = time.perf_counter(), step + 1
        if done == steps or (live and now - shown > 0.1):
            shown, filled = now, 30 * done // steps
            line = f"  [{'#' * filled}{'.' * (30 - filled)}] {done}/{steps}  {now - began:.0f} s  {say()}"
            sys.stderr.write(f"\r{line}\x1b[K" if live else f"{line}\n")
            sys.stderr.flush()
    if live:
        sys.stderr.write("\n")


def interleaved(ways: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Of every way the median milliseconds, and the cores it had: CPU time by wall time.

    The ways take turns, so that a busy machine slows all of them alike.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    cores: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, once in ways.items():
            began, work = time.perf_counter(), time.process_time()
            once()
            took = time.perf_counter() - began
            if number:  # the first round warms up
                times[name].append(took * 1e3)
                cores[name].append((time.process_time() - work) / took)
    return (
        {name: statistics.median(own) for name, own in times.items()},
        {name: statistics.median(own) for name, own in cores.items()},
    )
