"""Coming from torch.distributed.pipelining: the same training there (in comments) and here.

    python examples/from_torch_pipelining.py

    torch.distributed.pipelining                       pipec
    ------------------------------------------------   ---------------------------------------------------------
    one process a device, torchrun                     one process, a thread a device (processes: not yet)
    pipeline(model, mb_args=..., split_spec=...)       stages are declared; there is no tracing
    PipelineStage(part, rank, world, device)           net.stage("part", part, value)
    Schedule1F1B(stage, n_microbatches, loss_fn=...)   pipec.compile(net, devices, microbatches, "1f1b")
    ScheduleInterleaved1F1B([stage, stage], ...)       pipec.compile(..., "interleaved-1f1b", chunks=2)
    schedule.step(x) on the first rank,                run.step(x=x, target=target), once
      schedule.step(target=y, losses=[]) on the last
    a border carries tensors to the next stage         any value to any later stages, with any nesting
    scale_grads divides by n_microbatches              a mean loss is weighted by rows, a sum loss is summed
    _dump_csv of the actions of every rank             print(plan), plan.draw("plan.svg"), plan.simulate()
    schedule._dump_csv(path, format="compute_only")    pipec.compile(net, schedule=pipec.torch_csv(path))
    schedule._load_csv(path)                           plan.to_torch_csv(path)
"""

from __future__ import annotations

import torch
from torch import nn

import pipec


def build() -> pipec.Pipeline:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)] + [nn.Linear(16, 4)]
    # rank = dist.get_rank()
    # stage = PipelineStage(parts[rank], rank, num_stages=4, device=torch.device("cpu"))
    net = pipec.Pipeline("net")
    value, target = net.input("x"), net.input("target")
    for number, part in enumerate(parts):
        value = net.stage(f"part{number}", part, value)
    net.output(value)
    net.loss("cross entropy", nn.functional.cross_entropy, value, target)
    return net


def main(argv: list[str] | None = None) -> dict[str, object]:
    net = build()
    # schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=F.cross_entropy)
    plan = pipec.compile(net, devices=4, microbatches=8, schedule="1f1b", update="stage")
    x, target = torch.randn(30, 16), torch.randint(4, (30,))  # 30 rows in 8 microbatches: 4, 4, 4, 4, 4, 4, 3, 3

    # optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.5)
    losses = []
    with pipec.Runner(net, plan, optimizer=lambda own: torch.optim.SGD(own, lr=0.5)) as run:
        for _ in range(5):
            # optimizer.zero_grad()
            # if rank == 0:
            #     schedule.step(x)
            # elif rank == 3:
            #     output = schedule.step(target=target, losses=microbatch_losses)
            # else:
            #     schedule.step()
            # optimizer.step()
            losses.append(float(run.step(x=x, target=target).loss))
    report = pipec.check(net, {"x": x, "target": target}, devices=4, microbatches=8)
    print(report)
    print("loss:", ", ".join(f"{loss:.3f}" for loss in losses))
    return {"exact": bool(report), "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
