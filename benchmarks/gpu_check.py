"""Check the cuda backend on one GPU: numbers, races, speed, overlap, memory. See gpu_check.sh."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import gpu_checks
import gpu_ranks
import torch
from gpu_readings import Row
from gpu_target import Target

from pipec.runtime.placement import accelerators

PASSED, FAILED, NO_GPU = 0, 1, 77
LIMIT = 330.0  # seconds after which no further check begins
CUT = 350.0  # seconds after which the one that runs is given up, and with it the process: a GPU may stand still

Check = Callable[[Target], list[Row]]

CHECKS: dict[str, Check] = {
    "equality": gpu_checks.equality,
    "precision": gpu_checks.precision,
    "shared": gpu_checks.shared,
    "stress": gpu_checks.stress,
    "ranks": gpu_ranks.ranks,
    "speed": gpu_checks.speed,
    "overlap": gpu_checks.overlap,
    "memory": gpu_checks.memory,
    "peers": gpu_checks.peers,
}
QUICK: dict[str, Check] = CHECKS | {
    "equality": lambda target: gpu_checks.equality(target, schedules=("gpipe", "1f1b", "zb-h1")),
    "stress": lambda target: gpu_checks.stress(target, steps=20),
    "ranks": lambda target: gpu_ranks.ranks(target, schedules=("1f1b", "zb-v")),
    "speed": lambda target: gpu_checks.speed(target, rounds=3),
}


def run_checks(
    target: Target, checks: dict[str, Check], say: Callable[[str], None] = print, limit: float = LIMIT,
    cut: float = CUT, leave: Callable[[int], None] = os._exit,
) -> int:
    """Run the checks, print the table, and return the exit status. A check that raises, or has no time left, fails.

    One that still runs after ``cut`` seconds ends the process by ``leave(1)``, after the table of what there is.
    """
    rows: list[Row] = []
    running: list[str] = []
    start = time.perf_counter()

    def give_up() -> None:
        faulthandler.dump_traceback()
        rows.append(Row(running[-1], f"still running after {cut:.0f} s", "runs", ok=False))
        conclude(rows, say)
        sys.stdout.flush()
        leave(FAILED)

    timer = threading.Timer(cut, give_up)
    timer.daemon = True
    timer.start()
    for name, check in checks.items():
        began = time.perf_counter()
        if began - start > limit:
            rows.append(Row(name, f"not run: {limit:.0f} s are over", "runs", ok=False))
            continue
        running.append(name)
        deterministic(name in ("equality", "precision", "shared", "stress"))
        try:
            found = check(target)
        except Exception as error:
            traceback.print_exc()
            found = [Row(name, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}", "runs", ok=False)]
        rows += found
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    timer.cancel()
    return conclude(rows, say)


def conclude(rows: Sequence[Row], say: Callable[[str], None]) -> int:
    """Print the table and what fails; the exit status."""
    say(table(rows))
    failed = [row.name for row in rows if row.ok is False]
    say(f"\n{len(failed)} of {sum(row.ok is not None for row in rows)} checks fail" + (": " if failed else "")
        + ", ".join(failed))
    return FAILED if failed else PASSED


def deterministic(wanted: bool) -> None:
    """Where bits are compared, kernels must give the same ones twice."""
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cuda.enable_flash_sdp(not wanted)
    torch.backends.cuda.enable_mem_efficient_sdp(not wanted)
    torch.backends.cuda.enable_cudnn_sdp(not wanted)
    torch.set_float32_matmul_precision("highest" if wanted else "high")


def table(rows: Sequence[Row]) -> str:
    """Rows as lines of four columns."""
    marks = {True: "ok", False: "FAILS", None: ""}
    cells = [("check", "measured", "goal", ""), *((r.name, r.measured, r.goal, marks[r.ok]) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in cells)


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", action="append", choices=list(CHECKS), help="this check; may be given several times")
    options.add_argument("--quick", action="store_true", help="fewer schedules, steps and rounds")
    chosen = options.parse_args(argv)
    kind, count = accelerators()
    if not count:
        print("gpu_check: torch finds no GPU here, so nothing was checked "
              f"(torch {torch.__version__}); the same checks run on the CPU's lanes in tests/test_gpu_check.py, "
              "and on a stand-in for a GPU with make standin")
        return NO_GPU
    target = Target(torch.device(kind, 0))
    print(f"{target.describe()}, torch {torch.__version__}, "
          f"Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}\n")
    checks = QUICK if chosen.quick else CHECKS
    return run_checks(target, {name: check for name, check in checks.items() if not chosen.only or name in chosen.only})


if __name__ == "__main__":
    sys.exit(main())
