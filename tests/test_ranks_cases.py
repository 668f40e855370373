"""What training scripts do over processes: batches of other sizes, values that carry no gradient, failures of any kind
at any place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import WIDTH, chain, data, of_modules, same, snapshot
from test_ranks_hosts import apart
from test_ranks_interrupt import every_way
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

# -- batches of another size ----------------------------------------------------------------------------------------


def resized(rank: int, ways: tuple[str, ...], size: int) -> list[str]:
    """Steps of 16, 16, 6 and 16 rows, with 64 and 3 evaluated in between, as the plain loop does them."""
    net, plain = chain(size), chain(size)
    loop, found = pipec.reference(plain, 4), []
    with apart(ways), pipec.Runner(net, pipec.compile(net, size, 4), outputs="all") as run:
        for step, (rows, between) in enumerate(((16, 64), (16, 3), (6, 0), (16, 10))):
            if between:
                given = data(between, 100 + step)
                mine, theirs = run.evaluate(**given), whole(plain, given)
                (output,) = mine.outputs.values()
                if not (torch.allclose(mine.loss, theirs[0]) and torch.allclose(output, theirs[1])):
                    found.append(f"evaluation {step}: {mine}, not {theirs}")
            result, expected = run.step(**data(rows, step)), loop.step(**data(rows, step))
            if not same([result.losses, result.outputs], [expected.losses, expected.outputs]):
                found.append(f"step {step}: {result}, not {expected}")
        own = [n for n, stage in enumerate(run.stages) if stage.fn is not None]
        grads = [[p.grad for n in own for p in s.spec.stages[n].fn.parameters()] for s in (net, plain)]
        return found + ["gradients"] * (not same(*grads))


def whole(net: pipec.Pipeline, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and output of a whole batch at once."""
    with torch.no_grad():
        value = given["x"]
        for stage in net.spec.stages:
            value = stage.fn(value)
        return F.mse_loss(value, given["y"]), value


@every_way
def test_batches_of_other_sizes_and_evaluations_between_steps(ways: Any, crew2: Any, crew4: Any) -> None:
    assert crew2(resized, ways, 2) == [[]] * 2
    assert crew4(resized, ways, 4) == [[]] * 4


# -- values that carry no gradient ----------------------------------------------------------------------------------

KINDS = {"hidden": (torch.float32, True), "ids": (torch.int64, False), "mask": (torch.bool, False),
         "table": (torch.float32, False), "freqs": (torch.complex64, False)}


class Passing(nn.Module):
    """Changes the hidden state, and passes the rest on as it came."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.layer, self.first, self.seen = nn.Linear(WIDTH, WIDTH), first, list[Any]()

    def forward(self, value: Any) -> dict[str, Tensor]:
        if self.first:
            rows = len(value)
            value = {"hidden": value, "ids": torch.arange(rows), "mask": value > 0, "table": torch.ones(rows, 3) / 3,
                     "freqs": torch.polar(torch.ones(rows), torch.arange(rows) * 1.0)}
        elif torch.is_grad_enabled():
            self.seen.append({name: (t.dtype, t.requires_grad) for name, t in value.items()})
        hidden = self.layer(value["hidden"]) * value["mask"] + value["table"].sum(1, keepdim=True)
        return value | {"hidden": hidden * value["ids"][:, None] * value["freqs"].real[:, None]}


def passed_on(rank: int, ways: tuple[str, ...]) -> tuple[bool, list[Any]]:
    """Whether losses and gradients are those of the plain loop, and what this rank's stage was given."""
    def build() -> pipec.Pipeline:
        torch.manual_seed(0)
        return of_modules(*(Passing(number == 0) for number in range(4)), loss=lambda v, y: F.mse_loss(v["hidden"], y))

    net, plain = build(), build()
    loop = pipec.reference(plain, 4)
    with apart(ways), pipec.Runner(net, pipec.compile(net, 4, 4)) as run:
        equal = [same(run.step(**data(9, n)).losses, loop.step(**data(9, n)).losses) for n in range(2)]
    mine: Any = net.spec.stages[rank].fn
    theirs: Any = plain.spec.stages[rank].fn
    equal.append(same([p.grad for p in mine.parameters()], [p.grad for p in theirs.parameters()]))
    return all(equal), mine.seen


