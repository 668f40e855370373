"""A stream of random numbers of its own for every task.

What a stage draws depends on (seed, step, stage, microbatch) and on nothing else: not on the schedule, the
backend, the thread, or what other stages drew. A RECOMPUTE enters the stream of its FORWARD from the start
and so repeats its draws. A task neither reads nor advances the process's own CPU generator.

Inside a task every draw on the CPU comes from the stream: dropout of all kinds, ``torch.rand`` and its
family, ``torch.distributions``, what C++ draws inside attention or an LSTM, draws in backward. The state
functions (``torch.get_rng_state``, ``fork_rng``, ``manual_seed``, so ``torch.utils.checkpoint`` too) speak of
the stream.

Left alone:

* ``generator=`` given by the user. Stages on several threads that share one generator draw from it in the
  order in which they happen to run: give each stage its own. A RECOMPUTE draws again what its FORWARD drew,
  from a CPU generator that is.
* Python's ``random`` and NumPy, which have states of their own.
* Threads that a stage starts itself, and C++ extensions that fetch PyTorch's default generator directly.
* State of CUDA libraries that is made once: the dropout between the layers of cuDNN's LSTM and GRU.

GPUs: kernels take no generator from the host, they take seed and offset of the device's default generator when they
are enqueued. So a task sets that generator to its stream's seed and offset 0 under a lock per device, held until its
kernels are enqueued, and puts it back (:class:`DeviceStream`). Forward and recompute, and draws in backward, repeat.

The rule for the caller's generator: a step reads ``torch.initial_seed()`` on the caller's thread and counts
the steps (:class:`Position`). It draws nothing there, so a failed step has nothing to put back, evaluation
does not disturb training, and two pipelines in two threads do not disturb each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cache, partial
from types import TracebackType
from typing import Any

import torch
from attrs import field, frozen

from pipec.errors import RunError
from pipec.runtime.rng_kernels import (
    THREAD,
    Source,
    SupplyingMode,
    address,
    cpu_kernels,
    state_functions,
)

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What the numbers of a stream are for; tasks with different purposes never share one."""

    FORWARD = 0  # FORWARD and its RECOMPUTE
    BACKWARD = 1
    UPDATE = 2
    INFERENCE = 3


def _mix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix32(x: int) -> int:
    """The finaliser of MurmurHash3: a bijection of 32-bit numbers."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def task_seed(seed: int, step: int, stage: int, microbatch: int, purpose: Purpose = Purpose.FORWARD) -> int:
    """The 64-bit seed of a task's stream.

    PyTorch's CPU generator uses the low 32 bits of a seed only. So within one step and purpose these 32
    bits are a bijection of (stage, microbatch), each below 65,536: no two tasks of a step share a stream.
    Two given tasks of different steps share one with probability 2**-32. In formulas, modulo 2**64::

        key      = 0; for each w of (seed, step, purpose, stage >> 16, microbatch >> 16):
                       key = mix64(key + w + 0x9E3779B97F4A7C15)
        position = (stage mod 2**16) * 2**16 + (microbatch mod 2**16)
        low      = mix32(position xor (key mod 2**32)) xor (key >> 32)
        result   = (mix64(key + position) >> 32) * 2**32 + low
    """
    key = 0
    for word in (seed, step, purpose, stage >> 16, microbatch >> 16):
        key = _mix64((key + word + _GOLDEN) & _MASK64)
    position = (stage & 0xFFFF) << 16 | (microbatch & 0xFFFF)
    low = _mix32(position ^ (key & _MASK32)) ^ (key >> 32)
    return (_mix64((key + position) & _MASK64) >> 32) << 32 | low


@frozen
class Position:
    """Where a run stands in its random numbers: a frozen value, replaced only when a step succeeded.

    ``seed`` None means: whatever ``torch.initial_seed()`` is when a step begins, so ``torch.manual_seed``
    before training decides. Save ``position.pinned()`` with a checkpoint to continue bit-equally elsewhere.
    """

    seed: int | None = None
    step: int = 0

    def pinned(self) -> Position:
        """The same position with the seed written out. Call on the caller's thread, once per step."""
        return self if self.seed is not None else Position(torch.initial_seed(), self.step)

    def advanced(self) -> Position:
        """The position of the next step."""
        return Position(self.seed, self.step + 1)


