"""Checkpoints: everything that a bit-equal continuation needs, under the user's own names.

A checkpoint is a dict of tensors and plain Python, so that ``torch.load(..., weights_only=True)`` reads it. Nothing
in it depends on devices, schedule or microbatches, nor, when the runner knows the whole model, on the stages::

    {"format": 1,
     "model": {name: tensor},
     "optimizer": {"groups": [{"optimizer": "Adam", "names": [name], "options": {"lr": 0.1}}],
                   "state": {name: {"exp_avg": tensor}},
                   "more": {}},
     "scaler": None or the scaler's own state,
     "random": {"seed": seed, "step": steps done}}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipec.errors import Problem, RunError, raise_all
from pipec.runtime.names import Owner, aliases, few, load_model, model_problems, state_dict
from pipec.runtime.randomness import Position
from pipec.tree import flatten, tree_map

FORMAT = 1
PARTS = ("format", "model", "optimizer", "scaler", "random")
Optimizers = Mapping[str, Optimizer]  # by stage name, or under "all"


def save(
    found: Sequence[Owner], optimizers: Optimizers, scaler: Any, position: Position,
    elsewhere: AbstractSet[int] = frozenset(),
) -> dict[str, Any]:
    """A checkpoint that later steps do not change. ``elsewhere``: ids of tensors that other ranks answer for.

    Raises:
        RunError: an optimizer holds parameters that have no name.
    """
    state = {
        "format": FORMAT,
        "model": state_dict(found, elsewhere),
        "optimizer": _save_optimizers(found, optimizers, elsewhere),
        "scaler": None if scaler is None else scaler.state_dict(),
        "random": {"seed": position.seed, "step": position.step},
    }
    return _copied(state)  # type: ignore[no-any-return]


def restoring(
    found: Sequence[Owner], optimizers: Optimizers, scaler: Any, state: Any, elsewhere: AbstractSet[int] = frozenset(),
    what: str = "checkpoint", part: str = "", only_model: str = "",
) -> Callable[[], Position]:
    """A function that loads a checkpoint and returns where the random numbers go on. Nothing is loaded before.

    Args:
        what: what an error calls it.
        part: what to say where it has only a part.
        only_model: advice on how to load it without the states of optimizers.

    Raises:
        RunError: listing everything that does not fit.
    """
    if not isinstance(state, Mapping) or not all(part in state for part in PARTS):
        raise RunError(
            f"{what}: expected a dict from checkpoint() with {', '.join(PARTS)}; got "
            f"{_told(state)}; a model's state dict is loaded with load_state_dict()"
        )
    if state["format"] != FORMAT:
        raise RunError(f"{what}: it has format {state['format']!r}, this version of pipec reads {FORMAT}")
    problems = model_problems(found, state["model"], part, bool(elsewhere))
    ready, more = _fit_optimizers(found, optimizers, state["optimizer"], elsewhere, only_model)
    problems += more
    if state["scaler"] and scaler is None:
        problems.append(Problem("it has the state of a gradient scaler; give Runner(scaler=...)"))
    raise_all(what, problems, RunError)

    def load() -> Position:
        load_model(found, state["model"])
        for optimizer, own in ready:
            optimizer.load_state_dict(_copied(own))  # else the optimizer would go on in the checkpoint's own tensors
        if state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        return Position(state["random"]["seed"], state["random"]["step"])

    return load


def _save_optimizers(found: Sequence[Owner], optimizers: Optimizers, elsewhere: AbstractSet[int]) -> dict[str, Any]:
    names = aliases(found)
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for label, optimizer in optimizers.items():
        _check_named(names, label, optimizer, elsewhere)
        whole = optimizer.state_dict()
        left = dict(whole["state"])
        for own, packed in zip(optimizer.param_groups, whole["param_groups"], strict=True):
            called = [
                (names[id(parameter)][0], key) for parameter, key in zip(own["params"], packed["params"], strict=True)
                if id(parameter) not in elsewhere
            ]
            groups.append({"optimizer": type(optimizer).__name__, "names": [name for name, _ in called],
                           "options": _options(packed)})
            states |= {name: left.pop(key) for name, key in called if key in left}
        rest = {key: value for key, value in whole.items() if key not in ("state", "param_groups")}
        if left or rest:  # what an optimizer keeps for no parameter in particular
            more[label] = {"state": left, "rest": rest}
    return {"groups": groups, "state": states, "more": more}


def _fit_optimizers(
    found: Sequence[Owner], optimizers: Optimizers, saved: Mapping[str, Any], elsewhere: AbstractSet[int],
    only_model: str,
) -> tuple[list[tuple[Optimizer, dict[str, Any]]], list[Problem]]:
    """Per optimizer the state dict to load, and what does not fit."""
    if optimizers and not saved["groups"]:
        return [], [Problem(f"it has no optimizer states, since its plan had no UPDATE; {only_model}")]
    names = aliases(found)
    groups = {name: group for group in saved["groups"] for name in group["names"]}
    ready, used = [], set()
    problems: list[Problem] = []
    for label, optimizer in optimizers.items():
        _check_named(names, label, optimizer, elsewhere)
        packed: list[dict[str, Any]] = []
        states: dict[Any, Any] = dict(saved["more"].get(label, {}).get("state", {}))
        missing: list[str] = []
        for own, now in zip(optimizer.param_groups, optimizer.state_dict()["param_groups"], strict=True):
            called = []
            for parameter, key in zip(own["params"], now["params"], strict=True):
                if id(parameter) in elsewhere:
                    continue
                name = next((name for name in names[id(parameter)] if name in groups), None)
                if name is None:
                    missing.append(names[id(parameter)][0])
                    continue
                called.append(name)
                if name in saved["state"]:
                    states[key] = saved["state"][name]
            used |= set(called)
            problems += _group_problems(label, optimizer, called, groups, problems)
            options = groups[called[0]]["options"] if called else {}
            packed.append({**now, **options, "params": now["params"]})
        if missing:
            problems.append(Problem(f"optimizer {label!r}: missing state of {few(missing)}"))
        rest = saved["more"].get(label, {}).get("rest", {})
        ready.append((optimizer, {**rest, "state": states, "param_groups": packed}))
    unknown = [name for name in groups if name not in used]
    if unknown and optimizers:
        problems.append(Problem(f"no optimizer here has {few(unknown)}"))
    elif unknown:
        problems.append(Problem(f"it has optimizer states, but this plan has no UPDATE; {only_model}"))
    problems += [
        Problem(f"optimizer {label!r} had a state that belongs to no single parameter, and is not here")
        for label in saved["more"] if label not in optimizers
    ]
    return ready, problems


def _group_problems(
    label: str, optimizer: Optimizer, called: Sequence[str], groups: Mapping[str, Any], known: Sequence[Problem]
) -> list[Problem]:
    """Whether one parameter group can go on with what its parameters had; what is against it, unless it is known."""
    kind, problems = type(optimizer).__name__, []
    others = sorted({groups[name]["optimizer"] for name in called} - {kind})
    if others:
        problem = Problem(f"optimizer {label!r} is {kind}, the checkpoint's is {', '.join(others)}")
        problems += [] if problem in known else [problem]
    for name in called[1:]:
        one, other = groups[called[0]]["options"], groups[name]["options"]
        if one is not other and not _same(one, other):
            differing = [key for key in {**one, **other} if not _same(one.get(key), other.get(key))]
            problems.append(
                Problem(f"optimizer {label!r}: {called[0]} and {name} are in one group here, but had different "
                        f"{', '.join(differing)}")
            )
            break
    return problems


def _check_named(
    names: Mapping[int, list[str]], label: str, optimizer: Optimizer, elsewhere: AbstractSet[int]
) -> None:
    problems = [
        Problem(f"group {number} has a parameter of shape {tuple(parameter.shape)} that is in no stage; give "
                "Runner(model=...) a module, or a dict of tensors by name, that holds it too")
        for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        if id(parameter) not in names and id(parameter) not in elsewhere
    ]
    raise_all(f"optimizer {label!r}", problems, RunError)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _same(one: Any, other: Any) -> bool:
    left, right = flatten(one), flatten(other)
    return left[1] == right[1] and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else
        not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
        for a, b in zip(left[0], right[0], strict=True)
    )


def _copied(value: Any) -> Any:
    """A copy that shares no memory with ``value``; what is one tensor there is one tensor in the copy."""
    made: dict[Any, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) if leaf.numel() else id(leaf)
        if key not in made:
            made[key] = leaf.detach().clone()
        return made[key]

    return tree_map(copied, value)


def _told(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    keys = [str(key) for key in state]
    return f"a dict with {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}" if keys else "an empty dict"
