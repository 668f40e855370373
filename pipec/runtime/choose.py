"""From the name of a backend to the backend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from pipec.errors import RunError
from pipec.runtime.accelerator import Accelerator
from pipec.runtime.adversary import Adversarial
from pipec.runtime.backends import Auto, Backend, Replay, Threads
from pipec.runtime.cpu_lanes import CpuLanes
from pipec.runtime.replicas import Replicas
from pipec.runtime.stream_lanes import StreamLanes

_numbers = count()


def make_backend(
    backend: str | Backend | None, pipeline: str, devices: int, watchdog: float | None,
    real: Sequence[torch.device] | None = None, replicas: Replicas | None = None,
) -> Backend:
    """The backend of a run in one process.

    Args:
        backend: one of ``fit.BACKENDS``, None for the default, or one that is ready.
        pipeline: its name, for the names of threads.
        devices: logical ones.
        real: the GPU of each logical device, None for the CPU.
        replicas: of parameters that stages on several GPUs share.
        watchdog: see :class:`pipec.runtime.backends.Threads`.

    Raises:
        RunError: stages share parameters over GPUs, and the ready backend cannot keep replicas.
    """
    if backend is not None and not isinstance(backend, str):
        if isinstance(backend, StreamLanes):
            backend.replicas = replicas
        elif replicas is not None:
            raise RunError(
                f"stages on different GPUs share parameters, whose replicas only backend='cuda' keeps; got {backend!r}"
            )
        return backend
    if real is not None:
        return StreamLanes(Accelerator(real), real, replicas)
    name = f"{pipeline} {next(_numbers)}"
    if backend == "lanes":
        return CpuLanes(devices, name)
    if backend == "adversarial":
        return Adversarial()
    if backend == "replay" or (backend != "threads" and devices == 1):
        return Replay()
    threads = Threads(devices, name, watchdog)
    return threads if backend == "threads" else Auto(threads)
