"""Exported schedules are executed by PyTorch's own pipelining, in real processes, with pipec's gradients and losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
from torch import nn

import pipec

RANKS = Path(__file__).with_name("torch_ranks.py")
ROWS, MICROBATCHES = 16, 8
# schedule, stages: chunks of one stage, or of several
RUNS = {
    2: [("1f1b", 2), ("zb-v", 6), ("interleaved-1f1b", 4), ("interleaved-zero-bubble", 4), ("dualpipe-v", 6)],
    4: [("zb-v", 8), ("interleaved-1f1b", 8), ("interleaved-zero-bubble", 8), ("dualpipe-v", 8), ("zb-h2", 9),
        ("wave", 8)],
}


def run_ranks(world: int, folder: Path) -> None:
    """Run the jobs in ``folder``; neither this process nor its ranks outlive the call."""
    process = subprocess.Popen(
        [sys.executable, str(RANKS), str(world), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, told


@pytest.mark.parametrize("world", RUNS)
def test_pytorch_runs_exported_schedules_with_equal_gradients(world: int, tmp_path: Path) -> None:
    batch = {name: tensor.double() for name, tensor in models.data(ROWS).items()}
    jobs, expected = [], []
    for schedule, stages in RUNS[world]:
        net = models.chain(stages)
        modules = [stage.fn.double() for stage in net.spec.stages]
        plan = pipec.compile(net, world, MICROBATCHES, schedule)
        path = tmp_path / f"{schedule}.csv"
        plan.to_torch_csv(path)
        jobs.append({
            "csv": str(path), "microbatches": MICROBATCHES, "ranks": [chunk.device for chunk in plan.chunks], **batch,
            "modules": [nn.Sequential(*(modules[s] for s in chunk.stages)) for chunk in plan.chunks],
        })
        expected.append((schedule, net, plan, pipec.reference(net, MICROBATCHES)))
    torch.save(jobs, tmp_path / "jobs.pt")
    run_ranks(world, tmp_path)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world)]
    for number, (schedule, net, plan, loop) in enumerate(expected):
        mine = loop.step(**batch)
        theirs = {chunk: grads for result in results for chunk, grads in result[number]["gradients"].items()}
        assert sorted(theirs) == list(range(len(plan.chunks)))
        for chunk in plan.chunks:
            parameters = [p for s in chunk.stages for p in net.spec.stages[s].fn.parameters()]
            for parameter, gradient in zip(parameters, theirs[chunk.index], strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12, msg=schedule)
        losses = results[plan.chunks[-1].device][number]["losses"]
        torch.testing.assert_close(torch.stack(losses).mean(), mine.loss, rtol=1e-10, atol=1e-12)
