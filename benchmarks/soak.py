"""A soak: thousands of steps, bit-equal to the reference, with a line of progress and nothing that grows.

    python benchmarks/soak.py [steps]

Trains a small pipeline (skips, deferred batch norm, dropout, recompute, batches of changing size) beside the
reference for 10,000 steps and takes a checkpoint every 1,000, from which a new runner with another plan goes on.
Ends with an error at the first step that differs.
"""

from __future__ import annotations

import io
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

WIDTH, MICROBATCHES, EVERY = 8, 3, 1000
PLANS: list[dict[str, Any]] = [
    {"devices": 2, "schedule": "1f1b", "recompute": "except_last", "update": "stage"},
    {"devices": 3, "schedule": "gpipe", "recompute": "never", "update": "all"},
    {"devices": 1, "schedule": "1f1b", "recompute": "always", "update": "stage"},
    {"devices": 3, "schedule": "1f1b", "recompute": "always", "update": "stage"},
]


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor, skip: Tensor) -> Tensor:
        return self.line(torch.cat([h, skip], 1))


def pipeline() -> tuple[pipec.Pipeline, nn.ModuleList]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
    model = nn.ModuleList([first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()), Join()])
    pipec.deferred_batch_norm(model)
    net = pipec.Pipeline("soak")
    x, y = net.input("x"), net.input("y")
    a = net.stage("a", model[0], x)
    b = net.stage("b", model[1], a)
    c = net.stage("c", model[2], b, pipec.skip(a))
    net.loss("loss", F.mse_loss, c, y)
    return net, model


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def start(number: int) -> tuple[nn.ModuleList, pipec.Runner]:
    net, model = pipeline()
    how = PLANS[number % len(PLANS)]
    made = optimizer if how["update"] == "stage" else optimizer(model.parameters())
    plan = pipec.compile(net, microbatches=MICROBATCHES, **how)
    return model, pipec.Runner(net, plan, backend="threads", optimizer=made, model=model, seed=1)


def saved(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def resident() -> float:
    """MiB of this process in memory; where only their peak can be had, the peak."""
    if Path("/proc/self/statm").exists():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    torch.set_num_threads(1)
    net, reference_model = pipeline()
    loop = pipec.reference(net, MICROBATCHES, seed=1)
    own = optimizer(reference_model.parameters())
    model, run = start(0)
    draw, begin = torch.Generator().manual_seed(0), time.perf_counter()
    for step in range(1, steps + 1):
        rows = int(torch.randint(6, 15, (), generator=draw))
        x, y = torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)
        got, expected = run.step(x, y).loss, loop.step(x, y).loss
        own.step()
        own.zero_grad()
        if not torch.equal(got, expected):
            sys.exit(f"\nstep {step} differs from the reference: loss {got.item()}, expected {expected.item()}")
        if step % 100 == 0:
            seconds = time.perf_counter() - begin
            print(f"\r{step:>7} of {steps} steps bit-equal, {seconds / step * 1e3:.2f} ms a step, "
                  f"{resident():.0f} MiB, {threading.active_count()} threads ", end="", flush=True)
        if step % EVERY == 0:
            for key, value in reference_model.state_dict().items():
                if not torch.equal(value, model.state_dict()[key]):
                    sys.exit(f"\n{key} differs from the reference after step {step}")
            state = saved(run.checkpoint())
            run.close()
            model, run = start(step // EVERY)
            run.restore(state)
            print()
    run.close()


if __name__ == "__main__":
    main()
