"""Slices of a sequence: whether a pipeline can be cut along it, and what stands in the way."""

from __future__ import annotations

from torch import nn

from pipec.errors import Problem, ScheduleError, raise_all
from pipec.spec import Spec, StageSpec, owner_of

LOOK_AROUND = (
    nn.MultiheadAttention, nn.RNNBase, nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
)


def check_slices(spec: Spec, slices: int) -> None:
    """Raise ScheduleError, listing everything that keeps ``spec`` from being cut into ``slices``.

    A stage without ``carry=True`` must treat every position of the sequence by itself; only layers that are known not
    to are found here.
    """
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise ScheduleError(f"slices must be a whole number of at least 1, got {slices!r}")
    if slices == 1:
        return
    problems = []
    if all(item.slice_dim is None for item in spec.inputs):
        problems.append(Problem(
            "no input says which dimension is the sequence; declare it, as in input('tokens', slice_dim=1)"
        ))
    for stage in spec.stages:
        kinds = [] if stage.carry else looks_around(stage)
        if kinds:
            problems.append(Problem(
                f"stage {stage.name!r} holds {', '.join(kinds)}, which looks at the whole sequence; let the stage take "
                "carry= of the slice before and return (result, carry), and declare it with carry=True", stage.location
            ))
    problems += [
        Problem(f"output {out.name!r} does not say along which dimension its slices are joined; declare it, as in "
                "output(value, slice_dim=1)", out.location)
        for out in spec.outputs if out.slice_dim is None
    ]
    raise_all(f"pipeline {spec.name!r} cannot be cut into {slices} slices", problems, ScheduleError)


def looks_around(stage: StageSpec) -> list[str]:
    """Kinds of layers in a stage that mix the positions of a sequence."""
    owner = owner_of(stage.fn)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    return list(dict.fromkeys(type(module).__name__ for module in modules if isinstance(module, LOOK_AROUND)))
