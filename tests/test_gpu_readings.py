"""What the GPU checks read out of traces and byte counts, and the whole script with a stand-in for the GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from models import kept_streams
from test_gpu_check import BENCHMARKS, checks
from test_streams import backend
from torch import nn

import pipec
from pipec.runtime.backends import Replay

__all__ = ["checks", "kept_streams"]
MiB = 2**20


def event(category: str, start: float, length: float, stream: int, name: str = "") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name or category, "pid": 0, "tid": stream, "ts": start, "dur": length,
            "args": {"device": 0, "stream": stream, "correlation": 1}}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    """As torch.profiler writes it: also what is no span, and the host's part."""
    rest = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 1, "tid": 1, "ts": 1},
        {"ph": "i", "cat": "overhead", "name": "marker", "pid": 1, "tid": 1, "ts": 2},
        event("cpu_op", 0, 900, 99, "aten::mm"), event("cuda_runtime", 0, 900, 99, "cudaMemcpyAsync"),
        event("gpu_user_annotation", 0, 1000, 7, "pipec 0F0 a"), event("gpu_memset", 0, 5, 7, "Memset (Device)"),
    ]
    return {"schemaVersion": 1, "traceEvents": [*rest, *events]}


def test_copies_of_copy_lanes_and_kernels_are_read_from_a_trace(checks: Any) -> None:
    from gpu_readings import device_spans

    copies, kernels = device_spans(trace(
        event("kernel", 0, 10, 7), event("kernel", 20, 5, 9), event("gpu_memcpy", 3, 4, 8),
        event("gpu_memcpy", 12, 4, 7, "Memcpy DtoD (Device -> Device)"),  # taken over by a compute stream
    ))
    assert copies == [(3, 7)]
    assert kernels == [(0, 10), (20, 25)]
    bare = [{key: value for key, value in one.items() if key != "args"} for one in (
        event("kernel", 0, 1, 7), event("gpu_memcpy", 0, 1, 8), event("gpu_memcpy", 0, 1, 7))]
    assert device_spans({"traceEvents": bare}) == ([(0, 1)], [(0, 1)]), "the thread tells where no stream is given"
    assert device_spans({}) == ([], [])


def test_overlap_of_spans(checks: Any) -> None:
    from gpu_readings import overlapping

    assert overlapping([(0, 10)], [(0, 3), (2, 4), (9, 20)]) == 0.5
    assert overlapping([(0, 2), (4, 6)], [(5, 9)]) == 0.25
    assert overlapping([(0, 2), (1, 2)], [(1, 9)]) == 0.5
    assert overlapping([(0, 2)], []) == overlapping([], [(0, 2)]) == 0.0


def test_the_row_about_overlap(checks: Any) -> None:
    from gpu_readings import overlap_row

    beside = overlap_row(trace(event("kernel", 0, 10, 7), event("gpu_memcpy", 4, 8, 8)))
    assert (beside.measured, beside.goal, beside.ok) == ("75% of the time of 1 copies", "over 50%", True)
    apart = overlap_row(trace(event("kernel", 0, 10, 7), event("gpu_memcpy", 10, 8, 8)))
    assert (apart.measured, apart.ok) == ("0% of the time of 1 copies", False)
    nothing = overlap_row(trace(event("kernel", 0, 10, 7), event("gpu_memcpy", 4, 8, 7)))
    assert (nothing.measured, nothing.ok) == ("the trace has 0 copies and 1 kernels", False)


def test_a_real_trace_of_the_cpu_is_read_and_has_no_copies_of_a_gpu(checks: Any) -> None:
    target = checks.gpu_target.Lanes(torch.device("cpu"))
    line = nn.Linear(8, 8)
    made = target.trace(lambda: line(torch.randn(4, 8)).sum().backward())
    assert any(one.get("name") == "aten::addmm" and "dur" in one for one in made["traceEvents"])
    (row,) = checks.gpu_checks.overlap(target, mebibytes=0.02)
    assert (row.measured, row.ok) == ("the trace has 0 copies and 0 kernels", False)


def test_the_row_about_memory(checks: Any) -> None:
    from gpu_readings import memory_row

    right = memory_row(before=100 * MiB, peak=213 * MiB, gradients=10 * MiB, predicted=100 * MiB)
    assert (right.measured, right.goal, right.ok) == ("+3.0% of the predicted 100 MiB", "5%", True)
    assert memory_row(100 * MiB, 204 * MiB, 10 * MiB, 100 * MiB).ok is False, "less than predicted is wrong too"
    assert memory_row(100 * MiB, 220 * MiB, 10 * MiB, 100 * MiB).measured == "+10.0% of the predicted 100 MiB"
    assert memory_row(0, 5, 0, None).measured == "the simulator does not know the bytes"


# -- the script without a GPU ------------------------------------------------------------------------------------


