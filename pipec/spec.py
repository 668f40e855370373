"""The frozen declaration of a pipeline: what the DSL builds and every pass reads.

A :class:`Spec` keeps the user's callables; a :class:`Graph` is its bare structure, which a plan carries so that
it can be saved, verified, simulated and drawn without any module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

from attrs import field, frozen

from pipec.errors import Location, Problem, SpecError, raise_all
from pipec.tree import Path, flatten, show_path

REDUCTIONS = ("mean", "sum")


@frozen
class Ref:
    """A reader's argument: where it comes from and what is selected from it."""

    source: str  # "input" or "stage"
    index: int
    path: Path = ()


@frozen
class InputSpec:
    """An input of the pipeline; ``split`` is the dimension cut into microbatches, None: the same for all.

    ``slice_dim`` is the one that may be cut into slices of a sequence, None: the same for all slices.
    """

    name: str
    split: int | None = 0
    location: Location | None = field(default=None, eq=False)
    slice_dim: int | None = None


@frozen(eq=False)
class StageSpec:
    """One stage. ``args`` and ``kwargs`` are templates whose :class:`Ref` leaves are filled at run time."""

    name: str
    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(factory=dict)
    params: Any = None  # a pytree of tensors: ``fn`` is then called as fn(params, *args, **kwargs)
    device: int | None = None
    skips: frozenset[Ref] = frozenset()
    hosted: frozenset[Ref] = frozenset()  # of the skips those that wait in host memory
    location: Location | None = None
    outputs: int | None = None  # the result is a tuple or list of so many parts
    carry: bool = False  # ``fn`` takes ``carry=`` of the slice before and returns (result, carry for the next one)

    def refs(self) -> Iterator[Ref]:
        return refs_of((self.args, self.kwargs))


@frozen(eq=False)
class LossSpec:
    """A loss computed inside stage ``home``, the last stage whose value it reads.

    ``reduction`` says what ``fn`` returns for one microbatch: a mean over its rows, or a sum. With ``count``
    the loss is a sum that is divided by ``count(**inputs)`` of the whole minibatch.
    """

    name: str
    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reduction: str
    count: Callable[..., Any] | None
    home: int
    location: Location | None = None

    def refs(self) -> Iterator[Ref]:
        return refs_of((self.args, self.kwargs))

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Inputs of the pipeline that it reads."""
        return tuple(ref.index for ref in self.refs() if ref.source == "input")


@frozen
class OutputSpec:
    """A value handed back by ``step``; ``dim`` joins the microbatches, None gives a list of them.

    ``slice_dim`` joins the slices of a sequence.
    """

    name: str
    ref: Ref
    dim: int | None = 0
    location: Location | None = field(default=None, eq=False)
    slice_dim: int | None = None


@frozen(eq=False)
class Spec:
    """A pipeline: stages in the order of declaration, which is a topological order of the graph."""

    name: str
    inputs: tuple[InputSpec, ...]
    stages: tuple[StageSpec, ...]
    outputs: tuple[OutputSpec, ...] = ()
    losses: tuple[LossSpec, ...] = ()
    graph: Graph = field(init=False)
    ports: tuple[Port, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        raise_all(f"pipeline {self.name!r}", structure_problems(self))
        ports = find_ports(self)
        object.__setattr__(self, "ports", ports)
        object.__setattr__(self, "graph", build_graph(self, ports))

    def __repr__(self) -> str:
        def names(items: Iterable[Any], most: int = 6) -> str:
            all_names = [str(item.name) for item in items]
            return ", ".join(all_names[:most] + (["..."] if len(all_names) > most else [])) or "none"

        count = "1 stage" if len(self.stages) == 1 else f"{len(self.stages)} stages"
        return (
            f"<Spec {self.name!r}: inputs {names(self.inputs)}; {count}: {names(self.stages)}; "
            f"losses {names(self.losses)}; outputs {names(self.outputs)}>"
        )

    @property
    def spec(self) -> Spec:
        """Itself, so that a Pipeline and its Spec can be passed alike."""
        return self

    def stage(self, name: str) -> StageSpec:
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(s.name for s in self.stages)
        raise SpecError(f"pipeline {self.name!r} has no stage {name!r}; its stages are {known}")

    def port_of(self, ref: Ref) -> tuple[int, Path]:
        """The port that carries ``ref``, and what is left to select from it at the reader."""
        for index, port in enumerate(self.ports):
            if port.producer == ref.index and ref.path[: len(port.path)] == port.path:
                return index, ref.path[len(port.path) :]
        raise SpecError(f"no stage reads {ref}")


def refs_of(template: Any) -> Iterator[Ref]:
    """All references in an argument template, from left to right."""
    leaves, _ = flatten(template)
    return (leaf for leaf in leaves if isinstance(leaf, Ref))


@frozen
class Port:
    """A part of a stage's result that travels as one: ports of one stage never overlap."""

    producer: int
    path: Path
    readers: tuple[int, ...]  # stages, ascending


