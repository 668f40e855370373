"""Over ranks, gradients of inputs: of one process, bit for bit, wherever they are wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpus import there
from models import WIDTH, data, same
from test_lanes import Join
from test_ranks_hosts import apart
from torch import nn

import pipec
from pipec.runtime.distributed.ways import SOCKETS


def net() -> pipec.Pipeline:
    """``x`` is read by the first, a middle and the last stage, ``prompt`` by two, ``far`` by the last alone."""
    torch.manual_seed(6)
    made = pipec.Pipeline("net")
    x, y, far = made.input("x"), made.input("y"), made.input("far")
    prompt = made.input("prompt", split=None)
    a = made.stage("a", lambda v, p, params=None: v * p["scale"] + p["shift"][0], x, prompt)
    b = made.stage("b", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), a)
    c = made.stage("c", Join(), b, x)
    d = made.stage("d", nn.Linear(WIDTH, WIDTH), c)
    e = made.stage("e", lambda v, p, u, w: v * p["scale"] + u + w, d, prompt, x, far)
    made.output(e)
    made.loss("mse", nn.functional.mse_loss, e, y)
    return made


class Outer(nn.Module):
    """What makes the inputs, outside the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.line, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.shift, self.fixed = nn.Parameter(torch.rand(WIDTH)), torch.rand(WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        far = torch.tanh(self.line(given["y"]))
        x = given["x"].clone().requires_grad_()
        return {"x": x, "y": given["y"], "far": far,
                "prompt": {"scale": self.scale * 2, "shift": (self.shift, 3, self.fixed)}}


def trained(run: Any, batches: list[Any], of: Any = None) -> list[Any]:
    """Results, and every gradient outside the pipeline; ``of`` changes what a rank is given."""
    outer, found = Outer(), []
    for batch in batches:
        given = outer(batch)
        if of is not None:
            given = of(given)
        result = run.step(**given)
        gradients = [None if p.grad is None else p.grad.clone() for p in outer.parameters()]
        found.append([result.losses, given["x"].grad, gradients])
    return found


def alike(rank: int, devices: int, placement: Any, how: dict[str, Any]) -> list[bool]:
    """All ranks are given the same: each gets what one process would."""
    mine, theirs = net(), net()
    batches = [data(8), data(8, 1), data(7, 2), data(2, 3)]
    plan = pipec.compile(mine, devices, 4, placement=placement, **how)
    kinds: dict[str, Any] = {} if plan.update is None else {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    with pipec.Runner(mine, plan, seed=3, **kinds) as run:
        one = trained(run, batches)
    with pipec.Runner(theirs, pipec.compile(theirs, devices, 4, placement=placement, **how), backend="replay",
                      seed=3, **kinds) as run:
        other = trained(run, batches)
    assert all(g is not None for step in other for g in step[2])
    return [same(a, b) for a, b in zip(one, other, strict=True)]


PLACES: Any = [(2, [0, 1, 1, 0, 1]), (2, [0, 0, 0, 1, 1]), (4, [0, 1, 2, 3, 2])]
HOWS: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "gpipe", "recompute": "always", "update": "stage"},
                              {"schedule": "zb-h1"}]


@pytest.mark.parametrize(("devices", "placement"), PLACES)
def test_every_rank_gets_the_gradients_of_one_process(devices: int, placement: Any, crew2: Any, crew4: Any) -> None:
    crew = crew2 if devices == 2 else crew4
    for how in HOWS:
        assert crew(alike, devices, placement, how) == [[True] * 4] * devices


def far(rank: int, ways: tuple[str, ...], fn: Any, *args: Any) -> Any:
    """As ranks on several hosts: over sockets, or through gloo."""
    with apart(ways):
        return fn(rank, *args)


def test_between_hosts_and_on_gpus(crew2: Any) -> None:
    devices, placement = PLACES[0]
    for ways in ((SOCKETS,), ()):
        assert crew2(far, ways, alike, devices, placement, HOWS[1]) == [[True] * 4] * 2
    for kind in ("wired", "staged"):
        assert crew2(there, kind, alike, devices, placement, HOWS[0]) == [[True] * 4] * 2


PLAIN = {"scale": torch.ones(WIDTH), "shift": (torch.ones(WIDTH),)}


def one_wants(rank: int, who: int) -> Any:
    """``far`` is read by rank 1, and only ``who`` has what made it: the other leaves it out, or has a tensor that
    requires a gradient for its own stage's sake."""
    def whole(given: dict[str, Any]) -> dict[str, Any]:
        return {"x": given["x"].detach(), "y": given["y"], "far": given["far"], "prompt": PLAIN}

    def of(given: dict[str, Any]) -> dict[str, Any]:
        own = whole(given)
        if rank != who:
            own["far"] = given["far"].detach().requires_grad_()
        if rank != who and rank == 0:
            del own["far"]
        return own

    found = []
    for change, how in ((of, {}), (whole, {"backend": "replay"})):
        made = net()
        with pipec.Runner(made, pipec.compile(made, 2, 4, placement=[0, 0, 0, 1, 1]), seed=3, **how) as run:
            found.append(trained(run, [data(8), data(8, 1)], change))
    one, other = found
    got = [gradient for step in one for gradient in step[2]]
    return all(g is None for g in got) if rank != who else same(one, other)


