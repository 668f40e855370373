"""Golden files: ``golden(name, text)`` compares with ``tests/golden/name``; ``--update-golden`` writes it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("pipec", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("pipec")

torch.set_num_threads(1)  # several devices share the cores; with tiny tensors more threads only wait for each other

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts its jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a golden file; a file that is missing fails the test."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"golden file {name} is missing; run pytest --update-golden and read what it wrote")
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture(scope="session")
def crew2() -> Iterator[Any]:
    """Two ranks, kept for all tests that leave them alive."""
    from ranks import crew

    with crew(2) as made:
        yield made


@pytest.fixture(scope="session")
def crew4() -> Iterator[Any]:
    """Four ranks, kept for all tests that leave them alive."""
    from ranks import crew

    with crew(4) as made:
        yield made
