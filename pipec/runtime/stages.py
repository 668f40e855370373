"""A stage as a function: arguments filled from what it reads, parameters and buffers at hand."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pipec.errors import RunError, note
from pipec.lazy import Lazy
from pipec.runtime.aliases import Aliases
from pipec.runtime.borders import anchored, differs, own, private, unpack, version
from pipec.runtime.borrowed import modules_of
from pipec.runtime.buffers import BufferKeeper
from pipec.runtime.lent import Lent
from pipec.runtime.means import EvenMean, check_later, weighs_evenly
from pipec.runtime.walk import parameters_in
from pipec.spec import LossSpec, Ref, Spec, owner_of
from pipec.tree import Path, flatten, select, show_path, unflatten

OWN = -1  # slot of a loss argument that is the stage's own result


@frozen
class Argument:
    """Where an argument comes from: a position in what the stage reads, and what is selected from it."""

    slot: int
    path: Path


@frozen(eq=False)
class Call:
    """An argument template compiled for filling."""

    leaves: tuple[Any, ...]
    layout: Any
    direct: tuple[int, ...] | None  # all arguments positional and whole: their slots, OWN among them

    def fill(self, values: list[Any], own: Any = None) -> tuple[Any, dict[str, Any]]:
        if self.direct is not None:
            return [own if slot == OWN else values[slot] for slot in self.direct], {}
        leaves = [
            pick("an argument", own if leaf.slot == OWN else values[leaf.slot], leaf.path)
            if isinstance(leaf, Argument) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = unflatten(self.layout, leaves)
        return args, kwargs


def make_call(args: Any, kwargs: Any, resolve: Callable[[Ref], Argument]) -> Call:
    leaves, layout = flatten((args, kwargs))
    filled = tuple(resolve(leaf) if isinstance(leaf, Ref) else leaf for leaf in leaves)
    plain = not kwargs and all(
        isinstance(arg, Ref) and isinstance(leaf, Argument) and not leaf.path
        for arg, leaf in zip(args, filled, strict=False)
    ) and len(filled) == len(args)
    return Call(filled, layout, tuple(leaf.slot for leaf in filled) if plain else None)


@frozen(eq=False, slots=False)
class StageLoss:
    """A loss computed inside a stage."""

    index: int
    spec: LossSpec
    call: Call

    @cached_property
    def watched(self) -> bool:
        """Whether it is a mean that might leave rows out."""
        return self.spec.reduction == "mean" and not weighs_evenly(self.spec.fn)

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Parameters of a loss that is a module, with their names."""
        owner = owner_of(self.spec.fn)
        return list(owner.named_parameters()) if isinstance(owner, nn.Module) else []


