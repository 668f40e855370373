"""Deferred batch norm: running statistics of the whole minibatch, normalisation per microbatch.

An ordinary BatchNorm layer in a pipeline moves its running statistics once per microbatch, so what evaluation sees
depends on the number of microbatches. A deferred one adds up the rows of all microbatches and moves them once per
training step, as one unpipelined layer would over the whole minibatch. Training itself still normalises with the
statistics of each microbatch: the rows of a minibatch never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pipec.errors import Problem, SpecError, raise_all

ROWS, MEAN, SQUARES = "deferred_rows", "deferred_mean", "deferred_squares"


class Deferred(_BatchNorm):
    """The part that the three layers below share.

    The sums are buffers that no state dict holds: a RECOMPUTE runs on copies of them, which are then dropped, and a
    step that fails puts them back, as for every other buffer.
    """

    def prepare(self) -> None:
        """Make the sums: values per channel, their mean, and their squared distances from it."""
        like = self.running_mean
        assert like is not None
        self.deferring = False
        fine = torch.promote_types(like.dtype, torch.float32)
        self.register_buffer(ROWS, torch.zeros((), dtype=torch.long, device=like.device), persistent=False)
        self.register_buffer(MEAN, torch.zeros_like(like, dtype=fine), persistent=False)
        self.register_buffer(SQUARES, torch.zeros_like(like, dtype=fine), persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that BatchNorm uses
        """As BatchNorm. Called in training outside of a step, the input is a minibatch of its own."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # with momentum 1 the kernel leaves the microbatch's own mean and unbiased variance in these two
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._add(input.numel() // input.shape[1], mean, variance)
        if not self.deferring:
            self._finish()
        return out

    @torch.no_grad()
    def _add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Join the statistics of two sets of values (Chan, Golub and LeVeque 1983)."""
        rows, total, squares = self._sums()
        gap = mean - total
        share = count / (rows + count).to(total.dtype)
        squares.add_(variance * (count - 1) + gap * gap * (rows * share))
        total.add_(gap * share)
        rows.add_(count)

    @torch.no_grad()
    def _finish(self) -> None:
        """Move the running statistics once, unless no value was seen. Without a branch: no device is waited for."""
        rows, total, squares = self._sums()
        assert self.running_mean is not None
        assert self.running_var is not None
        seen = rows > 0
        factor = seen.to(self.running_mean.dtype)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(seen)
        if self.momentum is not None:
            factor = factor * self.momentum
        elif self.num_batches_tracked is not None:  # the average over all steps so far
            factor = factor / self.num_batches_tracked.clamp(min=1)
        self.running_mean.lerp_(total.to(factor.dtype), factor)
        self.running_var.lerp_((squares / (rows - 1).clamp(min=1)).to(factor.dtype), factor)
        self._clear()

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.get_buffer(ROWS), self.get_buffer(MEAN), self.get_buffer(SQUARES)

    def _clear(self) -> None:
        for held in self._sums():
            held.zero_()

    @contextmanager
    def minibatch(self) -> Iterator[None]:
        """What is run inside, in training, is one minibatch; an exception inside it leaves no trace of it."""
        self.deferring = True
        try:
            yield
            self._finish()
        finally:
            self.deferring = False
            self._clear()


class DeferredBatchNorm1d(Deferred, nn.BatchNorm1d):
    """BatchNorm1d with running statistics of the whole minibatch."""


class DeferredBatchNorm2d(Deferred, nn.BatchNorm2d):
    """BatchNorm2d with running statistics of the whole minibatch."""


class DeferredBatchNorm3d(Deferred, nn.BatchNorm3d):
    """BatchNorm3d with running statistics of the whole minibatch."""


KINDS: dict[type[nn.Module], type[Deferred]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d, nn.BatchNorm2d: DeferredBatchNorm2d, nn.BatchNorm3d: DeferredBatchNorm3d,
}


def deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Make every BatchNorm layer of ``module`` keep running statistics of whole minibatches.

    The layers are changed in place and stay the objects they are: parameters, buffers, hooks, optimizers and state
    dicts (with the same keys) remain valid. Call it before the pipeline is compiled, on a stage's module or on the
    whole model::

        e1 = net.stage("enc1", pipec.deferred_batch_norm(Encoder(3, 16)), image)

    Per training step and layer: the running mean moves towards the mean of all values of the minibatch, the running
    variance towards their unbiased variance, by ``momentum`` (or the cumulative average where it is None), and
    ``num_batches_tracked`` grows by 1. Microbatches may differ in size. RECOMPUTE counts nothing twice, a failed
    step counts nothing, evaluation and layers in eval mode are untouched. A layer that a stage calls several times
    counts all these values as one minibatch. Layers without running statistics stay as they are.

    Returns:
        ``module`` itself.

    Raises:
        SpecError: listing the layers that cannot be changed: subclasses with a forward of their own, lazy layers
            that saw no batch yet, layers with parametrizations.
    """
    layers = [(name, sub) for name, sub in module.named_modules() if isinstance(sub, _BatchNorm)]
    problems = [
        Problem(f"layer {name or '(the module itself)'} is a {type(layer).__name__}, not a plain nn.BatchNorm1d, 2d or "
                "3d; " + ("call it once with a batch first" if "Lazy" in type(layer).__name__ else
                          "convert it before it is wrapped or parametrized, or leave its module out"))
        for name, layer in layers if type(layer) not in KINDS and not isinstance(layer, Deferred)
    ]
    raise_all(f"deferred_batch_norm({type(module).__name__})", problems, SpecError)
    for _, layer in layers:
        if type(layer) in KINDS and layer.running_mean is not None:
            layer.__class__ = KINDS[type(layer)]
            assert isinstance(layer, Deferred)
            layer.prepare()
    return module


def minibatch(layers: Iterable[Deferred]) -> ExitStack:
    """One training step: every layer sees what runs inside as one minibatch. Layers may be given several times."""
    with ExitStack() as stack:
        for layer in {id(layer): layer for layer in layers}.values():
            stack.enter_context(layer.minibatch())
        return stack.pop_all()
