"""The checks of benchmarks/gpu_check.sh that are about numbers and races, on the stand-in accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import kept_streams

import standin

__all__ = ["kept_streams"]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEVICE = torch.device("standin:0")


@contextmanager
def side_stream() -> Iterator[None]:
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream(DEVICE))
    with side:
        yield
    torch.accelerator.current_stream(DEVICE).wait_stream(side)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The checks and a target; ``models`` there is another module than the tests'."""
    own = sys.modules.pop("models")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_checks
    import gpu_target

    monkeypatch.setattr(gpu_target.Target, "side_stream", lambda self: side_stream())
    monkeypatch.setattr(gpu_target.Target, "little_memory", lambda self, spare=1.1: nullcontext())
    gpu_checks.target = gpu_target.Target(DEVICE)
    yield gpu_checks
    for name in ("models", "gpu_checks", "gpu_models", "gpu_readings", "gpu_target"):
        sys.modules.pop(name, None)
    sys.modules["models"] = own
    torch.accelerator.synchronize(DEVICE)


def test_equality(checks: Any) -> None:
    rows = checks.equality(checks.target, (1, 4), ("gpipe", "zb-h1", "v-half", "pipemare", "pipedream-2bw"), 4, steps=1)
    assert [row.ok for row in rows] == [True, True]


def test_precision(checks: Any) -> None:
    assert all(row.ok for row in checks.precision(checks.target, steps=2))


def test_shared_weights(checks: Any) -> None:
    rows = checks.shared(checks.target, steps=2)
    assert [(row.measured, row.ok) for row in rows] == [("equal", True)] * 2


def test_stress(checks: Any) -> None:
    rows = checks.stress(checks.target, steps=5, mebibytes=0.01)
    assert [row.ok for row in rows] == [True]
    assert standin.works() > 500
