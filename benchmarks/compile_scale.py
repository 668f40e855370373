"""CPU time and memory of compile, verify and simulate as plans grow, beside PyTorch's own lowering of the same order.

    python benchmarks/compile_scale.py [--schedules zb-v ...] [--repeat 3] [--full zb-v] [--markdown]

Every schedule is measured in a child process of its own, whose largest resident set is its memory. It goes through
all shapes in turn, ``repeat`` times, so that a slow moment of the machine meets all of them; given are medians of CPU
time. Each shape has about twice the tasks of the one before. A full garbage collection comes before each run: one of
all that is imported takes a tenth of a second wherever it falls, whatever the plan.

PyTorch's part is what ``_PipelineScheduleRuntime`` does with an order when it loads one: check it and add sends and
receives. It gets pipec's order, in a child process where both take turns, up to 32 devices x 256 microbatches; the
schedules named by ``--full`` once at full size as well, which takes it half a minute each.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rounds import Quiet, Table, machine, prepare, publish

import pipec

SHAPES = ((16, 128), (32, 128), (32, 256), (64, 256), (64, 512))
LOWERED = 3  # shapes at which PyTorch's lowering is measured several times; the last one once
CHUNKS = {  # per device
    "gpipe": 1, "1f1b": 1, "eager-1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-1p": 1, "zb-2p": 1,
    "interleaved-1f1b": 2, "looped-bfs": 2, "interleaved-zero-bubble": 2,
    "wave": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2,
}
BESIDE = ("interleaved-1f1b", "interleaved-zero-bubble", "zb-v", "dualpipe-v")


def run(schedule: str, devices: int, microbatches: int) -> dict[str, float]:
    """Seconds of CPU time of one pass; ``compile`` ends in a proof of the plan, which ``verify`` repeats."""
    net = pipec.chain(CHUNKS[schedule] * devices)
    gc.collect()
    at = [time.process_time()]
    plan = pipec.compile(net, devices, microbatches, schedule)
    at.append(time.process_time())
    timeline = plan.simulate()
    timeline.makespan, timeline.bubble, timeline.peak_share  # noqa: B018 - computed when asked for
    at.append(time.process_time())
    plan.verify()
    at.append(time.process_time())
    compiled, simulated, verified = (after - before for before, after in pairwise(at))
    return {"tasks": len(plan), "compile": compiled, "simulate": simulated, "verify": verified,
            "total": compiled + simulated}


def lower(path: str, devices: int, stages: int, microbatches: int) -> float:
    """Seconds of CPU time of PyTorch's lowering of the order in a CSV, without reading the file."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _PipelineScheduleRuntime

    stage: Any = SimpleNamespace(num_stages=stages, group_size=devices, group_rank=0, stage_index=0, is_last=False)
    runtime = _PipelineScheduleRuntime([stage], microbatches, loss_fn=lambda *_: None)
    PipelineScheduleMulti._load_csv(runtime, path)
    gc.collect()
    begin = time.process_time()
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return time.process_time() - begin


def child(schedule: str, repeat: int, beside: bool, full: bool) -> None:
    """Measure one schedule and print the figures as JSON."""
    shapes = SHAPES[:LOWERED] if beside else SHAPES
    made: list[list[dict[str, float]]] = [[] for _ in SHAPES]
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    for turn in range(repeat):
        for number, (devices, microbatches) in enumerate(SHAPES):
            if number >= len(shapes) and not (full and turn == 0 and number == len(SHAPES) - 1):
                continue
            figures = run(schedule, devices, microbatches)
            if beside:
                with tempfile.TemporaryDirectory() as folder:
                    path = str(Path(folder) / "order.csv")
                    stages = CHUNKS[schedule] * devices
                    pipec.compile(pipec.chain(stages), devices, microbatches, schedule).to_torch_csv(path)
                    figures["lowering"] = lower(path, devices, stages, microbatches)
            made[number].append(figures)
    medians = [{key: statistics.median(row[key] for row in rows) for key in rows[0]} if rows else None for rows in made]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"shapes": medians, "MiB": peak, "imported": imported}))


def measured(schedule: str, *options: str) -> dict[str, Any]:
    """The figures of a child process."""
    command = [sys.executable, __file__, "--child", schedule, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    print(f"{schedule} done", file=sys.stderr)
    return dict(json.loads(done.stdout))


def tables(schedules: list[str], repeat: int, full: list[str]) -> list[Table]:
    largest, growth, beside = [], [], []
    for schedule in schedules:
        figures = measured(schedule, "--repeat", str(repeat))
        totals = [row["total"] for row in figures["shapes"]]
        last = figures["shapes"][-1]
        ratios = [after / before for before, after in pairwise(totals)]
        largest.append([
            schedule, f"{CHUNKS[schedule]}", f"{last['tasks']:,.0f}",
            *(f"{last[key]:.2f}" for key in ("compile", "verify", "simulate", "total")),
            f"{last['total'] / last['tasks'] * 1e6:.1f}", f"{figures['MiB']:.0f}",
            f"{figures['MiB'] - figures['imported']:.0f}", f"{max(ratios):.2f}",
        ])
        growth.append([schedule, *(f"{total:.2f}" for total in totals)])
    for schedule in (s for s in BESIDE if s in schedules):
        options = ["--repeat", str(repeat), "--beside", *(["--full-size"] if schedule in full else [])]
        for (devices, microbatches), row in zip(SHAPES, measured(schedule, *options)["shapes"], strict=True):
            if row is not None:
                ratio = row["lowering"] / row["total"]
                beside.append([f"{schedule}, {devices} x {microbatches}", f"{row['tasks']:,.0f}", f"{row['total']:.2f}",
                               f"{row['lowering']:.2f}", f"{ratio:.1f}"])
    devices, microbatches = SHAPES[-1]
    made = [
        Table(
            f"{devices} devices, {microbatches} microbatches: seconds of CPU time",
            ["schedule", "chunks", "tasks", "compile and verify", "of it verify", "simulate", "total", "us per task",
             "peak MiB", "of it beyond imports", "largest growth per doubling"],
            largest,
        ),
        Table("Totals by devices x microbatches", ["schedule", *(f"{d} x {m}" for d, m in SHAPES)], growth),
    ]
    if beside:
        made.append(Table(
            "Beside PyTorch's lowering of the same order",
            ["schedule, devices x microbatches", "tasks of pipec", "pipec: order, compile, verify, simulate",
             "PyTorch: lowering", "ratio"],
            beside,
        ))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(CHUNKS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--full", nargs="*", default=[], metavar="SCHEDULE", help="lowered by PyTorch at full size too")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--full-size", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.repeat, options.beside, options.full_size)
        return
    quiet = Quiet()
    made = tables(options.schedules, options.repeat, options.full)
    publish("compile_scale", f"{machine()}; medians of {options.repeat}; {quiet}.", made, options.markdown)


if __name__ == "__main__":
    prepare()
    main()
