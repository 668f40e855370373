"""Two steps at once on the same parameters: refused, as one gradient would be lost."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import models
import pytest
import torch

import pipec
from pipec.runtime.claim import PLACE, Claim


def marked(net: pipec.Pipeline) -> list[str]:
    return [
        name for stage in net.spec.stages if isinstance(stage.fn, torch.nn.Module)
        for name, p in stage.fn.named_parameters() if PLACE in p.__dict__
    ]


def other(net: pipec.Pipeline, name: str) -> pipec.Pipeline:
    """Another pipeline of the same modules."""
    made = pipec.Pipeline(name)
    value, y = made.input("x"), made.input("y")
    for stage in net.spec.stages:
        value = made.stage(stage.name, stage.fn, value)
    made.output(value)
    made.loss("loss", torch.nn.functional.mse_loss, value, y)
    return made


def around_a_step(inner: Any, first: pipec.Pipeline) -> None:
    """Call ``inner`` in another thread while a step of ``first`` stands in its first stage."""
    caught: list[BaseException] = []

    def call() -> None:
        try:
            inner()
        except BaseException as error:
            caught.append(error)

    def hook(*_: Any) -> None:
        if not called:
            called.append(True)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    called: list[bool] = []
    module: Any = first.spec.stages[0].fn
    handle = module.register_forward_hook(hook)
    try:
        with pipec.Runner(first, pipec.compile(first, 2, 2)) as run:
            run.step(**models.data())
    finally:
        handle.remove()
    if caught:
        raise caught[0]


@pytest.mark.parametrize("update", [None, "stage"])
def test_a_second_step_on_the_same_parameters_names_both_pipelines(update: str | None) -> None:
    first = models.chain(3)
    second = other(first, "second")
    optimizer = None if update is None else lambda p: torch.optim.SGD(p, lr=0.1)
    run = pipec.Runner(second, pipec.compile(second, 2, 2, update=update), optimizer=optimizer)
    with pytest.raises(pipec.RunError, match=rf"(?s)'second' cannot step now.*'{first.spec.name}'.*trains s\d\.\w+"):
        around_a_step(lambda: run.step(**models.data()), first)
    assert not marked(first)
    run.step(**models.data())  # and afterwards it may
    run.close()
    assert not marked(first)


def test_reference_and_asynchronous_steps_claim_too() -> None:
    first = models.chain(3)
    second = other(first, "second")
    with pytest.raises(pipec.RunError, match="'second' cannot step now"):
        around_a_step(lambda: pipec.reference(second, 2).step(**models.data()), first)
    plan = pipec.compile(second, 2, 2, "pipedream", update="stage")
    with pipec.Runner(second, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as run:
        with pytest.raises(pipec.RunError, match="'second' cannot step now"):
            around_a_step(lambda: run.step(**models.data()), first)
        for _, p in [named for s in first.spec.stages for named in s.fn.named_parameters()]:  # type: ignore[union-attr]
            p.grad = None
        run.step(**models.data())
        with pytest.raises(pipec.RunError, match="'second' cannot step now"):
            around_a_step(run.flush, first)
        assert run.in_flight  # nothing is lost
    assert not marked(first)


def test_evaluation_in_eval_mode_beside_a_step_and_steps_on_other_modules_are_free() -> None:
    first, apart = models.chain(3), models.chain(3)
    second = other(first, "second")
    for stage in first.spec.stages:
        stage.fn.eval()  # type: ignore[union-attr]
    for net, call in ((second, "evaluate"), (apart, "step")):
        with pipec.Runner(net, pipec.compile(net, 2, 2), backend="replay") as run:
            around_a_step(lambda run=run, call=call: getattr(run, call)(**models.data()), first)


@pytest.mark.parametrize("how", ["evaluate", "forward"])
def test_evaluation_that_would_switch_the_modules_of_a_step_is_refused(how: str) -> None:
    first = models.chain(3)
    second = other(first, "second")
    given = models.data() if how == "evaluate" else {"x": models.data()["x"]}
    with pipec.Runner(second, pipec.compile(second, 2, 2), backend="replay") as run:
        with pytest.raises(pipec.RunError, match=r"'second' cannot evaluate now: a step of .* and uses s0\.[.\w]+ too"):
            around_a_step(lambda: getattr(run, how)(**given), first)
        assert all(m.training for stage in first.spec.stages for m in stage.fn.modules())  # type: ignore[union-attr]
        assert not marked(first)
        getattr(run, how)(**given)
        assert not marked(first)


def test_nothing_runs_on_modules_that_an_evaluation_has_switched() -> None:
    first = models.chain(3)
    second, third = other(first, "second"), other(first, "third")
    refused: list[str] = []

    def hook(module: torch.nn.Module, *_: Any) -> None:
        for call in (run.step, run.evaluate):
            with torch.enable_grad(), pytest.raises(
                pipec.RunError, match="now: an evaluation of pipeline 'third' is running"
            ) as error:
                call(**models.data())
            refused.append(str(error.value).split(" now")[0])
        assert not module.training

    module: Any = first.spec.stages[0].fn
    with pipec.Runner(second, pipec.compile(second, 2, 2), backend="replay") as run, pipec.Runner(
        third, pipec.compile(third, 1, 1)
    ) as evaluating:
        handle = module.register_forward_hook(hook)
        evaluating.evaluate(**models.data())
        handle.remove()
        assert refused == ["pipeline 'second' cannot step", "pipeline 'second' cannot evaluate"]
        assert module.training
        run.step(**models.data())


def test_no_gradient_is_lost_by_runners_that_take_turns() -> None:
    first = models.chain(3)
    second = other(first, "second")
    refused = 0
    done = []

    def go(net: pipec.Pipeline) -> None:
        nonlocal refused
        with pipec.Runner(net, pipec.compile(net, 2, 2), backend="replay") as run:
            for _ in range(30):
                try:
                    run.step(**models.data())
                    done.append(net)
                except pipec.RunError:
                    refused += 1

    with pipec.Runner(first, pipec.compile(first, 2, 2)) as run:
        run.step(**models.data())
    weight: Any = next(first.spec.stages[0].fn.parameters())  # type: ignore[union-attr]
    once = weight.grad.clone()
    weight.grad = None
    threads = [threading.Thread(target=go, args=(net,)) for net in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused + len(done) == 60
    torch.testing.assert_close(weight.grad, once * len(done), rtol=1e-4, atol=1e-6)


def test_a_failed_step_and_copies_made_during_one_leave_no_claim() -> None:
    net = models.chain(3)
    copies: list[Any] = []
    module: Any = net.spec.stages[1].fn

    def hook(*_: Any) -> None:
        assert len(marked(net)) == sum(1 for s in net.spec.stages for _ in s.fn.parameters())  # type: ignore[union-attr]
        copies.extend(copy.deepcopy(module).parameters())
        file = io.BytesIO()
        torch.save(list(module.parameters()), file)
        file.seek(0)
        copies.extend(torch.load(file, weights_only=True))
        raise ValueError("no")

    handle = module.register_forward_hook(hook)
    with pipec.Runner(net, pipec.compile(net, 2, 2), backend="replay") as run:
        with pytest.raises(ValueError, match="no"):
            run.step(**models.data())
        handle.remove()
        assert not marked(net)
        run.step(**models.data())
    with Claim("own") as claim:
        claim.take(copies, [])
