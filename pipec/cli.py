"""The command line: look at plans, times and pictures without writing a script.

Every subcommand is one :class:`Command`; a new one is a function, its arguments, and a row in ``COMMANDS``.
Exit status: 0 all went well, 1 pipec found something wrong, 2 the command was used wrongly. Errors go to stderr, in
one line unless several problems are listed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from attrs import frozen

from pipec.cli_arguments import (
    check_arguments,
    compare_arguments,
    draw_arguments,
    export_arguments,
    plan_arguments,
    schedules_arguments,
    simulate_arguments,
    trace_arguments,
    tune_arguments,
)
from pipec.cli_input import (
    Given,
    UsageError,
    compile_given,
    costs_of,
    draw_options,
    load_targets,
)
from pipec.cli_report import (
    compare_rows,
    comparison,
    figures,
    heading,
    one_line,
    pictured,
    show_json,
    table,
    told,
    tuned,
)
from pipec.compiler import compile as compile_plan
from pipec.dsl import chain
from pipec.errors import PipecError, PlanError
from pipec.races import check_races
from pipec.render import draw
from pipec.render.trace import time_unit
from pipec.schedules import SCHEDULES, is_asynchronous

Arguments = argparse.Namespace


@frozen
class Command:
    """A subcommand: its one-line help, examples, arguments, and what it does."""

    name: str
    help: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def run_plan(arguments: Arguments) -> int:
    plan = compile_given(_one(arguments), arguments)
    if arguments.output is not None:
        if arguments.output.suffix == ".json":
            plan.save(arguments.output)
        else:
            arguments.output.write_text(str(plan), encoding="utf-8")
        print(f"wrote {arguments.output}: {len(plan)} tasks")
    elif arguments.json:
        from pipec.files import to_dict

        show_json(to_dict(plan))
    else:
        print(plan, end="")
    return 0


def run_simulate(arguments: Arguments) -> int:
    given = _one(arguments)
    timeline = compile_given(given, arguments).simulate(costs_of(arguments, given))
    if arguments.json:
        show_json(figures(timeline))
    else:
        print(timeline)
    return 0


def run_check(arguments: Arguments) -> int:
    plan = compile_given(_one(arguments), arguments)
    print(plan.verify())
    if arguments.races:
        print(f"  races: none; {check_races(plan)} pairs of tasks touch the same memory, each in a fixed order")
    return 0


def run_trace(arguments: Arguments) -> int:
    given = _one(arguments)
    output = arguments.output or Path(_file_name(given) + ".trace.json")
    timeline = compile_given(given, arguments).simulate(costs_of(arguments, given))
    timeline.to_chrome_trace(output)
    scaled = "" if time_unit(timeline.costs.unit) else f"; 1 {timeline.costs.unit or 'unit of time'} shown as 1 ms"
    print(f"wrote {output}: {len(timeline.plan)} tasks{scaled}; open it in ui.perfetto.dev or chrome://tracing")
    return 0


def run_export(arguments: Arguments) -> int:
    plan = compile_given(_one(arguments), arguments)
    text = plan.to_torch_csv(arguments.output)
    if arguments.output is None:
        print(text, end="")
    else:
        print(f"wrote {arguments.output}: {plan.devices} ranks, {len(plan.chunks)} stages, "
              f"{plan.microbatches} microbatches")
    return 0


def _file_name(given: Given) -> str:
    return re.sub(r"[^\w.-]+", "_", given.name) or "pipeline"


def run_draw(arguments: Arguments) -> int:
    given = _one(arguments)
    output = arguments.output or Path(_file_name(given)).with_suffix(".svg")
    if arguments.graph == "stages" and given.plan is None and arguments.devices is None:
        picture = draw(given.spec, output, graph="stages")
    elif arguments.graph != "timeline":
        options: dict[str, Any] = (
            {"pipeline": given.spec} if arguments.graph == "stages" and given.spec is not None else {}
        )
        picture = draw(compile_given(given, arguments), output, graph=arguments.graph, **options)
    else:
        plan = compile_given(given, arguments)
        picture = draw(plan.simulate(costs_of(arguments, given)), output, **draw_options(arguments))
    print(f"wrote {picture.path}")
    return 0


def _one(arguments: Arguments) -> Given:
    return load_targets([arguments.target] if arguments.target else [], arguments)[0]


def run_compare(arguments: Arguments) -> int:
    targets = arguments.targets
    given = load_targets(targets, arguments)
    rows = compare_rows(given, arguments)
    good = [row for row in rows if row.timeline is not None]
    if arguments.json:
        show_json(
            [
                figures(row.timeline) | {"name": row.name}
                if row.timeline is not None
                else {"name": row.name, "error": row.reason}
                for row in rows
            ]
        )
    else:
        heads = {heading(row.timeline) for row in rows if row.timeline is not None}
        if len(heads) == 1:
            print(f"{heads.pop()}\n")
        print(comparison(rows))
    if not good:
        raise PlanError("no schedule serves this pipeline with these options")
    if arguments.output is not None:
        options = draw_options(arguments)
        drawn = pictured(rows, named=bool(arguments.schedule or (targets and given[0].plan is not None)))
        titles = [row.name for row in drawn] if len(drawn) > 1 else None
        picture = draw([row.timeline for row in drawn], arguments.output, titles=titles, **options)
        left = "" if len(drawn) == len(good) else " of the synchronous schedules; name others with --schedule"
        print(f"wrote {picture.path}{left}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def run_tune(arguments: Arguments) -> int:
    found = tuned(_one(arguments), arguments)
    if arguments.json:
        show_json([
            {"schedule": trial.schedule, "microbatches": trial.microbatches, "recompute": trial.recompute}
            | ({"error": trial.reason} if trial.timeline is None else {"time": trial.time} | figures(trial.timeline))
            for trial in found.trials
        ])
    elif found.trials[0].plan is not None:
        print(found)
    best = found.best  # told on stderr when there is none
    if not arguments.json:
        mode = found.trials[0].recompute.replace("_", "-")
        print(f"\nthe fastest: --schedule {best.schedule} --microbatches {best.minibatch} --recompute {mode}")
    return 0


def what_of(policy: Any) -> str:
    """The first paragraph of a policy's own documentation."""
    text = type(policy).__doc__ or ""
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


