"""The declaration language: a few lines of Python become a :class:`~pipec.spec.Spec`.

Mistakes are collected with the line that made them and raised together when the spec is asked for, so that a
script is mended once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pipec.errors import Location, Problem, caller, raise_all
from pipec.given import misnamed
from pipec.losses import settle, takes_reduction
from pipec.spec import InputSpec, LossSpec, OutputSpec, Ref, Spec, StageSpec
from pipec.tree import flatten, unflatten
from pipec.values import Skip, Value


class Pipeline:
    """A pipeline being declared.

    >>> net = Pipeline("net")
    >>> x = net.input("x")
    >>> h = net.stage("first", None, x)
    >>> net.output(net.stage("second", None, h))
    """

    def __init__(self, name: str = "pipeline") -> None:
        self.name = name if isinstance(name, str) else "pipeline"
        self._inputs: list[InputSpec] = []
        self._stages: list[StageSpec] = []
        self._outputs: list[OutputSpec] = []
        self._losses: list[LossSpec] = []
        self._problems: list[Problem] = []
        self._meant: set[tuple[str, int]] = set()  # read by a declaration that is a problem already
        self._strings: list[tuple[str, str, Location | None]] = []  # who was given which string, and where
        self._loss_asked = False
        self._location = caller()
        self._spec: Spec | None = None
        if not isinstance(name, str):
            self._problem(f"Pipeline: its argument is a name, got {type(name).__name__}; stages are declared with "
                          "stage(name, module, ...)")

    def input(self, name: str, *, split: int | None = 0, slice_dim: int | None = None) -> Value:
        """Declare an input; ``split`` is the dimension cut into microbatches, None: the same for all of them.

        ``slice_dim`` is the dimension of the sequence, for ``compile(slices=...)``; None: the same for all slices.
        """
        self._check_name("input", name, [i.name for i in self._inputs])
        self._check_dim(f"input {name!r}: split", split)
        self._check_dim(f"input {name!r}: slice_dim", slice_dim)
        if split is not None and split == slice_dim:
            self._problem(f"input {name!r}: split and slice_dim are both {split}; one is cut into microbatches, the "
                          "other into slices of a sequence")
        self._inputs.append(InputSpec(name, split, caller(), slice_dim))
        return self._value("input", len(self._inputs) - 1)

    def stage(
        self,
        stage_name: str,
        fn: Callable[..., Any] | None,
        *args: Any,
        params: Any = None,
        outputs: int | None = None,
        device: int | None = None,
        carry: bool = False,
        **kwargs: Any,
    ) -> Value:
        """Declare a stage and return its result.

        ``fn`` is a module, a function, or None for a placeholder that can be compiled, simulated and drawn.
        With ``params`` (a pytree of tensors) it is called as ``fn(params, *args, **kwargs)``. Arguments are
        values of this pipeline, containers of them, or constants. ``outputs=n`` lets the result be unpacked;
        ``device`` is a logical device index.

        ``carry=True``: what the stage makes of a part of a sequence depends on the parts before it. It is called with
        ``carry=`` what it returned for the slice before (None for the first) and returns (result, carry), such as
        the keys and values of an attention; see ``compile(slices=...)``.
        """
        location = caller()
        if self._name_forgotten("stage", stage_name, (fn, args, kwargs)):
            self._stages.append(StageSpec("stage without a name", None, (), location=location))
            self._meant.add(("stage", len(self._stages) - 1))
            return self._value("stage", len(self._stages) - 1, outputs if isinstance(outputs, int) else None)
        self._check_name("stage", stage_name, [s.name for s in self._stages])
        if isinstance(fn, type):
            self._problem(f"stage {stage_name!r}: got the class {fn.__name__}; pass an instance, {fn.__name__}(...)")
        elif fn is not None and not callable(fn):
            self._problem(f"stage {stage_name!r}: expected a module, a function or None, got {_brief(fn)}")
        if outputs is not None and (not isinstance(outputs, int) or outputs < 1):
            self._problem(f"stage {stage_name!r}: outputs must be a positive number, got {outputs!r}")
            outputs = None
        if device is not None and (isinstance(device, bool) or not isinstance(device, int) or device < 0):
            self._problem(f"stage {stage_name!r}: device is a logical index 0, 1, ..., got {device!r}")
            device = None
        if not isinstance(carry, bool):
            self._problem(f"stage {stage_name!r}: carry is True or False, got {_brief(carry)}; what a stage carries on "
                          "comes from the stage itself")
            carry = False
        skips: set[Ref] = set()
        before = len(self._problems)
        hosted: set[Ref] = set()
        filled = self._template(f"stage {stage_name!r}", (args, kwargs), skips, hosted)
        if len(self._problems) == before and not any(isinstance(leaf, Ref) for leaf in flatten(filled)[0]):
            self._reads_nothing(f"stage {stage_name!r}", "value: pass an input or another stage's result", filled)
        self._check_call(f"stage {stage_name!r}", fn, ((None,) if params is not None else ()) + args,
                         kwargs | ({"carry": None} if carry else {}))
        self._stages.append(
            StageSpec(stage_name, fn, filled[0], filled[1], params, device, frozenset(skips), frozenset(hosted),
                      location, outputs, carry)
        )
        self._spec = None
        return self._value("stage", len(self._stages) - 1, outputs)

    def output(
        self, value: Any, name: str | None = None, *, dim: int | None = 0, slice_dim: int | None = None
    ) -> None:
        """Hand a value back from every step; microbatches are joined along ``dim``, None keeps a list.

        Slices of a sequence are joined along ``slice_dim``.
        """
        location = caller()
        if isinstance(value, Skip) and value.hold is not None:
            self._problem(f"output {value.value!r}: skip(hold={value.hold!r}) is for what a stage reads; leave it out")
        ref = self._ref("output", value)
        if ref is None:
            return
        if ref.source == "input":
            self._problem(f"output {value!r} is an input of the pipeline; only what a stage returns can be an output")
            return
        self._check_dim(f"output {value!r}: dim", dim)
        self._check_dim(f"output {value!r}: slice_dim", slice_dim)
        name = repr(value) if name is None else name
        self._check_name("output", name, [o.name for o in self._outputs])
        self._outputs.append(OutputSpec(name, ref, dim, location, slice_dim))
        self._spec = None

    def loss(
        self,
        loss_name: str,
        fn: Callable[..., Any] | None,
        *args: Any,
        reduction: str | None = None,
        count: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Declare a loss; several are added up.

        ``reduction="mean"`` (the default): ``fn`` averages over the rows of a microbatch, which then counts
        rows/all rows, so that the result does not depend on the number of microbatches. ``"sum"``: ``fn`` sums.
        ``count``: ``fn`` sums and the sum is divided by ``count`` of the whole minibatch, a function of the
        pipeline's inputs by name (tokens that are not ignored, say).

        torch's own losses are told the reduction, or asked for theirs: ``nn.MSELoss(reduction="sum")`` is a sum
        without saying so again.
        """
        location = caller()
        what = f"loss {loss_name!r}"
        self._loss_asked = True
        if self._name_forgotten("loss", loss_name, (fn, args, kwargs)):
            return
        self._check_name("loss", loss_name, [item.name for item in self._losses])
        if isinstance(fn, type):
            self._problem(f"{what}: got the class {fn.__name__}; pass an instance, {fn.__name__}(...)")
        elif fn is not None and not callable(fn):
            self._problem(f"{what}: expected a function or a module, got {_brief(fn)}")
        reduction, wrong = settle(fn, reduction, count is not None)
        if wrong is not None:
            self._problem(f"{what}: {wrong}")
        elif takes_reduction(fn):
            kwargs["reduction"] = reduction
        if count is not None:
            self._check_count(what, count)
        before = len(self._problems)
        hosted: set[Ref] = set()
        filled = self._template(what, (args, kwargs), set(), hosted)
        if hosted:
            self._problem(f"{what}: skip(hold='host') is for what a stage reads, and this loss reads as a part of the "
                          "last stage that it reads; mark it there, or leave hold= out")
        stages = [r.index for r in flatten(filled)[0] if isinstance(r, Ref) and r.source == "stage"]
        if not stages:
            if len(self._problems) == before:
                self._reads_nothing(what, "stage: pass a stage's result", filled)
            return
        self._check_call(what, fn, args, kwargs)
        self._losses.append(LossSpec(loss_name, fn, filled[0], filled[1], reduction, count, max(stages), location))
        self._spec = None

    def __repr__(self) -> str:
        inputs = ", ".join(str(item.name) for item in self._inputs) or "none"
        return f"<Pipeline {self.name!r}: inputs {inputs}; {_counted(len(self._stages), 'stage')}>"

    @property
    def spec(self) -> Spec:
        """The frozen spec.

        Raises:
            SpecError: listing every problem of the declaration.
        """
        if self._spec is None:
            problems = list(self._problems)
            if not self._stages:
                message = "it has no stage; add one with stage(name, module, value)"
                raise_all(f"pipeline {self.name!r}", [*problems, Problem(message, self._location)])
            raise_all(f"pipeline {self.name!r}", problems + self._unread())
            self._spec = Spec(
                self.name, tuple(self._inputs), tuple(self._stages), tuple(self._outputs), tuple(self._losses)
            )
        return self._spec

    # -- checks ---------------------------------------------------------------------------------------------

    def _problem(self, message: str) -> None:
        self._problems.append(Problem(message, caller()))

    def _check_name(self, what: str, name: Any, taken: list[str]) -> None:
        if not isinstance(name, str) or not name:
            self._problem(f"{what}: a name is a non-empty string, got {name!r}")
        elif name in taken:
            self._problem(f"{what} {name!r} is declared twice; give each {what} a name of its own")

    def _check_dim(self, what: str, dim: Any) -> None:
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            self._problem(f"{what} must be a dimension or None, got {dim!r}")

    def _name_forgotten(self, what: str, name: Any, call: Any) -> bool:
        """True when a module or a value stands where the name belongs; what the call reads counts as read."""
        if isinstance(name, str) or not (callable(name) or isinstance(name, Value)):
            return False
        self._problem(f"{what}: the first argument is the {what}'s name, a string; got {_brief(name)}")
        for leaf in flatten((name, call))[0]:
            leaf = leaf.value if isinstance(leaf, Skip) else leaf
            if isinstance(leaf, Value) and leaf.pipeline is self:
                self._meant.add((leaf.ref.source, leaf.ref.index))
        return True

    def _check_call(self, what: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = getattr(fn, "forward", fn)
        if fn is None or isinstance(fn, type) or not callable(fn):
            return
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):  # builtins without a signature
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(fn, "__name__", type(fn).__name__)
            self._problem(f"{what}: {name}{signature} cannot be called so: {misnamed(signature, kwargs) or error}")

    def _check_count(self, what: str, count: Any) -> None:
        if not callable(count):
            self._problem(f"{what}: count must be a function of the pipeline's inputs, got {_brief(count)}")
            return
        known = [i.name for i in self._inputs]
        for name, parameter in _parameters(count):
            bound = name in known or parameter.default is not parameter.empty
            if parameter.kind is not parameter.VAR_KEYWORD and not bound:
                self._problem(f"{what}: count takes {name!r}, which is no input; the inputs are {', '.join(known)}")

    def _unread(self) -> list[Problem]:
        draft = [s for s in self._stages if any(True for _ in s.refs())]
        used = {ref for stage in draft for ref in stage.refs()}
        used |= {ref for loss in self._losses for ref in loss.refs()} | {out.ref for out in self._outputs}
        sources = {(ref.source, ref.index) for ref in used} | self._meant
        counted = {name for loss in self._losses for name, _ in _parameters(loss.count)}
        sources |= {("input", index) for index, item in enumerate(self._inputs) if item.name in counted}
        no_loss = "" if self._loss_asked else "; the pipeline declares no loss"
        given = {name: Problem(f"{what}: {self._string(name)}", where) for what, name, where in self._strings}
        problems = [
            given[item.name] if item.name in given else
            Problem(f"input {item.name!r} is never read; pass it to a stage or a loss, or remove it{no_loss}",
                    item.location)
            for index, item in enumerate(self._inputs)
            if ("input", index) not in sources and item.name not in [i.name for i in self._inputs[:index]]
        ]
        for index, stage in enumerate(self._stages):
            if ("stage", index) not in sources:
                problems.append(
                    given[stage.name] if stage.name in given else
                    Problem(f"stage {stage.name!r}: nothing reads its value; pass it to a stage or a loss, "
                            "declare it with output(...), or remove the stage", stage.location)
                )
        return problems

    # -- values ---------------------------------------------------------------------------------------------

    def _value(self, source: str, index: int, outputs: int | None = None) -> Value:
        self._spec = None
        return Value(self, Ref(source, index), outputs)

    def _source_name(self, ref: Ref) -> str:
        items: list[Any] = self._inputs if ref.source == "input" else self._stages
        return str(items[ref.index].name)

    def _template(self, what: str, call: Any, skips: set[Ref], hosted: set[Ref]) -> Any:
        leaves, layout = flatten(call)
        filled = []
        for leaf in leaves:
            if isinstance(leaf, Skip):
                ref = self._ref(f"{what}: skip", leaf.value)
                if ref is not None:
                    skips.add(ref)
                if ref is not None and self._waits_on_host(what, leaf, ref):
                    hosted.add(ref)
                filled.append(ref)
            elif isinstance(leaf, Value):
                filled.append(self._ref(what, leaf))
            else:
                if isinstance(leaf, str):
                    self._strings.append((what, leaf, caller()))
                filled.append(leaf)
        return unflatten(layout, filled)

    def _waits_on_host(self, what: str, mark: Skip, ref: Ref) -> bool:
        if mark.hold is None:
            return False
        if mark.hold != "host":
            self._problem(f"{what}: skip({mark.value}, hold={mark.hold!r}): hold is 'host' or None, which leaves the "
                          "value on a device")
        elif ref.source == "input":
            self._problem(f"{what}: skip({mark.value}, hold='host'): {str(mark.value)!r} is an input of the pipeline, "
                          "and only what a stage returns can wait in host memory; leave hold= out")
        return mark.hold == "host" and ref.source == "stage"

    def _ref(self, what: str, value: Any) -> Ref | None:
        if isinstance(value, Skip):
            value = value.value
        if isinstance(value, str):
            if self._named(value):
                self._problem(f"{what}: {self._string(value)}")
                self._meant |= self._named(value)
            else:
                self._problem(f"{what}: expected a value of this pipeline, got the string {value!r}")
        elif not isinstance(value, Value):
            self._problem(f"{what}: expected what input(...) or stage(...) returned, got {_brief(value)}")
        elif value.pipeline is not self:
            self._problem(f"{what}: {value} belongs to another pipeline, {value.pipeline.name!r}")
        else:
            return value.ref
        return None

    def _reads_nothing(self, what: str, missing: str, template: Any) -> None:
        """The problem of a stage or loss without values: a name given where its value is meant, or none at all."""
        leaves = flatten(template)[0]
        names = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, str) and self._named(leaf)))
        for name in names:
            self._problem(f"{what}: {self._string(name)}")
            self._meant |= self._named(name)
        if not names:
            self._problem(f"{what} reads no {missing}")
        self._meant |= {(leaf.source, leaf.index) for leaf in leaves if isinstance(leaf, Ref)}

    def _named(self, name: str) -> set[tuple[str, int]]:
        """The stages and inputs of a name."""
        items: tuple[tuple[str, Sequence[Any]], ...] = (("stage", self._stages), ("input", self._inputs))
        return {(source, index) for source, known in items for index, item in enumerate(known) if item.name == name}

    def _string(self, name: str) -> str:
        is_stage = any(source == "stage" for source, _ in self._named(name))
        made = f"stage({name!r}, ...)" if is_stage else f"input({name!r})"
        return f"got the string {name!r}; pass the value that {made} returned"


def chain(stages: int, name: str = "chain", carry: bool = False) -> Pipeline:
    """A pipeline of ``stages`` placeholders in a row with a loss at its end: for plans without any module.

    ``carry``: each stage hands something on from slice to slice of a sequence.
    """
    pipeline = Pipeline(name)
    value = pipeline.input("x", slice_dim=1)
    for index in range(stages):
        value = pipeline.stage(f"s{index}", None, value, carry=carry)
    if stages:
        pipeline.loss("loss", None, value)
    return pipeline


def _parameters(fn: Any) -> list[tuple[str, inspect.Parameter]]:
    """The parameters of ``fn``; none where Python cannot tell."""
    try:
        return list(inspect.signature(fn).parameters.items()) if callable(fn) else []
    except (TypeError, ValueError):
        return []


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _brief(value: Any) -> str:
    text, name = repr(value).split("\n")[0], type(value).__name__
    shown = text[:60] + ("..." if len(text) > 60 else "")
    return shown if text.startswith((name, "<")) else f"{name} {shown}"  # modules print their class themselves
