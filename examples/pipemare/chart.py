"""Line charts as SVG: text with positions, so that nothing needs to be installed to make or to see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

Line = Sequence[tuple[float, float]]
COLOURS = ("#1b6ca8", "#d95f02", "#2a9d5c", "#b5338a", "#7a5195", "#8c6d1f", "#00a3a3", "#c1272d", "#555555",
           "#e58fb1", "#6b8e23")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 560, 380, 64, 40, 48  # width without the legend


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers between two others: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if (high - low) / step <= 9)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def lines(path: Path, title: str, across: str, up: str, series: Mapping[str, Line], top: float | None = None) -> None:
    """Write a chart of the series, at most eleven; values above ``top`` are drawn at the upper edge."""
    points = [point for line in series.values() for point in line]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(0.0, *(y for _, y in points)), max(y for _, y in points) if top is None else top

    whole = WIDTH + 56 + 7 * max(map(len, series))

    def place(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT),
                HEIGHT - BOTTOM - (min(y, y1) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT}" width="{whole}" '
             f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">',
             '<rect width="100%" height="100%" fill="#fff"/>', _text(LEFT, 22, title, extra=' font-size="15"')]
    parts += _axes(place, (x0, x1), (y0, y1), across, up)
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path_ = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{path_}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        y = TOP + 8 + 20 * number
        parts.append(f'<rect x="{WIDTH + 14}" y="{y - 8}" width="16" height="4" fill="{colour}"/>')
        parts.append(_text(WIDTH + 36, y - 2, name))
    path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _axes(place: object, xs: tuple[float, float], ys: tuple[float, float], across: str, up: str) -> Iterable[str]:
    assert callable(place)
    for x in ticks(*xs):
        at, y = place(x, ys[0])
        yield _text(at, y + 18, f"{x:g}", "middle")
    for y in ticks(*ys):
        at, height = place(xs[0], y)
        yield f'<line x1="{at}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>'
        yield _text(at - 8, height + 4, f"{y:g}", "end")
    yield _text((LEFT + WIDTH) / 2, HEIGHT - 10, across, "middle")
    yield _text(16, (TOP + HEIGHT - BOTTOM) / 2, up, "middle",
                f' transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2:.1f})"')
