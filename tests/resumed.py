"""Runs that are saved and go on: a model, ways to cut it, and what a file keeps of it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import torch
from models import WIDTH, data, of_modules
from torch import nn

import pipec


def whole(seed: int = 3) -> nn.Sequential:
    """A model with every kind of state; it is cut where a test likes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.utils.parametrizations.spectral_norm(
            nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH),
    )


def cut(model: nn.Sequential, *places: int) -> pipec.Pipeline:
    edges = [0, *places, len(model)]
    return of_modules(*(model[a:b] for a, b in itertools.pairwise(edges)))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved, and read back with nothing but tensors and plain Python allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def steps(run: Any, first: int, last: int) -> list[Any]:
    results = [run.step(**data(10, step)) for step in range(first, last)]
    return [[result.losses, result.output] for result in results]


def everything(model: nn.Module, run: Any) -> list[Any]:
    """Values of the model and of all optimizer states by parameter."""
    states: dict[int, Any] = {}
    for optimizer in run.optimizers.values():
        states |= {id(p): state for p, state in optimizer.state.items()}
    return [dict(model.state_dict()), [dict(states.get(id(p), {})) for p in model.parameters()]]

Start = tuple[tuple[int, ...], dict[str, Any]]

ARRANGEMENTS: dict[str, Start] = {  # places of the cuts, and how it is compiled
    "one device": ((2, 4, 6), {"devices": 1, "update": "stage"}),
    "two devices": ((2, 4, 6), {"devices": 2, "update": "stage", "recompute": "always"}),
    "interleaved": ((2, 4, 6), {"devices": 2, "schedule": "interleaved-1f1b", "update": "stage"}),
    "all at once": ((2, 4, 6), {"devices": 2, "schedule": "gpipe", "update": "all"}),
    "two stages": ((3,), {"devices": 2, "update": "stage"}),
    "three stages": ((1, 7), {"devices": 3, "update": "all"}),
    "uncut": ((), {"devices": 1, "update": "stage", "backend": "threads"}),
}


def started(arrangement: str, optimizer: Callable[..., Any], model: nn.Sequential, **own: Any) -> Any:
    places, how = ARRANGEMENTS[arrangement]
    net = cut(model, *places)
    made = optimizer(model.parameters()) if how["update"] == "all" else optimizer
    how = dict(how)
    backend = how.pop("backend", None)
    plan = pipec.compile(net, microbatches=4, **how)
    return pipec.Runner(net, plan, optimizer=made, backend=backend, model=model, **own)
