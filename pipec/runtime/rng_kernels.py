"""How a draw on a thread finds the generator of the task that the thread is running.

Two ways, one outcome: a random operation called without ``generator=`` draws from the current thread's
stream, and threads without a stream stay exactly as they are.

``kernels``
    Each CPU operation with a ``generator`` argument gets a kernel in front of its own, at the dispatcher's CPU
    key: below autograd, vmap, tracing and the user's own modes. Composite operations (dropout, attention,
    LSTM, rand) arrive at the same few operations from C++, in forward and in backward. Other operations are
    not touched. While installed, other threads' draws pass through as well, unchanged, a few microseconds
    later.

``mode``
    A ``TorchDispatchMode`` that rewrites the calls; it serves where the kernels cannot be installed. It sees
    every operation and costs microseconds on each, and it cannot look inside one: an operation that draws and
    offers no generator is refused by name. PyTorch itself behaves differently under any mode: it refuses
    higher-order operations (``torch.cond``, flex attention) and computes ``svdvals`` another way.

``torch.get_rng_state``, ``set_rng_state``, ``fork_rng``, ``initial_seed`` and ``manual_seed`` never reach
the dispatcher: they call methods of the object that ``torch.random`` knows as ``default_generator``. Without
help, ``torch.utils.checkpoint`` in a stage would save the state of a generator that no task draws from, and
recompute another mask. So while streams are installed that one name is bound to a
:class:`CurrentGenerator`, which answers for the thread's stream where there is one and for the process's
generator everywhere else. No function is replaced, and ``torch.default_generator`` stays what it is.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch.library import _scoped_library, get_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.errors import RunError

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DEFAULT = torch.default_generator

Operation = torch._ops.OpOverload


class Source(Protocol):
    """Whatever owns a generator; it may wait to make it until asked."""

    @property
    def generator(self) -> torch.Generator: ...

    def passed_over(self, given: torch.Generator) -> None:
        """A draw comes that uses ``given``, a generator of the user's own."""


class Thread(threading.local):
    """The stream of each thread; None on every thread that runs no task."""

    stream: Source | None = None


THREAD = Thread()


class CurrentGenerator:
    """The generator in charge on the calling thread: its stream's, or else the process's."""

    def __getattr__(self, name: str) -> Any:
        stream = THREAD.stream
        return getattr(_DEFAULT if stream is None else stream.generator, name)


_CURRENT = CurrentGenerator()


@contextmanager
def state_functions() -> Iterator[None]:
    """``torch.get_rng_state`` and its kin speak of the thread's stream; undone on leaving."""
    names = vars(torch.random)
    before = names.get("default_generator", _DEFAULT)
    names["default_generator"] = _CURRENT
    try:
        yield
    finally:
        if names["default_generator"] is _CURRENT:  # another tool may have bound the name since
            names["default_generator"] = before


@cache
def generator_place(op: Operation) -> int | None:
    """Position of ``generator`` among the positional arguments; None where it is keyword-only."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "generator":
            return None if argument.kwarg_only else place
    raise ValueError(f"{op} takes no generator")


def address(generator: torch.Generator) -> int:
    """Of the generator itself: the dispatcher hands kernels a new Python object around it."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _left_open(given: torch.Generator | None) -> bool:
    """No generator given, or the process's by name, which means the same everywhere in PyTorch."""
    return given is None or address(given) == address(_DEFAULT)


def supply(
    place: int | None, args: tuple[Any, ...], kwargs: dict[str, Any], source: Source
) -> tuple[Any, ...]:
    """Put the source's generator where the caller gave none: returns ``args``, completes ``kwargs``."""
    if place is not None and len(args) > place:
        if _left_open(args[place]):
            return (*args[:place], source.generator, *args[place + 1 :])
        source.passed_over(args[place])
        return args
    if _left_open(kwargs.get("generator")):
        kwargs["generator"] = source.generator
    else:
        source.passed_over(kwargs["generator"])
    return args


# --- kernels at the dispatcher's CPU key ----------------------------------------------------------------------

# Kernels taken out of use. PyTorch frees a removed kernel at once, even with another thread inside it (measured:
# a crash within seconds when kernels come and go under threads that draw). So the last sets are held, 31 kB each.
_RETIRED: deque[list[Any]] = deque(maxlen=256)


@cache
def random_operations() -> dict[str, Operation]:
    """Every ATen operation that has a CPU kernel and a ``generator`` argument, by its name in the dispatcher."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            continue
        base, _, overload = rest.partition(".")
        schema = torch._C._get_schema(f"aten::{base}", overload)
        if any(each.name == "generator" for each in schema.arguments):
            found[name] = getattr(getattr(torch.ops.aten, base), overload or "default")
    return found


def _kernel(op: Operation, own: Any) -> Callable[..., Any]:
    place = generator_place(op)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        source = THREAD.stream
        if source is not None:
            args = supply(place, args, kwargs, source)
        return own.call_boxed(keyset, *args, **kwargs)

    return kernel


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """The kernels in front of PyTorch's, removed on leaving. RuntimeError where this torch refuses them."""
    with _scoped_library("aten", "IMPL") as library:
        impl: Callable[..., None] = library.impl
        held = []
        for name, op in random_operations().items():
            own = get_kernel(op, "CPU")
            with warnings.catch_warnings():  # PyTorch says once per process that a kernel was overridden
                warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
                impl(name.removeprefix("aten::"), _kernel(op, own), "CPU", with_keyset=True, allow_override=True)
            held.append(get_kernel(op, "CPU"))
        try:
            yield
        finally:
            _RETIRED.append(held)


# --- a dispatch mode ----------------------------------------------------------------------------------------

_NO_DRAW = {  # tagged as random, but on a CPU they draw nothing themselves
    torch.ops.aten._fused_sdp_choice.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # chosen without dropout only
}


@cache
def _with_generator(op: Operation) -> Operation | None:
    """The overload that takes the same arguments and a generator: ``rand.generator`` for ``rand``."""
    wanted = [(each.name, str(each.type)) for each in op._schema.arguments]
    if any(name == "generator" for name, _ in wanted):
        return op
    packet = op.overloadpacket
    for overload in packet.overloads():
        offered = [(each.name, str(each.type)) for each in getattr(packet, overload)._schema.arguments]
        if [each for each in offered if each[0] != "generator"] == wanted and len(offered) > len(wanted):
            found: Operation = getattr(packet, overload)
            return found
    return None


def _native_dropout(source: Source, x: torch.Tensor, p: float, train: bool | None) -> Sequence[torch.Tensor]:
    """What the CPU kernel of ``native_dropout`` does, with a generator."""
    if x.numel() == 0:
        return x, torch.empty_like(x)
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = 1.0 - p
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(keep, generator=source.generator)
    return x.mul(mask).mul_(0.0 if keep == 0 else 1.0 / keep), mask


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for each in args:
        if isinstance(each, torch.Tensor):
            return each.device.type == "cpu"
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"


class SupplyingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each random operation the generator of the thread's stream."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = THREAD.stream
        draws = torch.Tag.nondeterministic_seeded in func.tags and func not in _NO_DRAW
        if source is None or not draws or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return _native_dropout(source, *args, **kwargs)
        if func.has_kernel_for_dispatch_key(_COMPOSITE):  # seen whole in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        op = _with_generator(func)
        if op is None:
            raise RunError(
                f"{func} draws random numbers and takes no generator, so its draws cannot be repeated.\n"
                "Expected an operation that takes generator=. Draw the numbers with torch.rand or "
                "torch.bernoulli and compute with them."
            )
        return op(*supply(generator_place(op), args, kwargs, source), **kwargs)
