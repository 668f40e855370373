"""Paths of files that the user names: checked before work begins, and answered in pipec's own words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipec.errors import PipecError


def file_path(path: Any, kind: type[PipecError]) -> Path:
    """``path`` as the path of a file.

    Raises:
        PipecError: of ``kind``, when it is no path, is empty, or names a folder.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise kind(f"expected the path of a file, got {type(path).__name__} {path!r}") from None
    if not isinstance(text, str):
        raise kind(f"expected the path of a file as text, got {text!r}")
    if not text.strip() or "\0" in text:
        raise kind(f"{text!r} is no path of a file")
    found = Path(text)
    if text.endswith((os.sep, "/")) or not found.name or found.name == ".." or found.is_dir():
        raise kind(f"{text!r} is a folder; name a file in it")
    return found


def write_text(path: Any, text: str, kind: type[PipecError]) -> None:
    """Write a text file. PipecError of ``kind`` when that fails."""
    file = file_path(path, kind)
    try:
        with file.open("w", encoding="utf-8", newline="") as out:
            out.write(text)
    except OSError as error:
        raise kind(f"cannot write {file}: {error.strerror or error}") from None


def read_text(path: Any, kind: type[PipecError]) -> str:
    """What a text file holds. PipecError of ``kind`` when it cannot be read."""
    file = file_path(path, kind)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise kind(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise kind(f"{file} is no text: {error}") from None