class Counted:
    """Stands for ``torch.cuda`` and ``torch.accelerator``, with their signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.seen = MagicMock(), 0
        self.put(monkeypatch, torch.cuda, memory_allocated=7 * MiB, max_memory_allocated=9 * MiB,
                 max_memory_reserved=10 * MiB, reset_peak_memory_stats=None, set_per_process_memory_fraction=None,
                 get_device_properties=SimpleNamespace(total_memory=100 * MiB), get_device_name="Some GPU",
                 stream=MagicMock())
        self.put(monkeypatch, torch.accelerator, synchronize=None)
        monkeypatch.setattr(torch.cuda, "Stream", self.calls.Stream)

    def put(self, monkeypatch: pytest.MonkeyPatch, module: Any, **values: Any) -> None:
        for name, value in values.items():
            fake = create_autospec(getattr(module, name), return_value=value)
            self.calls.attach_mock(fake, name)
            monkeypatch.setattr(module, name, fake)

    def names(self) -> list[str]:
        """What was called since the last look."""
        names = [call[0] for call in self.calls.mock_calls if "__" not in call[0]]
        self.seen, before = len(names), self.seen
        return names[before:]


def test_every_call_of_a_gpus_runtime_fits_torch(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, counted = checks.gpu_target.Target(torch.device("cuda", 0)), Counted(monkeypatch)
    assert target.describe() == "Some GPU"
    with target.side_stream():
        pass
    assert counted.names() == ["get_device_name", "Stream", "stream"]
    with target.little_memory():
        assert counted.calls.set_per_process_memory_fraction.call_args.args[0] == pytest.approx(0.11)
    assert counted.names()[-2:] == ["synchronize", "set_per_process_memory_fraction"]
    assert target.peak(lambda: None) == (7 * MiB, 9 * MiB)
    assert counted.names() == ["synchronize", "memory_allocated", "reset_peak_memory_stats", "synchronize",
                               "max_memory_allocated"]
    assert target.trace(lambda: torch.ones(2) + 1)["traceEvents"]
    net = checks.gpu_checks.mixed(torch.device("cpu"))
    plan = pipec.compile(net, 2, 2)
    for make in (target.runner, target.replay):
        with pytest.raises(pipec.RunError, match="devices cuda:0 are not here"):
            make(net, plan)


@pytest.fixture
def dry(checks: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for a GPU: recorded streams on the CPU, a trace and byte counts made up to be right."""
    readings = sys.modules["gpu_readings"]
    predicted: list[float] = []
    real = readings.memory_row

    def memory_row(before: int, peak: int, gradients: int, own: float) -> Any:
        predicted.append(own)
        return real(before, before + gradients + int(own), gradients, own)

    monkeypatch.setattr(checks.gpu_checks, "memory_row", memory_row)

    class Dry(checks.gpu_target.Lanes):
        def runner(self, net: Any, plan: Any, **how: Any) -> Any:
            return pipec.Runner(net, plan, backend=backend(plan.devices, real=1), **how)

        def replay(self, net: Any, plan: Any, **how: Any) -> Any:
            return pipec.Runner(net, plan, backend=Replay(), **how)

        def describe(self) -> str:
            return "Some GPU"

        def trace(self, work: Callable[[], Any]) -> Any:
            work()
            return trace(event("kernel", 0, 10, 7), event("gpu_memcpy", 4, 4, 8))

    monkeypatch.setattr(checks, "Target", lambda device: Dry(torch.device("cpu")))
    monkeypatch.setattr(checks, "accelerators", lambda: ("cuda", 1))
    yield checks
    assert len(predicted) <= 1


def small(checks: Any) -> dict[str, Any]:
    """Every check of the script, with less to do."""
    from models import transformer

    own = {"Transformer": lambda: transformer(4, 4, 16, 4)}
    less: dict[str, dict[str, Any]] = {
        "equality": {"devices": (2,), "schedules": ("1f1b", "zb-h1", "pipedream"), "microbatches": 4},
        "precision": {"steps": 2}, "shared": {"steps": 1}, "stress": {"steps": 2, "mebibytes": 0.05},
        "ranks": {"schedules": ("1f1b",)},
        "speed": {"models": own, "rounds": 1},
        "overlap": {"mebibytes": 0.02}, "memory": {"microbatches": 4}, "peers": {"rounds": 1},
    }
    assert set(less) == set(checks.CHECKS) == set(checks.QUICK)
    rooms = {name: checks.gpu_ranks if name == "ranks" else checks.gpu_checks for name in less}
    return {name: partial(getattr(rooms[name], name), **options) for name, options in less.items()}


def test_the_whole_script_runs(dry: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dry, "CHECKS", small(dry))
    monkeypatch.setattr(dry.gpu_checks, "GOALS", {1: 1e9, 4: 1e9})
    status = dry.main([])
    told = capsys.readouterr()
    rows = told.out.splitlines()
    assert status == 0, told.out
    assert rows[0].startswith(f"Some GPU, torch {torch.__version__}, Python 3.")
    wanted = ("bit-equal, 2", "bfloat16", "GradScaler", "2 steps", "Transformer, 4", "copies beside", "peak memory")
    for name in wanted:
        assert any(row.startswith(name) and row.endswith("ok") for row in rows), (name, told.out)
    assert rows[-1].startswith("0 of ")
    assert [line.split(":")[0] for line in told.err.splitlines() if line.endswith(" s")] == list(dry.CHECKS)


def test_only_one_check(dry: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dry, "QUICK", small(dry))
    assert dry.main(["--quick", "--only", "overlap"]) == 0
    assert "1 of 1" not in (told := capsys.readouterr().out)
    assert "100% of the time of 1 copies" in told


def test_checks_begin_while_there_is_time(checks: Any) -> None:
    said: list[str] = []
    target = checks.gpu_target.Lanes(torch.device("cpu"))
    assert checks.run_checks(target, {"late": lambda target: []}, said.append, limit=-1.0) == 1
    assert said[0].splitlines()[-1].split() == ["late", "not", "run:", "-1", "s", "are", "over", "runs", "FAILS"]
    assert checks.LIMIT < 360


def test_the_script_needs_torch_attrs_and_numpy_only() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('graphviz', 'graphviz_pure', 'sklearn', 'PIL', 'pytest'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import gpu_check, gpu_checks\n"
        "assert gpu_checks.transformer(2, 2, 8, 2).pipeline().spec\n"
        "sys.exit(gpu_check.main([]) - 77)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=100,
                          check=False, env={"PYTHONPATH": str(Path(pipec.__file__).parent.parent), "PATH": ""})
    assert done.returncode == 0, done.stderr
