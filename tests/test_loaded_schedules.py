"""Plans from files and text whose schedule or weight rule is the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import fails, run
from models import chain, data

import pipec
from pipec.rules import Reads, Rule
from pipec.schedules import B, F, Order, Problem

SCRIPT = """
import numpy as np
import pipec
from pipec.rules import Rule

class OneOlder(Rule):
    name, longest = "one-older", 1

    def versions(self, reads):
        return np.maximum(reads.at_forward - 1, 0)

class Older(pipec.PipeDream):
    weights = OneOlder()

older = Older(name="older")
"""


class OneOlder(Rule):
    """Forwards read weights an update older than the newest."""

    name, longest = "one-older", 1

    def versions(self, reads: Reads) -> Any:
        return np.maximum(reads.at_forward - 1, 0)


class Older(pipec.PipeDream):  # type: ignore[misc]
    weights = OneOlder()


OLDER = Older(name="older")


def in_turn(problem: Problem) -> Order:
    """Every microbatch forward and back before the next."""
    for device in range(problem.devices):
        own = problem.on(device)
        yield [task for m in range(problem.microbatches) for task in (
            *(F(chunk, m) for chunk in own), *(B(chunk, m) for chunk in own[::-1]))]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def losses(net: pipec.Pipeline, plan: pipec.Plan) -> list[torch.Tensor]:
    found: list[Any] = []
    with pipec.Runner(net, plan, optimizer=sgd, seed=0) as run_:
        for number in range(4):
            found += run_.step(**data(4, number)).losses
        found += run_.flush().losses
    return found


def read_back(plan: pipec.Plan, path: Path) -> dict[str, Callable[..., pipec.Plan]]:
    plan.save(path / "plan.json")
    return {
        "load": lambda **given: pipec.Plan.load(path / "plan.json", **given),
        "parse": lambda **given: pipec.Plan.parse(str(plan), **given),
    }


def test_a_rule_of_ones_own_comes_back_with_its_schedule(tmp_path: Path) -> None:
    net = chain(3)
    plan = pipec.compile(net, 3, 2, OLDER, update="stage")
    for name, read in read_back(plan, tmp_path).items():
        loaded = read(schedule=OLDER)
        assert loaded == plan, name
        loaded.verify()
        assert loaded.simulate().weight_memory == plan.simulate().weight_memory
        assert losses(chain(3), loaded) == losses(chain(3), plan)


def test_without_its_schedule_the_error_says_how_to_give_it(tmp_path: Path) -> None:
    for read in read_back(pipec.compile(chain(3), 3, 2, OLDER, update="stage"), tmp_path).values():
        plan = read()
        told = r"unknown weight rule 'one-older'; .* pipec\.Plan\.load\(path, schedule=\.\.\.\)"
        with pytest.raises(pipec.PlanError, match=told):
            plan.verify()
        with pytest.raises(pipec.PlanError, match=told):
            pipec.Runner(chain(3), plan, optimizer=sgd)


def test_another_schedule_than_the_plan_s_is_refused(tmp_path: Path) -> None:
    plan = pipec.compile(pipec.chain(3), 3, 2, OLDER, update="stage")
    for read in read_back(plan, tmp_path).values():
        with pytest.raises(pipec.PlanError, match="was compiled with schedule 'older', not with 'pipedream'"):
            read(schedule="pipedream")
        with pytest.raises(pipec.PlanError, match="with weight rule 'one-older', but schedule 'older' has 'stash'"):
            read(schedule=pipec.PipeDream(name="older"))
        with pytest.raises(pipec.ScheduleError, match="unknown schedule 'oldest'"):
            read(schedule="oldest")


def test_a_loaded_plan_of_ones_own_schedule_serves_fewer_rows(tmp_path: Path) -> None:
    plan = pipec.compile(chain(3), 2, 4, in_turn)
    plan.save(tmp_path / "plan.json")
    with pipec.Runner(chain(3), pipec.Plan.load(tmp_path / "plan.json", schedule=in_turn)) as run_:
        assert run_.step(**data(3, 0)).microbatches == 3


def test_a_loaded_asynchronous_plan_with_its_schedule_is_compiled_for_another_number(tmp_path: Path) -> None:
    from pipec.compiler import with_microbatches

    for read in read_back(pipec.compile(pipec.chain(3), 3, 4, OLDER, update="stage"), tmp_path).values():
        assert with_microbatches(read(schedule=OLDER), 2) == pipec.compile(pipec.chain(3), 3, 2, OLDER, update="stage")
        with pytest.raises(pipec.ScheduleError, match=r"pipec\.Plan\.load\(path, schedule='older'\)"):
            with_microbatches(read(), 2)


def test_the_command_takes_the_schedule_of_a_saved_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    pipec.compile(pipec.chain(3), 3, 2, OLDER, update="stage").save("plan.json")
    assert run(capsys, "check", "plan.json", "--schedule", "mine.py:older")[0] == 0
    fails(capsys, 1, "unknown weight rule 'one-older'", "check", "plan.json")
    given = ("check", "plan.json", "--schedule", "mine.py:older")
    fails(capsys, 2, "--devices cannot change it", *given, "--devices", "2")
