"""Plans edited by hand: whatever number stands in a text or a file, it is refused or serves, at no great cost."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import models
import pytest
from models import data, kept_streams

import pipec
from pipec.files import from_dict, to_dict

__all__ = ["kept_streams"]

KINDS = [("1f1b", "never", None), ("zb-h1", "never", None), ("1f1b", "always", "stage")]
HUGE = (2_000_000_000, 10**20)
MOST = 32 << 20  # bytes; the plans here need well under one MiB


def use(read: Any) -> None:
    """Read a plan and do with it what a script could; only pipec's own errors may come of it."""
    try:
        plan = read()
        str(plan)
        plan.simulate()
        plan.verify()
        to_dict(plan)
    except pipec.PipecError:
        return


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in nested lists and dicts a whole number stands."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))
    elif type(value) is int:
        yield path


@pytest.mark.parametrize(("schedule", "recompute", "update"), KINDS)
def test_every_number_of_a_text_may_be_huge(schedule: str, recompute: str, update: Any) -> None:
    text = str(pipec.compile(pipec.chain(2), 2, 2, schedule, recompute=recompute, update=update))
    tracemalloc.start()
    for number in HUGE:
        for match in re.finditer(r"\d+", text):
            edited = text[: match.start()] + str(number) + text[match.end() :]
            use(lambda edited=edited: pipec.Plan.parse(edited))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST


@pytest.mark.parametrize(("schedule", "recompute", "update"), KINDS)
def test_every_number_of_a_file_may_be_huge(schedule: str, recompute: str, update: Any) -> None:
    saved = to_dict(pipec.compile(pipec.chain(2), 2, 2, schedule, recompute=recompute, update=update))
    tracemalloc.start()
    for number in (HUGE[0], -1):
        for *path, last in places(saved):
            edited = copy.deepcopy(saved)
            inside: Any = edited
            for key in path:
                inside = inside[key]
            inside[last] = number
            use(lambda edited=edited: from_dict(edited))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST


def test_a_number_that_names_nothing_is_told_where_the_plan_is_read() -> None:
    text = str(pipec.compile(pipec.chain(2), 2, 2))
    with pytest.raises(pipec.PlanError, match=r"form: buffer \d+ .* names a stage, value, microbatch"):
        pipec.Plan.parse(text.replace("a0[1]", "a0[7]"))
    saved = json.loads(json.dumps(to_dict(pipec.compile(pipec.chain(2), 2, 2))))
    saved["lanes"][0][0][0] = 99
    with pytest.raises(pipec.PlanError, match="the compute lane of device 0 holds %99"):
        from_dict(saved)


def test_an_edited_plan_that_would_wait_for_ever_is_not_run() -> None:
    """The second device's first backward is put in front of its own forward."""
    net = models.chain(2)
    lines = str(pipec.compile(net, 2, 2)).splitlines()
    forward = next(i for i, line in enumerate(lines) if re.match(r"  %\d+ +1F1 ", line))
    backward = next(i for i, line in enumerate(lines) if re.match(r"  %\d+ +1B1 ", line))
    lines[forward], lines[backward] = lines[backward], lines[forward]
    plan = pipec.Plan.parse("\n".join(lines))
    with pytest.raises(pipec.PlanError, match="1B1"):
        pipec.Runner(net, plan, backend="threads")
    with pipec.Runner(net, pipec.Plan.parse(str(pipec.compile(net, 2, 2))), backend="threads") as run:
        run.step(**data())
