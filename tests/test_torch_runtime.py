"""Exported schedules are executed by PyTorch's own pipelining, in real processes, with pipec's gradients and losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

import pipec

ROWS, MICROBATCHES = 16, 8
RUNS = {  # schedule, stages: chunks of one stage, or of several
    2: [("1f1b", 2), ("zb-v", 6), ("interleaved-1f1b", 4), ("interleaved-zero-bubble", 4), ("dualpipe-v", 6)],
    4: [("zb-v", 8), ("interleaved-1f1b", 8), ("interleaved-zero-bubble", 8), ("dualpipe-v", 8)],
}
if tuple(int(part) for part in torch.__version__.split(".")[:2]) == (2, 11):  # its runtime stands still in V shapes
    RUNS = {size: [run for run in runs if run[0] not in ("zb-v", "dualpipe-v")] for size, runs in RUNS.items()}


def network(stages: int) -> pipec.Pipeline:
    """The same on every rank."""
    net = models.chain(stages)
    for stage in net.spec.stages:
        stage.fn.double()
    return net


def batch() -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in models.data(ROWS).items()}


def run_by_pytorch(rank: int, path: str, stages: int, chunks: list[tuple[int, tuple[int, ...]]]) -> dict[str, Any]:
    """One step of the schedule in a CSV on this rank's chunks, given as (device, stages): gradients and losses."""
    own = [stage.fn for stage in network(stages).spec.stages]
    modules = [nn.Sequential(*(own[s] for s in parts)) for _, parts in chunks]
    mine = [
        PipelineStage(modules[number], number, len(chunks), torch.device("cpu"))
        for number, (device, _) in enumerate(chunks) if device == rank
    ]
    schedule = _PipelineScheduleRuntime(mine, MICROBATCHES, loss_fn=F.mse_loss)
    schedule._load_csv(path)
    given, losses = batch(), []  # type: tuple[Any, list[torch.Tensor]]
    args = [given["x"]] if chunks[0][0] == rank else []
    options = {"target": given["y"], "losses": losses} if chunks[-1][0] == rank else {}
    schedule.step(*args, **options, return_outputs=False)
    return {
        "gradients": {stage.stage_index: [p.grad for p in stage.submod.parameters()] for stage in mine},
        "losses": [loss.detach() for loss in losses],
    }


@pytest.mark.parametrize("size", RUNS)
def test_pytorch_runs_exported_schedules_to_equal_gradients(size: int, crew2: Any, crew4: Any, tmp_path: Path) -> None:
    crew = crew2 if size == 2 else crew4
    for schedule, stages in RUNS[size]:
        net, path = network(stages), tmp_path / f"{schedule}.csv"
        plan = pipec.compile(net, size, MICROBATCHES, schedule)
        plan.to_torch_csv(path)
        results = crew(run_by_pytorch, str(path), stages, [(chunk.device, chunk.stages) for chunk in plan.chunks])
        expected = pipec.reference(net, MICROBATCHES).step(**batch())
        theirs = {number: grads for result in results for number, grads in result["gradients"].items()}
        assert sorted(theirs) == list(range(len(plan.chunks)))
        for chunk in plan.chunks:
            parameters = [p for s in chunk.stages for p in net.spec.stages[s].fn.parameters()]
            for parameter, gradient in zip(parameters, theirs[chunk.index], strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12, msg=schedule)
        losses = results[plan.chunks[-1].device]["losses"]
        torch.testing.assert_close(torch.stack(losses).mean(), expected.loss, rtol=1e-10, atol=1e-12, msg=schedule)
