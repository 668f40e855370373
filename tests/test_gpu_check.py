"""The GPU checks' own logic: the same functions on the CPU's lanes, the table, and the exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import kept_streams

from pipec.errors import RaceError
from pipec.runtime.borders import Packed
from pipec.runtime.lanes import CopyingChannels

__all__ = ["kept_streams"]

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the checks; ``models`` there is another one than the tests'."""
    own = {name: sys.modules.pop(name) for name in ("models",) if name in sys.modules}
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check
    import gpu_target

    gpu_check.gpu_target = gpu_target
    yield gpu_check
    for name in ("models", "gpu_check", "gpu_checks", "gpu_models", "gpu_ranks", "gpu_readings", "gpu_target"):
        sys.modules.pop(name, None)
    sys.modules.update(own)
    gpu_check.deterministic(False)


@pytest.fixture
def target(checks: Any) -> Any:
    return checks.gpu_target.Lanes(torch.device("cpu"))


def test_equality_on_lanes(checks: Any, target: Any) -> None:
    rows = checks.gpu_checks.equality(target, (1, 2, 4), ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b"), 4, steps=1)
    assert [row.ok for row in rows] == [True] * 3
    assert rows[1].measured == "8 of 8 plans"
    rows = checks.gpu_checks.equality(target, (3,), ("pipedream", "pipemare", "live-weights"), 4, steps=4)
    assert [(row.measured, row.ok) for row in rows] == [("6 of 6 plans", True)]


def test_shared_weights_on_lanes(checks: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = checks.gpu_checks.shared(target, steps=2)
    assert [(row.measured, row.ok) for row in rows] == [("equal", True)] * 2
    assert rows[1].name == "tied weights, 4 logical devices on 2 GPUs"
    monkeypatch.setattr(type(target), "gpus", lambda self: 1)
    assert checks.gpu_checks.shared(target, steps=1)[1].measured == "not run: it needs 2 GPUs, there is 1"
    right = CopyingChannels.send
    monkeypatch.setattr(CopyingChannels, "send", lambda self, route, slot, payload: right(
        self, route, slot, payload * 1.5 if isinstance(payload, torch.Tensor) else payload))
    assert checks.gpu_checks.shared(target, steps=1)[0].ok is False


def test_equality_fails_where_a_bit_differs(
    checks: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Any, route: Any, slot: int, payload: Any) -> None:
        if isinstance(payload, torch.Tensor) and not isinstance(payload, Packed):
            payload = (payload * (1 + 1e-6)).detach().requires_grad_(payload.requires_grad)
        right(self, route, slot, payload)

    right = CopyingChannels.send
    monkeypatch.setattr(CopyingChannels, "send", send)
    (row,) = checks.gpu_checks.equality(target, (2,), ("gpipe", "pipedream"), 2, steps=1)
    assert row.ok is False
    assert row.measured == "0 of 4 plans, wrong: " + ", ".join(
        f"{name} (recompute {mode})" for name in ("gpipe", "pipedream") for mode in ("never", "always"))


def test_precision_and_stress_on_lanes(checks: Any, target: Any) -> None:
    rows = checks.gpu_checks.precision(target, steps=2)
    rows += checks.gpu_checks.stress(target, steps=3, mebibytes=0.05)
    assert [row.ok for row in rows] == [True] * 3, rows
    assert rows[2].measured == "0 of 3 losses differ, gradients equal"


def test_ranks_on_gpus_that_are_not_there(checks: Any, target: Any) -> None:
    rows = checks.gpu_ranks.ranks(target, ("zb-v",))
    assert [(row.name, row.ok) for row in rows] == [
        ("2 ranks on one GPU, through host memory", True), ("2 ranks on one GPU, through host memory, a step", None),
        ("2 ranks on one GPU, over NCCL", True),
        ("2 ranks on 2 GPUs, over NCCL", True), ("2 ranks on 2 GPUs, over NCCL, a step", None),
    ], rows
    assert [row.measured for row in rows if row.ok] == ["5 of 5", "1 of 1", "5 of 5"]
    wrong = {"ran": 5, "wrong": ["zb-v"], "step": 1.0}
    told = checks.gpu_ranks.rows_of("name", [wrong, wrong | {"wrong": []}], "")
    assert (told[0].measured, told[0].ok) == ("4 of 5, wrong: zb-v (rank 0)", False)


def test_what_there_are_no_gpus_for_is_not_run_and_what_ends_badly_fails(
    checks: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(target), "gpus", lambda self: 1)
    rows = checks.gpu_ranks.ranks(target, ("no such schedule",))
    assert [(row.ok, row.measured) for row in rows[-1:]] == [(None, "not run: it needs 2 GPUs, there is 1")]
    assert rows[0].ok is False
    assert "unknown schedule 'no such schedule'" in rows[0].measured
    late = checks.gpu_ranks.ranks(target, ("1f1b",), 0.2)[0]
    assert (late.ok, late.measured) == (False, "no end after 0 s")


def test_speed_and_peers_give_rows(checks: Any, target: Any) -> None:
    from models import transformer

    small = {"Transformer": lambda: transformer(4, 4, 16, 4)}
    rows = checks.gpu_checks.speed(target, small, rounds=1)
    assert [row.name for row in rows] == [
        "Transformer, plain training", "Transformer, 1 logical device", "Transformer, 4 logical devices",
    ]
    assert [row.goal for row in rows] == ["", "+3%", "+8%"]
    rows = checks.gpu_checks.peers(target, rounds=1)
    assert [row.ok for row in rows] == [None, None]
    assert "does not run here" in rows[0].measured
    assert rows[1].measured.endswith(" ms"), rows[1]


def test_the_table_the_exit_code_and_a_check_that_raises(checks: Any, target: Any) -> None:
    said: list[str] = []
    row = checks.Row

    def broken(target: Any) -> Any:
        raise RaceError("lost a wait\nand more")

    passing = {"one": lambda target: [row("one", "1", "1", True), row("two", "for information")]}
    assert checks.run_checks(target, passing, said.append) == 0
    assert said[0].splitlines()[1:] == ["one    1                1     ok", "two    for information"]
    assert said[1].strip() == "0 of 1 checks fail"
    said.clear()
    assert checks.run_checks(target, {**passing, "three": broken}, said.append) == 1
    assert said[0].splitlines()[-1].split() == ["three", "RaceError:", "lost", "a", "wait", "runs", "FAILS"]
    assert said[1].strip() == "1 of 2 checks fail: three"


def test_a_check_that_fails_gives_exit_code_one(checks: Any, target: Any) -> None:
    assert checks.run_checks(target, {"x": lambda t: [checks.Row("x", "2", "1", False)]}, lambda text: None) == 1


def test_a_check_that_never_ends_does_not_take_the_others_with_it(checks: Any, target: Any) -> None:
    said: list[str] = []
    left: list[int] = []
    gone = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        gone.set()

    def stuck(target: Any) -> Any:
        assert gone.wait(30)
        return []

    row = checks.Row
    whole = {"one": lambda target: [row("one", "1", "1", True)], "two": stuck}
    checks.run_checks(target, whole, said.append, cut=0.2, leave=leave)
    assert left == [1]
    assert [line.split()[0] for line in said[0].splitlines()[1:]] == ["one", "two"]
    assert "still running after 0 s" in said[0]
    assert said[1].strip() == "1 of 2 checks fail: two"


def test_the_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    """From another folder, without pipec installed, with an environment of its own."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(BENCHMARKS / "gpu_check.sh")], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("gpu_check: torch finds no GPU here, so nothing was checked")
    done = subprocess.run(
        [str(BENCHMARKS / "gpu_check.sh"), "--only", "nonsense"], capture_output=True, text=True, env=environment,
        timeout=100, check=False,
    )
    assert done.returncode == 2
