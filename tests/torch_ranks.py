"""Schedules in CSVs, run by PyTorch's own pipelining: one process per rank over gloo.

Run as a script with a folder in which ``jobs.pt`` lists what to run; every rank leaves its gradients and losses there.
The ranks are forked from this process, which ends them when they take too long, and is itself a child of a test.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

SECONDS = 60  # for all jobs together


def rank_main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS / 2))
    jobs = torch.load(folder / "jobs.pt", weights_only=False)
    torch.save([run(job, rank) for job in jobs], folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """One step of the schedule in ``job["csv"]`` on the modules of this rank, a module per stage."""
    modules = job["modules"]
    own = [
        PipelineStage(modules[number], number, len(modules), torch.device("cpu"))
        for number, owner in enumerate(job["ranks"]) if owner == rank
    ]
    schedule = _PipelineScheduleRuntime(own, job["microbatches"], loss_fn=F.mse_loss)
    schedule._load_csv(job["csv"])
    first, last = job["ranks"][0] == rank, job["ranks"][-1] == rank
    losses: list[torch.Tensor] = []
    schedule.step(
        *([job["x"]] if first else []), **({"target": job["y"], "losses": losses} if last else {}),
        return_outputs=False,
    )
    gradients = {stage.stage_index: [p.grad for p in stage.submod.parameters()] for stage in own}
    return {"gradients": gradients, "losses": [loss.detach() for loss in losses]}


def main(world: int, folder: Path) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_main, args=(rank, world, folder), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + SECONDS
    while any(process.is_alive() for process in ranks):
        if time.monotonic() > deadline or any(process.exitcode for process in ranks):
            break
        time.sleep(0.02)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
