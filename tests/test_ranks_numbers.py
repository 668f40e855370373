"""Over real processes every plan gives the numbers of the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import RUNS, WIDTH, Recipe, batch, chain, data, gradients, of_modules, options, recipes, same
from plans import any_order
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.reference import Reference


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def differences(
    build: Any, how: dict[str, Any], batches: list[dict[str, Any]], microbatches: int, evaluate: bool = False
) -> list[str]:
    """Run a pipeline here as one rank, and the reference beside it; what differs in this rank's part."""
    net, plain = build(), build()
    loop: Reference = pipec.reference(plain, microbatches, slices=how.get("slices", 1))
    plan = pipec.compile(net, microbatches=microbatches, **how)
    mine, theirs = [_parameters(n) for n in (net, plain)]
    optimizer: Any = {None: None, "stage": sgd, "all": sgd(mine)}[plan.update]
    used = [p for p, flag in zip(theirs, _used(plain), strict=True) if flag]
    other = sgd(used)
    found = []
    with pipec.Runner(net, plan, optimizer=optimizer, outputs="all") as run:
        own = {id(p) for p in run.parameters()}
        for number, given in enumerate(batches):
            if evaluate:
                run.evaluate(**given)
            result, expected = run.step(**given), loop.step(**given)
            if not same([result.losses, result.outputs], [expected.losses, expected.outputs]):
                found.append(f"step {number}: {result} instead of {expected}")
            if plan.update is not None:
                other.step()
                other.zero_grad()
            else:
                pairs = zip(gradients(net), gradients(plain), mine, strict=True)
                found += [f"step {number}: a gradient" for a, b, p in pairs if id(p) in own and not same(a, b)]
            here = [s for s in range(len(plan.graph.stages)) if run.stages[s].fn is not None]
            for stage in here:
                a, b = (n.spec.stages[stage].fn for n in (net, plain))
                if isinstance(a, nn.Module) and not same(dict(a.state_dict()), dict(b.state_dict())):
                    found.append(f"step {number}: state of stage {stage}")
    return found


def _parameters(net: pipec.Pipeline) -> list[Tensor]:
    from models import parameters

    return parameters(net)


def _used(net: pipec.Pipeline) -> list[bool]:
    from models import parameters

    used = {id(p) for p in parameters(net, backward=True)}
    return [id(p) in used for p in parameters(net)]


def drawn(rank: int, recipe: Recipe, how: dict[str, Any], microbatches: int) -> list[str]:
    if isinstance(how["schedule"], int):
        how = how | {"schedule": any_order(how["schedule"], split=False)}
    return differences(recipe.build, how, [batch(10), batch(10, 1), batch(3, 2), batch(10, 3)], microbatches)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_pipeline_on_two_and_four_ranks(data: Any, crew2: Any, crew4: Any) -> None:
    recipe = data.draw(recipes().filter(lambda r: len(r.nodes) >= 2))
    how = data.draw(options(recipe).filter(lambda o: o["devices"] in (2, 4)))
    if callable(how["schedule"]):
        how["schedule"] = data.draw(st.integers(0, 1000))
    crew = {2: crew2, 4: crew4}[how["devices"]]
    microbatches = how.pop("microbatches")
    assert crew(drawn, recipe, how, microbatches) == [[]] * crew.size


def every_schedule(rank: int, devices: int) -> dict[str, list[str]]:
    return {
        name: differences(lambda: chain(2 * devices), {"devices": devices, "schedule": name}, [data(9), data(9, 2)], 4)
        for name in RUNS
    }


@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule(size: int, crew2: Any, crew4: Any) -> None:
    crew = crew2 if size == 2 else crew4
    assert crew(every_schedule, size) == [{name: [] for name in RUNS}] * size


# -- skips that jump over ranks, values of every kind ---------------------------------------------------------------