def run_schedules(arguments: Arguments) -> int:
    devices, microbatches = arguments.devices or 4, arguments.microbatches or 8
    rows = []
    for name, make in SCHEDULES.items():
        policy = make()
        entry: dict[str, Any] = {
            "name": name,
            "placement": getattr(policy, "placement", "linear"),
            "what": what_of(policy),
        }
        try:
            update = "stage" if is_asynchronous(policy) else None
            timeline = compile_plan(chain(2 * devices), devices, microbatches, name, update=update).simulate()
            entry |= {"bubble": timeline.bubble, "peak_share": max(timeline.peak_share)}
        except PipecError as error:
            entry |= {"error": one_line(error)}
        rows.append(entry)
    if arguments.json:
        show_json(rows)
        return 0
    print(
        f"With {devices} devices, {microbatches} microbatches, 2 stages a device, forward and both halves of "
        "backward equally long; of asynchronous schedules a steady step:\n"
    )
    print(
        table(
            ["schedule", "placement", "bubble", "peak activations"],
            [
                [e["name"], e["placement"], f"{e['bubble']:.1%}", f"{e['peak_share']:.4g}"]
                if "bubble" in e
                else [e["name"], f"- {e['error']}"]
                for e in rows
            ],
        )
    )
    print()
    for entry in rows:
        print(f"{entry['name']}: {entry['what']}")
    return 0


