"""Updates: optimizers that fit the plan, gradient hooks and loss scaling around them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipec.errors import Problem, RunError, note, raise_all
from pipec.ir import Plan
from pipec.runtime.stages import Stage

Hook = Callable[[list[Tensor]], Any]


class Updater:
    """The optimizers of a run, as the plan's ``update`` asks for them.

    A parameter that several stages use belongs to the first of them that a loss depends on. Stages without trainable
    parameters have no optimizer, and their UPDATE does nothing; what no loss depends on keeps its ``.grad``.
    """

    def __init__(
        self, plan: Plan, optimizer: Any, stages: Sequence[Stage], scaler: Any = None, hook: Hook | None = None,
        anywhere: Callable[[bool], bool] | None = None,
    ) -> None:
        """``anywhere``: whether a flag is true in any of the processes that run the plan; None: there is one."""
        self.update, self.scaler, self.hook, self._anywhere = plan.update, scaler, hook, anywhere
        self.per_stage: dict[int, Optimizer] = {}
        self.skip = self.in_hook = False
        self.updated: list[int] = []
        check_fit(plan.update, optimizer, hook)
        if plan.update_early:
            check_early(stages, scaler, hook)
        if plan.update == "all":
            self.per_stage[-1] = check_closure(optimizer)
        elif plan.update == "stage":
            owned: set[int] = set()
            for stage in stages:
                if not plan.graph.stages[stage.index].backward:
                    continue  # no loss depends on it: it has no UPDATE
                own = [p for p in stage.trainable() if id(p) not in owned]
                owned |= {id(p) for p in own}
                if own:
                    made = optimizer(own)
                    if not isinstance(made, Optimizer):
                        raise RunError(
                            f"optimizer(params) must return a torch.optim.Optimizer, got {type(made).__name__} for "
                            f"stage {stage.name!r}"
                        )
                    self.per_stage[stage.index] = check_closure(made)
        self._stages = [s for s in stages if plan.graph.stages[s.index].backward]
        self._known: set[int] = set()
        if plan.update is not None:
            check_parameters(self.per_stage, self._stages)
            self._known = {id(p) for s in self._stages for p in s.trainable()} | {id(p) for p in self._held()}

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self.per_stage.values())

    def _held(self) -> list[Tensor]:
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    def others(self, parameters: list[Tensor]) -> list[Tensor]:
        """What the optimizers hold beside the pipeline's own parameters."""
        own = {id(p) for p in parameters}
        return [p for p in self._held() if id(p) not in own]

    def check(self, parameters: list[Tensor]) -> None:
        """Raise RunError for parameters that came to be trained after the optimizers were made."""
        if self.update is None or self._known.issuperset(map(id, parameters)):
            return
        late = {id(p) for p in parameters} - self._known - {id(p) for p in self._held()}
        names = [f"{s.name}.{name}" for s in self._stages for name, p in s.named_parameters() if id(p) in late]
        if names:
            raise RunError(
                f"no optimizer holds {', '.join(dict.fromkeys(names))}, unfrozen or replaced after the runner was "
                "made; add them with run.optimizers[...].add_param_group(...), or make a new runner"
            )

    @property
    def scale(self) -> float:
        """What the loss is multiplied by; the scaler's current scale, else 1."""
        if self.scaler is None or not self.scaler.is_enabled():
            return 1.0
        # A scaler makes its state when first used, on the device of what it scales. For gradients on a GPU that must
        # not be the CPU: update() copies there what it found, without waiting, and reads it at once.
        home = next((p.device for stage in self._stages for p in stage.trainable()), None)
        self.scaler.scale(torch.ones((), device=home))
        return float(self.scaler.get_scale())

    def begin(self) -> None:
        """A step begins; one that failed before it has left nothing behind."""
        self.skip, self.updated = False, []
        if self.scaler is not None and self.scaler.is_enabled() and self.update is not None:
            self.scaler._per_optimizer_states.clear()  # else unscaling again would be refused after a failure

    def prepare(self, parameters: list[Tensor]) -> None:
        """All gradients are there: unscale them, look for inf, call the user's hook. Before any UPDATE."""
        scaled = self.scaler is not None and self.scaler.is_enabled()
        if self.update is None:
            if scaled and self._anywhere is not None:
                share_inf([p.grad for p in parameters if p.grad is not None], self._anywhere)
            return
        everything = self._everything(parameters)
        if scaled:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            gradients = [p.grad for p in everything if p.grad is not None]
            found = not all_finite(gradients)
            self.skip = found if self._anywhere is None else self._anywhere(found)
            tell_scaler(self.scaler, self.skip)
        if self.hook is not None and not self.skip:
            self.in_hook = True
            try:
                self.hook(everything)
            except BaseException as error:
                note(error, "pipec: raised in before_update, after all backwards and before any UPDATE")
                raise
            finally:
                self.in_hook = False

    def _everything(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those of the pipeline, and others that the user gave to an optimizer (an encoder in front, say)."""
        own = {id(p): p for p in parameters}
        own |= {id(p): p for p in self._held()}
        return list(own.values())

    def step(self, stage: int) -> None:
        """Run the UPDATE of ``stage`` (-1: of all)."""
        optimizer = self.per_stage.get(stage)
        if optimizer is not None and not self.skip:
            optimizer.step()
        self.updated.append(stage)

    def finish(self, parameters: list[Tensor]) -> None:
        """After the last UPDATE: gradients are spent, the scaler learns what happened."""
        if self.update is None:
            return
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler.update()
        for parameter in self._everything(parameters):
            parameter.grad = None


def told_scaler(scaler: Any) -> dict[str, Any]:
    """What all processes of a run must have alike of their scalers, in words: the scale, then the rest by name."""
    state = scaler.state_dict() if scaler is not None and scaler.is_enabled() else {}
    return {
        "scaler": f"scale {state.pop('scale'):g}" if state else "none",
        "rest": {f"the scaler's {key.strip('_')}": str(value) for key, value in state.items()},
    }


def tell_scaler(scaler: Any, found: bool) -> None:
    """Let a scaler know whether there was an inf anywhere, so that the scales of all processes stay the same."""
    states = scaler._per_optimizer_states
    if not any(state["found_inf_per_device"] for state in states.values()):  # no optimizer here has a gradient
        states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
    if found:
        for state in states.values():
            for flag in state["found_inf_per_device"].values():
                flag.fill_(1.0)


def share_inf(gradients: Sequence[Tensor], anywhere: Callable[[bool], bool]) -> None:
    """Let an inf of any process be seen in the gradients of all: then the script's own scaler, of which each process
    has one, skips the update in all of them and the scales stay the same."""
    found = not all_finite(gradients)
    if anywhere(found) and not found:
        for gradient in gradients:
            gradient.fill_(torch.inf)


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether no gradient has an inf or NaN; the host waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        flags.setdefault(gradient.device, []).append(torch.isfinite(gradient).all())
    return all(bool(torch.stack(own).all()) for own in flags.values())


def check_closure(optimizer: Optimizer) -> Optimizer:
    """The optimizer. Raises RunError when its ``step`` cannot be called without an argument, as LBFGS cannot."""
    try:
        needed = [name for name, one in inspect.signature(optimizer.step).parameters.items()
                  if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise RunError(
            f"the optimizer {type(optimizer).__name__} needs {', '.join(needed)} in its step: a function that computes "
            "the loss again, which an UPDATE of a plan cannot; use an optimizer whose step() takes none (SGD, Adam), "
            "or compile with update=None and call run.step() inside the closure of your own optimizer"
        )
    return optimizer


def check_early(stages: Sequence[Stage], scaler: Any, hook: Hook | None) -> None:
    """Raise RunError for what needs all gradients of a step before the first UPDATE."""
    for name, given in (("before_update", hook), ("scaler", scaler)):
        if given is not None:
            raise RunError(
                f"{name} needs all gradients before the first UPDATE, but the plan was compiled with "
                "update_early=True; compile without it"
            )
    users: dict[int, tuple[str, str]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            first = users.setdefault(id(parameter), (stage.name, name))
            if first[0] != stage.name and parameter.requires_grad:
                raise RunError(
                    f"stages {first[0]!r} and {stage.name!r} share the parameter {first[1]!r} ({name!r} there), "
                    "which must wait for the gradients of both, but the plan was compiled with update_early=True; "
                    "compile without it"
                )


def check_parameters(optimizers: dict[int, Optimizer], stages: Sequence[Stage]) -> None:
    """Warn of parameters that nothing would train.

    Raises:
        RunError: an optimizer holds none of the parameters that it is there for.
    """
    held = {s: {id(p) for group in o.param_groups for p in group["params"]} for s, o in optimizers.items()}
    names: dict[int, str] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                names.setdefault(id(parameter), f"{stage.name}.{name}")
    for number, own in held.items():
        if number < 0 and names and not own & names.keys():
            raise RunError("the optimizer holds no parameter of the pipeline, so nothing would be trained")
        stage_parameters = {id(p) for s in stages if s.index == number for p in s.trainable()}
        if number >= 0 and not own & stage_parameters:
            name = next(s.name for s in stages if s.index == number)
            raise RunError(
                f"optimizer(params) made an optimizer for stage {name!r} that holds none of the stage's parameters; "
                "make it from params, such as lambda params: torch.optim.SGD(params, lr=0.1)"
            )
    check_foreign(held, stages)
    left = [name for key, name in names.items() if not any(key in own for own in held.values())]
    if left:
        warnings.warn(
            f"no optimizer holds {', '.join(left[:8])}{' and more' if len(left) > 8 else ''}: they require a gradient "
            "and will not be trained; give them to an optimizer or switch off requires_grad", stacklevel=4,
        )


def check_foreign(held: dict[int, set[int]], stages: Sequence[Stage]) -> None:
    """Raise RunError for parameters that several stages' optimizers would step, or another stage's.

    Args:
        held: per stage the ids of what its optimizer holds.
    """
    called = {stage.index: stage.name for stage in stages}
    owner: dict[int, tuple[int, str]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            owner.setdefault(id(parameter), (stage.index, f"{stage.name}.{name}"))
    first: dict[int, int] = {}
    problems = []
    for number, own in held.items():
        if number < 0:
            continue
        foreign = [owner[key][1] for key in own if key in owner and owner[key][0] != number]
        twice = [first[key] for key in own if first.setdefault(key, number) != number and key not in owner]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            problems.append(Problem(f"that of stage {called[number]!r} holds {sorted(foreign)[0]}{more}"))
        elif twice:
            problems.append(Problem(f"that of stage {called[number]!r} holds what that of {called[twice[0]]!r} holds"))
    raise_all(
        "optimizer(params) is called once per stage and each optimizer steps on its own, but some hold what belongs to "
        "others, which would be updated several times a step; make it from params alone, such as lambda params: "
        "torch.optim.SGD(params, lr=0.1)", problems, RunError, most=8,
    )


def check_fit(update: str | None, optimizer: Any, hook: Hook | None) -> None:
    """Raise RunError when the optimizer is not what the plan's ``update`` needs."""
    if update is None:
        if optimizer is not None:
            raise RunError(
                "the plan has no UPDATE, so the runner takes no optimizer; compile with update='stage' or 'all', or "
                "step your own optimizer after run.step()"
            )
        if hook is not None:
            raise RunError("before_update needs a plan with UPDATE tasks; compile with update='stage' or 'all'")
    elif update == "all" and not isinstance(optimizer, Optimizer):
        raise RunError(
            "the plan was compiled with update='all', so optimizer= must be one torch.optim.Optimizer, such as "
            f"torch.optim.SGD(model.parameters(), lr=0.1); got {_told(optimizer)}"
        )
    elif update == "stage" and (isinstance(optimizer, Optimizer) or not callable(optimizer)):
        raise RunError(
            "the plan was compiled with update='stage', so optimizer= must be a function that makes an optimizer from "
            f"a stage's parameters, such as lambda params: torch.optim.SGD(params, lr=0.1); got {_told(optimizer)}"
        )


def _told(value: Any) -> str:
    return "none" if value is None else type(value).__name__


