"""Measuring: the environment of a benchmark process, interleaved rounds, and tables."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).with_name("RESULTS.md")

# glibc hands every block above 128 KiB back to the kernel when it is freed and takes it anew, page fault by page
# fault, under a lock that all threads of the process share. Activations are such blocks: without this, two threads
# wait for each other in the kernel. 32 MiB is the largest threshold that every glibc accepts.
# OMP and MKL: threads that a library starts itself get one intra-op thread as well.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def prepare() -> None:
    """Start the script again with :data:`ENVIRONMENT` set (glibc reads it once, at the start), one intra-op thread."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], dict(os.environ) | ENVIRONMENT)
    torch.set_num_threads(1)


class Quiet:
    """Watches from its creation on how much of the machine went to anything but this process and its children."""

    def __init__(self) -> None:
        self.begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: the clock, busy time of all cores (stolen time included), own CPU time."""
        stat = Path("/proc/stat")
        busy = 0.0
        if stat.exists():
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, stat.read_text().split("\n")[0].split()[1:9])
            busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, sum(os.times()[:4])

    def __str__(self) -> str:
        clock, busy, own = (after - before for before, after in zip(self.begin, self._now(), strict=True))
        if not busy:
            return "unknown what other programs used meanwhile"
        others = max(busy - own, 0.0) / clock
        return f"other programs used {others:.2f} of {os.cpu_count()} cores meanwhile"


class Times(NamedTuple):
    """Seconds per call in each round: by the clock, and of CPU time over all threads of this process."""

    wall: list[float]
    cpu: list[float]


def interleave(contenders: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, Times]:
    """Every contender runs once a round, and every round begins with another one.

    So a slow moment of the machine meets all of them, and a ratio is taken within a round.
    """
    names = list(contenders)
    times = {name: Times([], []) for name in names}
    for number in range(rounds + warmup):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            cpu, wall = time.process_time(), time.perf_counter()
            contenders[name]()
            if number >= warmup:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    return times


class Ratio(NamedTuple):
    """The median of ratios taken round by round, and their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """``above / below`` round by round."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    if len(each) < 2:
        return Ratio(each[0], each[0], each[0])
    low, _, high = statistics.quantiles(each, n=4, method="inclusive")
    return Ratio(statistics.median(each), low, high)


def milliseconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times) * 1e3:.1f}"


class Table(NamedTuple):
    """Rows of text under a title; the first column is left-aligned, the others right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        body = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths,
                                                                                              strict=True)))
            for line in lines
        ]
        return "\n".join([self.title, *body])

    def markdown(self) -> str:
        head = "| " + " | ".join(self.columns) + " |"
        rule = "|" + "|".join("---" if i == 0 else "--:" for i in range(len(self.columns))) + "|"
        return "\n".join([f"### {self.title}", "", head, rule, *("| " + " | ".join(row) + " |" for row in self.rows)])


def machine() -> str:
    """The machine, torch and the day, for the head of a table."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        model = found.group(1).strip() if found else model
    return (f"{len(os.sched_getaffinity(0))} cores, {model}; Python {platform.python_version()}, "
            f"torch {torch.__version__}; {datetime.date.today().isoformat()}")


def publish(section: str, head: str, tables: Sequence[Table], markdown: bool) -> None:
    """Print the tables; with ``markdown`` also put them into RESULTS.md in place of the section's last ones."""
    for table in tables:
        print(table.text(), end="\n\n")
    print(head)
    if not markdown:
        return
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    made = "\n\n".join([begin, head, *(table.markdown() for table in tables), end])
    text = RESULTS.read_text()
    if begin not in text:
        raise RuntimeError(f"{RESULTS.name} has no section {section!r}")
    before, rest = text.split(begin)
    RESULTS.write_text(before + made + rest.split(end)[1])
    print(f"section {section!r} of {RESULTS.name} written")
