"""Asynchronous runs written down again as simply as possible: one thread, a copy of every version, plain autograd.

:class:`Replay` walks over the tasks of a plan. Every FORWARD runs on a copy of the stage's module that holds the
version the plan says. Where the backward reads the weights of its forward that is all. For other rules a stage is a
:class:`Dense`, whose products are written by hand, or ``mixed`` tells saved parameters by their memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from models import microbatches
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.compiler import compute_tasks
from pipec.costs import Costs
from pipec.ir import Kind, Plan, Table
from pipec.passes.order import chunk_edges
from pipec.schedules.base import Problem
from pipec.segments import recomputed_values

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Dense(nn.Module):
    """tanh(x W^T + b), with its vector-Jacobian product for any weights written out."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / 2), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))

    @staticmethod
    @torch.no_grad()
    def product(x: Tensor, out: Tensor, gradient: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gradients of the input and of the parameters: activations of the forward, ``weights`` of the backward."""
        inner = torch.ops.aten.tanh_backward(gradient, out)
        return inner.mm(weights[0]), [x.t().mm(inner).t(), inner.sum(0)]


def chain(modules: Iterable[nn.Module], loss: Callable[..., Tensor] = F.mse_loss) -> pipec.Pipeline:
    """A chain of stages a, b, c... from x to a loss against y."""
    net = pipec.Pipeline("chain")
    value, y = net.input("x"), net.input("y")
    for letter, module in zip("abcdefghij", modules, strict=False):
        value = net.stage(letter, module, value)
    net.output(value)
    net.loss("loss", loss, value, y)
    return net


def laid_out(plan: Plan, minibatches: int) -> Table:
    """The tasks of the same schedule over that many minibatches, the last of them flushed."""
    problem = Problem(
        plan.chunks, plan.devices, plan.minibatch * minibatches, chunk_edges(plan.graph, plan.chunks), Costs(),
        tuple(stage.name for stage in plan.graph.stages), minibatches=minibatches,
    )
    return compute_tasks(plan.graph, problem, plan.recipe).table


class Replay:
    """A one-thread replay of a plan's declared versions."""

    def __init__(
        self, modules: list[nn.Module], optimizer: Optimizer, *, mixed: bool = False, byhand: bool = False,
        backward: Callable[..., list[Tensor]] | None = None, forward: Callable[..., list[Tensor]] | None = None,
        recompute: Callable[..., list[Tensor]] | None = None, updated: Callable[..., None] | None = None,
    ) -> None:
        """``forward``, ``recompute``, ``backward``: a rule's weights of (replay, stage, version, microbatch);
        ``updated`` is called after an update with (replay, stage, weights before)."""
        self.modules = [copy.deepcopy(module) for module in modules]
        self.optimizers = [optimizer(module.parameters()) if any(True for _ in module.parameters()) else None
                           for module in self.modules]
        self.mixed, self.byhand = mixed, byhand
        self.rule = {"F": forward, "R": recompute or forward, "B": backward}
        self.updated = updated
        self.losses: list[Tensor] = []
        self.deltas: dict[int, list[Tensor]] = {}

    def weights(self, stage: int) -> list[Tensor]:
        return [p.detach().clone() for p in self.modules[stage].parameters()]

    def made(self, letter: str, stage: int, version: int, microbatch: int) -> list[Tensor]:
        rule = self.rule[letter]
        return self.versions[stage][version] if rule is None else rule(self, stage, version, microbatch)

    def run(self, plan: Plan, batches: list[dict[str, Tensor]]) -> None:
        """Train on ``batches``, fed one after another and then flushed."""
        table, count, every = laid_out(plan, len(batches)), plan.minibatch, plan.update_every
        parts = [part for batch in batches for part in microbatches([batch["x"], batch["y"]], [0, 0], count)]
        rows = [len(batch["x"]) for batch in batches]
        self.versions = [{0: self.weights(stage)} for stage in range(len(self.modules))]
        self.now: dict[tuple[int, int], Any] = {}
        values: dict[tuple[int, int], Tensor] = {}
        gradients: dict[tuple[int, int], Tensor] = {}
        sums: dict[tuple[int, int], list[Tensor | None]] = {}
        buffers: dict[tuple[int, int], dict[str, Tensor]] = {}
        last = len(self.modules) - 1
        self.losses = [torch.zeros(())] * len(parts)
        self.reads = {(Kind(k).letter, s, m): v for k, s, m, v in zip(
            table.kind.tolist(), table.stage.tolist(), table.microbatch.tolist(), table.version.tolist(), strict=True)}
        again = {(s, m) for letter, s, m in self.reads if letter == "R"}
        anew = {reader for readers in recomputed_values(plan.graph, plan.recompute).values() for reader in readers}
        forwards: dict[tuple[int, int], Tensor] = {}  # what forwards made, whenever they are recomputed
        for task in map(table.task, range(len(table))):
            stage, m, key = task.stage, task.microbatch, (task.stage, task.microbatch)
            if task.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                master = self.modules[stage]
                module = copy.deepcopy(master)
                if task.kind is Kind.FORWARD:
                    buffers[key] = {name: b.clone() for name, b in master.named_buffers()}
                module.load_state_dict(buffers[key], strict=False)
                with torch.no_grad():
                    for p, value in zip(module.parameters(), self.made(task.kind.letter, *key[:1], task.version, m),
                                        strict=True):
                        p.copy_(value)
                source = values if task.kind is Kind.RECOMPUTE and stage in anew else forwards
                x = parts[m][0] if stage == 0 else source[stage - 1, m].detach().requires_grad_()
                self.now[key] = self.record(module, x, parts[m][1] if stage == last else None)
                values[key] = self.now[key][2].detach()
                if task.kind is Kind.FORWARD:
                    forwards[key] = values[key]
                    master.load_state_dict(dict(module.named_buffers()), strict=False)
                    if stage == last:
                        self.losses[m] = self.now[key][3].detach()
                    if key in again:
                        del self.now[key]
            elif task.kind is Kind.BACKWARD:
                first = m // every * every
                group = sum(len(parts[other][0]) for other in range(first, first + every))
                share = len(parts[m][0]) / rows[m // count]
                seed = torch.tensor(share if every == count else share * rows[m // count] / group)
                found = self.backward(key, task.version, gradients.get(key), seed)
                if stage:
                    gradients[stage - 1, m] = found[0]
                total = sums.setdefault((stage, m // every), [None] * len(found[1]))
                for place, gradient in enumerate(found[1]):
                    before = total[place]
                    total[place] = gradient.clone() if before is None else before + gradient
            elif task.kind is Kind.UPDATE:
                optimizer, before = self.optimizers[stage], self.weights(stage)
                if optimizer is not None:
                    for p, gradient in zip(self.modules[stage].parameters(), sums.pop(key), strict=True):
                        p.grad = gradient
                    optimizer.step()
                    if self.updated is not None:
                        self.updated(self, stage, before)
                self.versions[stage][task.version + 1] = self.weights(stage)

    def record(self, module: nn.Module, x: Tensor, y: Tensor | None) -> list[Any]:
        """A forward of one task: [module, x, out, loss, what the backward's weights are put into]."""
        given: dict[str, list[Tensor]] = {}
        own = {p.untyped_storage().data_ptr(): place for place, p in enumerate(module.parameters())}

        def pack(tensor: Tensor) -> Any:
            place = own.get(tensor.untyped_storage().data_ptr())
            return tensor.detach() if place is None else (
                place, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else given["weights"][packed[0]].as_strided(*packed[1:])

        if self.mixed:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = module(x)
        else:
            out = module(x)
        loss = F.mse_loss(out, y) if y is not None else None
        return [module, x, out, loss, given]

    def backward(
        self, key: tuple[int, int], version: int, gradient: Tensor | None, seed: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        module, x, out, loss, given = self.now.pop(key)
        weights = self.made("B", key[0], version, key[1])
        if self.byhand:
            if loss is not None:
                gradient, = torch.autograd.grad(loss, out, seed.to(loss.dtype))
            return Dense.product(x.detach(), out.detach(), gradient, weights)
        given["weights"] = weights
        wanted = [*module.parameters(), *([x] if x.requires_grad else [])]
        root = out if loss is None else loss
        found = torch.autograd.grad(root, wanted, gradient if loss is None else seed.to(loss.dtype))
        return (found[-1] if x.requires_grad else None), list(found[: len(wanted) - x.requires_grad])