@pytest.mark.parametrize("who", [0, 1])
def test_only_the_rank_that_holds_what_made_an_input_gets_its_gradient(who: int, crew2: Any) -> None:
    assert crew2(one_wants, who) == [True, True]


def told_apart(rank: int) -> list[str]:
    found = []
    mine = net()
    with pipec.Runner(mine, pipec.compile(mine, 2, 4, placement=[0, 1, 1, 0, 1])) as run:
        for case in ("x", "prompt", "far", None):
            given = Outer()(data(8))
            if case == "x" and rank == 1:
                given["x"] = given["x"].detach()
            if case == "prompt" and rank == 1:
                given["prompt"] = {"scale": given["prompt"]["scale"].detach(), "shift": given["prompt"]["shift"]}
            if case == "far" and rank == 1:
                given["far"] = given["far"].detach()
            try:
                run.step(**given)
                found.append("")
            except pipec.RankError as error:
                found.append(str(error))
        assert given["x"].grad is not None
    return found


def test_ranks_that_want_other_gradients_are_told(crew2: Any) -> None:
    one, two = crew2(told_apart)
    assert one == two
    advice = "; give the ranks that read an input the same, and others the same or one that requires none"
    assert one == [
        "input 'x' requires a gradient on rank 0, but not on rank 1, which reads it" + advice,
        "input 'prompt' has other tensors that require a gradient on rank 0 than on rank 1" + advice,
        "input 'far' requires a gradient on rank 0, but not on rank 1, which reads it" + advice, "",
    ]


def in_replicas(rank: int) -> bool:
    """Each replica gets the gradient of its own rows, weighed against all rows; a shared prompt its own part."""
    mine = net()
    given = data(6 if rank // 2 else 10, rank // 2)
    with pipec.Runner(mine, pipec.compile(mine, 2, 2, placement=[0, 1, 1, 0, 1], data_parallel=2), seed=3) as run:
        for module in mine.spec.stages[1].fn.modules():
            module.p = 0.0
        outer = Outer()
        values = outer(given)
        run.step(**values)
    plain, whole = net(), Outer()
    for module in plain.spec.stages[1].fn.modules():
        module.p = 0.0
    parts = [whole(data(10, 0)), whole(data(6, 1))]
    fns = [stage.fn for stage in plain.spec.stages]
    outs = []
    for part in parts:
        c = fns[2](fns[1](fns[0](part["x"], part["prompt"])), part["x"])
        outs.append(fns[4](fns[3](c), part["prompt"], part["x"], part["far"]))
    total = [nn.functional.mse_loss(out, part["y"], reduction="sum") / (16 * WIDTH) for out, part in
             zip(outs, parts, strict=True)]
    total[rank // 2].backward()
    expected = parts[rank // 2]["x"].grad
    pairs = zip([values["x"].grad, *(p.grad for p in outer.parameters())],
                [expected, *(p.grad for p in whole.parameters())], strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_replicas(crew4: Any) -> None:
    assert crew4(in_replicas) == [True] * 4


def fails_outside(rank: int) -> Any:
    """The caller's graph raises on rank 1: nobody keeps anything of the step."""
    mine, told = net(), ""
    with pipec.Runner(mine, pipec.compile(mine, 2, 4, placement=[0, 1, 1, 0, 1])) as run:
        values = Outer()(data(8))
        run.step(**values)
        before = [p.grad.clone() for p in run.parameters()], values["x"].grad.clone()
        again = Outer()(data(8, 1))
        again["x"] = values["x"]
        if rank == 1:
            def fail(gradient: Any) -> None:
                raise ValueError("outside")

            again["far"].register_hook(fail)
        try:
            run.step(**again)
        except (ValueError, pipec.RankError) as error:
            told = f"{type(error).__name__}: {error}"
        unchanged = same(before, ([p.grad for p in run.parameters()], values["x"].grad))
        run.step(**Outer()(data(8, 2)))
        return told, unchanged


def test_a_failure_in_the_callers_graph(crew2: Any) -> None:
    (first, kept), (second, kept_too) = crew2(fails_outside)
    assert second == "ValueError: outside"
    assert first.startswith("RankError: rank 1 failed: ValueError: outside")
    assert "undone" in first
    assert kept
    assert kept_too


def evaluated(rank: int) -> Any:
    mine = net()
    with pipec.Runner(mine, pipec.compile(mine, 2, 4, placement=[0, 1, 1, 0, 1])) as run:
        values = Outer()(data(8))
        result = run.evaluate(**values)
        return float(result.loss) > 0 and values["x"].grad is None


def test_evaluation_makes_none(crew2: Any) -> None:
    assert crew2(evaluated) == [True, True]


def asynchronous(rank: int) -> str:
    mine = net()
    plan = pipec.compile(mine, 2, 4, "pipedream", placement=[0, 0, 0, 1, 1], update="stage")
    with pipec.Runner(mine, plan, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as run:
        with pytest.raises(pipec.PipecError) as error:
            run.step(**Outer()(data(8)))
        return str(error.value)


def test_asynchronous_plans_refuse_them_as_in_one_process(crew2: Any) -> None:
    for text in crew2(asynchronous):
        assert "input 'x' requires a gradient, which would be there only steps later" in text