OwnState = tuple[torch.Generator, torch.Tensor]  # a generator and its state


@contextmanager
def repeated(others: Sequence[OwnState]) -> Iterator[None]:
    """What is run inside draws again what was drawn from these generators; afterwards they go on where they were."""
    before = [(generator, generator.get_state()) for generator, _ in others]
    for generator, state in others:
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


class Stream:
    """The random numbers of one task: a context manager to enter once, on the thread that runs the task.

    The seed is hashed and a generator made only at the first draw. Streams nest: a pipeline run inside a
    stage puts its own tasks' streams in front, and afterwards the stage's stream goes on where it was.
    """

    __slots__ = ("_generator", "_key", "_mode", "_outer", "_with_mode", "others")

    def __init__(self, key: tuple[int, int, int, int, Purpose], with_mode: bool) -> None:
        self._key = key
        self._with_mode = with_mode
        self._generator: torch.Generator | None = None
        self._mode: SupplyingMode | None = None
        self._outer: Source | None = None
        self.others: list[OwnState] | None = None  # the user's own generators, as they were before the first draw

    @property
    def seed(self) -> int:
        """The 64-bit seed, see :func:`task_seed`."""
        return task_seed(*self._key)

    @property
    def generator(self) -> torch.Generator:
        """The CPU generator of this task, made when first asked for."""
        generator = self._generator
        if generator is None:
            generator = self._generator = torch.Generator().manual_seed(self.seed)
        return generator

    def passed_over(self, given: torch.Generator) -> None:
        """Note the state of a generator of the user's own before the task first draws from it."""
        if self.others is None:
            self.others = []
        if all(address(given) != address(known) for known, _ in self.others):
            self.others.append((given, given.get_state()))

    def __enter__(self) -> Stream:
        self._outer = THREAD.stream
        if self._with_mode:
            self._mode = SupplyingMode()  # type: ignore[no-untyped-call]
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        THREAD.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        THREAD.stream = self._outer
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            self._mode = None
        self._outer = None


@frozen(eq=False)
class DeviceGenerator:
    """The default generator of a device, and the lock under which tasks use it."""

    generator: torch.Generator
    lock: threading.RLock = field(factory=threading.RLock)


@cache
def generator_of(device: torch.device) -> DeviceGenerator:
    """That of a GPU; the process has one of each."""
    generators = getattr(torch, device.type).default_generators
    return DeviceGenerator(generators[device.index])


class DeviceStream(Stream):
    """The random numbers of a task on a GPU. Entered again, it goes on where it was left."""

    __slots__ = ("_before", "_device", "_state")

    def __init__(self, key: tuple[int, int, int, int, Purpose], with_mode: bool, device: DeviceGenerator) -> None:
        super().__init__(key, with_mode)
        self._device = device
        self._state: torch.Tensor | None = None

    def __enter__(self) -> DeviceStream:
        self._device.lock.acquire()
        try:
            generator = self._device.generator
            self._before = generator.get_state()
            if self._state is None:
                generator.manual_seed(self.seed)  # and offset 0
            else:
                generator.set_state(self._state)
            super().__enter__()
        except BaseException:
            self._device.lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
            self._state = self._device.generator.get_state()
            self._device.generator.set_state(self._before)
        finally:
            self._device.lock.release()


