"""The program that lays out and paints: ``dot`` from PATH, else the one from pip, always with a timeout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipec.errors import RenderError

INSTALL = (
    "  any platform:   pip install graphviz-pure",
    "  Debian, Ubuntu: apt install graphviz",
    "  Fedora:         dnf install graphviz",
    "  macOS:          brew install graphviz",
    "  Windows:        winget install graphviz",
    "  conda:          conda install -c conda-forge graphviz",
)
PIP_PROGRAM = "graphviz-pure"


def find_program() -> str | None:
    """The path of a Graphviz program, or None.

    ``dot`` or ``neato`` from PATH come first; then ``graphviz-pure``, also where its environment is not
    activated.
    """
    for name in ("dot", "neato", PIP_PROGRAM):
        if found := shutil.which(name):
            return found
    for folder in _script_folders():
        if found := shutil.which(PIP_PROGRAM, path=str(folder)):
            return found
    return None


def _script_folders() -> Iterator[Path]:
    """Where pip may have put scripts of this environment."""
    if sys.executable:
        yield Path(sys.executable).parent
    yield Path(sysconfig.get_path("scripts"))
    user = f"{os.name}_user"
    if user in sysconfig.get_scheme_names():
        yield Path(sysconfig.get_path("scripts", user))
    import importlib.metadata as metadata

    try:
        files = metadata.files(PIP_PROGRAM) or []
    except metadata.PackageNotFoundError:
        return
    for entry in files:
        if entry.stem == PIP_PROGRAM:
            yield Path(str(entry.locate())).resolve().parent


def missing() -> str:
    """What to say where there is no program."""
    return "\n".join(
        [
            "drawing needs a Graphviz program, and neither `dot` nor `graphviz-pure` was found; install one:",
            *INSTALL,
        ]
    )


def run_program(dot: str, arguments: Sequence[str], what: str, timeout: float) -> bytes:
    """Feed ``dot`` to the program and return what it wrote.

    Raises:
        RenderError: there is no program, it failed (with what it said), ran past ``timeout`` seconds, or
            wrote nothing.
    """
    program = find_program()
    if program is None:
        raise RenderError(missing())
    command = [program, *arguments]
    try:
        done = subprocess.run(  # the program found above, no shell
            command, input=dot.encode("utf-8"), capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise RenderError(
            f"{program} did not finish the {what} in {timeout:g} s; draw less (devices=, microbatches=, "
            "time=), or give it longer with timeout="
        ) from None
    except OSError as error:
        raise RenderError(f"{program} could not be started: {error}") from None
    said = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode != 0 or not done.stdout:
        state = f"failed with exit status {done.returncode}" if done.returncode else f"wrote no {what}"
        detail = "\n".join(f"  {row}" for row in said.splitlines()[-8:]) or "  it said nothing"
        raise RenderError(f"{program} {state}:\n{detail}")
    return done.stdout
