"""Pictures of plans and timelines; a Graphviz program is looked for only when something is painted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import fields

from pipec.errors import RenderError
from pipec.given import spec_of
from pipec.ir import Plan
from pipec.render.picture import Picture
from pipec.timeline import Timeline

GRAPHS = ("timeline", "stages", "tasks")


def draw(
    what: Any,
    path: str | Path | None = None,
    *,
    graph: str = "timeline",
    titles: Sequence[str] | None = None,
    **options: Any,
) -> Picture:
    """Draw a plan, a timeline, or several of them stacked on one time axis.

    The picture is returned (a notebook shows it; ``.dot`` is its DOT text) and, with ``path``, written: the
    suffix decides the format, one of .svg, .png, .pdf (where the program can), .dot, .gv.

    Args:
        what: a Plan, a Timeline (simulated or measured), or a list of these; with ``graph="stages"`` a
            Pipeline too.
        graph: "timeline", "stages" (the stages and values by device) or "tasks" (every task and what it
            needs, for small plans).
        titles: with several timelines, a title each; by default their schedules.
        options: for timelines ``copies=True`` (an arrow per copy, skips dashed), ``lanes=True`` (copy lanes),
            ``memory=`` (True, False, "shares", "bytes"), ``memory_limit=`` (bytes or
            ``pipec.activations(n)``), ``critical=False``, ``legend=False``, ``width=`` (points), the windows
            ``devices=``, ``microbatches=`` (numbers in any collection) and ``time=(begin, end)``, ``costs=``.
            For the stage graph ``pipeline=`` (names the losses and outputs of a plan) and ``costs=`` (bytes).
            For all ``timeout=`` seconds.

    Raises:
        RenderError: an unknown option, more than a picture can show, or no program to paint with.
    """
    if graph not in GRAPHS:
        raise RenderError(f"graph={graph!r}: expected one of {', '.join(GRAPHS)}")
    if graph != "timeline":
        return _draw_graph(what, path, graph, options)
    given = list(what) if isinstance(what, (list, tuple)) else [what]
    if not given:
        raise RenderError("nothing to draw: the list is empty")
    costs = options.pop("costs", None)
    if costs is not None and any(isinstance(item, Timeline) for item in given):
        raise RenderError("costs= is for plans; a timeline has run already: draw plan.simulate(costs)")
    timelines = [item.simulate(costs) if isinstance(item, Plan) else item for item in given]
    for item in timelines:
        if not isinstance(item, Timeline):
            if callable(item):  # a model
                spec_of(item, "draw", RenderError)
            raise RenderError(
                f"draw takes a Plan or a Timeline, got {type(item).__name__}; compile a pipeline first, or "
                'draw it with graph="stages"'
            )
    return _written(_draw_timelines(timelines, titles, options), path)


def draw_plan(plan: Plan, path: str | Path | None = None, **options: Any) -> Picture:
    """Draw one plan. See :func:`draw`."""
    return draw(plan, path, **options)


def draw_timeline(timeline: Timeline, path: str | Path | None = None, **options: Any) -> Picture:
    """Draw one timeline. See :func:`draw`."""
    return draw(timeline, path, **options)


def _draw_timelines(timelines: list[Timeline], titles: Sequence[str] | None, options: dict[str, Any]) -> Picture:
    from pipec.render.timeline import Options, draw_timelines

    _known(options, {f.name for f in fields(Options)}, "a timeline")
    return draw_timelines(timelines, titles, Options(**options))


def _draw_graph(what: Any, path: str | Path | None, graph: str, options: dict[str, Any]) -> Picture:
    from pipec.render.graphs import draw_stages
    from pipec.render.tasks import draw_tasks

    if isinstance(what, Timeline):
        what = what.plan
    if graph == "stages":
        _known(options, {"pipeline", "costs", "timeout"}, "a stage graph")
        if callable(what):  # a model
            spec_of(what, "draw", RenderError)
        if not isinstance(what, Plan) and not hasattr(what, "spec"):
            raise RenderError(f"a stage graph is drawn of a Pipeline or a Plan, got {type(what).__name__}")
        return _written(draw_stages(what, **options), path)
    _known(options, {"timeout", "width"}, "a task graph")
    if not isinstance(what, Plan):
        raise RenderError(f"a task graph is drawn of a Plan, got {type(what).__name__}; compile a pipeline first")
    return _written(draw_tasks(what, **options), path)


def _known(options: dict[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise RenderError(f"{what} has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _written(picture: Picture, path: str | Path | None) -> Picture:
    return picture if path is None else picture.save(path)


__all__ = ["GRAPHS", "Picture", "draw", "draw_plan", "draw_timeline"]