@frozen
class StageInfo:
    """Structure of a stage.

    ``backward``: a loss depends on it. ``ordered``: its buffers change per microbatch. ``carry``: it hands something
    on from each slice of a sequence to the next.
    """

    name: str
    backward: bool = True
    loss: bool = False
    ordered: bool = False
    reads: tuple[int, ...] = ()  # values
    gives: tuple[int, ...] = ()  # values
    carry: bool = False
    tied: tuple[int, ...] = ()  # other stages with a parameter in common


@frozen
class ValueInfo:
    """Structure of a value: one producer, readers in ascending order, ``skip`` edges marked by the user.

    ``host``: readers for which it may wait in host memory.
    """

    name: str
    producer: int
    readers: tuple[int, ...]
    skips: tuple[int, ...] = ()
    host: tuple[int, ...] = ()

    def through_host(self, devices: Any) -> tuple[int, ...]:
        """The devices whose readers all take the value from host memory, ascending; ``devices``: that of each
        stage.

        Where another reads it too it is on that device anyway.
        """
        direct = {int(devices[r]) for r in self.readers if r not in self.host}
        return tuple(sorted({int(devices[r]) for r in self.host} - direct)) if self.host else ()


@frozen
class InputInfo:
    """Structure of an input of the pipeline and the stages that read it."""

    name: str
    readers: tuple[int, ...]


@frozen
class Graph:
    """The structure of a pipeline without its callables."""

    name: str
    stages: tuple[StageInfo, ...]
    values: tuple[ValueInfo, ...]
    inputs: tuple[InputInfo, ...] = ()

    def gradient_readers(self, value: int) -> tuple[int, ...]:
        """The readers of ``value`` that send a gradient back, ascending."""
        info = self.values[value]
        if not self.stages[info.producer].backward:
            return ()
        return tuple(r for r in info.readers if self.stages[r].backward)


def read_by(spec: Spec, stage: int) -> Iterator[Ref]:
    """Every reference a stage reads: its own arguments, and those of the losses computed inside it."""
    yield from spec.stages[stage].refs()
    for loss in spec.losses:
        if loss.home == stage:
            yield from (ref for ref in loss.refs() if ref.source == "input" or ref.index != stage)


def structure_problems(spec: Spec) -> list[Problem]:
    """What makes a spec uncompilable whatever wrote it: edges that run backwards, unknown sources, no stage."""
    problems = []
    if not spec.stages:
        problems.append(Problem("the pipeline has no stage; add one with stage(name, module, value)"))
    for number, stage in enumerate(spec.stages):
        for ref in stage.refs():
            known = spec.inputs if ref.source == "input" else spec.stages
            if not 0 <= ref.index < len(known):
                problems.append(Problem(f"stage {stage.name!r} reads an unknown {ref.source}", stage.location))
            elif ref.source == "stage" and ref.index >= number:
                source = spec.stages[ref.index].name
                problems.append(
                    Problem(f"edge {source!r} -> {stage.name!r} runs backwards or forms a cycle; a stage reads "
                            "only stages declared before it", stage.location)
                )
    for loss in spec.losses:
        if not 0 <= loss.home < len(spec.stages):
            problems.append(Problem(f"loss {loss.name!r} reads no stage", loss.location))
    return problems


