"""Coming from torchgpipe: the same model there (in comments) and here. Runs without torchgpipe.

    python examples/from_torchgpipe.py

    torchgpipe                                   pipec
    ------------------------------------------   -----------------------------------------------------------
    nn.Sequential of layers                      stages that take values: branches, merges, several outputs
    @skippable(stash=["x"]), yield stash / pop   another argument: net.stage("up", Up(), below, pipec.skip(x))
    balance=[2, 2]                               placement=[0, 0, 1, 1], or costs=pipec.profile(...)
    torchgpipe.balance.balance_by_time(...)      costs=pipec.profile(net, microbatches=4, x=..., target=...)
    chunks=4                                     microbatches=4
    checkpoint="except_last"                     recompute="except_last" (also per stage)
    GPipe's fixed order                          schedule="gpipe", "1f1b", ... or your own
    deferred_batch_norm=True                     net.stage("down", pipec.deferred_batch_norm(Down()), x)
    model(x), loss, loss.backward()              run.step(x=x, target=target) does all three
    the loss sees the whole minibatch            the loss runs per microbatch; a mean is weighted by rows
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pipec

# import torchgpipe
# from torchgpipe.skip import pop, skippable, stash
#
# @skippable(stash=["early"])
# class Down(nn.Module):
#     def __init__(self): ...
#     def forward(self, x):
#         x = self.layer(x)
#         yield stash("early", x)
#         return x


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()  # nothing to stash: whoever reads it is named where the stages are joined


# @skippable(pop=["early"])
# class Up(nn.Module):
#     def __init__(self): ...
#     def forward(self, x):
#         early = yield pop("early")
#         return self.layer(torch.cat([x, early], 1))


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 16)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return self.layer(torch.cat([x, early], 1))


def build() -> pipec.Pipeline:
    # model = nn.Sequential(Down(), nn.Linear(16, 16), nn.Tanh(), Up())
    # model = torchgpipe.GPipe(model, balance=[2, 2], devices=[...], chunks=4, checkpoint="except_last")
    torch.manual_seed(0)
    net = pipec.Pipeline("net")
    x, target = net.input("x"), net.input("target")
    down = net.stage("down", Down(), x)
    h = net.stage("linear", nn.Linear(16, 16), down)
    h = net.stage("tanh", nn.Tanh(), h)
    up = net.stage("up", Up(), h, pipec.skip(down))
    net.output(up)
    net.loss("mse", nn.functional.mse_loss, up, target)
    return net


def main(argv: list[str] | None = None) -> dict[str, object]:
    net = build()
    plan = pipec.compile(net, devices=2, microbatches=4, schedule="gpipe", placement=[0, 0, 1, 1],
                         recompute="except_last")
    x, target = torch.randn(10, 16), torch.randn(10, 16)
    parameters = [p for stage in net.spec.stages for p in stage.fn.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    report = pipec.check(net, {"x": x, "target": target}, plan)
    losses = []
    with pipec.Runner(net, plan) as run:
        for _ in range(5):
            # optimizer.zero_grad()
            # output = model(x)
            # loss = F.mse_loss(output, target)
            # loss.backward()
            # optimizer.step()
            optimizer.zero_grad()
            result = run.step(x=x, target=target)  # result.loss, result.output
            optimizer.step()
            losses.append(float(result.loss))
    print(report)
    print("loss:", ", ".join(f"{loss:.3f}" for loss in losses))
    return {"exact": bool(report), "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main()