class Gate(nn.Module):
    """Reads values by keyword; some microbatches make no use of ``late``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, late: Any = None, scale: float = 1.0, flag: bool = False) -> Tensor:
        out = self.norm(self.drop(self.layer(h))) * scale
        if isinstance(late, dict):
            out = out + late["h"] * late["n"] + late["wide"].real[:, :1] * late["mask"]
        return out if not flag else out.tanh()


class Carry(nn.Module):
    """Returns what can cross a border: a gradient, none, integers, booleans, complex numbers, gaps, plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> dict[str, Any]:
        made = self.layer(h)
        assert made.requires_grad or not torch.is_grad_enabled()
        wide = made.detach().to(torch.complex64)
        return {
            "h": made, "aux": (made.t().contiguous().t(), None, made[:, ::2], made[:1].expand(len(made), -1)),
            "n": len(h), "flag": True, "mask": made.detach()[:, :1] > 0, "wide": wide, "ids": torch.arange(len(h)),
            "empty": made[:0],
        }


class Last(nn.Module):
    def forward(self, deep: Tensor, early: dict[str, Any], ids: Tensor, name: str) -> Tensor:
        assert name == "kept"
        assert early["ids"].dtype is torch.int64
        assert not early["wide"].requires_grad
        assert not early["mask"].requires_grad
        assert early["mask"].dtype is torch.bool
        turned, nothing, gaps, wide = early["aux"]
        assert nothing is None
        assert early["h"].requires_grad == torch.is_grad_enabled()
        return deep + turned * 0.5 + wide + F.pad(gaps, (0, WIDTH // 2)) + ids[:, None] * 0.01


def jumping() -> pipec.Pipeline:
    """Values of every kind jump from rank 0 to 2 and 3, inputs go to any stage, arguments by keyword."""
    torch.manual_seed(3)
    net = pipec.Pipeline("jumping")
    x, ids, y = net.input("x"), net.input("ids"), net.input("y")
    scale = net.input("scale", split=None)
    a = net.stage("a", Carry(), x, device=0)
    b = net.stage("b", Gate(), a["h"], device=1, scale=scale)
    c = net.stage("c", Gate(), h=b, late=pipec.skip(a), flag=True, device=2)
    d = net.stage("d", Last(), c, pipec.skip(a), ids, device=3, name="kept")
    net.output(d)
    net.output(b, "middle")
    net.loss("mse", F.mse_loss, d, y)
    net.loss("middle", F.mse_loss, b, y, reduction="sum")
    return net


def kinds(rank: int) -> list[str]:
    given = [data(rows, seed) | {"ids": torch.arange(rows), "scale": 0.5 + seed} for seed, rows in
             enumerate((16, 16, 7, 2, 16))]
    found = []
    for schedule in ("1f1b", "gpipe"):
        for recompute in ("never", "always"):
            how = {"devices": 4, "schedule": schedule, "recompute": recompute}
            found += differences(jumping, how, given, 4, evaluate=True)
    return found


def test_values_of_every_kind_and_batches_of_every_size(crew4: Any) -> None:
    assert crew4(kinds) == [[]] * 4


UNUSUAL: dict[str, Any] = {  # made of the hidden value, with a gradient, and read as a dense tensor
    "sparse": (lambda h: h.to_sparse(), lambda v: v.to_dense()),
    "csr": (lambda h: h.to_sparse_csr(), lambda v: v.to_dense()),
    "conjugate": (lambda h: torch.complex(h, h).conj(), lambda v: v.imag),
    "negative": (lambda h: torch.complex(h, h).conj().imag, lambda v: v),
    "nested": (lambda h: torch.nested.as_nested_tensor([h[0], h[0, :3]]),
               lambda v: torch.nested.to_padded_tensor(v, 0.0).sum()),
}


class Makes(nn.Module):
    def __init__(self, name: str, alone: bool) -> None:
        super().__init__()
        self.layer, self.name, self.alone = nn.Linear(WIDTH, WIDTH), name, alone

    def forward(self, x: Tensor) -> Any:
        made = UNUSUAL[self.name][0](self.layer(x))
        return made if self.alone else {"h": x, "more": [made, 3]}


class Reads(nn.Module):
    def __init__(self, name: str, alone: bool) -> None:
        super().__init__()
        self.layer, self.name, self.alone = nn.Linear(WIDTH, WIDTH), name, alone

    def forward(self, value: Any) -> Tensor:
        made = value if self.alone else value["more"][0]
        assert made.requires_grad or not torch.is_grad_enabled()
        dense = UNUSUAL[self.name][1](made)
        return self.layer(dense.expand(4, WIDTH) if self.alone else value["h"] + dense)


def unusual(rank: int, name: str) -> list[bool]:
    """Tensors that are not their elements alone keep that they require a gradient, and get it."""
    found = []
    for alone in (False, True):
        seen = []
        for backend in (None, "replay"):
            torch.manual_seed(4)
            stages = [Makes(name, alone), Reads(name, alone)]
            net = of_modules(*stages)
            with pipec.Runner(net, pipec.compile(net, 2, 2), backend=backend) as run:
                losses = [run.step(**data(8, step)).loss for step in range(2)]
            seen.append((losses, [p.grad for p in stages[rank].parameters()]))
        found.append(same(*seen) and all(grad is not None for grad in seen[0][1]))
    return found


@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_that_are_not_their_elements_alone(name: str, crew2: Any) -> None:
    assert crew2(unusual, name) == [[True, True]] * 2


def unread(rank: int) -> Any:
    """Each rank gives what its own stages read, and the rows."""
    net = jumping()
    plan = pipec.compile(net, 4, 4)
    given = data(8) | {"ids": torch.arange(8), "scale": 0.5}
    own = {0: ("x",), 1: ("scale", "y"), 2: (), 3: ("ids", "y")}[rank]
    with pipec.Runner(net, plan) as run:
        result = run.step(**{name: given[name] for name in own})
    loop = pipec.reference(jumping(), 4)
    return same(result.losses, loop.step(**given).losses), sorted(result.outputs)


def test_inputs_may_be_left_out_where_nobody_reads_them(crew4: Any) -> None:
    assert crew4(unread) == [(True, []), (True, ["middle"]), (True, []), (True, ["d"])]


def read_last(rank: int, schedule: str) -> list[str]:
    """Rank 3 reads a value of each microbatch only after all of them passed it for the first time."""
    def build() -> pipec.Pipeline:
        torch.manual_seed(3)
        net = pipec.Pipeline("read last")
        x, y = net.input("x"), net.input("y")
        h = first = net.stage("s0", nn.Linear(WIDTH, WIDTH), x)
        for number in range(1, 7):
            h = net.stage(f"s{number}", nn.Linear(WIDTH, WIDTH), h)
        net.output(net.stage("s7", lambda a, b: a + b, h, pipec.skip(first)))
        net.loss("mse", F.mse_loss, net.stage("end", nn.Linear(WIDTH, WIDTH), h), y)
        return net

    how = {"devices": 4, "schedule": schedule, "placement": [0, 1, 2, 3, 0, 1, 2, 3, 3]}
    return differences(build, how, [data(24), data(24, 1)], 24, evaluate=True)


def test_a_rank_that_reads_late_holds_nobody_up(crew4: Any) -> None:
    """More messages wait for it than a sender has under way at once."""
    assert crew4(read_last, "gpipe") == [[]] * 4


def counted(rank: int, size: int) -> list[Any]:
    """Losses of other types than most, some of them for evaluation only; a complex one is refused."""
    found: list[Any] = []
    for fn in (lambda h, y: (h > y).sum(), lambda h, y: (h > y).any(), lambda h, y: (h > y).sum().int(),
               lambda h, y: (h - y).mean().half()):
        results = []
        for backend in (None, "replay"):
            net = chain(4, loss=fn, reduction="sum")
            with pipec.Runner(net, pipec.compile(net, size, 4), backend=backend) as run:
                results.append(run.evaluate(**data()).losses)
        found.append(same(*results))
    net = chain(4, loss=lambda h, y: h.mean().to(torch.complex64))
    with pipec.Runner(net, pipec.compile(net, size, 4)) as run, pytest.raises(pipec.RunError) as error:
        run.evaluate(**data())
    return [*found, "must return a real number, got a tensor of torch.complex64; take .real" in str(error.value)]


def test_losses_of_every_type(crew2: Any) -> None:
    assert crew2(counted, 2) == [[True] * 5] * 2


def asked(rank: int) -> list[str]:
    """What a rank is told that asks for another one's output."""
    net, told = jumping(), list[str]()
    single = chain(4)
    given = data(8) | {"ids": torch.arange(8), "scale": 0.5}
    with pipec.Runner(net, pipec.compile(net, 4, 4)) as run, pipec.Runner(single, pipec.compile(single, 4, 4)) as other:
        result = run.step(**given)
        assert result.outputs.get("nothing") is None
        for ask in (lambda: result.outputs["d"], lambda: result.outputs["nothing"], lambda: result.output,
                    lambda: other.step(**data(8)).output):
            try:
                told.append(str(tuple(ask().shape)))
            except (pipec.RunError, KeyError) as error:
                told.append(str(error))
    return told


def test_outputs_of_other_ranks_are_told(crew4: Any) -> None:
    there = "outputs are on other ranks: {} with that of device 3; " \
            "give Runner(outputs='all') to have them on every rank"
    several = "the pipeline has 2 outputs: {}"
    none = "d on the rank of device 3, middle on the rank of device 1"
    assert crew4(asked) == [
        [there.format("'d'"), "'nothing'", several.format(none), there.format("'s3'")],
        [there.format("'d'"), "'nothing'", several.format("middle, d on the rank of device 3"), there.format("'s3'")],
        [there.format("'d'"), "'nothing'", several.format(none), there.format("'s3'")],
        ["(8, 8)", "'nothing'", several.format("d, middle on the rank of device 1"), "(8, 8)"],
    ]


# -- sizes ------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Makes its rows ``size`` bytes wide, or reads such rows."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()) * 1.5)
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, self.columns) * self.gain if x.shape[1] == 1 else x * self.gain


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


def large(rank: int, nbytes: int, size: int, placement: str, schedule: str) -> list[str]:
    columns, stages = nbytes // 4, 2 * size
    modules = [Wide(columns) for _ in range(stages - 1)] + [Narrow()]

    def build() -> pipec.Pipeline:
        return of_modules(*modules)

    given = {"x": torch.randn(2, 1, generator=torch.Generator().manual_seed(1)), "y": torch.zeros(2, 1)}
    how = {"devices": size, "schedule": schedule, "placement": placement}
    net = build()
    plan = pipec.compile(net, microbatches=2, **how)
    with pipec.Runner(net, plan) as run:
        losses = [float(run.step(**given).loss) for _ in range(2)]
        evaluated = float(run.evaluate(**given).loss)
    expected = sum(((1.5 ** (stages - 1)) * float(x)) ** 2 for x in given["x"]) / 2
    return [f"{got} instead of {expected}" for got in (*losses, evaluated) if abs(got - expected) > 1e-4 * expected]


@pytest.mark.parametrize(("placement", "schedule", "most"), [
    ("looped", "1f1b", 1 << 20), ("v", "zb-v", 64 << 20), ("linear", "gpipe", 1 << 20),
])
def test_borders_from_4_kib_to_64_mib(placement: str, schedule: str, most: int, crew2: Any) -> None:
    for nbytes in (4 << 10, most):
        assert crew2(large, nbytes, 2, placement, schedule) == [[]] * 2


def test_large_borders_between_four_ranks(crew4: Any) -> None:
    assert crew4(large, 1 << 20, 4, "v", "v-min") == [[]] * 4
    assert crew4(large, 8 << 20, 4, "looped", "1f1b") == [[]] * 4
