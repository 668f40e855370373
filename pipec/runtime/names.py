"""The user's names of a pipeline's tensors, and the model's state under them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipec.errors import Problem, RunError, raise_all
from pipec.runtime.stages import Stage, named_leaves
from pipec.spec import owner_of

Model = nn.Module | Mapping[str, Tensor]
State = Mapping[str, Any]
MOST = 8  # names in one message
COMPILED = "_orig_mod."  # what torch.compile puts into the names of what it wraps
PART = "; what one rank of several has is only its own part: write with run.save(folder) on all ranks, and read with " \
       "run.load(folder), on any number of them"


@frozen(eq=False)
class Owner:
    """What holds tensors: a module, or tensors by name; ``prefix`` begins all its names."""

    prefix: str
    held: Model

    def values(self) -> dict[str, Any]:
        """The live parameters and persistent buffers by name, and what modules keep as extra state."""
        found = self.held.state_dict(keep_vars=True) if isinstance(self.held, nn.Module) else self.held
        return {self._name(key): value for key, value in found.items()}

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """The live parameters by name, tied ones under each of their names."""
        held = self.held
        found = held.named_parameters(remove_duplicate=False) if isinstance(held, nn.Module) else held.items()
        return ((self._name(key), value) for key, value in found)

    def load(self, state: State) -> None:
        """Copy the values of ``state``, which has all own names, into the live tensors."""
        if isinstance(self.held, nn.Module):
            keys = self.held.state_dict(keep_vars=True)
            self.held.load_state_dict({key: state[self._name(key)] for key in keys})
            return
        with torch.no_grad():
            for key, value in self.held.items():
                value.copy_(state[self._name(key)])

    def _name(self, key: str) -> str:
        return self.prefix + key.replace(COMPILED, "")


def few(names: Sequence[str]) -> str:
    """The first of the names and how many more there are."""
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def owners(stages: Sequence[Stage], model: Model | None = None) -> list[Owner]:
    """Where the names of a pipeline's tensors come from.

    Without ``model`` a stage's tensors are ``stage.key``, those of a loss module ``loss.key``. With it they are its
    own names, however it was cut into stages.

    Raises:
        RunError: a tensor of a stage is not in ``model``, or two have the same name.
    """
    own = stage_owners(stages)
    if model is None:
        check_names(own)
        return own
    whole = Owner("", model)
    known = {id(value) for value in whole.values().values()}
    lost = [name for owner in own for name, value in owner.values().items()
            if isinstance(value, Tensor) and id(value) not in known]
    if lost:
        raise RunError(
            f"{few(lost)} {'is' if len(lost) == 1 else 'are'} not in model=; make the stages from "
            "the model's own modules, not from copies, or give model= a dict of all tensors by name"
        )
    return [whole]


def stage_owners(stages: Sequence[Stage]) -> list[Owner]:
    found = []
    for stage in stages:
        if stage.module is not None:
            found.append(Owner(f"{stage.name}.", stage.module))
        leaves = {path: leaf for path, leaf in named_leaves(stage.spec.params) if isinstance(leaf, Tensor)}
        if leaves:
            found.append(Owner(f"{stage.name}.", leaves))
        held = [(loss.spec.name, owner_of(loss.spec.fn)) for loss in stage.losses]
        found += [Owner(f"{name}.", module) for name, module in held if isinstance(module, nn.Module)]
    return found


def check_names(found: Sequence[Owner]) -> None:
    taken: dict[str, Any] = {}
    problems = []
    for owner in found:
        for name, value in owner.values().items():
            if taken.setdefault(name, value) is not value:
                problems.append(Problem(f"two tensors are named {name!r}; rename a stage, or give Runner(model=...)"))
    raise_all("names of parameters and buffers", problems, RunError)


def live(found: Sequence[Owner]) -> dict[str, Any]:
    """The live values by name."""
    return {name: value for owner in found for name, value in owner.values().items()}


def aliases(found: Sequence[Owner]) -> dict[int, list[str]]:
    """Per parameter (by its id) all its names; the first is the one that is written down."""
    names: dict[int, list[str]] = {}
    for owner in found:
        for name, value in owner.parameters():
            if name not in names.setdefault(id(value), []):
                names[id(value)].append(name)
    return names


def named(found: Sequence[Owner]) -> dict[str, list[str]]:
    """Per name all names of the same tensor."""
    written = {name: [name] for name in live(found)}
    for names in aliases(found).values():
        for name in names:
            written[name] = names
    return written


def state_dict(found: Sequence[Owner], without: AbstractSet[int] = frozenset()) -> dict[str, Any]:
    """The model's state by name, sharing memory with the live tensors, as in PyTorch; without tensors of these ids."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in live(found).items()
        if id(value) not in without
    }


def model_problems(found: Sequence[Owner], state: State, part: str = "", many: bool = False) -> list[Problem]:
    """Everything that keeps ``state`` from being loaded.

    A name is missing when none of the names of the same tensor is there; several must agree.

    Args:
        part: what to say where it seems to be only a part of the model.
        many: this process is one rank of many.
    """
    own, same = live(found), _tied(found)
    missing = [name for name in own if not any(other in state for other in same[name])]
    unknown = [name for name in state if name not in own]
    partly = many or (not unknown and any(name in state for name in own))
    problems = [Problem(f"missing: {few(missing)}{part * partly}")] if missing else []
    hint = "; names are stage.key, or those of the module given as Runner(model=...)" if missing else ""
    problems += [Problem(f"unknown: {few(unknown)}{hint}")] if unknown else []
    checked: set[str] = set()
    for name, value in own.items():
        given = state.get(name)
        if name not in state or not isinstance(value, Tensor) or is_lazy(value):
            continue
        if not isinstance(given, Tensor):
            problems.append(Problem(f"{name} is a {type(given).__name__}, expected a tensor of {tuple(value.shape)}"))
        elif given.shape != value.shape:
            problems.append(Problem(f"{name} has shape {tuple(given.shape)}, expected {tuple(value.shape)}"))
        else:
            checked.add(name)
            problems += [
                Problem(f"{other} and {name} are one tensor here, but two different ones there")
                for other in same[name] if other != name and other in checked and not _equal(state[other], given)
            ]
    return problems


def load_model(found: Sequence[Owner], state: State) -> None:
    """Load a state in which :func:`model_problems` found nothing."""
    full = {name: next(state[other] for other in names if other in state) for name, names in _tied(found).items()}
    for owner in found:
        owner.load(full)


def _tied(found: Sequence[Owner]) -> dict[str, list[str]]:
    """Per name all names of the same live value, its own first."""
    groups: dict[int, list[str]] = {}
    own = live(found)
    for name, value in own.items():
        groups.setdefault(id(value), []).append(name)
    return {
        name: [name, *(other for other in groups[id(value)] if other != name)] if isinstance(value, Tensor) else [name]
        for name, value in own.items()
    }


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one.to(other.device), other)
