"""What the command line is given: pipelines and plans from files, and options that become plans and costs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from pipec.compiler import compile as compile_plan
from pipec.costs import Activations, Costs, StageCosts, activations
from pipec.dsl import Pipeline, chain
from pipec.errors import PipecError
from pipec.ir import Plan
from pipec.schedules import Policy, find_schedule, is_asynchronous, torch_csv
from pipec.spec import Spec

Arguments = argparse.Namespace
COMPILE = (
    "devices",
    "microbatches",
    "schedule",
    "placement",
    "chunks",
    "slices",
    "recompute",
    "update",
    "forward_only",
)
COSTS = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "recompute_cost",
    "update_cost",
    "overlap",
    "latency",
    "bandwidth",
    "output_bytes",
    "activation_bytes",
    "weight_bytes",
    "optimizer",
    "unit",
)
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


class UsageError(Exception):
    """The command was used wrongly: exit status 2."""


@frozen(eq=False)
class Given:
    """A target: a pipeline to compile, or a plan that is compiled already."""

    name: str
    spec: Spec | None = None
    plan: Plan | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        graph = self.plan.graph if self.plan is not None else self.spec.graph if self.spec is not None else None
        return () if graph is None else tuple(stage.name for stage in graph.stages)


def load_targets(targets: Sequence[str], arguments: Arguments) -> list[Given]:
    """The pipelines or plans named, or the chain of ``--stages``.

    Raises:
        UsageError: none is named, or a target and ``--stages`` together.
        PipecError: a file that cannot be read, or holds no pipeline.
    """
    if arguments.stages is not None:
        if targets:
            raise UsageError("give a target or --stages, not both")
        return [Given("chain", chain(arguments.stages).spec)]
    if not targets:
        raise UsageError("give file.py:object, a saved plan.json, or --stages N for a chain of N stages")
    return [load_target(target) for target in targets]


def load_target(target: str) -> Given:
    """One target: ``plan.json``, ``file.py:object``, or ``file.py`` when it holds one pipeline or plan."""
    if target.endswith(".json"):
        return Given(Path(target).stem, plan=Plan.load(_file(target)))
    match = re.fullmatch(r"(.+\.py)(?::([\w.]+))?", target)
    if match is None:
        raise UsageError(f"{target!r} is no target: expected file.py:object or plan.json")
    path, name = _file(match[1]), match[2]
    module = _run(path)
    if name is None:
        found = [key for key, value in vars(module).items() if isinstance(value, (Pipeline, Spec, Plan))]
        if not found:
            raise PipecError(
                f"{path} holds no Pipeline or Plan; name a function that returns one as {path}:function, or make one "
                "outside of functions"
            )
        if len(found) > 1:
            raise PipecError(f"{path} holds several: {', '.join(found)}; name the pipeline or plan as {path}:object")
        name = found[0]
    return _given(_part(module, name, path), f"{path}:{name}")


def _part(module: Any, name: str, path: Path) -> Any:
    """What a script calls ``name``, which may be dotted."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise PipecError(f"{path} has no {name!r}{_hint(module)}")
        value = getattr(value, part)
    return value


def load_schedule(text: str) -> Policy:
    """A schedule by name, a function or object of a script, ``file.py:mine``, or a CSV of PyTorch's pipelining."""
    if text.endswith(".csv"):
        return torch_csv(_file(text))
    match = re.fullmatch(r"(.+\.py):([\w.]+)", text)
    if match is None:
        return find_schedule(text)
    path = _file(match[1])
    return find_schedule(_part(_run(path), match[2], path))


def _file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise PipecError(f"there is no file {name}")
    return path


def _hint(module: Any) -> str:
    found = [key for key, value in vars(module).items() if isinstance(value, (Pipeline, Spec, Plan))]
    return f"; it holds {', '.join(found)}" if found else ""


