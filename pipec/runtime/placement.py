"""Real devices: which are meant, and the stages' tensors on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from pipec.errors import Problem, RunError, raise_all
from pipec.ir import Plan
from pipec.runtime.randomness import DeviceGenerator, generator_of
from pipec.runtime.replicas import Replicas
from pipec.runtime.stages import Stage, named_leaves


def real_devices(given: Any, backend: Any, count: int) -> list[torch.device] | None:
    """One accelerator per logical device, None where all are the CPU.

    ``backend="cuda"`` without devices, or ``given`` a kind of GPU such as "cuda", takes those there are in turn,
    several logical devices on one where needed.

    Raises:
        RunError: there is no such device, kinds are mixed, or the backend runs on others.
    """
    if given is None and backend != "cuda":
        return None
    if given is None or isinstance(given, str):
        kind, there = accelerators()
        asked = "backend='cuda'" if given is None else f"devices={given!r}"
        if not there or given not in (None, kind):
            found = f"finds only {kind}" if there else "finds none"
            raise RunError(
                f"{asked} needs a GPU, but torch {found} here; leave {asked.split('=')[0]}= out to run on the CPU, or "
                "use backend='lanes' for the same lanes and copies on it"
            )
        _check_backend(backend, torch.device(kind))
        return [torch.device(kind, number % there) for number in range(count)]
    devices = [_indexed(named_device(one)) for one in given]
    kinds = sorted({device.type for device in devices})
    if kinds == ["cpu"]:
        if backend == "cuda":
            raise RunError(f"backend='cuda' runs on GPUs, got the devices {', '.join(map(str, given))}")
        return None
    if len(kinds) > 1:
        raise RunError(
            f"devices must be of one kind, got {' and '.join(kinds)}; stages on the host beside GPUs are not supported"
        )
    kind, there = accelerators()
    missing = sorted({str(d) for d in devices if d.type != kind or d.index >= there})
    if missing:
        known = f"{kind}:0 to {kind}:{there - 1}" if there else "no GPU, only the CPU"
        raise RunError(f"devices {', '.join(missing)} are not here; torch finds {known}")
    _check_backend(backend, devices[0])
    return devices


def _check_backend(backend: Any, device: torch.device) -> None:
    if isinstance(backend, str) and backend not in ("auto", "cuda"):
        raise RunError(f"backend={backend!r} runs on the CPU; leave backend= out, or give 'cuda', for {device}")


def accelerators() -> tuple[str, int]:
    """The kind of GPU that torch finds, and how many."""
    if not torch.accelerator.is_available():
        return "cuda", 0
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None else "cuda", torch.accelerator.device_count()


def named_device(given: Any) -> torch.device:
    """What the user calls a device. Raises RunError when torch knows no such name."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        raise RunError(
            f"devices: {given!r} is no torch device; give names such as 'cpu' or 'cuda:0', or torch.device objects"
        ) from None


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None or not torch.accelerator.is_available():
        return device if device.type == "cpu" else torch.device(device.type, device.index or 0)
    return torch.device(device.type, torch.accelerator.current_device_index())


def homes(plan: Plan, devices: Sequence[torch.device]) -> list[torch.device]:
    """The real device of each stage."""
    made = np.zeros(len(plan.graph.stages), np.int64)
    for chunk in plan.chunks:
        made[list(chunk.stages)] = chunk.device
    return [devices[logical] for logical in made.tolist()]


def check_places(devices: Sequence[torch.device] | None, before: Plan, after: Plan) -> None:
    """Raise RunError when stages would have to move to other GPUs."""
    if devices is not None and (
        before.devices != after.devices or homes(before, devices) != homes(after, devices)
    ):
        raise RunError(
            "the plan places stages on other devices than the one before, and stages do not move while optimizers hold "
            "their state; compile it with the same devices and placement, or make a new Runner"
        )


def place_stages(stages: Sequence[Stage], where: Sequence[torch.device], replicas: Replicas | None = None) -> None:
    """Move parameters and buffers of every stage to its device. Parameters stay the same objects; those with replicas
    go to their owner's device.

    Raises:
        RunError: stages on different devices share a buffer, or a parameter without replicas; nothing is moved then.
    """
    first: dict[int, tuple[Stage, str, torch.device]] = {}
    problems = []
    stand_ins = {} if replicas is None else replicas.stand_ins
    for stage, device in zip(stages, where, strict=True):
        replicated = stand_ins[stage.index].replicas if stage.index in stand_ins else {}
        for name, tensor in _tensors(stage):
            if id(tensor) in replicated:
                continue
            other, its_name, its_device = first.setdefault(id(tensor), (stage, name, device))
            if its_device != device:
                problems.append(Problem(
                    f"stages {other.name!r} and {stage.name!r} share {its_name!r} ({name!r} there) but run on "
                    f"{its_device} and {device}; {_ADVICE if isinstance(tensor, Parameter) else _BUFFER_ADVICE}",
                    stage.spec.location,
                ))
    raise_all("devices", problems, RunError)
    for stage, device in zip(stages, where, strict=True):
        with stand_ins.get(stage.index) or nullcontext():
            _move(stage, device)


_ADVICE = "place them on one device (placement=), or bind both logical devices to one GPU (devices=)"
_BUFFER_ADVICE = f"a buffer may change in one of them and be missed in the other; give each its own, or {_ADVICE}"


def _move(stage: Stage, device: torch.device) -> None:
    for module in stage.modules:
        if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
            module.to(device)
    for _, leaf in named_leaves(stage.spec.params):
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.device != device:
            leaf.data = leaf.data.to(device)
            if leaf.grad is not None:
                leaf.grad = leaf.grad.to(device)


def generators_of(stages: Sequence[Stage]) -> dict[int, DeviceGenerator]:
    """By stage the generator of the GPU that its tensors are on; a stage without tensors is where the others are."""
    found = {stage.index: tensor.device for stage in stages for _, tensor in _tensors(stage)[:1]}
    gpus = [device for device in found.values() if device.type not in ("cpu", "meta")]
    if not gpus:
        return {}
    return {stage.index: generator_of(found.get(stage.index, gpus[0])) for stage in stages}


def _tensors(stage: Stage) -> list[tuple[str, Tensor]]:
    found = list(stage.named_parameters())
    for module in stage.modules:
        found += [*module.named_parameters(), *module.named_buffers()]
    return found
