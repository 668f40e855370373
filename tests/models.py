"""Small real pipelines for the tests of the runtime, and loops that share no code with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import strategies as st
from plans import any_order
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.randomness import Streams
from pipec.schedules import REGISTRY
from pipec.spec import Ref
from pipec.tree import flatten, select, tree_map

WIDTH, WORDS = 8, 11
RUNS = list(REGISTRY)


@dataclasses.dataclass
class Carrier:
    """A user's own container on an edge."""

    h: Any
    rest: Any


FORMS: dict[str, tuple[Callable[[Tensor], Any], tuple[Any, ...]]] = {  # how a stage wraps h, and the path to it
    "tensor": (lambda h: h, ()),
    "tuple": (lambda h: (h, None, 3), (0,)),
    "dict": (lambda h: {
        "h": h, "flag": True, "ids": torch.arange(len(h)), "table": torch.ones(len(h), 2, device=h.device),
    }, ("h",)),
    "nested": (lambda h: {"a": [1, (h * 1.0, h)], "mask": h.detach() > 0}, ("a", 1, 0)),
    "dataclass": (lambda h: Carrier(h, (h.detach().to(torch.complex64), "text")), ("h",)),
    "halves": (lambda h: h.chunk(2, 1), (0,)),
    "twice": (lambda h: [h, h], (1,)),
}


def hidden(value: Any) -> Tensor:
    """All floating tensors in a value as one tensor of WIDTH columns; those that carry no gradient count too."""
    total = None
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0:
            wide = leaf if leaf.shape[1] == WIDTH else F.pad(leaf, (0, WIDTH - leaf.shape[1]))
            total = wide if total is None else total + wide
        elif isinstance(leaf, bool) and leaf:
            total = total if total is None else total * 1.5
    assert total is not None
    return total


class Block(nn.Module):
    """Adds up what it reads, does something of ``kind`` with it, and returns it in ``form``."""

    def __init__(self, kind: str, form: str) -> None:
        super().__init__()
        self.kind, self.form = kind, form
        if kind in ("linear", "frozen", "moody"):
            self.net: nn.Module = nn.Linear(WIDTH, WIDTH)
        elif kind == "conv":
            self.net = nn.Conv1d(2, 2, 3, padding=1)
        elif kind == "batchnorm":
            self.net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
        elif kind == "layernorm":
            self.net = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        elif kind == "embedding":
            self.net = nn.Embedding(WORDS, WIDTH)
        elif kind == "inplace":
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, *values: Any, ids: Any = None, scale: Any = None) -> Any:
        h = sum((hidden(value) for value in values[1:]), hidden(values[0]))
        if self.kind in ("conv", "batchnorm"):
            h = self.net(h.view(-1, 2, 4)).flatten(1)
        elif self.kind == "embedding":
            h = h + self.net(ids)
        elif self.kind == "moody":  # reads its last value for some microbatches only
            h = self.net(h if bool(h.sum() > 0) or len(values) == 1 else hidden(values[0]))
        elif self.kind != "none":
            h = self.net(h)
        h = h.tanh()
        if scale is not None:
            h = h * scale
        return FORMS[self.form][0](h)


def affine(params: dict[str, Tensor], *values: Any, ids: Any = None, scale: Any = None) -> Tensor:
    """A stage that is a function of its parameters."""
    total = sum((hidden(value) for value in values[1:]), hidden(values[0]))
    return (total * params["gain"] + params["shift"]).sin()


@frozen
class Node:
    """One stage of a drawn pipeline: ``reads`` are (stage or -1 for the input, whole value or just h)."""

    kind: str
    form: str
    reads: tuple[tuple[int, bool], ...]
    scaled: bool


@frozen
class Recipe:
    """A pipeline that can be built again and again with the same weights."""

    nodes: tuple[Node, ...]
    losses: tuple[tuple[int, str], ...]  # stage, "mean" | "sum" | "count"

    def build(self) -> pipec.Pipeline:
        torch.manual_seed(7)
        net = pipec.Pipeline("drawn")
        x, ids, scale, y = net.input("x"), net.input("ids"), net.input("scale", split=None), net.input("y")
        made: dict[int, Any] = {-1: x}
        forms = {-1: "tensor"}
        for number, node in enumerate(self.nodes):
            values = []
            for source, whole in node.reads:
                value = made[source]
                for key in () if whole else FORMS[forms[source]][1]:
                    value = value[key]
                values.append(value if source == number - 1 else pipec.skip(value))
            named = {"scale": scale} if node.scaled else {}
            if node.kind == "params":
                params = {"gain": torch.randn(WIDTH, requires_grad=True), "shift": torch.zeros(WIDTH).requires_grad_()}
                made[number] = net.stage(f"s{number}", affine, *values, params=params, **named)
            else:
                named |= {"ids": ids} if node.kind == "embedding" else {}
                made[number] = net.stage(f"s{number}", Block(node.kind, node.form), *values, **named)
            forms[number] = "tensor" if node.kind == "params" else node.form
        read = {source for node in self.nodes for source, _ in node.reads} | {stage for stage, _ in self.losses}
        for number in range(len(self.nodes)):
            if number not in read:
                net.output(made[number])
        for stage, reduction in self.losses:
            value = made[stage]
            for key in FORMS[forms[stage]][1]:
                value = value[key]
            given = {"reduction": reduction} if reduction != "count" else {"count": lambda y: y.shape[0] * 2.0}
            net.loss(f"{reduction} {stage}", squares if reduction == "mean" else summed, value, y, **given)
        last = len(self.nodes) - 1  # every input has a reader
        value = made[last]
        for key in FORMS[forms[last]][1]:
            value = value[key]
        net.loss("all", everything, value, x, ids, scale, y)
        return net


