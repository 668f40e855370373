"""What a new user gets wrong first: each is told in the user's own words, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

SGD: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731


def net(loss: Any = F.mse_loss) -> pipec.Pipeline:
    torch.manual_seed(3)
    made = pipec.Pipeline("net")
    x, y = made.input("x"), made.input("y")
    body = made.stage("body", nn.Linear(4, 4), x)
    made.loss("mse", loss, made.stage("head", nn.Linear(4, 4), body), y)
    return made


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}


def told(kind: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# -- check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"update": "stage"}, {"update": "all"}, {"update": "stage", "update_early": True, "recompute": "always"},
    {"update": "stage", "schedule": "zb-h1"},
])
def test_check_leaves_updates_out(options: dict[str, Any]) -> None:
    made, plain = net(), {name: value for name, value in options.items() if not name.startswith("update")}
    weights = [p.detach().clone() for s in made.spec.stages for p in s.fn.parameters()]  # type: ignore[union-attr]
    report = pipec.check(made, batch(), pipec.compile(made, 2, 4, **options))
    assert report, str(report)
    assert report.compared == pipec.check(made, batch(), devices=2, microbatches=4, **plain).compared
    now = [p for s in made.spec.stages for p in s.fn.parameters()]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))


def test_check_of_a_plan_with_updates_that_was_loaded_and_cut_shorter(tmp_path: Any) -> None:
    made = net()
    pipec.compile(made, 2, 4, update="stage").save(tmp_path / "plan.json")
    assert pipec.check(made, batch(), pipec.Plan.load(tmp_path / "plan.json"))


def test_check_refuses_what_it_cannot_compare() -> None:
    made = net()
    plan = pipec.compile(made, 2, 4)
    text = told(pipec.RunError, lambda: pipec.check(made, batch(), plan, schedule="gpipe", devices=1))
    assert "got a plan and schedule=, devices= to compile another" in text
    assert "plan= is what pipec.compile returns, got str 'gpipe'" in told(
        pipec.RunError, lambda: pipec.check(made, batch(), "gpipe"))  # type: ignore[arg-type]
    for given in (lambda: pipec.check(made, batch(), pipec.compile(made, 2, 2, "pipedream", update="stage")),
                  lambda: pipec.check(made, batch(), schedule="pipemare", update="stage")):
        text = told(pipec.RunError, given)
        assert "is asynchronous" in text
        assert "check(net, batch, schedule='1f1b')" in text


# -- a model where a pipeline is meant ---------------------------------------------------------------------------


def test_a_module_is_told_what_a_pipeline_is() -> None:
    model, plan = nn.Sequential(nn.Linear(4, 4)), pipec.compile(net(), 2, 4)
    wrong: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "compile": (pipec.SpecError, lambda: pipec.compile(model, 2, 4)),
        "Runner": (pipec.RunError, lambda: pipec.Runner(model, plan)),
        "check": (pipec.RunError, lambda: pipec.check(model, batch())),
        "reference": (pipec.RunError, lambda: pipec.reference(model, 4)),
        "profile": (pipec.RunError, lambda: pipec.profile(model, **batch())),
        "draw": (pipec.RenderError, lambda: pipec.draw(model)),
    }
    for name, (kind, act) in wrong.items():
        text = told(kind, act)
        assert text.startswith(f"{name}: expected a Pipeline, got Sequential; a pipeline says how a model is cut"), text
        assert "net.stage(" in text
    assert "draw: expected" in told(pipec.RenderError, lambda: pipec.draw(model, graph="stages"))
    assert "expected a Pipeline, got the class Pipeline" in told(
        pipec.SpecError, lambda: pipec.compile(pipec.Pipeline, 2, 4))
    assert "expected the pipeline, got a plan" in told(pipec.SpecError, lambda: pipec.compile(plan, 2, 4))


# -- options of a runner -----------------------------------------------------------------------------------------


def test_clipping_after_the_updates_is_refused() -> None:
    made = net()
    params = [p for s in made.spec.stages for p in s.fn.parameters()]  # type: ignore[union-attr]
    for update, optimizer in (("stage", SGD), ("all", SGD(params))):
        with pipec.Runner(made, pipec.compile(made, 2, 4, update=update), optimizer=optimizer) as run:
            run.step(**batch())
            text = told(pipec.RunError, lambda: run.clip_grad_norm_(1.0))
            assert f"compiled with update='{update}'" in text
            assert "before_update=lambda _: run.clip_grad_norm_(1.0)" in text
    with pipec.Runner(made, pipec.compile(made, 2, 2, "pipemare", update="stage"), optimizer=SGD) as run:
        run.step(**batch())
        assert "every stage updates on its own" in told(pipec.RunError, lambda: run.clip_grad_norm_(1.0))


def test_clipping_in_the_hook_and_after_a_step_without_updates() -> None:
    made, norms = net(), []
    with pipec.Runner(made, pipec.compile(made, 2, 4, update="stage"), optimizer=SGD,
                      before_update=lambda _: norms.append(run.clip_grad_norm_(1e-3))) as run:
        run.step(**batch())
        assert float(norms[0]) > 0
        told(pipec.RunError, lambda: run.clip_grad_norm_(1.0))
    with pipec.Runner(made, pipec.compile(made, 2, 4)) as run:
        run.step(**batch())
        assert float(run.clip_grad_norm_(1e-3)) > 0
        assert float(run.clip_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-2)


def test_rescheduling_where_it_does_nothing_is_refused() -> None:
    made, T1 = net(), pipec.Rescheduling(steps=8)
    stale = pipec.compile(made, 2, 2, "pipemare", update="stage")
    assert "rescheduling= takes pipec.Rescheduling(steps=1000) or None, got 5" in told(
        pipec.RunError, lambda: pipec.Runner(made, stale, optimizer=SGD, rescheduling=5))
    assert "delay= takes pipec.TruncatedExponential(" in told(
        pipec.RunError, lambda: pipec.Runner(made, stale, optimizer=SGD, delay=2.0, backend="replay"))
    text = told(pipec.RunError, lambda: pipec.Runner(made, pipec.compile(made, 2, 4), rescheduling=T1))
    assert "the plan has schedule '1f1b' and update=None, where it would do nothing" in text
    pipec.Runner(made, pipec.compile(made, 2, 4, update="stage"), optimizer=SGD, rescheduling=T1).close()  # a warm-up


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    made = net()
    params = [p for s in made.spec.stages for p in s.fn.parameters()]  # type: ignore[union-attr]
    for update, optimizer in (("stage", torch.optim.LBFGS), ("all", torch.optim.LBFGS(params))):
        make = partial(pipec.Runner, made, pipec.compile(made, 2, 4, update=update), optimizer=optimizer)
        text = told(pipec.RunError, make)
        assert text.startswith("the optimizer LBFGS needs closure in its step")


def test_devices_that_are_none() -> None:
    made = net()
    plan = pipec.compile(made, 2, 4)
    assert "devices: 'cpux' is no torch device" in told(
        pipec.RunError, lambda: pipec.Runner(made, plan, devices=["cpux", "cpu"]))
    assert "devices=['cpu'] * 2" in told(pipec.RunError, lambda: pipec.Runner(made, plan, devices="cpu"))
    assert "unknown backend 'thread' (did you mean 'threads'?)" in told(
        pipec.RunError, lambda: pipec.Runner(made, plan, backend="thread"))


def test_a_wrong_model_is_told_once() -> None:
    made = net()
    text = told(pipec.RunError, lambda: pipec.Runner(made, pipec.compile(made, 2, 4), model=nn.Linear(4, 4)))
    assert text.startswith("body.weight, body.bias, head.weight, head.bias are not in model=; make the stages")
    assert text.count("make the stages") == 1


# -- what a run says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "backend"), [("1f1b", "replay"), ("1f1b", "threads"), ("pipemare", "replay")])
def test_an_error_inside_a_loss_names_the_loss(schedule: str, backend: str) -> None:
    def wrong(value: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(value, target.reshape(7, 9))

    made = net(wrong)
    update = None if schedule == "1f1b" else "stage"
    plan = pipec.compile(made, 2, 2, schedule, update=update)
    with pipec.Runner(made, plan, backend=backend, optimizer=SGD if update else None) as run, \
            pytest.raises(RuntimeError) as caught:
        assert [run.step(**batch()) for _ in range(4)]
    notes = caught.value.__notes__
    assert notes[0] == "pipec: raised by loss 'mse' of stage 'head'"
    assert any("raised in stage 'head', microbatch 0" in text for text in notes)


def test_an_empty_flush_says_why() -> None:
    made = net()
    with pipec.Runner(made, pipec.compile(made, 2, 2, "pipemare", update="stage"), optimizer=SGD) as run:
        empty = run.flush()
        assert repr(empty) == "Result(nothing finished: nothing was in flight)"
        assert "is in the result of the step or the flush that finished" in told(pipec.RunError, lambda: empty.loss)
        first = run.step(**batch())
        assert repr(first) == "Result(nothing finished: the pipeline is still filling)"
        assert "take the loss of run.flush()" in told(pipec.RunError, lambda: first.loss)
        assert run.flush().loss > 0
        run.step(**batch())
        assert "; minibatch 1 finished first" in repr(run.evaluate(**batch()))
    with pipec.Runner(made, pipec.compile(made, 2, 4)) as run:
        run.step(**batch())
        assert "the plan is synchronous, so every step finishes its own minibatch" in repr(run.flush())
        assert "the loss is in the result of step()" in told(pipec.RunError, lambda: run.flush().loss)


# -- compiling ---------------------------------------------------------------------------------------------------


def test_asynchronous_schedules_take_no_slices_and_say_so_first() -> None:
    text = told(pipec.ScheduleError, lambda: pipec.compile(net(), 2, 4, "pipemare", slices=2, update="stage"))
    assert text.startswith("schedule 'pipemare' updates weights between microbatches, so it cannot cut them into 2")
    assert "1f1b without slices" in str(pipec.schedules())


def test_names_with_a_typo() -> None:
    def near(name: str) -> str:
        return told(pipec.ScheduleError, lambda: pipec.compile(net(), 2, 4, name)).split("; known")[0]

    assert near("1F1B") == "unknown schedule '1F1B' (did you mean '1f1b'?)"
    assert near("zb_h1") == "unknown schedule 'zb_h1' (did you mean 'zb-h1'?)"
    assert near("pipdream") == "unknown schedule 'pipdream' (did you mean 'pipedream'?)"
    assert near("something else") == "unknown schedule 'something else'"
    text = told(pipec.PipecError, lambda: pipec.compile(pipec.chain(2), 2, 4, placement="looped", chunks=2))
    assert "compile for at most 1 device" in text
    assert "1 devices" not in text


class Up(nn.Module):
    def forward(self, late: Tensor, early: Tensor) -> Tensor:
        return late + early


def test_a_keyword_with_a_typo_is_named() -> None:
    made = pipec.Pipeline("net")
    x = made.input("x")
    first = made.stage("first", nn.Linear(4, 4), x)
    made.output(made.stage("up", Up(), first, erly=pipec.skip(x)))
    text = told(pipec.SpecError, lambda: made.spec)
    assert "cannot be called so: it has no argument 'erly' (did you mean 'early'?)" in text
    other = pipec.Pipeline("net")
    other.output(other.stage("up", other.input("x"), Up()))
    assert "got Up Up(" not in told(pipec.SpecError, lambda: other.spec)


def test_a_plan_for_a_pipeline_of_another_name_says_so() -> None:
    other = pipec.Pipeline("other")
    x, y = other.input("x"), other.input("y")
    body = other.stage("body", nn.Linear(4, 4), x)
    other.loss("mse", F.mse_loss, other.stage("head", nn.Linear(4, 4), body), y)
    message = told(pipec.RunError, lambda: pipec.Runner(other, pipec.compile(net(), 2, 2)))
    assert "it is named 'other', the plan is for 'net'; compile this pipeline again" in message


def test_a_process_of_torchrun_without_a_process_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = net()
    plan = pipec.compile(made, 2, 4)
    with pytest.raises(pipec.RunError, match=r"this is one of 2 processes .* call torch.*init_process_group"):
        pipec.Runner(made, plan)
    pipec.Runner(made, plan, backend="threads").close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    pipec.Runner(made, plan).close()
