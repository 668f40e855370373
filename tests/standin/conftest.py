"""Tests on the stand-in accelerator, in a process of their own: ``pytest tests/standin``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import standin

try:
    standin.load()
except RuntimeError as error:
    pytest.exit(str(error), returncode=3)


@pytest.fixture(autouse=True)
def orderly() -> Iterator[None]:
    """Begins anew, and fails a test that leaves a problem which it has not asked for."""
    standin.reset()
    yield
    assert standin.problems() == []