def _run(path: Path) -> Any:
    """The script as a module, not as ``__main__``; what it prints goes to stderr."""
    spec = importlib.util.spec_from_file_location(f"_pipec_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PipecError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except PipecError:
        raise
    except (Exception, SystemExit) as error:
        raise PipecError(f"{_where(error, path)}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.pop(0)
    return module


def _where(error: BaseException, path: Path) -> str:
    """The last line of the user's script in a traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    rows = [
        row
        for row in traceback.extract_tb(error.__traceback__)
        if Path(row.filename) == path.absolute() or row.filename == str(path)
    ]
    return f"{path}:{rows[-1].lineno}" if rows else str(path)


def _given(value: Any, target: str) -> Given:
    if not isinstance(value, (Pipeline, Spec, Plan)) and callable(value) and not hasattr(value, "parameters"):
        try:
            value = value()
        except PipecError:
            raise
        except Exception as error:
            raise PipecError(f"{target}() failed: {type(error).__name__}: {error}") from None
    if isinstance(value, Plan):
        return Given(value.graph.name, plan=value)
    if isinstance(value, (Pipeline, Spec)):
        return Given(value.name, value.spec)
    raise PipecError(
        f"{target} is a {type(value).__name__}; expected a Pipeline, a Spec, a Plan, or a function that returns one"
    )


def compile_given(given: Given, arguments: Arguments) -> Plan:
    """The plan of a target under the options. Raises UsageError when options do not fit it."""
    return compile_with(given, arguments, arguments.schedule or "1f1b")


def compile_with(given: Given, arguments: Arguments, schedule: str) -> Plan:
    if given.plan is not None:
        wrong = [f"--{name.replace('_', '-')}" for name in COMPILE if getattr(arguments, name, None)]
        if wrong:
            raise UsageError(f"{given.name} is a plan already; {', '.join(wrong)} cannot change it")
        if arguments.memory_limit is not None:
            given.plan.verify(memory_limit=arguments.memory_limit)
        return given.plan
    assert given.spec is not None
    policy: Any = schedule if schedule == "auto" else load_schedule(schedule)
    forward_only = arguments.forward_only or not given.spec.losses
    update = None if arguments.update == "none" else arguments.update
    if arguments.update is None and is_asynchronous(policy) and not forward_only:
        update = "stage"  # the only way there is
    devices = arguments.devices or getattr(policy, "devices", None) or devices_of(given.spec)
    return compile_plan(
        given.spec,
        devices,
        arguments.microbatches or getattr(policy, "microbatches", None) or 2 * devices,
        policy,
        placement=arguments.placement,
        chunks=arguments.chunks,
        slices=arguments.slices or 1,
        recompute=(arguments.recompute or "never").replace("-", "_"),
        update=update,
        forward_only=forward_only,
        costs=costs_of(arguments, given),
        memory_limit=arguments.memory_limit,
    )


def devices_of(spec: Spec) -> int:
    """The number of devices that the stages say they are on."""
    own = [stage.device for stage in spec.stages if stage.device is not None]
    if not own:
        raise UsageError("--devices is needed: the stages do not say their device")
    return max(own) + 1


def costs_of(arguments: Arguments, given: Given) -> Costs | None:
    """The costs of the command line over the plan's own; None when none were given."""
    said = {name: getattr(arguments, name, None) for name in COSTS}
    if all(value is None for value in said.values()):
        return None
    base = (given.plan.costs if given.plan is not None else None) or Costs()
    sizes = {name: said.pop(name) for name in ("output_bytes", "activation_bytes", "weight_bytes")}
    words = {"recompute_cost": "recompute", "update_cost": "update"}
    made = evolve(base, **{words.get(name, name): value for name, value in said.items() if value is not None})
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if sizes:
        made = made.with_stages({name: evolve(made.stages.get(name, StageCosts()), **sizes) for name in given.stages})
    return made


def draw_options(arguments: Arguments) -> dict[str, Any]:
    """Options of a timeline picture."""
    said = {
        "copies": arguments.copies or None,
        "lanes": arguments.lanes or None,
        "memory": arguments.memory,
        "memory_limit": arguments.memory_limit if arguments.memory is not False else None,
        "critical": False if arguments.no_critical else None,
        "devices": arguments.show_devices,
        "microbatches": arguments.show_microbatches,
        "time": arguments.time,
        "width": arguments.width,
    }
    return {name: value for name, value in said.items() if value is not None}


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