@every_way
def test_only_what_needs_a_gradient_gets_one(ways: Any, crew4: Any) -> None:
    for rank, (equal, seen) in enumerate(crew4(passed_on, ways)):
        assert equal
        assert seen == [KINDS] * (8 if rank else 0)


# -- failures at any place ------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """Raises what a test asks for, where it asks for it, once."""

    plan: tuple[str, BaseException] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.forwards = 0

    def raises(self, where: str) -> None:
        if self.plan is not None and self.plan[0] == where:
            error, self.plan = self.plan[1], None
            raise error

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.raises("forward" if self.forwards % 2 else "recompute")  # each right behind its forward
        made = self.layer(x)
        if made.requires_grad:
            made.register_hook(lambda gradient: self.raises("hook"))
        return made


PLACES = {"forward": "1F", "recompute": "1R", "hook": "1B", "loss": "1F"}
ERRORS = (ValueError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError)


def fragile(rank: int, ways: tuple[str, ...]) -> list[Any]:
    """Every kind of error at every place of rank 1: what each rank is told, whether anything has changed, and whether
    the next step works."""
    torch.manual_seed(0)
    weak = Fragile()

    def loss(value: Tensor, y: Tensor) -> Tensor:
        weak.raises("loss")
        return F.mse_loss(value, y)

    net = of_modules(nn.Linear(WIDTH, WIDTH), weak, loss=loss)
    found = []
    with apart(ways), pipec.Runner(net, pipec.compile(net, 2, 4, recompute="always"), timeout=20.0) as run:
        for place in PLACES:
            for kind in ERRORS:
                before, weak.forwards = snapshot(net), 0
                weak.plan = (place, kind("on purpose"))
                try:
                    run.step(**data())
                    told: Any = None
                except BaseException as error:
                    told = type(error).__name__, str(error), getattr(error, "rank", None)
                unchanged, weak.plan, weak.forwards = same(snapshot(net), before), None, 0
                found.append((place, kind.__name__, told, unchanged, bool(run.step(**data()).loss > 0)))
    return found


@every_way
def test_every_kind_of_error_at_every_place(ways: Any, crew2: Any) -> None:
    first, second = crew2(fragile, ways)
    assert len(first) == len(PLACES) * len(ERRORS)
    for (place, kind, told, *fine), (_, _, own, *too) in zip(first, second, strict=True):
        assert own[0] == kind, place
        assert told[0] == "RankError", (place, kind)
        assert told[1].startswith(f"rank 1 failed: {kind}: on purpose"), (place, kind, told)
        assert "stage 'b', microbatch 0, " in told[1], (place, kind, told)
        assert f"({PLACES[place]}" in told[1], (place, kind, told)
        assert told[2] == 1
        assert fine == too == [True, True], (place, kind)


# -- parameters that several ranks step -----------------------------------------------------------------------------


def stepped_apart(rank: int, shared: bool) -> str:
    """Rank 1 steps its copy of a parameter by another rule than rank 0."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 if shared else 1)]
    layers[-1].weight = layers[0].weight
    net = of_modules(*layers)
    how: dict[str, Any] = {"devices": 2} if shared else {"devices": 1, "data_parallel": 2}
    plan = pipec.compile(net, microbatches=4, update="stage", **how)
    try:
        pipec.Runner(net, plan, optimizer=lambda own: torch.optim.SGD(own, lr=0.1 if rank else 0.2)).close()
        return "nothing"
    except pipec.RankError as error:
        return str(error)


@pytest.mark.parametrize("shared", [True, False])
def test_copies_of_a_parameter_are_stepped_alike(shared: bool, crew2: Any) -> None:
    what = "the parameter of stages 'a' (weight) and 'b' (weight) here, its optimizer" if shared else \
        "stage 'a', the optimizer of weight"
    for told in crew2(stepped_apart, shared):
        assert f"{what}: SGD(lr=0.2, momentum=0, " in told
        assert " on rank 0; SGD(lr=0.1, momentum=0, " in told