def find_ports(spec: Spec) -> tuple[Port, ...]:
    """What travels: per producer the shortest paths read, so that no two of them overlap."""
    readers: dict[tuple[int, Path], set[int]] = {}
    for stage in range(len(spec.stages)):
        for ref in read_by(spec, stage):
            if ref.source == "stage":
                readers.setdefault((ref.index, ref.path), set()).add(stage)
    merged: dict[tuple[int, Path], set[int]] = {}
    for (producer, path), stages in sorted(readers.items(), key=lambda item: (item[0][0], len(item[0][1]))):
        cover = next((k for k in merged if k[0] == producer and path[: len(k[1])] == k[1]), (producer, path))
        merged.setdefault(cover, set()).update(stages)
    order = sorted(merged.items(), key=lambda item: (item[0][0], [str(key) for key in item[0][1]]))
    return tuple(Port(producer, path, tuple(sorted(stages))) for (producer, path), stages in order)


def build_graph(spec: Spec, ports: tuple[Port, ...]) -> Graph:
    """The bare structure of ``spec``."""
    homes = {loss.home for loss in spec.losses}
    backward = [stage in homes for stage in range(len(spec.stages))]
    for stage in reversed(range(len(spec.stages))):
        backward[stage] |= any(backward[r] for p in ports if p.producer == stage for r in p.readers)
    skips = [{spec.port_of(ref)[0] for ref in stage.skips if ref.source == "stage"} for stage in spec.stages]
    hosted = [{spec.port_of(ref)[0] for ref in stage.hosted} for stage in spec.stages]
    values = tuple(
        ValueInfo(
            spec.stages[port.producer].name + show_path(port.path),
            port.producer,
            port.readers,
            tuple(r for r in port.readers if index in skips[r]),
            tuple(r for r in port.readers if index in hosted[r]),
        )
        for index, port in enumerate(ports)
    )
    tied = tied_stages(spec)
    stages = tuple(
        StageInfo(
            stage.name,
            backward[number],
            number in homes,
            _has_buffers(stage.fn),
            tuple(i for i, port in enumerate(ports) if number in port.readers),
            tuple(i for i, port in enumerate(ports) if port.producer == number),
            stage.carry,
            tied[number],
        )
        for number, stage in enumerate(spec.stages)
    )
    inputs = tuple(
        InputInfo(
            info.name,
            tuple(s for s in range(len(spec.stages)) if Ref("input", i) in
                  {Ref(ref.source, ref.index) for ref in read_by(spec, s)}),
        )
        for i, info in enumerate(spec.inputs)
    )
    return Graph(spec.name, stages, values, inputs)


def parameters_of(stage: StageSpec) -> Iterator[tuple[str, Any]]:
    """The tensors of a declared stage that may be trained, each once, by name; none of a lazy one."""
    owner = owner_of(stage.fn)
    if hasattr(owner, "named_parameters"):
        yield from owner.named_parameters()
    leaves = flatten(stage.params)[0] if stage.params is not None else []
    yield from ((str(place), leaf) for place, leaf in enumerate(leaves) if hasattr(leaf, "requires_grad"))


def tied_stages(spec: Spec) -> list[tuple[int, ...]]:
    """Per stage the others that have a parameter in common with it."""
    users: dict[int, set[int]] = {}
    for number, stage in enumerate(spec.stages):
        for _, parameter in parameters_of(stage):
            users.setdefault(id(parameter), set()).add(number)
    found: list[set[int]] = [set() for _ in spec.stages]
    for stages in users.values():
        if len(stages) > 1:
            for number in stages:
                found[number] |= stages - {number}
    return [tuple(sorted(others)) for others in found]


def owner_of(fn: Any) -> Any:
    """The module behind a callable: of a bound method (``model.encode``) or a partial, else the callable itself."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__self__", fn)


def _has_buffers(fn: Any) -> bool:
    """True when a forward may change state that the next microbatch reads, so that order matters."""
    owner = owner_of(fn)
    return hasattr(owner, "buffers") and any(True for _ in owner.buffers())
