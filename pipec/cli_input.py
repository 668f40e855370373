"""What the command line works on: pipelines and plans from files, and their plans and costs under the options."""

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
from pipec.compiler import scheduled
from pipec.costs import Costs, StageCosts
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

_SCRIPT = re.compile(r"(.+\.py):([\w.]+)")


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
    match = _SCRIPT.fullmatch(text)
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
        own = bool(_SCRIPT.fullmatch(arguments.schedule or ""))
        given_too = [name for name in COMPILE if getattr(arguments, name, None) and not (own and name == "schedule")]
        wrong = [f"--{name.replace('_', '-')}" for name in given_too]
        if wrong:
            raise UsageError(f"{given.name} is a plan already; {', '.join(wrong)} cannot change it")
        plan = scheduled(given.plan, load_schedule(schedule)) if own else given.plan  # whose weight rule it may need
        if arguments.memory_limit is not None:
            plan.verify(memory_limit=arguments.memory_limit)
        return plan
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
