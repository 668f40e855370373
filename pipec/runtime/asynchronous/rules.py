"""The run-time halves of the weight rules: weights that no version holds, and what an UPDATE does besides stepping.

A rule's compile-time half (:mod:`pipec.rules`) says which version a task reads. Most rules read versions as they are.
A rule that makes its weights here has its name in :data:`HALVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pipec.errors import RunError
from pipec.runtime.asynchronous.weights import Leaves, StageWeights, copy_of

Give = Callable[[int], Tensor]
Advance = Callable[[float], None]  # steps the stage's optimizer with its learning rates times a factor


@frozen
class Delays:
    """Mean staleness of a stage's weights in a steady period, in updates.

    Attributes:
        forward: of what FORWARD read when BACKWARD runs (tau_fwd - tau_bkwd of the papers).
        recompute: of what RECOMPUTE read; 0 without one.
    """

    forward: float
    recompute: float = 0.0


class Half:
    """Weights as their versions are: stash, 2bw, live."""

    def __init__(self, rule: Any, delays: Sequence[Delays]) -> None:
        self.rule, self.delays = rule, delays

    @property
    def follows(self) -> bool:
        """Whether a backward reads what its forward read, whatever that was."""
        return self.rule.name in ("stash", "2bw") or bool(getattr(self.rule, "stash", False))

    def makes(self, stage: int) -> bool:
        """Whether a backward of the stage reads other weights than made its graph, under the same version too."""
        return False

    def check(self, weights: StageWeights, optimizer: Optimizer | None) -> None:
        """Raise RunError for an optimizer that the rule cannot work with."""

    def forward(self, weights: StageWeights, version: int, ahead: int, optimizer: Optimizer | None) -> Leaves:
        """What a FORWARD reads; ``ahead``: updates until the version that its backward reads."""
        return weights.of(version)

    def recompute(self, weights: StageWeights, version: int, ahead: int, optimizer: Optimizer | None) -> Leaves:
        """What a RECOMPUTE reads."""
        return self.forward(weights, version, ahead, optimizer)

    def backward(self, weights: StageWeights, version: int) -> Give:
        """What a BACKWARD reads, by the index of the parameter."""
        return weights.of(version).bare.__getitem__

    def update(self, weights: StageWeights, advance: Advance) -> None:
        """Run an UPDATE."""
        advance(1.0)


class CorrectedHalf(Half):
    """PipeMare's T2 (arXiv 1910.05124, sections 3.2 and appendix): u = w - (tau_fwd - tau_bkwd) * delta.

    delta(t+1) = g * delta(t) + (1 - g) * (w(t+1) - w(t)).
    """

    def gamma(self, stage: int) -> float:
        """g = D^(1/tau), or 1 - 2/(tau + 1) for "optimal"; within [0, 1)."""
        tau, decay = self.delays[stage].forward, self.rule.decay
        if tau <= 0:
            return 0.0
        made = 1.0 - 2.0 / (tau + 1.0) if decay == "optimal" else float(decay) ** (1.0 / tau)
        return min(max(made, 0.0), 1.0 - 2.0**-24)

    def makes(self, stage: int) -> bool:
        return self.delays[stage].forward > 0

    def recompute(self, weights: StageWeights, version: int, ahead: int, optimizer: Optimizer | None) -> Leaves:
        """u = w - (tau_fwd - tau_recomp) * delta (appendix on recompute)."""
        delays = self.delays[weights.stage.index]
        factor = delays.forward - delays.recompute
        base = weights.of(version)
        if factor == 0 or "delta" not in weights.buffers:
            return base
        key = ("recompute", version)
        if weights.made is None or weights.made[0] != key:
            give = _moved(base.bare, weights.buffer("delta"), -factor)
            weights.made = key, weights.leaves([give(index) for index in range(len(base.bare))])
        return weights.made[1]

    def backward(self, weights: StageWeights, version: int) -> Give:
        tau, base = self.delays[weights.stage.index].forward, weights.of(version).bare
        if tau <= 0 or "delta" not in weights.buffers:
            return base.__getitem__
        if not self.rule.kept:
            return _moved(base, weights.buffer("delta"), -tau)
        if weights.corrected is None:  # gone with the next update, and there is one version only
            delta = weights.buffer("delta")
            weights.corrected = [_sum(own, along, -tau) for own, along in zip(base, delta, strict=True)]
        return weights.corrected.__getitem__

    def update(self, weights: StageWeights, advance: Advance) -> None:
        if not self.makes(weights.stage.index) or not weights.parameters:
            advance(1.0)
            return
        before = [copy_of(p) for p in weights.parameters]
        advance(1.0)
        gamma, delta = self.gamma(weights.stage.index), weights.buffer("delta")
        with torch.no_grad():
            change = torch._foreach_sub(weights.parameters, before)
            torch._foreach_mul_(delta, gamma)
            torch._foreach_add_(delta, change, alpha=1.0 - gamma)


class DelayedHalf(CorrectedHalf):
    """Given delays, with T2 where the rule has a decay.

    u = w(t - tau_bkwd) - (tau_fwd - tau_bkwd) delta(t - tau_bkwd): the delta that belongs to the version read.
    """

    def makes(self, stage: int) -> bool:
        return self.rule.decay is not None and super().makes(stage)

    def backward(self, weights: StageWeights, version: int) -> Give:
        own, stage = weights.of(version), weights.stage.index
        delta = weights.buffers.get("delta") if own.live else own.delta
        if not self.makes(stage) or delta is None:
            return own.bare.__getitem__
        return _moved(own.bare, delta, -self.delays[stage].forward)

    def update(self, weights: StageWeights, advance: Advance) -> None:
        stage = weights.stage.index
        if self.makes(stage) and "delta" in weights.buffers:
            for version, old in weights.kept.items():
                if version == weights.version:
                    old.delta = [copy_of(tensor) for tensor in weights.buffer("delta")]
                elif version <= weights.version - self.rule.back(stage):
                    old.delta = None  # no backward reads it after this update
        super().update(weights, advance)


def _moved(base: Sequence[Tensor], along: Sequence[Tensor], factor: float) -> Give:
    """base + factor * along, made when asked for, with the strides of ``base``.

    A backward asks for one again and again when its stage used it in parts; the last one made is kept.
    """
    last: list[Any] = [-1, None]

    def give(index: int) -> Tensor:
        if last[0] != index:
            last[1] = None  # its memory is free for the next
            last[:] = index, _sum(base[index], along[index], factor)
        return last[1]  # type: ignore[no-any-return]

    return give


def _sum(own: Tensor, along: Tensor, factor: float) -> Tensor:
    """own + factor * along, with the strides of ``own``."""
    made = torch.add(own, along, alpha=factor)
    if made.stride() == own.stride():
        return made
    out = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
    return torch.add(own, along, alpha=factor, out=out)


class PredictedHalf(Half):
    """FORWARD reads the newest weights moved on by the optimizer's own last step, once per update until BACKWARD.

    SGD with momentum: w - s * lr * buffer (SpecTrain, arXiv 1809.02839, equation 3). Adam and AdamW: w - s * lr *
    m_hat / (sqrt(v_hat) + eps), and for AdamW its weight decay (PipeOptim, arXiv 2312.00839). Before an optimizer's
    first step there is nothing to move along.
    """

    def makes(self, stage: int) -> bool:
        return False

    def check(self, weights: StageWeights, optimizer: Optimizer | None) -> None:
        if optimizer is None or self.delays[weights.stage.index].forward <= 0:
            return
        if type(optimizer) is SGD:
            if all(group["momentum"] for group in optimizer.param_groups):
                return
            told = "SGD without momentum, which does not say where its next step goes"
        elif type(optimizer) in (Adam, AdamW):
            return
        else:
            told = type(optimizer).__name__
        raise RunError(
            f"stage {weights.stage.name!r}: weight prediction needs torch's SGD with momentum, Adam or AdamW; got "
            f"{told}"
        )

    def forward(self, weights: StageWeights, version: int, ahead: int, optimizer: Optimizer | None) -> Leaves:
        base = weights.of(version)
        if ahead <= 0 or optimizer is None or not optimizer.state:
            return base
        key = ("predicted", version, ahead)
        if weights.made is None or weights.made[0] != key:
            weights.made = key, weights.leaves(predicted(optimizer, weights, base.tensors, ahead))
        return weights.made[1]


@torch.no_grad()
def predicted(optimizer: Optimizer, weights: StageWeights, base: Sequence[Tensor], ahead: int) -> list[Tensor]:
    """``base`` after ``ahead`` more steps like the optimizer's last one."""
    index = {id(p): number for number, p in enumerate(weights.parameters)}
    made = [copy_of(tensor) for tensor in base]
    for number, group in enumerate(optimizer.param_groups):
        rate = weights.rates[number] if number < len(weights.rates) else group["lr"]
        sign = -1.0 if group.get("maximize") else 1.0
        for parameter in group["params"]:
            state, place = optimizer.state.get(parameter), index.get(id(parameter))
            if not state or place is None:
                continue
            out = made[place]
            if "momentum_buffer" in state:
                if state["momentum_buffer"] is not None:
                    out.sub_(state["momentum_buffer"], alpha=float(sign * ahead * rate))
            elif "exp_avg" in state:
                _adam(out, base[place], state, group, float(rate), ahead, sign)
    return made


