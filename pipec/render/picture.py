"""A picture: DOT text, and what a Graphviz program makes of it, made when asked for."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

from pipec.errors import RenderError
from pipec.paths import file_path
from pipec.render.program import run_program

SUFFIXES = (".svg", ".png", ".pdf", ".dot", ".gv")
PIXELS = 16_000  # the longest side of a PNG that viewers still open
DPI = 144.0


class Picture:
    """A picture that can be shown in a notebook or written to a file.

    Attributes:
        dot: the DOT text; needs no program.
        pinned: positions are fixed (``neato -n2``), else laid out by ``dot``.
        size: width and height in points where they are known.
        path: the file it was written to, if any.
    """

    def __init__(self, dot: str, pinned: bool, size: tuple[float, float] | None = None, timeout: float = 60.0) -> None:
        self.dot, self.pinned, self.size, self.timeout = dot, pinned, size, timeout
        self.path: Path | None = None

    def _render(self, kind: str, *extra: str) -> bytes:
        layout = ("-Kneato", "-n2") if self.pinned else ("-Kdot",)
        try:
            made = run_program(self.dot, ["-q1", *layout, f"-T{kind}", *extra], kind.upper(), self.timeout)
        except RenderError as error:
            if kind == "pdf" and "-Tpdf" not in str(error) and "not recognized" in str(error):
                raise RenderError(
                    f"{error}\nthis program writes no PDF; .svg and .png work, or install Graphviz"
                ) from None
            raise
        start = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}[kind]
        if start not in made[:2000]:
            raise RenderError(f"the Graphviz program answered with something that is no {kind.upper()}")
        return made

    def svg(self) -> str:
        """The picture as SVG text. Raises RenderError."""
        return self._svg

    @cached_property
    def _svg(self) -> str:
        made = self._render("svg").decode("utf-8")
        head, end, body = made.partition("</title>")  # the graph's; those of its nodes are only generated ids
        return head + end + re.sub(r"<title>[^<]*</title>\n?", "", body)

    def png(self, dpi: float = DPI) -> bytes:
        """The picture as PNG bytes; fewer dots per inch where it would grow past 16,000 pixels.

        Raises:
            RenderError: it would not be legible at that size, or no program is there.
        """
        if self.size is not None:
            most = PIXELS * 72.0 / max(self.size)
            if most < 36:
                raise RenderError(
                    f"a PNG of {self.size[0]:.0f} x {self.size[1]:.0f} points is too large to be legible; "
                    "write .svg, or draw less (devices=, microbatches=, time=)"
                )
            dpi = min(dpi, most)
        return self._render("png", f"-Gdpi={dpi:.4g}")

    def save(self, path: str | Path) -> Picture:
        """Write the picture; the suffix decides the format, .svg without any.

        Where it cannot be painted, the DOT text is written beside it as ``<path>.dot``.

        Raises:
            RenderError: an unknown suffix, a folder that is not there, or what :meth:`svg` raises.
        """
        path = file_path(path, RenderError)
        if not path.suffix:
            path = path.with_name(path.name + ".svg")
        kind = path.suffix.lower()
        if kind not in SUFFIXES:
            raise RenderError(f"cannot draw {str(path)!r}: the suffix decides the format, one of {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise RenderError(f"cannot draw {str(path)!r}: there is no folder {str(path.parent)!r}")
        if kind in (".dot", ".gv"):
            _write(path, self.dot.encode("utf-8"))
        else:
            try:
                made = (
                    self.svg().encode("utf-8")
                    if kind == ".svg"
                    else self.png()
                    if kind == ".png"
                    else self._render("pdf")
                )
            except RenderError as error:
                source = path.with_name(path.name + ".dot")
                _write(source, self.dot.encode("utf-8"))
                raise RenderError(f"{path} was not drawn: {error}\nthe DOT source was written to {source}") from None
            _write(path, made)
        self.path = path
        return self

    def _repr_svg_(self) -> str:
        """For notebooks: the SVG element alone."""
        return re.sub(r"^.*?(?=<svg)", "", self.svg(), count=1, flags=re.DOTALL)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """For notebooks: the SVG, or where there is no program a line that says so."""
        try:
            return {"image/svg+xml": self._repr_svg_(), "text/plain": repr(self)}
        except RenderError as error:
            return {"text/plain": f"{self!r}\n{error}"}

    def __repr__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"<Picture{where}: {len(self.dot.splitlines())} lines of DOT>"


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RenderError(f"cannot write {path}: {error.strerror or error}") from None