class Stage:
    """One stage of a spec, ready to run.

    What it reads stands in one list: first the values of ``reads`` (indices of ports), then with ``carry`` what it
    returned for the slice before, then the pipeline's inputs of ``inputs``, and a loss may need more inputs than the
    stage itself.
    """

    def __init__(self, spec: Spec, index: int) -> None:
        self.spec, self.index = spec.stages[index], index
        self.name = self.spec.name
        self.reads = spec.graph.stages[index].reads
        self.gives = tuple((port, spec.ports[port].path) for port in spec.graph.stages[index].gives)
        own_losses = [(i, loss) for i, loss in enumerate(spec.losses) if loss.home == index]
        refs = [*self.spec.refs(), *(ref for _, loss in own_losses for ref in loss.refs())]
        self.carry = self.spec.carry
        self.inputs = tuple(sorted({ref.index for ref in refs if ref.source == "input"}))
        self.needed_inputs = tuple(sorted({r.index for r in self.spec.refs() if r.source == "input"}))
        self.call = make_call(self.spec.args, self.spec.kwargs, lambda ref: self._resolve(spec, ref))
        self.losses = tuple(
            StageLoss(i, loss, make_call(loss.args, loss.kwargs, lambda ref: self._resolve(spec, ref)))
            for i, loss in own_losses
        )
        self.outputs = tuple((i, out.ref.path) for i, out in enumerate(spec.outputs) if out.ref.index == index)
        self.fn = self.spec.fn
        self.params = self.spec.params  # another version of them while a task of an asynchronous plan reads it
        owner = owner_of(self.fn)
        self.module = owner if isinstance(owner, nn.Module) else None
        owned = (self.module, *(loss.spec.fn for loss in self.losses))
        self.modules = [fn for fn in owned if isinstance(fn, nn.Module)]
        self.buffers = BufferKeeper(*self.modules)
        self.modules += modules_of(self.name, self.fn)  # for train and eval mode
        self._sources = [spec.graph.values[port].name for port in self.reads]
        self._sources += ["carry"] if self.carry else []
        self._sources += [spec.inputs[index].name for index in self.inputs]
        first_input = len(spec.graph.values)
        self.read_values: tuple[int | None, ...] = (  # as nodes of aliases; what is carried is none
            *self.reads, *(None,) * self.carry, *(first_input + index for index in self.inputs)
        )
        self._contested = contested(spec, index, self.reads, self.inputs)
        if self.carry:
            self._contested.insert(len(self.reads), None)
        self._everything = set(range(len(self._sources)))
        self._written: set[int] = set()  # what the stage writes into, as seen in the first run of each mode
        self._learned: set[bool | None] = set()
        self.learning = True
        self._before: list[Any] = []  # what it read, where writes are found by comparing
        self.aliases, self.lent = Aliases(), Lent()
        self.searched = False  # whether its graph was looked through for tensors that it does not own
        self.anchor: Tensor | None = None  # of graphs whose backward is split, see borders.Anchored
        self.put_off: dict[str, list[Tensor]] = {}  # per loss what is looked at when the step has run
        self.told_split = False  # whether the user was told that its backward cannot be split

    def _resolve(self, spec: Spec, ref: Ref) -> Argument:
        if ref.source == "input":
            return Argument(len(self.reads) + self.carry + self.inputs.index(ref.index), ref.path)
        if ref.index == self.index:
            return Argument(OWN, ref.path)
        port, path = spec.port_of(ref)
        return Argument(self.reads.index(port), path)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the stage that may be trained, each once, under the user's own keys."""
        if self.module is not None:
            yield from self.module.named_parameters()
        yield from self._given()

    def _given(self) -> Iterator[tuple[str, Tensor]]:
        """Those that came as ``params=``."""
        seen = set()
        for path, leaf in named_leaves(self.spec.params):
            if isinstance(leaf, Tensor) and leaf.is_leaf and id(leaf) not in seen:
                seen.add(id(leaf))
                yield path, leaf

    def trainable(self) -> list[Tensor]:
        """The tensors that require a gradient now."""
        own = parameters_in(self.module) if self.module is not None else []
        return [p for p in (*own, *(p for _, p in self._given())) if p.requires_grad]

    def read(self, packets: list[Any]) -> tuple[list[Any], list[Any]]:
        """The stage's own values of what it reads, and the tensors in them to differentiate with respect to.

        Values are shared with other readers. A stage that writes into one gets a copy of its own, which takes the
        place of the packet in ``packets``. Which ones it writes into is seen in its first run in each of train and
        eval mode, on copies of all. Inference mode counts no writes, so there nothing is learned and all is copied.
        """
        mode = self.module.training if self.module is not None else None
        self.learning = mode not in self._learned
        self._before = list(packets) if self.learning and torch.is_inference_mode_enabled() else []
        written = self._everything if self.learning else self._written
        anchor = self.anchor if torch.is_grad_enabled() else None
        values, leaves = [], []
        for place, packet in enumerate(packets):
            if type(packet) is Tensor and anchor is None and place not in written:  # most are: no further calls
                value = packet.detach().requires_grad_() if packet.requires_grad else packet
                values.append(value)
                leaves.append(value if value is not packet else None)
                continue
            mine = own(packet) if anchor is None else anchored(packet, anchor)
            value, wanted = unpack(mine)
            if place in written:
                packets[place] = private(mine)
                value, _ = unpack(packets[place])
            values.append(value)
            leaves.append(wanted)
        return values, leaves

    def forget(self) -> None:
        """Forget what was learned about writes."""
        self._written, self.aliases = set(), Aliases()
        self._learned.clear()

    def check_writes(self, packets: list[Any], versions: list[int], out: Any) -> None:
        """Learn from the first run, which gave ``out``, which values the stage writes into.

        Raises:
            RunError: it wrote into a value that a later stage or the caller sees too, or into a shared one that it
                had left alone before.
        """
        found = {place for place, packet in enumerate(packets) if version(packet) != versions[place]}
        unseen, self._before = self._before, []
        found |= {place for place, packet in enumerate(unseen) if differs(packet, packets[place])}
        for place in sorted(found):
            if self._contested[place] is not None:
                raise RunError(
                    f"stage {self.name!r} writes in place into {self._sources[place]!r}, which "
                    f"{self._contested[place]}: in which state is not clear; clone it in the stage before writing"
                )
        if unseen:
            return
        if self.learning:
            self._written = self._written | found
            self.aliases.learn(self, packets, out)
            self._learned.add(self.module.training if self.module is not None else None)
        elif not found <= self._written:
            names = ", ".join(repr(self._sources[place]) for place in sorted(found - self._written))
            raise RunError(
                f"stage {self.name!r} wrote in place into {names}, a value shared with other readers, for the first "
                "time now; clone it in the stage before writing"
            )

    def take(self, out: Any, path: Path) -> Any:
        """A part of the stage's result.

        Raises:
            RunError: the result has no such part.
        """
        return pick(f"the result of stage {self.name!r}", out, path) if path else out

    def run(self, values: list[Any]) -> tuple[Any, Any]:
        """The stage's result for one microbatch or slice, and what it carries on to the next slice."""
        if self.fn is None:
            raise RunError(f"stage {self.name!r} is a placeholder without a module; it can be drawn but not run")
        args, kwargs = self.call.fill(values)
        carry = None
        if self.carry:
            kwargs["carry"] = values[len(self.reads)]
        out = self.fn(*args, **kwargs) if self.params is None else self.fn(self.params, *args, **kwargs)
        if self.carry:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise RunError(
                    f"stage {self.name!r} was declared with carry=True, so it returns (result, carry), but it returned "
                    f"{brief(out)}"
                )
            out, carry = out
        if self.buffers.places and (self.learning or self.lent.looks(self.buffers)):
            out, carry = self.lent.result(self.buffers, (out, carry))
        parts = self.spec.outputs
        if parts is not None and not (isinstance(out, tuple | list) and len(out) == parts):
            raise RunError(f"stage {self.name!r} was declared with outputs={parts} but returned {brief(out)}")
        return out, carry

    def run_all(self, values: list[Any], wanted: Container[int]) -> tuple[Any, Any, list[Any]]:
        """As :meth:`run`, and its losses: None for one that is not among ``wanted``."""
        out, carry = self.run(values)
        if not self.losses:
            return out, carry, []
        losses = [self.run_loss(loss, values, out) if loss.index in wanted else None for loss in self.losses]
        return out, carry, losses

    def run_loss(self, loss: StageLoss, values: list[Any], own: Any) -> Tensor:
        """A loss for one microbatch, a scalar.

        Raises:
            RunError: it is no scalar tensor, complex, or leaves rows out without ``count=``.
        """
        what = f"loss {loss.spec.name!r} of stage {self.name!r}"
        fn = loss.spec.fn
        if fn is None:
            raise RunError(f"{what} is a placeholder without a function; it can be drawn but not run")
        args, kwargs = loss.call.fill(values, own)
        try:
            if loss.watched:
                with EvenMean(what, self.put_off.setdefault(what, [])):
                    value = fn(*args, **kwargs)
            else:
                value = fn(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, RunError):  # the watch over means names the loss itself
                note(error, f"pipec: raised by {what}")
            raise
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise RunError(f"{what} must return a scalar tensor, got {got}; reduce it with .mean() or .sum()")
        if value.is_complex():
            raise RunError(f"{what} must return a real number, got a tensor of {value.dtype}; take .real or .abs()")
        return value


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a parameter pytree with dotted names."""
    if tree is None:
        return
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from named_leaves(value, f"{path}.{key}" if path else str(key))


def contested(spec: Spec, index: int, reads: Sequence[int], inputs: Sequence[int]) -> list[str | None]:
    """Per value a stage reads, who sees it after the stage: a later stage, the caller, or nobody."""
    told: list[str | None] = []
    for port in reads:
        info, path = spec.graph.values[port], spec.ports[port].path
        later = [spec.stages[r].name for r in info.readers if r > index]
        outputs = [
            out.name for out in spec.outputs if out.ref.index == info.producer
            and (out.ref.path[: len(path)] == path or path[: len(out.ref.path)] == out.ref.path)
        ]
        told.append(
            f"stage {later[0]!r} reads later" if later else f"is the output {outputs[0]!r}" if outputs else None
        )
    for item in inputs:
        later = [spec.stages[r].name for r in spec.graph.inputs[item].readers if r > index]
        told.append(f"stage {later[0]!r} reads later" if later else None)
    return told


def pick(what: str, value: Any, path: Path) -> Any:
    """``value`` at ``path``, or a RunError that says what there is instead."""
    try:
        return select(value, path)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RunError(f"{what} has no {show_path(path)}; it is {brief(value)}") from None


def brief(value: Any) -> str:
    """What a value is, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def bind(spec: Spec) -> list[Stage]:
    """Every stage of ``spec``, ready to run.

    Raises:
        RunError: a loss has trainable parameters that its stage does not own, a stage has lazy parameters, or uses a
            module from outside that changes.
    """
    spec = built(spec)
    stages = [Stage(spec, index) for index in range(len(spec.stages))]
    for stage in stages:
        lazy = [name for name, p in stage.named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise RunError(
                f"stage {stage.name!r} has lazy parameters ({', '.join(map(repr, lazy))}) without a shape yet; run its "
                "module once on an example before making the runner"
            )
        own = {id(p) for _, p in stage.named_parameters()}
        for loss in stage.losses:
            names = [name for name, p in loss.parameters() if p.requires_grad and id(p) not in own]
            if names:
                raise RunError(
                    f"loss {loss.spec.name!r} has parameters of its own ({', '.join(map(repr, names))}), which nobody "
                    "would train; make it a stage that returns the loss, or switch off their requires_grad"
                )
    return stages


def built(spec: Spec) -> Spec:
    """The spec with the modules of its lazy stages."""
    if not any(isinstance(stage.fn, Lazy) for stage in spec.stages):
        return spec
    return evolve(spec, stages=tuple(
        evolve(stage, fn=stage.fn.build(place)) if isinstance(stage.fn, Lazy) else stage
        for place, stage in enumerate(spec.stages)
    ))


def check_means(stages: Sequence[Stage]) -> None:
    """After a step: losses on a GPU whose mean left rows out; the host waits for the device only where there are any.

    Raises:
        RunError: naming the loss.
    """
    for stage in stages:
        for what, flags in stage.put_off.items():
            check_later(what, flags)


@torch.no_grad()
def training_flags(stages: list[Stage]) -> list[tuple[nn.Module, bool]]:
    """The train/eval flag of every module, so that it can be put back."""
    return [(m, m.training) for stage in stages for module in stage.modules for m in module.modules()]
