"""Arguments of a Runner, of profile and of tune that cannot be meant: named as given, before anything runs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.cli import main
from pipec.runtime.distributed.agree import compare, summary


def net() -> pipec.Pipeline:
    torch.manual_seed(3)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    body = made.stage("body", nn.Linear(4, 4), x)
    made.loss("mse", F.mse_loss, made.stage("head", nn.Linear(4, 4), body), y)
    return made


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}


def runner(**options: Any) -> pipec.Runner:
    made = net()
    plan = pipec.compile(made, 2, 4, update="stage")
    return pipec.Runner(made, plan, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), **options)


@pytest.mark.parametrize(("option", "value", "said"), [
    ("scaler", True, "scaler= is a torch.amp.GradScaler, such as torch.amp.GradScaler('cpu'), or None, got True"),
    ("scaler", torch.amp.GradScaler, "scaler= is a torch.amp.GradScaler"),
    ("before_update", 1.0, "before_update= is a function of the list of all trained parameters, or None, got 1.0"),
    ("seed", "x", "seed= is a whole number, as for torch.manual_seed, or None, got 'x'"),
    ("seed", 1.5, "seed= is a whole number"),
    ("seed", 2**64, "seed= is a whole number"),
    ("model", 5, "model= is the module that the stages are parts of, or a dict of tensors by name, got 5"),
    ("model", [nn.Linear(2, 2)], "model= is the module that the stages are parts of"),
    ("watchdog", 0, "watchdog= is a number of seconds above 0, or None, got 0"),
    ("timeout", "x", "timeout= is a number of seconds above 0, got 'x'"),
    ("timeout", -1, "timeout= is a number of seconds above 0, got -1"),
    ("timeout", None, "timeout= is a number of seconds above 0, got None"),
    ("outputs", "everything", "outputs must be 'owner' or 'all', got 'everything'"),
    ("backend", 3, "backend= is a name, such as 'threads' or 'replay', got 3"),
    ("backend", torch.optim.SGD, "backend= is a name"),
    ("devices", "gpu", "got 'gpu'; such as 'cpu' or 'cuda:0', or the name 'cuda' for the GPUs there are"),
    ("devices", 3, "got 3; such as 'cpu' or 'cuda:0'"),
])
def test_what_a_runner_cannot_use_is_named(option: str, value: Any, said: str) -> None:
    with pytest.raises(pipec.RunError) as caught:
        runner(**{option: value})
    assert said in str(caught.value)


def test_all_of_them_at_once() -> None:
    with pytest.raises(pipec.RunError) as caught:
        runner(scaler=1, seed=0.5, outputs="none")
    lines = str(caught.value).splitlines()
    assert lines[0] == "Runner: 3 problems"
    assert [line.split("=")[0].split(" must")[0] for line in lines[1:]] == ["  1. scaler", "  2. seed", "  3. outputs"]


def test_what_it_can_use_is_taken() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    options = {"seed": -1, "watchdog": 0.5, "timeout": float("inf"), "outputs": "all", "scaler": scaler}
    with runner(**options, before_update=len, backend="replay") as run:
        run.step(**batch())


# -- started by a launcher, without a process group ---------------------------------------------------------------

ALONE = """
import warnings
from test_arguments import batch, runner
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    runner({option}).close()
print(*[f"{{warning.filename.rsplit('/')[-1]}}: {{warning.message}}" for warning in seen])
"""


@pytest.mark.parametrize(("size", "option", "warned"), [
    ("2", "", True), ("2", "backend='auto'", False), ("1", "", False),
])
def test_processes_that_do_not_know_of_each_other_are_told(size: str, option: str, warned: bool) -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    known = os.environ | {"RANK": "0", "WORLD_SIZE": size}
    known["PYTHONPATH"] = os.pathsep.join([folder, os.path.dirname(folder), os.environ.get("PYTHONPATH", "")])
    made = subprocess.run(
        [sys.executable, "-c", ALONE.format(option=option)], env=known, capture_output=True, text=True, timeout=100
    )
    assert made.returncode == 0, made.stderr
    if warned:
        assert made.stdout.startswith("test_arguments.py: this is one of 2 processes (WORLD_SIZE), but ")
        assert "each of them runs all devices" in made.stdout
        assert "init_process_group" in made.stdout
    else:
        assert made.stdout.strip() == ""


def test_nobody_is_told_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner().close()


# -- profile and tune -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [
    ({"microbatches": 0}, "profile: microbatches must be a whole number of at least 1, got 0"),
    ({"microbatches": "4"}, "profile: microbatches must be a whole number of at least 1, got '4'"),
    ({"repeats": 0}, "profile: repeats must be a whole number of at least 1, got 0"),
    ({"repeats": None}, "profile: repeats must be a whole number of at least 1, got None"),
])
def test_a_profile_cannot_be_taken_so(options: dict[str, Any], said: str) -> None:
    with pytest.raises(pipec.RunError) as caught:
        pipec.profile(net(), **options, **batch())
    assert str(caught.value) == said


def test_one_schedule_and_one_way_of_recompute_need_no_list() -> None:
    found = pipec.tune(net(), 2, 4, schedules="1f1b", recompute="never")
    assert [(trial.schedule, trial.recompute) for trial in found.trials] == [("1f1b", "never")]
    assert found.best.schedule == "1f1b"
    order = pipec.parse_schedule("0: 0F0 0B0\n1: 1F0 1B0")
    assert len(pipec.tune(net(), 2, 1, schedules=order, recompute={"body": "always"}).trials) == 1


def test_where_nothing_can_be_compiled_the_table_says_why() -> None:
    found = pipec.tune(net(), 2, 4, schedules="1f1b", recompute="nevr")
    head, reason = str(found).splitlines()
    assert head == "none of 1 combinations can be compiled with these options:"
    assert reason.startswith("  1f1b: recompute: unknown mode 'nevr'")
    tight = pipec.tune(net(), 2, 4, memory_limit=pipec.activations(0.1))
    assert "\n  gpipe: memory: device 0 holds 4 activations at its peak; the limit is 0.1" in str(tight)
    assert "reasons" in str(tight).splitlines()[-1]


def test_tune_takes_costs_and_nothing_else() -> None:
    with pytest.raises(pipec.SpecError, match=r"tune: costs must be pipec.Costs\(...\), got dict"):
        pipec.tune(net(), 2, 4, costs={"body": 1.0})  # type: ignore[arg-type]
    with pytest.raises(pipec.ScheduleError, match="tune: costs_at must be a whole number of at least 1, got '4'"):
        pipec.tune(net(), 2, 4, costs_at="4")  # type: ignore[arg-type]


# -- costs of a profile know of how many microbatches they are ------------------------------------------------------


def test_a_profile_is_taken_in_proportion_where_a_plan_cuts_otherwise() -> None:
    made = net()
    costs = pipec.profile(made, microbatches=4, repeats=1, **batch())
    assert costs.microbatches == 4
    assert pipec.compile(made, 2, 4, costs=costs).costs is costs
    plain, halved = pipec.compile(made, 2, 4), pipec.compile(made, 2, 8, costs=costs)
    assert halved.costs is not None
    for name, own in costs.stages.items():
        assert halved.costs.stages[name].forward == pytest.approx(own.forward / 2)
        assert halved.costs.stages[name].activation_bytes == round(own.activation_bytes / 2)
    assert halved.simulate(costs).makespan == halved.simulate().makespan
    assert plain.simulate(costs).makespan == pipec.compile(made, 2, 4, costs=costs).simulate().makespan
    work = [sum(timeline.useful) for timeline in (plain.simulate(costs), halved.simulate())]
    assert work[0] == pytest.approx(work[1])


def test_tune_and_auto_count_from_what_the_profile_says() -> None:
    made = net()
    costs = pipec.profile(made, microbatches=4, repeats=1, **batch())
    for trial in pipec.tune(made, 2, (2, 4, 8), schedules=["1f1b", "gpipe"], recompute="never", costs=costs).trials:
        plan = pipec.compile(made, 2, trial.microbatches, trial.schedule, costs=costs)
        assert trial.time == pytest.approx(plan.simulate().makespan)
    limit = pipec.activations(2)
    assert pipec.compile(made, 2, 8, "auto", costs=costs, memory_limit=limit).simulate().peak_share[0] <= 2


def test_an_example_that_is_one_microbatch_says_nothing_of_the_minibatch() -> None:
    made = net()
    costs = pipec.profile(made, repeats=1, **batch())
    assert costs.microbatches is None
    assert pipec.compile(made, 2, 8, costs=costs).costs is costs
    with pytest.raises(pipec.SpecError, match="costs: microbatches must be a whole number of at least 1, or None"):
        pipec.Costs(microbatches=0)


def test_a_profile_prints_no_default_that_no_stage_takes() -> None:
    costs = pipec.profile(net(), microbatches=4, repeats=1, **batch())
    assert str(costs).splitlines()[:2] == ["costs: latency 0 ms", "of one of 4 microbatches, in ms and bytes:"]


# -- the same mistakes elsewhere --------------------------------------------------------------------------------


def test_a_simulation_without_measured_costs_beside_a_trace() -> None:
    made = net()
    plan = pipec.compile(made, 2, 4)
    with pipec.Runner(made, plan) as run:
        run.step(**batch())
        measured = run.trace()
    with pytest.raises(pipec.RenderError) as caught:
        pipec.draw([plan.simulate(), measured], titles=["predicted", "run"])
    said = str(caught.value)
    assert "'predicted' without a unit; 'run' in ms; for times in ms profile first" in said
    seconds = plan.simulate(pipec.Costs(unit="s"))
    with pytest.raises(pipec.RenderError, match="'1f1b' in s; '1f1b, measured' in ms; give all Costs the same unit="):
        pipec.draw([seconds, measured])


def test_a_pipeline_is_given_a_name_and_no_model() -> None:
    made = pipec.Pipeline(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(pipec.SpecError, match="Pipeline: its argument is a name, got Linear; stages are declared with"):
        pipec.compile(made, 1, 1)


def test_a_state_of_another_model_names_a_few() -> None:
    made = pipec.Pipeline("deep")
    value = made.input("x")
    for number in range(6):
        value = made.stage(f"s{number}", nn.Linear(2, 2), value)
    made.loss("sum", torch.sum, value, reduction="sum")
    with pipec.Runner(made, pipec.compile(made, 2, 2)) as run, pytest.raises(pipec.RunError) as caught:
        run.load_state_dict({f"other{number}": torch.zeros(1) for number in range(9)})
    missing, unknown = str(caught.value).splitlines()[1:]
    assert missing.startswith("  1. missing: s0.weight, s0.bias, ")
    assert missing.endswith("s3.bias and 4 more")
    assert unknown.endswith("other7 and 1 more; names are stage.key, or those of the module given as Runner(model=...)")


def test_ranks_that_profiled_by_themselves_are_told_so() -> None:
    summaries = []
    for forward, schedule in ((1.0, "gpipe"), (1.5, "1f1b"), (1.0, "1f1b")):
        made = net()
        summaries.append(summary(made.spec, pipec.compile(made, 2, 4, schedule, costs=pipec.Costs(forward)), {}))
    with pytest.raises(pipec.RankError) as caught:
        compare(summaries[:2], (0, 1), 0)
    assert "their costs differ, as where each rank has profiled by itself: give all those of one" in str(caught.value)
    assert "schedule: gpipe on rank 0; 1f1b on rank 1" in str(caught.value)
    with pytest.raises(pipec.RankError) as caught:
        compare(summaries[::2], (0, 1), 0)
    assert "costs" not in str(caught.value)
    assert compare(summaries[1:], (0, 1), 0)  # alone they are no difference


def test_a_saved_plan_is_compared_as_it_is(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pipec.compile(pipec.chain(2), 2, 2).save(tmp_path / "plan.json")
    plan = str(tmp_path / "plan.json")
    assert main(["compare", plan, plan]) == 0
    assert main(["compare", plan, "--schedule", "gpipe", "--microbatches", "8"]) == 2
    assert "plan is a plan already; --microbatches, --schedule cannot change it" in capsys.readouterr().err


@pytest.mark.parametrize(("fn", "other"), [(torch.sum, "mean"), (Tensor.sum, "mean"), (torch.mean, "sum")])
def test_torchs_sum_and_mean_are_taken_at_their_word(fn: Any, other: str) -> None:
    layer = nn.Linear(4, 4)

    def made(**options: Any) -> pipec.Pipeline:
        pipeline = pipec.Pipeline("net")
        pipeline.loss("total", fn, pipeline.stage("layer", layer, pipeline.input("x")), **options)
        return pipeline

    rows = torch.randn(7, 4)
    for microbatches in (1, 3):
        with pipec.Runner(made(), pipec.compile(made(), 1, microbatches)) as run:
            torch.testing.assert_close(run.step(x=rows).loss, fn(layer(rows)).detach())
    with pytest.raises(pipec.SpecError, match=f"reduction={other!r}, but the loss itself has reduction="):
        pipec.compile(made(reduction=other), 1, 1)


@pytest.mark.parametrize(("option", "value"), [("forward_only", "no"), ("forward_only", 1), ("update_early", "yes")])
def test_a_flag_is_true_or_false(option: str, value: Any) -> None:
    with pytest.raises(pipec.ScheduleError, match=f"{option} must be True or False, got {value!r}"):
        pipec.compile(pipec.chain(2), 2, 2, update="stage", **{option: value})


def test_a_unit_of_time_is_a_name() -> None:
    with pytest.raises(pipec.SpecError, match="costs: unit is the name of the unit of time, such as 'ms', got 5"):
        pipec.Costs(unit=5)  # type: ignore[arg-type]
