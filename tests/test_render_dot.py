"""DOT text: whatever a name holds, it is shown and cannot become syntax; items are painted in order."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipec
from pipec.ir import Kind
from pipec.render import Picture, draw
from pipec.render.dot import Box, Line, Text, escape, printable, scene, shorten, text_width
from pipec.render.palette import ink_on, shade

ODD = [
    "F0:s1",
    "new\nline",
    "<b>&amp;\"'</b>",
    "\\N\\G\\l",
    "{x|y}",
    "%",
    "ünï漢",
    "a\x00\x1b\ud800",
    "</text>",
    "; }",
]


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]


def painted(*items: Box | Text | Line) -> str:
    return Picture(scene(items, 300, 100, "t", "c"), True, (300, 100)).svg()


@pytest.mark.parametrize("name", ODD)
def test_a_name_of_any_characters_is_shown_as_it_is(name: str) -> None:
    assert texts(painted(Text(10, 50, name))) == [printable(name)]


@given(st.text(max_size=30))
def test_an_escaped_name_stays_inside_its_quotes(name: str) -> None:
    inside = escape(name)
    assert "\n" not in inside
    assert all(c.isprintable() for c in inside)
    assert '"' not in inside.replace("\\\\", "").replace('\\"', "")
    assert (len(inside) - len(inside.rstrip("\\"))) % 2 == 0  # no backslash swallows the closing quote


def test_ids_of_nodes_are_generated() -> None:
    net = pipec.Pipeline("net")
    value = net.input("F0:s1")
    for name in ODD:
        value = net.stage(name, None, value)
    net.loss("</svg>", None, value)
    dot = draw(net, graph="stages").dot
    nodes = [line.split()[0] for line in dot.splitlines() if line.startswith(("  s", "  i", "  l"))]
    assert set(nodes) == {"i0", "l0", *(f"s{n}" for n in range(len(ODD)))}


def test_items_are_painted_in_the_order_given() -> None:
    svg = painted(
        Box(0, 0, 9, 9, "#111111", id="first"),
        Line(((0, 0), (9, 9)), id="second"),
        Box(0, 0, 9, 9, "#222222", id="third"),
        Line(((0, 0), (9, 0)), id="fourth"),
        Text(5, 5, "x", id="fifth"),
    )
    ids = [node.get("id") for node in ElementTree.fromstring(svg).iter() if node.get("id")]
    assert [i for i in ids if i in ("first", "second", "third", "fourth", "fifth")] == [
        "first",
        "second",
        "third",
        "fourth",
        "fifth",
    ]


def test_a_box_stands_where_it_was_put() -> None:
    svg = painted(Box(30, 20, 60, 10, "#123456", id="box"))
    root = ElementTree.fromstring(svg)
    polygon = next(p for p in root.iter() if p.get("fill") == "#123456")
    points = [tuple(map(float, pair.split(","))) for pair in (polygon.get("points") or "").split()]
    xs, ys = {round(x) for x, _ in points}, {round(y + 100) for _, y in points}
    assert (xs, ys) == ({30, 90}, {20, 30})


def test_long_names_are_cut_in_the_middle() -> None:
    assert shorten("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert shorten("short", 11) == "short"
    assert text_width("WW", 10) > text_width("ii", 10) * 2


# The usual matrices for what people without one kind of cone see, in linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of a colour as it is seen."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = seen @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    )
    part = to_xyz @ linear.clip(0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(part > 0.008856, np.cbrt(part), 7.787 * part + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_kinds_keep_apart_for_colour_blind_readers(blindness: str) -> None:
    kinds = [kind for kind in Kind if kind is not Kind.COPY]  # copies have lanes of their own
    seen = {kind: lab(shade(kind, 0, 1), BLINDNESS[blindness]) for kind in kinds}
    for one, other in itertools.combinations(kinds, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 15, (one.name, other.name)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_of_a_kind_keep_apart(chunks: int) -> None:
    kinds = [kind for kind in Kind if kind is not Kind.COPY]  # a copy has no chunk
    for kind, seen in itertools.product(kinds, BLINDNESS.values()):
        shades = [lab(shade(kind, c, chunks), seen) for c in range(chunks)]
        assert all(np.linalg.norm(a - b) > 5.5 for a, b in itertools.pairwise(shades)), kind.name
        assert all(a[0] > b[0] for a, b in itertools.pairwise(shades)), kind.name  # from light to dark


def test_numbers_are_legible_on_every_colour() -> None:
    for kind, chunks in itertools.product(Kind, (1, 2, 4)):
        for chunk in range(chunks):
            colour = shade(kind, chunk, chunks)
            contrast = abs(lab(colour, np.eye(3))[0] - lab(ink_on(colour), np.eye(3))[0])
            assert contrast > 38, (kind.name, chunk, chunks)
