"""DOT text: escaping, and scenes of boxes, lines and texts at fixed positions.

Every name becomes escaped label text and every node id is generated, so a name may hold any character.
Graphviz draws nodes in the order of their first appearance and an edge right after its tail, so a scene's
items are painted in the order they were added in: lines hang on an invisible node made where they appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import frozen

FONT = "Helvetica"
POINTS = 72.0
Point = tuple[float, float]

# Widths of Helvetica in thousandths of the font size; what is not listed counts as a wide letter.
_NARROW = dict.fromkeys("ijl'|", 222) | dict.fromkeys("ft I.,:;/!()[]\\-", 300) | dict.fromkeys("crsvxyzkJ", 500)
_WIDE = dict.fromkeys("mMW%@", 880)


def text_width(text: str, size: float) -> float:
    """Estimated width of ``text`` in points."""
    total = sum(_NARROW.get(c) or _WIDE.get(c) or (722 if c.isupper() else 556 if ord(c) < 512 else 1000) for c in text)
    return total * size / 1000


def printable(name: object) -> str:
    """``name`` with every control or unpaired character written out: a newline becomes backslash and n."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(name))


def shorten(name: object, length: int = 40) -> str:
    """``name`` for a label: printable, and cut in its middle when it is longer than ``length``."""
    text = printable(name)
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def escape(text: str) -> str:
    """One line of label or tooltip text between quotes: shown as it is, whatever it holds."""
    return printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")


def lines(rows: Iterable[str], end: str = "\\n") -> str:
    """Escaped rows joined by Graphviz's line breaks (centred, ``\\l`` left, ``\\r`` right)."""
    return end.join(escape(row) for row in rows)


class Markup(str):
    """A label between angle brackets: not quoted."""


def attributes(**given: object) -> str:
    """``[key="value" ...]`` of the values that are not None; values are already escaped."""
    shown = " ".join(f"{key}={_value(value)}" for key, value in given.items() if value is not None)
    return f" [{shown}]" if shown else ""


def _value(value: object) -> str:
    if isinstance(value, (int, Markup)):
        return str(value)
    return f'"{number(value) if isinstance(value, float) else value}"'


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


@frozen
class Box:
    """A filled rectangle; (x, y) is its top left corner, y runs down, all in points."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    border: str = "#555555"
    pen: float = 0.0
    label: str = ""
    small: str = ""  # under the label, smaller; both are numbers and letters only
    size: float = 10.0
    ink: str = "#111111"
    id: str | None = None
    css: str | None = None
    tooltip: tuple[str, ...] = ()


@frozen
class Text:
    """Text whose middle line is at ``y``; ``anchor`` says which end ``x`` is: "l", "r" or "c"."""

    x: float
    y: float
    text: str
    size: float = 10.0
    anchor: str = "l"
    bold: bool = False
    ink: str = "#222222"
    id: str | None = None
    css: str | None = None
    tooltip: tuple[str, ...] = ()


@frozen
class Line:
    """A polyline, or with ``curved`` the four points of one Bezier curve; with an arrow head on request."""

    points: tuple[Point, ...]
    ink: str = "#888888"
    pen: float = 0.75
    dashed: bool = False
    arrow: bool = False
    curved: bool = False
    id: str | None = None
    css: str | None = None
    tooltip: tuple[str, ...] = ()


Item = Box | Text | Line
ARROW = 0.45  # arrow heads are 10 points long at size 1


def scene(items: Sequence[Item], width: float, height: float, title: str, command: str) -> str:
    """DOT text of ``items`` in a canvas of width x height points, painted in the order given."""
    head = [
        f"// {command}",
        f'digraph "{escape(title)}" {{',
        '  graph [layout=neato bgcolor="white" pad=0 outputorder=breadthfirst id="pipec"]',
        f'  node [shape=box style=filled fixedsize=true margin=0 label="" fontname="{FONT}"]',
        f"  edge [arrowhead=none arrowsize={ARROW}]",
        f"  canvas{attributes(pos=_at(width / 2, height / 2, height), width=width / POINTS, height=height / POINTS, color='white', fillcolor='white', penwidth=0)}",  # noqa: E501
    ]
    body = []
    anchor = ""
    for index, item in enumerate(items):
        if isinstance(item, Line):
            if not anchor:
                anchor = f"n{index}"
                body.append(f'  {anchor} [style=invis shape=point width=0.01 height=0.01 pos="0,0"]')
            body.append(_line(item, anchor, height))
        else:
            anchor = ""
            body.append(f"  n{index}" + (_box(item, height) if isinstance(item, Box) else _text(item, height)))
    return "\n".join([*head, *body, "}"]) + "\n"


def _at(x: float, y: float, height: float) -> str:
    return f"{number(x)},{number(height - y)}"


def _inches(points: float) -> str:
    return f"{max(points, 0.01) / POINTS:.5f}"


def _box(box: Box, height: float) -> str:
    return attributes(
        pos=_at(box.x + box.width / 2, box.y + box.height / 2, height),
        width=_inches(box.width),
        height=_inches(box.height),
        fillcolor=box.fill,
        color=box.border if box.pen else box.fill,
        penwidth=box.pen,
        label=(_two_sizes(box) if box.small else escape(box.label)) if box.label else None,
        fontsize=box.size if box.label else None,
        fontcolor=box.ink if box.label else None,
        id=box.id,
        **{"class": box.css},
        tooltip=lines(box.tooltip) if box.tooltip else None,
    )


def _two_sizes(box: Box) -> Markup:
    return Markup(
        f'<<font point-size="{number(box.size)}">{box.label}</font><br/>'
        f'<font point-size="{number(box.size * 0.7)}">{box.small}</font>>'
    )


def _text(text: Text, height: float) -> str:
    wide = text_width(text.text, text.size) * (1.1 if text.bold else 1.0) * 1.25 + 8
    shift = {"l": wide / 2, "r": -wide / 2, "c": 0.0}[text.anchor]
    end = {"l": "\\l", "r": "\\r", "c": ""}[text.anchor]
    return attributes(
        shape="plaintext",
        style="",
        pos=_at(text.x + shift, text.y, height),
        width=_inches(wide),
        height=_inches(text.size * 1.3 + 2),
        label=escape(text.text) + end,
        fontname=f"{FONT}-Bold" if text.bold else None,
        fontsize=text.size,
        fontcolor=text.ink,
        id=text.id,
        **{"class": text.css},
        tooltip=lines(text.tooltip) if text.tooltip else None,
    )


def _line(line: Line, anchor: str, height: float) -> str:
    points = list(line.points)
    tip = ""
    if line.arrow:
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
        back = min(10 * ARROW, length * 0.6) / length
        tip = f"e,{_at(x1, y1, height)} "
        points[-1] = (x1 - (x1 - x0) * back, y1 - (y1 - y0) * back)
    at = [_at(x, y, height) for x, y in points]
    spline = at if line.curved else [at[0]] + [p for a, b in pairwise(at) for p in (a, b, b)]
    return f"  {anchor} -> {anchor}" + attributes(
        pos=tip + " ".join(spline),
        color=line.ink,
        penwidth=line.pen,
        style="dashed" if line.dashed else None,
        arrowhead="normal" if line.arrow else None,
        id=line.id,
        **{"class": line.css},
        tooltip=lines(line.tooltip) if line.tooltip else None,
    )