def everything(h: Tensor, x: Tensor, ids: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    return ((h * scale - y[:, : h.shape[1]]) ** 2).mean() + x.mean() + ids.float().mean() * 0.1


def squares(h: Tensor, y: Tensor) -> Tensor:
    return ((h - y[:, : h.shape[1]]) ** 2).mean()


def summed(h: Tensor, y: Tensor) -> Tensor:
    return ((h - y[:, : h.shape[1]]) ** 2).sum()


def batch(rows: int, seed: int = 0) -> dict[str, Any]:
    make = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=make), "ids": torch.randint(WORDS, (rows,), generator=make),
        "scale": torch.tensor(0.9), "y": torch.randn(rows, WIDTH, generator=make),
    }


KINDS = ("linear", "conv", "batchnorm", "layernorm", "embedding", "inplace", "moody", "frozen", "none", "params")


@st.composite
def recipes(draw: Any, most: int = 5) -> Recipe:
    """Any graph of any kinds of stages; the first stage trains, so that every loss has something to differentiate."""
    nodes = []
    for number in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(KINDS))
        sources = sorted(draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=3)), reverse=True)
        if number == 0 and kind in ("frozen", "none"):
            kind = "linear"
        if number and max(sources) < 0:
            sources = [number - 1, *sources]
        reads = tuple((source, draw(st.booleans())) for source in sources)
        nodes.append(Node(kind, draw(st.sampled_from(list(FORMS))), reads, draw(st.booleans())))
    count = len(nodes)
    homes = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True))
    losses = tuple((home, draw(st.sampled_from(("mean", "sum", "count")))) for home in homes)
    return Recipe(tuple(nodes), losses)


@st.composite
def options(draw: Any, recipe: Recipe) -> dict[str, Any]:
    """Arguments of pipec.compile that this pipeline may be compiled with."""
    count = len(recipe.nodes)
    names = [f"s{number}" for number in range(count)]
    devices = draw(st.integers(1, min(4, count)))
    ordered = any(node.kind == "batchnorm" for node in recipe.nodes)  # a random order would be refused
    schedule: Any = draw(st.sampled_from([*RUNS] if ordered else [*RUNS, "random"]))
    placement: Any = None
    if schedule == "random":
        schedule = any_order(draw(st.integers(0, 1000)), split=False)
    if schedule == "dualpipe-v":  # two chunks per device
        devices = min(devices, count // 2) or 1
        schedule = schedule if count > 1 else "1f1b"
    elif schedule not in ("interleaved-1f1b", "looped-bfs"):
        kinds = ["linear", "looped", "mapping"] + (["v"] if count >= 2 * devices else [])
        placement = draw(st.sampled_from(kinds))
        if placement == "mapping":
            extra = [draw(st.integers(0, devices - 1)) for _ in range(count - devices)]
            placement = dict(zip(names, draw(st.permutations([*range(devices), *extra])), strict=True))
    modes = st.sampled_from(["never", "always", "except_last"])
    return {
        "devices": devices, "microbatches": draw(st.integers(1, 5)), "schedule": schedule, "placement": placement,
        "recompute": draw(st.one_of(modes, st.dictionaries(st.sampled_from(names), modes))),
        "update": draw(st.sampled_from([None, "stage", "all"])),
    }


# -- loops that share no code with the runtime -------------------------------------------------------------------


def microbatches(values: Iterable[Any], splits: Iterable[int | None], count: int) -> list[list[Any]]:
    """Per microbatch the inputs; sizes differ by at most one, larger ones first."""
    columns = [
        list(value.tensor_split(count, dim)) if dim is not None else [value] * count
        for value, dim in zip(values, splits, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def whole(net: pipec.Pipeline, count: int, inputs: dict[str, Any]) -> Tensor:
    """The uncut model: one graph per microbatch and one backward; returns the minibatch's loss."""
    spec = net.spec
    rows = len(inputs["x"])
    values = [inputs[item.name] for item in spec.inputs]
    total = torch.zeros(())
    for given in microbatches(values, [item.split for item in spec.inputs], count):
        made: list[Any] = []

        def fill(leaf: Any, given: Any = given, made: Any = made) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            return select((given if leaf.source == "input" else made)[leaf.index], leaf.path)

        for stage in spec.stages:
            args, kwargs = tree_map(fill, stage.args), tree_map(fill, stage.kwargs)
            first = () if stage.params is None else (stage.params,)
            made.append(stage.fn(*first, *args, **kwargs))
        loss = torch.zeros(())
        for item in spec.losses:
            value = item.fn(*tree_map(fill, item.args), **tree_map(fill, item.kwargs))
            if item.count is not None:
                value = value / item.count(inputs["y"])
            elif item.reduction == "mean":
                value = value * (len(given[0]) / rows)
            loss = loss + value
        loss.backward()
        total = total + loss.detach()
    return total


def parameters(net: pipec.Pipeline, *, backward: bool = False) -> list[Tensor]:
    """All parameters of a pipeline, each once; with ``backward`` those of stages that a loss depends on."""
    found: dict[int, Tensor] = {}
    for stage, info in zip(net.spec.stages, net.spec.graph.stages, strict=True):
        if info.backward or not backward:
            own = list(stage.fn.parameters()) if isinstance(stage.fn, nn.Module) else []
            own += [leaf for leaf in flatten(stage.params)[0] if isinstance(leaf, Tensor)]
            found |= {id(p): p for p in own}
    return list(found.values())


def buffers(net: pipec.Pipeline) -> list[Tensor]:
    return [b.clone() for stage in net.spec.stages if isinstance(stage.fn, nn.Module) for b in stage.fn.buffers()]


def gradients(net: pipec.Pipeline) -> list[Tensor | None]:
    return [p.grad for p in parameters(net)]


def same(mine: Any, theirs: Any) -> bool:
    """Bit-equal trees; None equals None only."""
    left, right = flatten(mine), flatten(theirs)
    if left[1] != right[1]:
        return False
    for a, b in zip(left[0], right[0], strict=True):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)):
                return False
        elif a != b:
            return False
    return True


def snapshot(net: pipec.Pipeline) -> list[Any]:
    """Parameters, gradients and buffers as they are now."""
    copies = [p.detach().clone() for p in parameters(net)]
    return [copies, [None if g is None else g.clone() for g in gradients(net)], buffers(net)]


def chain(stages: int = 3, *, loss: Callable[..., Any] = F.mse_loss, **how: Any) -> pipec.Pipeline:
    """Linear and tanh per stage, an output and a loss, always with the same weights."""
    torch.manual_seed(5)
    net = pipec.Pipeline("chain")
    value, y = net.input("x"), net.input("y")
    for number in range(stages):
        value = net.stage(f"s{number}", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), value)
    net.output(value)
    net.loss("loss", loss, value, y, **how)
    return net