def _adam(
    out: Tensor, base: Tensor, state: dict[str, Any], group: dict[str, Any], rate: float, ahead: int, sign: float
) -> None:
    step, (beta1, beta2) = float(state["step"]), group["betas"]
    squares = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    denominator = (squares.sqrt() / (1.0 - beta2**step) ** 0.5).add_(group["eps"])
    if group.get("decoupled_weight_decay"):
        out.sub_(base, alpha=ahead * rate * group["weight_decay"])
    out.addcdiv_(state["exp_avg"], denominator, value=-sign * ahead * rate / (1.0 - beta1**step))


class NesterovHalf(Half):
    """w(t+1) = w(t) + d - (1-g) * step, d = g * (w(t) - w(t-1)) (arXiv 2505.01099)."""

    def update(self, weights: StageWeights, advance: Advance) -> None:
        if not weights.parameters:
            advance(1.0)
            return
        gamma, change = self.rule.momentum, weights.buffer("change")
        before = [copy_of(p) for p in weights.parameters]
        advance(1.0 - gamma)
        with torch.no_grad():
            torch._foreach_add_(weights.parameters, change, alpha=gamma)
            weights.buffers["change"] = list(torch._foreach_sub(weights.parameters, before))


HALVES: dict[str, type[Half]] = {
    "corrected": CorrectedHalf, "predicted": PredictedHalf, "nesterov": NesterovHalf, "delayed": DelayedHalf,
}


def half_of(rule: Any, delays: Sequence[Delays]) -> Half:
    """The run-time half of a rule: its own attribute ``half``, one of pipec's, or versions as they are."""
    make = getattr(rule, "half", None) or HALVES.get(rule.name, Half)
    return make(rule, delays)
