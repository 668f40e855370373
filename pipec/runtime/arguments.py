"""Arguments of a Runner that need no plan to be wrong: each is told as it was given, all of them at once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import Problem, RunError, raise_all

SCALES = ("is_enabled", "scale", "unscale_", "step", "update", "state_dict")  # what a scaler is used by
RUNS = ("run", "channels", "close")  # what a backend is used by, unless it only brings the GPUs of a rank
SEEDS = range(-(2**63), 2**64)  # as torch.manual_seed takes them


def check_arguments(backend: Any, given: Mapping[str, Any]) -> None:
    """Raise RunError listing what is of no use: ``given`` are arguments of a Runner by name, with their defaults."""
    problems = [
        f"{name}= {expected}, got {value!r}"
        for name, (value, good, expected) in {
            "backend": (backend, _is_backend(backend), "is a name, such as 'threads' or 'replay'"),
            "scaler": (given["scaler"], given["scaler"] is None or _has(given["scaler"], SCALES),
                       "is a torch.amp.GradScaler, such as torch.amp.GradScaler('cpu'), or None"),
            "before_update": (given["before_update"], given["before_update"] is None or callable(
                given["before_update"]), "is a function of the list of all trained parameters, or None"),
            "seed": (given["seed"], given["seed"] is None or _is_seed(given["seed"]),
                     "is a whole number, as for torch.manual_seed, or None"),
            "model": (given["model"], given["model"] is None or _is_model(given["model"]),
                      "is the module that the stages are parts of, or a dict of tensors by name"),
            "watchdog": (given["watchdog"], given["watchdog"] is None or _is_time(given["watchdog"]),
                         "is a number of seconds above 0, or None"),
            "timeout": (given["timeout"], _is_time(given["timeout"]), "is a number of seconds above 0"),
        }.items()
        if not good
    ]
    if given["outputs"] not in ("owner", "all"):
        problems.append(f"outputs must be 'owner' or 'all', got {given['outputs']!r}")
    if len(problems) == 1:
        raise RunError(problems[0])
    raise_all("Runner", [Problem(problem) for problem in problems], RunError)


def _has(value: Any, names: tuple[str, ...]) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def _is_backend(value: Any) -> bool:
    return value is None or isinstance(value, str) or _has(value, RUNS) or hasattr(value, "gpus")


def _is_seed(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) in SEEDS


def _is_time(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module) or (
        isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def tell_started_alone(backend: Any) -> None:
    """Warn where a launcher started several processes, which do not know of each other: each would train all of it.

    A backend by name says that each is to run all devices.

    Raises:
        RunError: the launcher is torchrun, of which that cannot be meant.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if backend is None and "RANK" in os.environ and size.isdigit() and int(size) > 1 and not _knows_others():
        told = (
            f"this is one of {size} processes (WORLD_SIZE), but torch.distributed was not initialised, so each of "
            "them runs all devices of the plan by itself; call torch.distributed.init_process_group('gloo') before "
            "the Runner is made, or give backend='auto' where that is meant"
        )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise RunError(told)
        warnings.warn(told, stacklevel=4)


def _knows_others() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
