"""The stage graph: stages by device, main edges solid, skip edges dashed, laid out by ``dot``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from pipec.costs import Costs
from pipec.errors import RenderError
from pipec.ir import Plan
from pipec.render.dot import FONT, attributes, escape, lines, shorten
from pipec.render.palette import INK, PALE, mix
from pipec.render.picture import Picture
from pipec.spec import Graph, Ref, Spec
from pipec.timeline import show_bytes

MOST_STAGES = 400
TINTS = ("#5B9BD5", "#F2A14A", "#57B894", "#B07CC6", "#D9C94A", "#D98880", "#7FB3C8", "#A3A3A3")
COMMAND = "paint with: dot -Tsvg this.dot -o picture.svg"
MAIN, SKIP, WHITE = "#333333", "#A34700", "#FFFFFF"


@frozen
class Ends:
    """What stands around the stages: (node id, label, kind) and their edges (from, to)."""

    nodes: tuple[tuple[str, str, str], ...]
    edges: tuple[tuple[str, str], ...]


def draw_stages(what: Any, pipeline: Any = None, costs: Costs | None = None, timeout: float = 60.0) -> Picture:
    """The stage graph of a plan, clustered by device, or of a pipeline that is not placed yet.

    Raises:
        RenderError: too many stages, or a ``pipeline`` that is not the plan's.
    """
    plan = what if isinstance(what, Plan) else None
    spec: Spec | None = pipeline.spec if pipeline is not None else None if plan is not None else what.spec
    graph: Graph = plan.graph if plan is not None else what.spec.graph
    if spec is not None and [s.name for s in spec.stages] != [s.name for s in graph.stages]:
        raise RenderError(f"pipeline={spec.name!r} has other stages than the plan of {graph.name!r}")
    if len(graph.stages) > MOST_STAGES:
        raise RenderError(
            f"a graph of {len(graph.stages)} stages cannot be read (at most {MOST_STAGES}); draw the "
            "timeline of some devices instead: plan.draw(path, devices=range(0, 8))"
        )
    costs = costs or (plan.costs if plan is not None else None) or Costs()
    ends = _ends_of_spec(spec) if spec is not None else _ends_of_graph(graph)
    rows = [
        f"// {COMMAND}",
        f'digraph "{escape(graph.name)}" {{',
        f'  graph [rankdir=LR bgcolor="white" pad=0.2 nodesep=0.3 ranksep=0.45 fontname="{FONT}" labelloc=t '
        f'labeljust=l fontsize=15 id="pipec" label="{_title(plan, graph)}"]',
        f'  node [shape=box style="filled,rounded" fontname="{FONT}" fontsize=11 height=0.4 '
        f'margin="0.16,0.06" color="#555555" penwidth=0.8]',
        f'  edge [fontname="{FONT}" fontsize=9 color="{MAIN}" penwidth=1.2 arrowsize=0.7]',
        *_inputs(ends),
        *_stages(plan, graph),
        *_others(ends),
        *_value_edges(graph, costs),
        *(f"  {a} -> {b}" + attributes(color=PALE, penwidth=0.9, **{"class": "end"}) for a, b in ends.edges),
        "}",
    ]
    return Picture("\n".join(rows) + "\n", False, None, timeout)


def _title(plan: Plan | None, graph: Graph) -> str:
    parts = [shorten(graph.name, 60), f"{len(graph.stages)} stage{'s' * (len(graph.stages) > 1)}"]
    if plan is not None:
        parts.append(f"{plan.devices} device{'s' * (plan.devices > 1)}")
    skips = sum(_is_skip(graph, v, r) for v, value in enumerate(graph.values) for r in value.readers)
    if skips:
        parts.append(f"{skips} skip edge{'s' * (skips > 1)} (dashed)")
    return escape(" · ".join(parts)) + "\\l"


def _stages(plan: Plan | None, graph: Graph) -> Iterator[str]:
    if plan is None:
        yield from (f"  {_stage(graph, s, '#DDE9F5')}" for s in range(len(graph.stages)))
        return
    count = {d: sum(c.device == d for c in plan.chunks) for d in range(plan.devices)}
    for chunk in plan.chunks:
        tint = TINTS[chunk.device % len(TINTS)]
        label = f"device {chunk.device}"
        if count[chunk.device] > 1:
            label += f", chunk {sum(c.device == chunk.device for c in plan.chunks[: chunk.index])}"
        yield f"  subgraph cluster_{chunk.index} {{"
        yield (
            f'    graph [label="{label}" id="chunk-{chunk.index}" class="device-{chunk.device}" '
            f'style="filled,rounded" color="{mix(tint, WHITE, 0.35)}" fillcolor="{mix(tint, WHITE, 0.85)}" '
            f'labeljust=l fontsize=10 fontcolor="{INK}" margin=10 penwidth=1]'
        )
        for stage in chunk.stages:
            yield f"    {_stage(graph, stage, mix(tint, WHITE, 0.5))}"
        yield "  }"


def _stage(graph: Graph, number: int, fill: str) -> str:
    info = graph.stages[number]
    notes = [word for word, on in (("no gradient", not info.backward), ("keeps buffers", info.ordered)) if on]
    label = [shorten(info.name, 32)] + ([", ".join(notes)] if notes else [])
    return f"s{number}" + attributes(
        label=lines(label),
        fillcolor=fill,
        id=f"stage-{number}",
        **{"class": "stage"},
        tooltip=lines([f"stage {number}: {info.name}", *notes]),
    )


def _is_skip(graph: Graph, value: int, reader: int) -> bool:
    info = graph.values[value]
    return reader in info.skips or reader != info.producer + 1


def _value_edges(graph: Graph, costs: Costs) -> Iterator[str]:
    for number, value in enumerate(graph.values):
        producer = graph.stages[value.producer].name
        size = costs.value_bytes(value.name, producer)
        part = value.name[len(producer) :] if value.name.startswith(producer) else value.name
        label = " ".join(filter(None, [shorten(part, 24), "" if size is None else show_bytes(size)]))
        for reader in value.readers:
            skip = _is_skip(graph, number, reader)
            tip = f"{value.name}: {producer} to {graph.stages[reader].name}" + (
                "" if size is None else f", {show_bytes(size)}"
            )
            tip += ", may wait in host memory" if reader in value.host else ""
            yield f"  s{value.producer} -> s{reader}" + attributes(
                label=escape(label) if label else None,
                style="dashed" if skip else None,
                color=SKIP if skip else None,
                fontcolor=SKIP if skip else None,
                weight=1 if skip else 8,
                id=f"edge-v{number}-{reader}",
                **{"class": "edge skip" if skip else "edge"},
                tooltip=escape(tip),
                labeltooltip=escape(tip),
            )


def _inputs(ends: Ends) -> Iterator[str]:
    for node, label, kind in ends.nodes:
        if kind == "input":
            yield f"  {node}" + _end_style(label, kind, "ellipse", "#FFFFFF")


def _others(ends: Ends) -> Iterator[str]:
    for node, label, kind in ends.nodes:
        if kind != "input":
            yield f"  {node}" + _end_style(label, kind, "ellipse", "#FFFFFF" if kind == "output" else "#FBE3E4")


def _end_style(label: str, kind: str, shape: str, fill: str) -> str:
    text = shorten(label, 32)
    rows = [text] if kind == "input" or text == kind else [kind, text]
    return attributes(
        shape=shape,
        style="filled",
        fillcolor=fill,
        color=PALE,
        fontsize=10,
        label=lines(rows),
        **{"class": kind},
        tooltip=escape(f"{kind} {label}"),
        margin="0.08,0.03",
        height=0.3,
    )


def _ends_of_graph(graph: Graph) -> Ends:
    """Around a plan alone: its inputs, the stages with a loss, outputs where nothing else reads a stage."""
    nodes = [(f"i{n}", item.name, "input") for n, item in enumerate(graph.inputs)]
    edges = [(f"i{n}", f"s{r}") for n, item in enumerate(graph.inputs) for r in item.readers]
    for number, stage in enumerate(graph.stages):
        if stage.loss:
            nodes.append((f"l{number}", "loss", "loss"))
            edges.append((f"s{number}", f"l{number}"))
        elif not stage.gives:
            nodes.append((f"o{number}", "output", "output"))
            edges.append((f"s{number}", f"o{number}"))
    return Ends(tuple(nodes), tuple(edges))


def _ends_of_spec(spec: Spec) -> Ends:
    def node(ref: Ref) -> str:
        return f"{'i' if ref.source == 'input' else 's'}{ref.index}"

    nodes = [(f"i{n}", item.name, "input") for n, item in enumerate(spec.inputs)]
    edges = [(node(ref), f"s{n}") for n, s in enumerate(spec.stages) for ref in s.refs() if ref.source == "input"]
    for n, loss in enumerate(spec.losses):
        nodes.append((f"l{n}", loss.name, "loss"))
        edges += [(node(ref), f"l{n}") for ref in loss.refs()]
    for n, output in enumerate(spec.outputs):
        nodes.append((f"o{n}", output.name, "output"))
        edges.append((node(output.ref), f"o{n}"))
    return Ends(tuple(nodes), tuple(dict.fromkeys(edges)))
