"""Every example in its quick form: it runs, its numbers are the plain loop's, and it learns."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pipec

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "helpers")

Run = Callable[..., dict[str, Any]]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Run an example as a user would, in a folder of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield lambda name, *arguments: load(name).main(list(arguments))
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def test_unet_learns_and_draws(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    got = run("unet", "--quick", "--recompute", "except_last")
    assert got["exact"]
    assert got["last"] < 0.7 * got["first"]
    assert got["after"] > got["before"] + 0.2
    assert got["predicted"] > 0
    for name in ("unet.svg", "unet-stages.svg"):
        assert "</svg>" in (tmp_path / "out" / name).read_text(encoding="utf-8")
    assert (tmp_path / "out" / "unet-patches.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "skip 6" in out  # the first encoder stage is read by the last decoder stage
    assert "bit-equal to the reference" in out


def test_the_unet_skips_cross_to_the_other_device(run: Run) -> None:
    plan = pipec.compile(load("unet").build(4), 2, 2)
    crossing = {plan.graph.values[task.value].name for task in plan.tasks[0]
                if task.kind is pipec.Kind.COPY and not task.gradient}
    assert crossing == {"enc1", "enc2", "enc3", "middle"}


def test_character_transformer_keeps_its_weight_tied(run: Run) -> None:
    got = run("char_transformer", "--quick")
    assert got["exact"]
    assert got["tied"]
    assert got["last"] < got["first"] - 0.5


def test_long_sequences_in_slices_are_the_whole_sequence(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    got = run("long_sequences", "--quick")
    assert got["exact"]
    assert got["apart"] < 1e-5
    assert got["last"] < got["first"] - 0.5
    assert "seq-1f1b 4 slices" in capsys.readouterr().out


def test_a_tied_weight_gets_the_sum_of_both_gradients(run: Run) -> None:
    example = load("char_transformer")
    net = example.build(16, 1)
    stages = [stage.fn for stage in net.spec.stages]
    text, following = example.batch(example.library_source(), torch.Generator().manual_seed(1))
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as runner:
        runner.step(text, following)
    weight = stages[0].letter.weight
    assert weight is stages[-1].weight
    piped, weight.grad = weight.grad, None
    x = text
    for stage in stages:
        x = stage(x)
    F.cross_entropy(x.flatten(0, 1), following.flatten()).backward()
    torch.testing.assert_close(piped, weight.grad)


def test_resnet_reads_digits_and_counts_microbatches(run: Run) -> None:
    got = run("resnet_digits", "--quick")
    assert got["exact"]
    assert got["accuracy"] > 0.6
    assert got["counted"] == 4 * got["steps"]  # recompute does not count again


def test_two_towers_run_together_and_learn(run: Run) -> None:
    got = run("two_tower", "--quick")
    assert got["exact"]
    assert got["together"]
    assert got["accuracy"] > got["blind"] + 0.05


def test_custom_schedule_bounds_memory(run: Run) -> None:
    got = run("custom_schedule")
    assert got["exact"]
    assert got["peak"] == {"gpipe": 8, "waves": 4, "1f1b": 4}
    # Two waves of four microbatches on four devices: each pays the bubble of 3 forwards and 3 backwards.
    assert got["makespan"] == {"gpipe": 8 * 3 + 3 * 3, "waves": 2 * (4 * 3 + 3 * 3), "1f1b": 8 * 3 + 3 * 3}


@pytest.mark.parametrize("name", ["from_torchgpipe", "from_torch_pipelining"])
def test_coming_from_another_library(run: Run, name: str) -> None:
    got = run(name)
    assert got["exact"]
    assert got["last"] < got["first"]


def test_an_example_runs_as_a_script(tmp_path: Path) -> None:
    script = EXAMPLES / "custom_schedule.py"
    done = subprocess.run([sys.executable, str(script), "--quick"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "waves" in done.stdout


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = Path(__file__).read_text(encoding="utf-8")
    for name in SCRIPTS:
        assert f"[{name}.py]({name}.py)" in listed
        assert f'"{name}"' in tests


def torchrun(folder: Path, processes: int, *arguments: str) -> str:
    """The output of the distributed example under torchrun, which ends all processes when one fails."""
    script = [str(EXAMPLES / "distributed.py"), "--quick", *arguments]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    root = str(EXAMPLES.parent)
    done = subprocess.run(
        [*launch, *script], cwd=folder, env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_loss(text: str) -> float:
    return float(text.rsplit("loss ", 1)[1].split(";")[0])


def test_the_distributed_example_gives_the_same_bits_in_one_process_and_in_two(run: Run, tmp_path: Path) -> None:
    losses = run("distributed", "--quick", "--save", str(tmp_path / "one"))
    text = torchrun(tmp_path, 2, "--save", str(tmp_path / "two"))
    assert last_loss(text) == losses[-1]
    assert losses[-1] < losses[0]
    assert "process 0 holds 14 tensors" in text  # the stem and two of four blocks
    again = torchrun(tmp_path, 4, "--replicas", "2", "--resume", str(tmp_path / "two"))
    assert last_loss(again) < losses[-1]
