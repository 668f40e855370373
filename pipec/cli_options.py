"""Options that several subcommands share, and what their words mean: sizes, limits, numbers, times."""

from __future__ import annotations

import argparse
import re

from pipec.costs import Activations, activations
from pipec.errors import PipecError

UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def size(text: str) -> float:
    """Bytes: ``1500``, ``2MiB``, ``1.5 GB``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1500, 2MiB or 1.5GB")
    return int(float(match[1]) * UNITS[match[2].lower()])


def limit(text: str) -> float | Activations:
    """A memory limit: a size, or ``4activations``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(?:a|activations?)\s*", text)
    try:
        return activations(float(match[1])) if match else size(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no limit; write 8GiB or 4activations") from None
    except PipecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers(text: str) -> tuple[int, ...]:
    """``0-3,7``: 0 1 2 3 7."""
    made: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:\s*-\s*([0-9]+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text!r}: write numbers such as 0-3,7")
        made += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(made)


def times(text: str) -> tuple[float, float]:
    """``0:100``."""
    try:
        begin, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write begin and end such as 0:100") from None
    return begin, end


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="file.py:object (a Pipeline, Spec or Plan, or a function that returns one), file.py alone when it holds "
        "one pipeline or plan, or a saved plan.json; none: see --stages",
    )


def add_compile_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Options of ``pipec.compile`` and of its costs."""
    group = parser.add_argument_group("compiling")
    group.add_argument("--stages", type=count, metavar="S", help="a chain of S stages instead of a target")
    group.add_argument("--devices", type=count, metavar="D", help="number of devices")
    group.add_argument(
        "--microbatches", type=count, metavar="M", help="number of microbatches (default: twice the devices)"
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="names, file.py:function or a CSV of PyTorch's pipelining, separated by commas (default: all)"
        if several
        else "a name of `pipec schedules`, auto, file.py:function, or a CSV of PyTorch's pipelining (default: 1f1b)",
    )
    group.add_argument("--placement", choices=("linear", "looped", "v"), help="default: the schedule's own")
    group.add_argument("--chunks", type=count, metavar="V", help="chunks per device, for a looped placement")
    group.add_argument("--slices", type=count, metavar="K", help="slices of a sequence per microbatch")
    group.add_argument(
        "--recompute",
        type=lambda text: text.replace("_", "-"),
        choices=("never", "always", "except-last"),
        help="default: never",
    )
    group.add_argument("--update", choices=("none", "stage", "all"),
                       help="UPDATE tasks (default: none, and stage for asynchronous schedules)")
    group.add_argument("--forward-only", action="store_true", help="no backward, for evaluation")
    group.add_argument(
        "--memory-limit", type=limit, metavar="SIZE", help="per device: 8GiB, or 4activations (in shares)"
    )
    group = parser.add_argument_group("costs, of one stage and one microbatch, in any unit of time")
    for name, text in (
        ("forward", "a forward (default: 1)"),
        ("backward-input", "the input half of a backward (default: 1)"),
        ("backward-weight", "the weight half of a backward (default: 1)"),
        ("backward", "a whole backward (default: its halves together)"),
        ("recompute-cost", "a recompute (default: as forward)"),
        ("update-cost", "an update (default: 0)"),
        ("overlap", "factor on tasks that run as one (default: 1)"),
        ("latency", "added to every copy's arrival (default: 0)"),
    ):
        group.add_argument(f"--{name}", type=float, metavar="T", help=text)
    group.add_argument("--bandwidth", type=size, metavar="SIZE", help="bytes per unit of time between devices")
    group.add_argument("--output-bytes", type=size, metavar="SIZE", help="of every value, such as 2MiB")
    group.add_argument("--activation-bytes", type=size, metavar="SIZE", help="kept by every stage for its backward")
    group.add_argument("--weight-bytes", type=size, metavar="SIZE", help="of every stage's parameters")
    group.add_argument(
        "--optimizer", type=float, metavar="X",
        help="bytes of optimizer state per byte of weights: 0 for SGD, 1 with momentum, 2 for Adam (default: 2)",
    )
    group.add_argument("--unit", help="the unit of time, for titles and tables")


def add_window_options(parser: argparse.ArgumentParser) -> None:
    """Options of a timeline picture."""
    group = parser.add_argument_group("the timeline picture")
    group.add_argument("--copies", action="store_true", help="an arrow per copy, skips dashed")
    group.add_argument("--lanes", action="store_true", help="the copy lanes of each device")
    group.add_argument("--memory", type=_memory, metavar="UNIT", help="shares, bytes, or no")
    group.add_argument("--no-critical", action="store_true", help="do not outline the critical path")
    group.add_argument("--show-devices", type=numbers, metavar="0-3,7", help="only these devices")
    group.add_argument("--show-microbatches", type=numbers, metavar="0-7", help="only these microbatches")
    group.add_argument("--time", type=times, metavar="A:B", help="only this part of the time")
    group.add_argument("--width", type=float, metavar="POINTS", help="of the time axis")


def _memory(text: str) -> bool | str:
    if text not in ("shares", "bytes", "no", "yes"):
        raise argparse.ArgumentTypeError(f"{text!r}: write shares, bytes, yes or no")
    return {"no": False, "yes": True}.get(text, text)
