"""What tasks and copies cost: durations in any unit of time, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from attrs import asdict, evolve, field, fields, frozen

from pipec.errors import SpecError
from pipec.ir import Kind
from pipec.spec import Graph


@frozen
class StageCosts:
    """Costs of one stage for one microbatch; None takes the default of :class:`Costs`.

    ``activation_bytes``: saved by a FORWARD for its backward, without parameters, inputs and outputs.
    ``weight_activation_bytes``: held from the end of a BACKWARD_INPUT until its BACKWARD_WEIGHT: what of the saved the
    weight half reads, inputs of the stage included, and gradients that wait for it. By default all that was saved.
    ``carry_bytes``: of what the stage carries on over the slices of a whole microbatch; each slice adds its part.
    ``output_bytes``: of the stage's values, each; a mapping by value name in ``Costs.values`` overrides it.
    """

    forward: float | None = None
    backward_input: float | None = None
    backward_weight: float | None = None
    recompute: float | None = None
    update: float | None = None
    activation_bytes: int | None = None
    output_bytes: int | None = None
    weight_bytes: int | None = None
    weight_activation_bytes: int | None = None
    carry_bytes: int | None = None
    reduce: float | None = None
    backward: float | None = None


MOST = 2.0**53  # of any cost: beyond it a float no longer tells a whole number from the next

DURATIONS = (
    "forward", "backward_input", "backward_weight", "backward", "recompute", "update", "latency", "host_latency"
)


def _stage_costs(value: Mapping[str, Any]) -> dict[str, StageCosts]:
    if not isinstance(value, Mapping):
        raise SpecError(f"costs: stages must be a mapping from stage names, got {value!r}")
    made = {}
    for name, costs in value.items():
        if isinstance(costs, StageCosts):
            made[name] = costs
            continue
        if not isinstance(costs, Mapping):
            raise SpecError(f"costs of stage {name!r}: expected a mapping or StageCosts, got {costs!r}")
        unknown = set(costs) - {f.name for f in fields(StageCosts)}
        if unknown:
            known = ", ".join(f.name for f in fields(StageCosts))
            raise SpecError(f"costs of stage {name!r}: unknown {', '.join(sorted(unknown))}; known are {known}")
        made[name] = StageCosts(**costs)
    for name, own in made.items():
        for item, number in asdict(own).items():
            if number is not None:
                _check(f"costs of stage {name!r}: {item}", number)
    return made


def _value_bytes(value: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise SpecError(f"costs: bytes of values are a mapping from value names, got {value!r}")
    for name, size in value.items():
        _check(f"costs of value {name!r}: bytes", size)
    return dict(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.number)


def _check(what: str, value: Any) -> None:
    """Raise SpecError unless ``value`` is a finite number that is not negative."""
    if not _is_number(value):
        raise SpecError(f"{what} must be a number, got {value!r}")
    if value != value:
        raise SpecError(f"{what} must be a number, got {value!r}")
    if value < 0:
        raise SpecError(f"{what} must not be negative, got {value!r}")
    if value == float("inf"):
        raise SpecError(f"{what} must be finite, got {value!r}")
    if value > MOST:
        raise SpecError(f"{what} must be at most {MOST:g}, got {_short(value)}; use a larger unit")


def _short(value: Any) -> str:
    """A large number in a few signs; a whole one may be too large for ``float``."""
    try:
        return f"{float(value):g}"
    except OverflowError:
        return f"a number of {len(str(abs(int(value))))} digits"


def _not_negative(_: Any, attribute: Any, value: Any) -> None:
    if value is not None or attribute.default is not None:
        _check(f"costs: {attribute.name}", value)


@frozen
class Costs:
    """Durations per task kind and stage, hand-over costs, sizes.

    Args:
        forward, backward_input, backward_weight: of one stage and one microbatch.
        backward: of a whole BACKWARD; input + weight unless given. Two halves take longer to run than the whole.
        recompute: as ``forward`` unless given.
        update: of one UPDATE.
        latency: delays the arrival of every copy and occupies no lane.
        bandwidth: bytes per unit of time on the copy lanes; None: no transfer time.
        stages: per stage name a mapping or :class:`StageCosts` that overrides the defaults.
        values: bytes per value name (``"enc1"``, ``"enc1[0]"``).
        gradients: bytes of a value's gradient where it is not as large as the value (integers have none).
        saved_values: bytes of a value that the graph of the stage that made it saves as well (Tanh does).
        unit: the unit of time, for titles and tables.
        reduce: of one REDUCE; by default from the stage's ``weight_bytes`` and the bandwidth, 0 without them.
        overlap: tasks that a schedule runs as one (a fused forward and backward) take the sum of their durations times
            this; 1: nothing is gained.
        optimizer: bytes of optimizer state per byte of weights: 0 for plain SGD, 1 with momentum, 2 for Adam.
        microbatches: into how many microbatches the minibatch was cut that durations and sizes belong to, as a profile
            says; where a plan cuts it into others they are taken in proportion. None: into as many as the plan's.
        host_latency, host_bandwidth: of copies between a device and host memory (``pipec.skip(v, hold="host")``); by
            default those between devices, as where both go over the same bus.
    """

    forward: float = field(default=1.0, validator=_not_negative)
    backward_input: float = field(default=1.0, validator=_not_negative)
    backward_weight: float = field(default=1.0, validator=_not_negative)
    recompute: float | None = field(default=None, validator=_not_negative)
    update: float = field(default=0.0, validator=_not_negative)
    latency: float = field(default=0.0, validator=_not_negative)
    bandwidth: float | None = None
    stages: dict[str, StageCosts] = field(factory=dict, converter=_stage_costs)
    values: dict[str, int] = field(factory=dict, converter=_value_bytes)
    gradients: dict[str, int] = field(factory=dict, converter=_value_bytes)
    saved_values: dict[str, int] = field(factory=dict, converter=_value_bytes)
    unit: str = ""
    reduce: float | None = field(default=None, validator=_not_negative)
    overlap: float = field(default=1.0, validator=_not_negative)
    optimizer: float = field(default=2.0, validator=_not_negative)
    host_latency: float | None = field(default=None, validator=_not_negative)
    host_bandwidth: float | None = None
    backward: float | None = field(default=None, validator=_not_negative)
    microbatches: int | None = None

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.unit, str):
            raise SpecError(f"costs: unit is the name of the unit of time, such as 'ms', got {self.unit!r}")
        cut = self.microbatches
        if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
            raise SpecError(f"costs: microbatches must be a whole number of at least 1, or None, got {cut!r}")
        for name in ("bandwidth", "host_bandwidth"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise SpecError(f"costs: {name} must be positive, got {value!r}")
            if value is not None and not 1 / MOST <= value <= MOST**2 and value != float("inf"):
                raise SpecError(
                    f"costs: {name} must be between {1 / MOST:g} and {MOST**2:g}, got {_short(value)}; use another "
                    "unit, or None for no transfer time"
                )

    def to_host(self) -> tuple[float | None, float]:
        """Bandwidth and latency of copies between a device and host memory."""
        bandwidth = self.bandwidth if self.host_bandwidth is None else self.host_bandwidth
        return bandwidth, self.latency if self.host_latency is None else self.host_latency

    def duration(self, kind: Kind, stage: str) -> float:
        """How long one task of ``kind`` takes in the stage named ``stage`` (COPY: see :meth:`transfer`)."""
        own = self.stages.get(stage, _NONE)

        def pick(name: str) -> float:
            value = getattr(own, name)
            return float(getattr(self, name) if value is None else value)

        if kind is Kind.FORWARD:
            return pick("forward")
        if kind is Kind.RECOMPUTE:
            given = own.recompute if own.recompute is not None else self.recompute
            return pick("forward") if given is None else float(given)
        if kind is Kind.BACKWARD:
            return self._whole(own, pick("backward_input") + pick("backward_weight"))
        if kind is Kind.BACKWARD_INPUT:
            return pick("backward_input")
        if kind is Kind.BACKWARD_WEIGHT:
            return pick("backward_weight")
        if kind is Kind.UPDATE:
            return pick("update")
        return 0.0

    def _whole(self, own: StageCosts, halves: float) -> float:
        """Of a whole backward: as given, and as the sum of the halves where a stage overrides only these."""
        if own.backward is not None:
            return float(own.backward)
        halved = own.backward_input is not None or own.backward_weight is not None
        return halves if halved or self.backward is None else float(self.backward)

    def reduce_duration(self, stage: str, replicas: int) -> float:
        """How long a REDUCE occupies the copy-out lane: as given, else what a ring over ``replicas`` needs to move.

        2(n-1)/n of the weights' bytes through ``bandwidth`` (Patarasuk and Yuan 2009); 0 where either is unknown.
        """
        own = self.stages.get(stage, _NONE)
        given = self.reduce if own.reduce is None else own.reduce
        if given is not None:
            return float(given)
        if self.bandwidth is None or own.weight_bytes is None:
            return 0.0
        return 2.0 * max(replicas - 1, 1) / max(replicas, 2) * own.weight_bytes / self.bandwidth

    def __str__(self) -> str:
        """The defaults in a line, as far as a stage may take them, and a row per stage that overrides them."""
        unit = f" {self.unit}" if self.unit else ""
        said = {f.name: getattr(self, f.name) for f in fields(type(self)) if not self._everywhere(f.name)}
        defaults = [f"{name} {value:.4g}{unit}" for name in DURATIONS if (value := said.get(name)) is not None]
        defaults += [f"overlap {self.overlap:.4g}"] if self.overlap != 1.0 else []
        lines = ["costs: " + ", ".join(defaults)]
        if self.bandwidth is not None:
            lines.append(f"bandwidth {self.bandwidth:.4g} bytes per{unit or ' unit of time'}")
        if self.host_bandwidth is not None:
            lines.append(f"bandwidth to host memory {self.host_bandwidth:.4g} bytes per{unit or ' unit of time'}")
        names = [f.name for f in fields(StageCosts)
                 if any(getattr(own, f.name) is not None for own in self.stages.values())]
        if names:
            if self.microbatches is not None:
                lines.append(f"of one of {self.microbatches} microbatches, in{unit or ' units of time'} and bytes:")
            rows = [["stage", *names]]
            for stage, own in self.stages.items():
                cells = [getattr(own, name) for name in names]
                rows.append([stage, *("-" if c is None else f"{c:.4g}" if isinstance(c, float) else f"{c:,}"
                                      for c in cells)])
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in
                                zip(row[1:], widths[1:], strict=True))]) for row in rows]
        return "\n".join(lines)

    def _everywhere(self, name: str) -> bool:
        """Whether every stage that is listed has a cost of its own in place of the default ``name``."""
        return bool(self.stages) and all(getattr(own, name, None) is not None for own in self.stages.values())

    def check(self, graph: Graph) -> None:
        """Raise SpecError when costs name a stage or value that ``graph`` has not."""
        stages, values = {s.name for s in graph.stages}, {v.name for v in graph.values}
        wrong = [f"stage {name!r}" for name in self.stages if name not in stages]
        named = dict.fromkeys([*self.values, *self.gradients, *self.saved_values])
        wrong += [f"value {name!r}" for name in named if name not in values]
        if wrong:
            raise SpecError(
                f"costs name what pipeline {graph.name!r} has not: {', '.join(wrong)}; "
                f"its stages are {', '.join(sorted(stages))}"
            )

    def activation_bytes(self, stage: str) -> int | None:
        return self.stages.get(stage, _NONE).activation_bytes

    def weight_activation_bytes(self, stage: str) -> int | None:
        return self.stages.get(stage, _NONE).weight_activation_bytes

    def carry_bytes(self, stage: str) -> int | None:
        return self.stages.get(stage, _NONE).carry_bytes

    def weight_bytes(self, stage: str) -> int | None:
        return self.stages.get(stage, _NONE).weight_bytes

    def value_bytes(self, value: str, producer: str) -> int | None:
        if value in self.values:
            return self.values[value]
        return self.stages.get(producer, _NONE).output_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_stages(self, stages: Mapping[str, StageCosts]) -> Costs:
        return evolve(self, stages=dict(self.stages) | dict(stages))


_NONE = StageCosts()
UNIT = Costs()


@frozen
class Activations:
    """A memory limit counted in activations, in shares: see :func:`activations`."""

    shares: float


def activations(shares: float) -> Activations:
    """A memory limit of ``shares`` activations per device; one share is all that one device saves for one
    microbatch."""
    if not _is_number(shares) or not shares > 0:
        raise SpecError(f"activations: the limit must be positive, got {shares!r}")
    return Activations(shares)