class _Installation:
    """What the process has installed now, counted by its users; thread-safe.

    The lock is re-entrant because the garbage collector may run a user's finaliser while it is held.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.undo = ExitStack()
        self.kernels: bool = False  # else a dispatch mode serves

    def acquire(self) -> None:
        with self.lock:
            if self.users == 0:
                self._install()
            self.users += 1

    def release(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.kernels = False
                self.undo.close()

    def _install(self) -> None:
        with ExitStack() as undo:
            undo.enter_context(state_functions())
            kernels = ExitStack()
            try:
                kernels.enter_context(cpu_kernels())
                self.kernels = streams_work(with_mode=False)
            except RuntimeError:  # this torch refuses them
                self.kernels = False
            if self.kernels:
                undo.push(kernels)
            else:
                kernels.close()
                if not streams_work(with_mode=True):
                    raise RunError(
                        f"torch {torch.__version__} does not let pipec keep the tasks' random numbers apart: "
                        "neither kernels nor a dispatch mode gives a stage its own stream.\n"
                        "Use a torch version that pipec is tested with (see pyproject.toml)."
                    )
            self.undo = undo.pop_all()


def streams_work(*, with_mode: bool) -> bool:
    """Whether draws on this thread come from a stream and nothing else, tried out on the operations below."""
    before = torch.default_generator.get_state()
    with Stream((0, 0, 0, 0, Purpose.FORWARD), with_mode) as stream:
        plain = torch.Generator().manual_seed(stream.seed)
        ones = torch.ones(4, 4)
        same = [
            torch.equal(torch.rand(5), torch.rand(5, generator=plain)),
            torch.equal(torch.randn(5), torch.randn(5, generator=plain)),
            torch.equal(torch.randint(99, (5,)), torch.randint(99, (5,), generator=plain)),
            torch.equal(torch.randperm(9), torch.randperm(9, generator=plain)),
            torch.equal(torch.bernoulli(ones / 2), torch.bernoulli(ones / 2, generator=plain)),
            torch.equal(torch.multinomial(ones, 2), torch.multinomial(ones, 2, generator=plain)),
            torch.equal(torch.empty(5).exponential_(), torch.empty(5).exponential_(generator=plain)),
            torch.equal(
                torch.nn.functional.dropout(ones, 0.5),
                2 * torch.empty(4, 4).bernoulli_(0.5, generator=plain),
            ),
            torch.equal(torch.get_rng_state(), plain.get_state()),
        ]
        torch.nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
        same.append(not torch.equal(torch.get_rng_state(), plain.get_state()))
    return all(same) and torch.equal(before, torch.default_generator.get_state())


_INSTALLED = _Installation()


class Streams:
    """The streams of one run: hold one for as long as tasks may run, then ``close()`` it.

    The first one in a process installs the kernels (a few milliseconds) and the last one to be closed or
    collected removes them. ``with_mode=True`` takes the dispatch mode even where the kernels work.
    """

    def __init__(self, *, with_mode: bool = False) -> None:
        _INSTALLED.acquire()
        self.with_mode = with_mode or not _INSTALLED.kernels
        self._release = weakref.finalize(self, _INSTALLED.release)

    def task(
        self, seed: int, step: int, stage: int, microbatch: int, purpose: Purpose = Purpose.FORWARD
    ) -> Stream:
        """The stream of one task, to be entered on the thread that runs it. RunError after ``close()``."""
        if not self._release.alive:
            raise RunError("a task was started after its run was closed; keep the run open while steps run")
        return Stream((seed, step, stage, microbatch, purpose), self.with_mode)

    def __reduce__(self) -> Any:
        """A copy is a user of the kernels of its own."""
        return partial(Streams, with_mode=self.with_mode), ()

    def close(self) -> None:
        """Give the installation back; calling it twice is harmless."""
        self._release()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@frozen
class Randomness:
    """The streams of one step, which all begin at ``position``; ``inference`` steps share none with training.

    ``generators``: of the devices, by stage, where these are GPUs.
    """

    streams: Streams
    position: Position
    inference: bool = False
    generators: Mapping[int, DeviceGenerator] = field(factory=dict)

    def task(self, stage: int, microbatch: int, purpose: Purpose) -> Stream:
        """The stream of one task of this step."""
        position = self.position
        if self.inference:
            purpose = Purpose.INFERENCE
        key = (position.seed or 0, position.step, stage, microbatch, purpose)
        if self.generators:
            return DeviceStream(key, self.streams.with_mode, self.generators[stage])
        return Stream(key, self.streams.with_mode)
