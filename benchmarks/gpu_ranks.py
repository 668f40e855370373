"""Two processes of the GPU checks: one pipeline over both, through host memory on one GPU, or over NCCL on two.

``gpu_check.py`` starts this file twice. Each process writes what it found, way by way, to a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import mixed
from gpu_readings import Row
from torch import Tensor, nn

import pipec

HERE = Path(__file__).resolve().parent
PATIENCE = 90.0  # seconds for all of it
MICROBATCHES = 8
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "gpipe")
WAYS = {  # what the process group moves tensors of GPUs by, the GPUs it needs, and what is said about it
    "gloo": (1, "2 ranks on one GPU, through host memory"),
    "refused": (1, "2 ranks on one GPU, over NCCL"),
    "nccl": (2, "2 ranks on 2 GPUs, over NCCL"),
}


def ranks(target: Any, schedules: Sequence[str] = SCHEDULES, patience: float = PATIENCE) -> list[Row]:
    """Two processes give the numbers of the plain loop; each way that there are GPUs for."""
    ways = [way for way, (needed, _) in WAYS.items() if needed <= target.gpus()]
    with tempfile.TemporaryDirectory() as folder:
        story = launch(target, ways, schedules, Path(folder), patience)
        rows = []
        for way, (needed, name) in WAYS.items():
            if way in ways:
                rows += rows_of(name, [read(Path(folder), rank, way) for rank in (0, 1)], story)
            else:
                rows.append(Row(name, f"not run: it needs {needed} GPUs, there is {target.gpus()}"))
    return rows


def launch(target: Any, ways: Sequence[str], schedules: Sequence[str], folder: Path, patience: float) -> str:
    """Run both processes; what they said at last if they did not end well."""
    command = [sys.executable, str(HERE / "gpu_ranks.py"), "--folder", str(folder), "--kind", target.device.type,
               "--ways", *ways, "--schedules", *schedules, *(["--stand-in"] if target.stand_in else [])]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], env=env | {"LOCAL_RANK": str(rank)},
                         stdout=subprocess.DEVNULL, stderr=(folder / f"error{rank}").open("w"))
        for rank in (0, 1)
    ]
    end = time.monotonic() + patience
    try:
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no end after {patience:.0f} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [(folder / f"error{rank}").read_text(encoding="utf-8").strip().splitlines() for rank in (0, 1)]
    broken = [f"rank {rank} ended with {p.returncode}: {(said[rank] or ['nothing said'])[-1][:80]}"
              for rank, p in enumerate(processes) if p.returncode]
    return "; ".join(broken)


def read(folder: Path, rank: int, way: str) -> dict[str, Any]:
    path = folder / f"{way}{rank}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows_of(name: str, found: Sequence[dict[str, Any]], story: str) -> list[Row]:
    """What both processes found on one way, as lines of the table."""
    if not all(found):
        return [Row(name, story or "nothing was found", "runs", ok=False)]
    wrong = [f"{problem} (rank {rank})" for rank, own in enumerate(found) for problem in own["wrong"]]
    ran = found[0]["ran"]
    told = f"{ran - len({text.split(' (rank')[0] for text in wrong})} of {ran}" + (
        f", wrong: {', '.join(wrong)}"[:200] if wrong else "")
    rows = [Row(name, told, "all", ran > 0 and not wrong)]
    if "step" in found[0]:
        rows.append(Row(f"{name}, a step", f"{max(own['step'] for own in found):.1f} ms"))
    return rows


# -- in each process ---------------------------------------------------------------------------------------------


def same(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
               for a, b in zip(mine, theirs, strict=True))


def held(net: pipec.Pipeline, stages: Sequence[int]) -> list[Tensor | None]:
    """Gradients and buffers of some stages."""
    modules = [net.spec.stages[stage].fn for stage in stages]
    return [p.grad for m in modules for p in m.parameters()] + [b for m in modules for b in m.buffers()]


def minibatch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 3 * MICROBATCHES, 6, 32, generator=torch.Generator().manual_seed(step))
    return x, y


class Process:
    """One of the two."""

    def __init__(self, rank: int, kind: str, stand_in: bool) -> None:
        self.rank, self.kind, self.stand_in = rank, kind, stand_in

    def devices(self, way: str) -> str:
        """By the place on the host over NCCL, else the first GPU for both."""
        return self.kind if way == "nccl" else f"{self.kind}:0"

    def on(self, way: str) -> AbstractContextManager[Any]:
        """Where runners are made."""
        if not self.stand_in:
            return nullcontext()
        sys.path.insert(0, str(HERE.parent / "tests"))
        from fake_gpus import on_gpus

        return on_gpus("staged" if way == "gloo" else "wired", self.devices(way).replace("cpu", "cuda"))

    def device(self, way: str) -> torch.device:
        if self.stand_in:
            return torch.device("cpu")
        return torch.device(self.kind, self.rank if way == "nccl" else 0)

    def runner(self, way: str, net: pipec.Pipeline, plan: Any, **how: Any) -> Any:
        own = {} if self.stand_in else {"devices": self.devices(way)}
        return pipec.Runner(net, plan, timeout=30.0, seed=3, **own, **how)

    def equal(self, way: str, schedule: str, hold: str | None = None) -> bool:
        """Losses, gradients and buffers of this rank's stages against the plain loop on its own GPU."""
        device = self.device(way)
        net, other = mixed(torch.device("cpu"), hold=hold), mixed(device)
        plan = pipec.compile(net, 2, MICROBATCHES, schedule, placement=[0, 0, 1, 1, 1, 1, 0, 0] if hold else None)
        loop = pipec.reference(other, MICROBATCHES, seed=3)
        mine = [stage for stage in range(len(net.spec.stages)) if plan.stage_device(stage) == self.rank]
        with self.runner(way, net, plan) as run:
            for step in range(3):
                x, y = minibatch(step)
                if not torch.equal(run.step(x, y).loss.to(device), loop.step(x.to(device), y.to(device)).loss):
                    return False
            run.evaluate(*minibatch(7))
        return same(held(net, mine), held(other, mine))

    def trained(self, way: str) -> bool:
        """Updates, loss scaling and clipping: the scale and the norm of both ranks, finite weights that have moved."""
        net = mixed(torch.device("cpu"))
        before = [p.detach().clone() for stage in net.spec.stages for p in stage.fn.parameters()]
        scaler = torch.amp.GradScaler(self.device(way).type, init_scale=1024.0)
        norms: list[float] = []
        plan = pipec.compile(net, 2, MICROBATCHES, "1f1b", update="stage")
        run = self.runner(way, net, plan, optimizer=lambda p: torch.optim.AdamW(p, 1e-2), scaler=scaler,
                          before_update=lambda _: norms.append(float(run.clip_grad_norm_(1.0))))
        with run:
            for step in range(3):
                run.step(*minibatch(step))
            own = {id(p) for p in run.parameters()}
        after = [p for stage in net.spec.stages for p in stage.fn.parameters()]
        moved = [not torch.equal(a, b.cpu()) and bool(b.isfinite().all())
                 for a, b in zip(before, after, strict=True) if id(b) in own]
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (norms, scaler.get_scale()), group=dist.new_group(backend="gloo"))
        return all(moved) and told[0] == told[1] and len(norms) == 3

    def replicas(self, way: str) -> bool:
        """Two replicas of a pipeline of one device: the gradients of the whole batch, within rounding."""
        device, parts = self.device(way), (torch.randn(12, 32), torch.randn(20, 32))

        def build() -> pipec.Pipeline:
            torch.manual_seed(1)
            net = pipec.Pipeline("replicas")
            x = net.input("x")
            value = net.stage("second", nn.Linear(32, 32), net.stage("first", nn.Linear(32, 32), x))
            net.loss("mse", nn.functional.mse_loss, value, x)
            return net

        net, other = build(), build()
        for stage in other.spec.stages:
            stage.fn.to(device)
        with self.runner(way, net, pipec.compile(net, 1, 4, data_parallel=2)) as run:
            run.step(parts[self.rank])
        pipec.reference(other, 1).step(torch.cat(parts).to(device))
        found = zip(held(net, (0, 1)), held(other, (0, 1)), strict=True)
        return all(a is not None and b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in found)

    def failure(self, way: str) -> bool:
        """A task that raises on one rank ends both, and the next step is right."""
        net, armed = mixed(torch.device("cpu")), [self.rank == 1]

        def trap(module: Any, args: Any) -> None:
            if armed and armed.pop():
                raise ValueError("on purpose")

        net.spec.stages[6].fn.register_forward_pre_hook(trap)
        with self.runner(way, net, pipec.compile(net, 2, MICROBATCHES)) as run:
            try:
                run.step(*minibatch(0))
                return False
            except (ValueError, pipec.RankError) as error:
                if isinstance(error, ValueError) != (self.rank == 1):
                    return False
            x, y = minibatch(0)
            got, device = run.step(x, y).loss, self.device(way)
        loop = pipec.reference(mixed(device), MICROBATCHES, seed=3)
        return torch.equal(got.to(device), loop.step(x.to(device), y.to(device)).loss)

    def refused(self, way: str) -> bool:
        """Two ranks on one GPU, which NCCL cannot have, are told so before it is asked."""
        net = mixed(torch.device("cpu"))
        try:
            self.runner(way, net, pipec.compile(net, 2, MICROBATCHES)).close()
        except pipec.RankError as error:
            return "which NCCL refuses" in str(error)
        return False

    def milliseconds(self, way: str) -> float:
        """A step, at the median."""
        net, took = mixed(torch.device("cpu")), list[float]()
        with self.runner(way, net, pipec.compile(net, 2, MICROBATCHES)) as run:
            for step in range(8):
                given, began = minibatch(step), time.perf_counter()
                run.step(*given)
                took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took[3:])

    def found(self, way: str, schedules: Sequence[str]) -> dict[str, Any]:
        """What is wrong on one way, of how many checks."""
        checks: dict[str, Callable[[], bool]] = {"refused in words": lambda: self.refused(way)}
        if way != "refused":
            checks = {name: partial(self.equal, way, name) for name in schedules}
            checks["skips in host memory"] = partial(self.equal, way, "1f1b", "host")
            checks |= {name: partial(getattr(self, name), way) for name in ("trained", "replicas", "failure")}
        wrong = []
        with self.on(way):
            for name, check in checks.items():
                try:
                    if not check():
                        wrong.append(name)
                except Exception as error:
                    traceback.print_exc()
                    wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:60]}")
            step = {} if way == "refused" or wrong else {"step": self.milliseconds(way)}
        return {"ran": len(checks), "wrong": wrong, **step}


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--kind", required=True)
    options.add_argument("--ways", nargs="+", choices=list(WAYS), required=True)
    options.add_argument("--schedules", nargs="+", required=True)
    options.add_argument("--stand-in", action="store_true", help="GPUs that are not there, as in the tests")
    given = options.parse_args(argv)
    from gpu_check import deterministic

    deterministic(True)
    torch.set_num_threads(1)
    process = Process(given.rank, given.kind, given.stand_in)
    for way in given.ways:
        backend = "gloo" if way == "gloo" or given.stand_in else f"cpu:gloo,{given.kind}:nccl"
        store = f"file://{given.folder}/store-{way}"
        limit = timedelta(seconds=60)
        dist.init_process_group(backend, init_method=store, rank=given.rank, world_size=2, timeout=limit)
        found = process.found(way, given.schedules)
        (given.folder / f"{way}{given.rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