def of_modules(*modules: Any, loss: Callable[..., Any] = F.mse_loss, name: str = "net", **how: Any) -> pipec.Pipeline:
    """A chain of the given stages, named a, b, c, ..."""
    net = pipec.Pipeline(name)
    value, y = net.input("x"), net.input("y")
    for letter, module in zip("abcdefgh", modules, strict=False):
        value = net.stage(letter, module, value)
    net.output(value)
    net.loss("loss", loss, value, y, **how)
    return net


def data(rows: int = 8, seed: int = 1, width: int = WIDTH) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, width, generator=make), "y": torch.randn(rows, width, generator=make)}


def runner(net: pipec.Pipeline, devices: int = 2, microbatches: int = 4, schedule: Any = "1f1b", **how: Any) -> Any:
    """A Runner; ``backend``, ``optimizer``, ``before_update`` and ``scaler`` are its own, the rest is compile's.

    Threads unless said otherwise: tasks as small as the tests' would be given to one thread.
    """
    own = {"backend": "threads" if devices > 1 else "replay"}
    own |= {key: how.pop(key) for key in ("backend", "optimizer", "before_update", "scaler") if key in how}
    return pipec.Runner(net, pipec.compile(net, devices, microbatches, schedule, **how), **own)


MATRIX = [
    (devices, schedule, recompute, backend)
    for devices in (1, 2, 3) for schedule in ("gpipe", "1f1b") for recompute in ("never", "always")
    for backend in ("threads", "replay", "lanes")
]


def equal_everywhere(build: Callable[[], pipec.Pipeline], given: dict[str, Any], microbatches: int = 4) -> pipec.Result:
    """Two steps of every plan in MATRIX are bit-equal to the reference; returns the reference's last result."""
    net = build()
    loop = pipec.reference(net, microbatches)
    first = loop.step(**given)
    expected = loop.step(**given)
    for devices, schedule, recompute, backend in MATRIX:
        if devices > len(net.spec.stages):
            continue
        mine = build()
        with runner(mine, devices, microbatches, schedule, recompute=recompute, backend=backend) as run:
            result = run.step(**given)
            told = f"{devices} devices, {schedule}, recompute {recompute}, {backend}"
            assert same([result.losses, result.outputs], [first.losses, first.outputs]), told
            result = run.step(**given)
        assert same([result.losses, result.outputs], [expected.losses, expected.outputs]), told
        assert same(gradients(mine), gradients(net)), told
        assert same(buffers(mine), buffers(net)), told
    return expected


@pytest.fixture(scope="module", autouse=True)
def kept_streams() -> Iterator[None]:
    """Keep the kernels of the random streams installed between the runners of a test file: installing takes time.

    One intra-op thread: on tensors this small, more only wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with Streams():
        yield
    torch.set_num_threads(threads)
