"""The arguments of each subcommand of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipec.cli_options import add_compile_options, add_target, add_window_options, count, numbers


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of a table for people")


def _output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=what)


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    _json(parser)
    _output(parser, "write the plan: .json to load again, anything else as text")


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    _json(parser)


def check_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    parser.add_argument(
        "--races",
        action="store_true",
        help="hold back every task in turn as long as the plan allows, and look for one that did not wait for it",
    )


def trace_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    _output(parser, "the trace: .json, or .json.gz (default: the pipeline's name and .trace.json)")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    _output(parser, "the CSV (default: print it)")


def draw_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser)
    _output(
        parser,
        "the picture: .svg, .png or .dot, without a suffix .svg (default: the pipeline's name and .svg)",
    )
    parser.add_argument(
        "--graph",
        choices=("timeline", "stages", "tasks"),
        default="timeline",
        help="what to draw (default: timeline)",
    )
    add_window_options(parser)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="file.py:object with a pipeline (file.py alone when it holds one), or several saved plans; "
        "none: see --stages",
    )
    add_compile_options(parser, several=True)
    _json(parser)
    _output(parser, "one picture of all schedules on one time axis; without a suffix .svg")
    add_window_options(parser)


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_compile_options(parser, several=True)
    group = parser.add_argument_group("what is tried; costs and activations are those of --microbatches")
    group.add_argument("--try-microbatches", type=numbers, metavar="4,8,16",
                       help="numbers of microbatches (default: once, twice and four times the devices)")
    group.add_argument("--overhead", type=float, default=0.0, metavar="T",
                       help="time of every task beside what depends on its rows (default: 0)")
    _json(parser)


def schedules_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=count, metavar="D", help="devices of the example (default: 4)")
    parser.add_argument("--microbatches", type=count, metavar="M", help="microbatches of the example (default: 8)")
    _json(parser)
