"""How a pipeline is put together, in words that two ranks can compare: who reads what, and the forms of what several
ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipec.runtime.distributed.local import Tied
from pipec.runtime.stages import Stage
from pipec.spec import LossSpec, Ref, Spec, StageSpec
from pipec.tree import flatten, show_path

PLAIN = (type(None), bool, int, float, str)
ORDER = "order of parameters and buffers"


def wiring(spec: Spec) -> dict[str, str]:
    """By stage, value, loss and output what can be read of it in the script, but for the functions themselves."""
    graph, made = spec.graph, dict[str, str]()
    names = [stage.name for stage in spec.stages]
    for stage, info in zip(spec.stages, graph.stages, strict=True):
        flags = (
            "" if info.backward else "no loss depends on it", "has buffers" if info.ordered else "",
            f"shares parameters with {_listed(names[s] for s in info.tied)}" if info.tied else "",
            f"{stage.outputs} outputs" if stage.outputs else "", "has a carry" if stage.carry else "",
        )
        made[f"stage {stage.name!r}"] = ", ".join([f"reads {_read(spec, stage)}", *filter(None, flags)])
    for value in graph.values:
        kinds = {"skip": value.skips, "through host memory": value.host}
        made[f"value {value.name!r}"] = ", ".join(
            [f"to {_listed(names[r] for r in value.readers)}"]
            + [f"{kind} to {_listed(names[r] for r in own)}" for kind, own in kinds.items() if own]
        )
    for loss in spec.losses:
        count = " and has a count" if loss.count is not None else ""
        made[f"loss {loss.name!r}"] = f"reads {_read(spec, loss)}{count}"
    for out in spec.outputs:
        slices = "" if out.slice_dim is None else f", slices along {out.slice_dim}"
        made[f"output {out.name!r}"] = f"{_shown(spec, out.ref)} joined along {out.dim}{slices}"
    return made


def _read(spec: Spec, reader: StageSpec | LossSpec) -> str:
    """Its arguments in order; what is no value of the pipeline is none that can be compared."""
    parts = [_argument(spec, argument) for argument in reader.args]
    return ", ".join(parts + [f"{key}={_argument(spec, value)}" for key, value in reader.kwargs.items()]) or "nothing"


def _argument(spec: Spec, template: Any) -> str:
    if isinstance(template, Ref):
        return _shown(spec, template)
    refs = [_shown(spec, leaf) for leaf in flatten(template)[0] if isinstance(leaf, Ref)]
    if refs:
        return f"({', '.join(refs)})"
    return repr(template) if isinstance(template, PLAIN) else type(template).__name__


def _shown(spec: Spec, ref: Ref) -> str:
    source = (spec.inputs if ref.source == "input" else spec.stages)[ref.index]
    return source.name + show_path(ref.path)


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)


def held_forms(
    stages: Sequence[Stage], optimizers: Iterable[Optimizer], tied: Sequence[Tied], replicas: int
) -> dict[str, Any]:
    """What other ranks hold as well, by name: parameters that stages of several share, and with replicas, per stage of
    this rank, all parameters and buffers; and what steps them, as each rank's optimizer steps its own copy."""
    made: dict[str, Any] = {}
    steps = stepped(optimizers) if tied or replicas > 1 else {}
    for one in tied:
        users = _listed(f"{stages[number].name!r} ({name})" for number, name in one.users)
        made[f"the parameter of stages {users}"] = form(one.parameter)
        if id(one.parameter) in steps:
            made[f"the parameter of stages {users} here"] = {"its optimizer": steps[id(one.parameter)]}
    for stage in stages if replicas > 1 else ():
        if stage.fn is not None:
            own = {name: form(parameter) for name, parameter in stage.named_parameters()}
            own |= {name: form(b) for module in stage.modules for name, b in module.named_buffers()}
            by = {f"the optimizer of {name}": steps[id(p)] for name, p in stage.named_parameters() if id(p) in steps}
            made[f"stage {stage.name!r}"] = own | by | {ORDER: ", ".join(own)}
    return made


def stepped(optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """By the id of a parameter the optimizer that steps it, with its options."""
    return {
        id(parameter): f"{type(optimizer).__name__}({_options(group)})"
        for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }


def _options(group: dict[str, Any]) -> str:
    shown = {key: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in group.items()}
    return ", ".join(f"{key}={value}" for key, value in shown.items() if isinstance(value, (*PLAIN, tuple)))


def form(tensor: Tensor) -> str:
    """Shape and dtype, and whether a parameter is frozen."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{shape} {kind}" + ("" if tensor.requires_grad else ", not trained")