COMMANDS = (
    Command(
        "plan",
        "compile a pipeline and print every device's tasks",
        (
            "pipec plan net.py:unet --devices 2 --microbatches 8 --schedule 1f1b",
            "pipec plan --stages 8 --devices 4 -o plan.json",
        ),
        plan_arguments,
        run_plan,
    ),
    Command(
        "simulate",
        "print makespan, bubble, memory and copies of a plan",
        (
            "pipec simulate net.py:unet --devices 2 --forward 1.2 --latency 0.05 --unit ms",
            "pipec simulate plan.json --json",
        ),
        simulate_arguments,
        run_simulate,
    ),
    Command(
        "check",
        "prove the invariants of a plan, and look for races between its lanes",
        ("pipec check plan.json --races", "pipec check net.py:unet --devices 4 --schedule zb-v --races"),
        check_arguments,
        run_check,
    ),
    Command(
        "compare",
        "one table, and one picture, of all schedules or of several plans",
        (
            "pipec compare --stages 8 --devices 4 --microbatches 16 -o all.svg",
            "pipec compare net.py:unet --devices 4 --memory-limit 6activations",
            "pipec compare one.json two.json",
        ),
        compare_arguments,
        run_compare,
    ),
    Command(
        "tune",
        "try schedules, microbatches and recompute, and print the fastest within the memory",
        (
            "pipec tune --stages 8 --devices 4 --memory-limit 4activations",
            "pipec tune net.py:unet --devices 4 --microbatches 8 --try-microbatches 4,8,16 --overhead 0.1",
        ),
        tune_arguments,
        run_tune,
    ),
    Command(
        "draw",
        "draw a timeline, the stages, or the tasks of a plan",
        (
            "pipec draw net.py:unet --devices 4 -o unet.svg --copies",
            "pipec draw net.py:unet --graph stages -o stages.png",
            "pipec draw --stages 64 --devices 64 --microbatches 256 --show-devices 0-7 --time 0:200",
        ),
        draw_arguments,
        run_draw,
    ),
    Command(
        "trace",
        "write the simulated timeline as a Chrome/Perfetto trace",
        (
            "pipec trace net.py:unet --devices 2 --forward 1.2 --unit ms -o unet.json.gz",
            "pipec trace --stages 8 --devices 4 --schedule gpipe -o chain.json",
        ),
        trace_arguments,
        run_trace,
    ),
    Command(
        "export",
        "write the order as a CSV that PyTorch's pipelining runs",
        (
            "pipec export --stages 8 --devices 4 --microbatches 8 --schedule zb-v -o zb-v.csv",
            "pipec export plan.json",
        ),
        export_arguments,
        run_export,
    ),
    Command(
        "schedules",
        "list the schedules and what they cost",
        ("pipec schedules", "pipec schedules --devices 8 --microbatches 32"),
        schedules_arguments,
        run_schedules,
    ),
)


def make_parser() -> Parser:
    """The parser of all subcommands."""
    every = "\n".join(f"  {command.examples[0]}" for command in COMMANDS)
    parser = Parser(
        prog="pipec",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Plan, simulate and draw pipeline parallelism for PyTorch.",
        epilog=f"examples:\n{every}\n\npipec SUBCOMMAND --help says more about each.",
    )
    from pipec import __version__

    parser.add_argument("--version", action="version", version=f"pipec {__version__}")
    made = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for command in COMMANDS:
        examples = "\n".join(f"  {example}" for example in command.examples)
        sub = made.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(sub)
        sub.set_defaults(run=command.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. With PIPEC_DEBUG set, an error keeps its traceback."""
    arguments = make_parser().parse_args(argv)
    prog = arguments.parser.prog
    try:
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"{prog}: error: {one_line(error)} (see {prog} --help)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; no second complaint
        return 0
    except Exception as error:
        if os.environ.get("PIPEC_DEBUG"):
            raise
        own = isinstance(error, (PipecError, OSError))
        print(f"{prog}: error: " + (told(error) if own else one_line(f"{type(error).__name__}: {error}")),
              file=sys.stderr)
        return 1
