"""A timeline: when every task ran, and what follows from that (bubble, memory, copies, critical path)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipec.costs import Costs
from pipec.excerpt import Excerpt
from pipec.footprint import WeightMemory, weight_memory
from pipec.ir import BACKWARDS, TO_HOST, Buffer, Kind, Lane, Plan, Task
from pipec.periods import settled

Floats = npt.NDArray[np.float64]
USEFUL = (Kind.FORWARD, *BACKWARDS)


class Interval(NamedTuple):
    """A task on a lane of a device during the half-open interval [start, end)."""

    device: int
    lane: Lane
    task: Task
    start: float
    end: float


class Timeline:
    """When the tasks of ``plan`` run. Attributes are computed when first asked for.

    Attributes:
        start, end: per task, in the unit of the costs.
        cause: per task the task whose end its start waited for last, -1 at time zero.
        measured: times are from a clock and not from costs.
        excerpt: the run and the whole plan of which this is one step or flush; None for all others.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        start: Floats,
        end: Floats,
        cause: npt.NDArray[np.int32],
        measured: bool = False,
        excerpt: Excerpt | None = None,
    ) -> None:
        self.plan, self.costs, self.start, self.end, self.cause = plan, costs, start, end, cause
        self.measured, self.excerpt = measured, excerpt

    @property
    def whole(self) -> Plan:
        """The plan; of a step of an asynchronous run the whole one."""
        return self.plan if self.excerpt is None else self.excerpt.plan

    def item(self, task: Task) -> tuple[int, int]:
        """The (minibatch, microbatch) of one of its tasks: in the trace of an asynchronous step as its result's
        ``finished`` counts them, else as the plan does."""
        return divmod(task.microbatch, self.plan.minibatch) if self.excerpt is None else self.excerpt.item(task)

    @cached_property
    def makespan(self) -> float:
        """Last end over all devices, UPDATE and COPY included."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def span(self) -> float:
        """The largest (last end - first start) of one device's F, B and W tasks and updates."""
        spans = [0.0]
        for device in range(self.plan.devices):
            ids = self.plan.lanes[device][Lane.COMPUTE]
            if len(ids):
                spans.append(float(self.end[ids].max() - self.start[ids].min()))
        return max(spans)

    @cached_property
    def _times(self) -> Floats:
        """Time spent per kind and device, shape (kinds, devices)."""
        table, devices = self.plan.table, self.plan.devices
        key = table.kind.astype(np.int64) * devices + table.device
        made = np.bincount(key, self.end - self.start, minlength=len(Kind) * devices)
        return np.asarray(made.reshape(len(Kind), devices), np.float64)

    def _time(self, device: int, kinds: tuple[Kind, ...]) -> float:
        return float(self._times[list(kinds), device].sum())

    @cached_property
    def useful(self) -> list[float]:
        """Per device the time in forwards and backwards; recompute, copies and updates are not useful work."""
        return [self._time(d, USEFUL) for d in range(self.plan.devices)]

    @cached_property
    def recompute(self) -> list[float]:
        """Per device the time in RECOMPUTE."""
        return [self._time(d, (Kind.RECOMPUTE,)) for d in range(self.plan.devices)]

    @cached_property
    def busy(self) -> list[float]:
        """Per device the share of the makespan in which its compute lane works."""
        kinds = tuple(kind for kind in Kind if kind not in (Kind.COPY, Kind.REDUCE))  # these have lanes of their own
        return [self._time(d, kinds) / self.makespan if self.makespan else 0.0 for d in range(self.plan.devices)]

    @cached_property
    def period(self) -> float:
        """Time from one minibatch to the next: of a steady step in an asynchronous plan, else the makespan."""
        from pipec.steady import measured_period, steady_period

        if not self.plan.asynchronous:
            return self.makespan
        if self.measured:
            return measured_period(self.plan, self.end)
        return steady_period(self.plan, self.costs, self.end - self.start)

    @cached_property
    def step(self) -> float:
        """Time of a ``run.step()`` of an asynchronous plan, whose devices begin and end it together: the period, or a
        little more; of any other the makespan."""
        from pipec.steady import step_time

        if not self.plan.asynchronous or self.measured:
            return self.period
        return max(self.period, step_time(self.plan, self.costs, self.end - self.start))

    @cached_property
    def period_useful(self) -> list[float]:
        """Per device the time in forwards and backwards of one minibatch: of a steady step in an asynchronous plan."""
        plan, table = self.plan, self.plan.table
        if not plan.asynchronous:
            return self.useful
        ids = settled(plan).ids(plan.minibatches - 1)
        ids = ids[np.isin(table.kind[ids], USEFUL)]
        spent = np.bincount(table.device[ids], self.end[ids] - self.start[ids], minlength=plan.devices)
        return [float(time) for time in spent]

    @property
    def bubble_time(self) -> float:
        """Makespan minus the busiest device's useful time; of one steady period in an asynchronous plan."""
        return _rounded(self.period - max(self.period_useful), self.period)

    @property
    def bubble(self) -> float:
        """1 - useful time of all devices / (devices x makespan); of one steady period in an asynchronous plan."""
        whole = self.plan.devices * self.period
        return _rounded(1.0 - sum(self.period_useful) / whole, 1.0) if whole else 0.0

    @cached_property
    def copies(self) -> int:
        """Number of COPY tasks between devices."""
        return int(self._copied(host=False).sum())

    @cached_property
    def host_copies(self) -> int:
        """Number of COPY tasks to and from host memory."""
        return int(self._copied(host=True).sum())

    def _copied(self, host: bool) -> npt.NDArray[np.bool_]:
        table = self.plan.table
        return np.asarray((table.kind == Kind.COPY) & ((table.gradient >= TO_HOST) == host))

    @cached_property
    def copy_bytes(self) -> int | None:
        """Bytes moved between devices, None when a size is unknown."""
        return self._bytes_of(self._copied(host=False))

    @cached_property
    def host_copy_bytes(self) -> int | None:
        """Bytes moved to and from host memory, None when a size is unknown."""
        return self._bytes_of(self._copied(host=True))

    def _bytes_of(self, copies: npt.NDArray[np.bool_]) -> int | None:
        from pipec.simulate import value_bytes

        used = self.plan.table.value[copies]
        sizes = value_bytes(self.plan, self.costs)
        if any(sizes[v] is None for v in set(used.tolist())):
            return None
        counts = np.bincount(used, minlength=len(sizes))
        return int(sum(int(n) * (size or 0) for n, size in zip(counts, sizes, strict=True)))

    def memory(self, device: int, weights: Floats) -> tuple[Floats, Floats]:
        """Steps of the sum of ``weights`` over the buffers alive on ``device``: (times, level from that time on).

        A buffer lives in the half-open interval from its writer's start to its free point's end. With ``byte_weights``
        activations change their size when the input half of their backward ends.
        """
        buffers = self.plan.buffers
        half, later = self._halves if weights is self.byte_weights else (np.full(len(weights), -1), weights)
        own = np.flatnonzero((buffers.device == device) & ((weights != 0) | (later != 0)))
        writer, free = buffers.writer[own], buffers.free[own]  # -1: outside what was measured
        times = np.concatenate([np.where(writer < 0, 0.0, self.start[writer]),
                                np.where(free < 0, self.makespan, self.end[free])])
        change = np.concatenate([weights[own], -later[own]])
        shrunk = own[half[own] >= 0]
        times = np.concatenate([times, self.end[half[shrunk]]])
        change = np.concatenate([change, (later - weights)[shrunk]])
        order = np.lexsort((change, times))  # at one instant frees come first
        times, level = times[order], np.cumsum(change[order])
        last = np.append(np.flatnonzero(np.diff(times)), len(times) - 1) if len(times) else np.empty(0, int)
        return times[last], np.round(level[last], 9)

    def _peaks(self, weights: Floats) -> list[float]:
        return [float(self.memory(d, weights)[1].max(initial=0.0)) for d in range(self.plan.devices)]

    @cached_property
    def share_weights(self) -> Floats:
        """Per buffer its activations in shares; zero for values and gradients."""
        from pipec.simulate import shares

        buffers = self.plan.buffers
        saved = buffers.kind == Buffer.ACTIVATION
        return np.where(saved, shares(self.plan)[np.where(saved, buffers.ref, 0)] / self.plan.slices, 0.0)

    @cached_property
    def peak_share(self) -> list[float]:
        """Per device the most activations alive at once, in shares."""
        return self._peaks(self.share_weights)

    @cached_property
    def _buffer_bytes(self) -> Floats | None:
        from pipec.simulate import buffer_bytes

        sizes = buffer_bytes(self.whole, self.costs)
        return sizes if sizes is None or self.excerpt is None else sizes[self.excerpt.buffers]

    @cached_property
    def byte_weights(self) -> Floats | None:
        """Per buffer its bytes of device memory, None when a size is unknown."""
        sizes = self._buffer_bytes
        return None if sizes is None else np.where(self.plan.buffers.kind == Buffer.HOST, 0.0, sizes)

    @cached_property
    def _halves(self) -> tuple[npt.NDArray[np.int64], Floats]:
        """Per buffer the task after which its bytes change (-1: none), and its bytes from then on."""
        from pipec.simulate import later_bytes

        return later_bytes(self.plan, self.costs, np.zeros(0) if self.byte_weights is None else self.byte_weights)

    @cached_property
    def peak_bytes(self) -> list[int] | None:
        """Per device the most bytes of activations, values, gradients and stashed weights at once, None when a size is
        unknown."""
        return None if self.byte_weights is None else [int(peak) for peak in self._peaks(self.byte_weights)]

    @cached_property
    def host_peak_bytes(self) -> list[int] | None:
        """Per device the most bytes in host memory of values that it made, None when a size is unknown."""
        sizes = self._buffer_bytes
        if sizes is None:
            return None
        return [int(peak) for peak in self._peaks(np.where(self.plan.buffers.kind == Buffer.HOST, sizes, 0.0))]

    @cached_property
    def weight_memory(self) -> list[WeightMemory] | None:
        """Per device the memory for weights, gradients, optimizer, stashed versions and what the weight rule keeps;
        None when ``weight_bytes`` of a stage is unknown. Stashed versions count in ``peak_bytes`` too."""
        return weight_memory(self.whole, self.costs)

    @cached_property
    def critical_path(self) -> list[int]:
        """Task ids from time zero to the makespan, each starting when the one before it ended."""
        if not len(self.end):
            return []
        latest = np.flatnonzero(self.end == self.end.max())
        kinds = self.plan.table.kind[latest]
        task = int(latest[np.argmax((kinds != Kind.COPY) & (self.end[latest] > self.start[latest]))])
        path = []
        while task >= 0:
            path.append(task)
            task = int(self.cause[task])
        return path[::-1]

    @property
    def intervals(self) -> Iterator[Interval]:
        """Every task on every lane, by device, lane and time."""
        for device, lanes in enumerate(self.plan.lanes):
            for lane, ids in zip(Lane, lanes, strict=True):
                for i in ids.tolist():
                    yield Interval(device, lane, self.plan.table.task(i), float(self.start[i]), float(self.end[i]))

    def draw(self, path: str | Path | None = None, **options: Any) -> Any:
        """Draw this timeline. See :func:`pipec.draw`."""
        from pipec.render import draw_timeline

        return draw_timeline(self, path, **options)

    def to_chrome_trace(
        self, path: str | Path, *others: Timeline, names: Sequence[str] | None = None, unit: str = "ms"
    ) -> None:
        """Write this timeline, and ``others`` beside it, as a Chrome/Perfetto trace (gzip when it ends in ``.gz``).

        For example ``plan.simulate(costs).to_chrome_trace("both.json.gz", run.trace())``. Costs without a unit of
        time are shown with one unit as one ``unit``. See :func:`pipec.render.trace.write_trace`.

        Raises:
            RenderError: names that do not fit, times that are not finite, or a file that cannot be written.
        """
        from pipec.render.trace import write_trace

        write_trace([self, *others], path, names=names, unit=unit)

    def to_costs(self, base: Costs | None = None) -> Costs:
        """What the tasks of this measured timeline took, as costs in milliseconds: for other schedules, numbers of
        microbatches or placements of the same stages. Every rank of a run over several processes gets the same.

        Args:
            base: sizes, bandwidths and what the plan did not run; by default the costs of the plan. Halves of a
                backward that ran whole keep their proportion.

        Returns:
            Costs whose stages have the medians over the microbatches, and the latency between devices.

        Raises:
            SpecError: the timeline was simulated, or ``base`` names what the pipeline has not.
        """
        from pipec.measured import measured_costs

        return measured_costs(self, base)

    @property
    def _measured(self) -> str:
        if self.excerpt is not None:
            return f"; one measured step of an asynchronous plan, the {self.excerpt.name}"
        return "; measured" if self.measured else ""

    def _steady(self, unit: str) -> str:
        period, step = f"period {self.period:.5g}{unit} a minibatch", f"step {self.step:.5g}{unit}"
        return f"{period}, {step}, " if self.plan.asynchronous else ""

    def __repr__(self) -> str:
        return f"<Timeline of {self.plan.graph.name!r}: makespan {self.makespan:g}, bubble {self.bubble:.1%}>"

    def __str__(self) -> str:
        unit = f" {self.costs.unit}" if self.costs.unit else ""
        lines = [
            f"{self.plan.graph.name}: {self.plan.schedule}, {self.plan.devices} devices, "
            f"{self.plan.minibatch} microbatches"
            + (f" a minibatch, weights: {self.whole.weights}" if self.whole.asynchronous else "")
            + self._measured,
            f"makespan {self.makespan:.5g}{unit}, span {self.span:.5g}{unit}, {self.copies} copies"
            + ("" if self.copy_bytes is None else f" of {show_bytes(self.copy_bytes)}")
            + (f", {self.host_copies} to and from host memory" if self.host_copies else "")
            + (f" of {show_bytes(self.host_copy_bytes)}" if self.host_copy_bytes else ""),
            self._steady(unit)
            + f"bubble {self.bubble:.1%} of all devices' time, {self.bubble_time:.4g}{unit} beyond the busiest one's "
            "work",
        ]
        if self.plan.asynchronous:
            lines[1] += f", laid out over {self.plan.minibatches} minibatches"
        if self.weight_memory is not None:
            lines.append(weight_line(self.weight_memory))
        lines.append(
            f"{'device':<8}{'busy':>8}{'useful':>10}{'recompute':>11}{'activations':>13}{'peak memory':>13}"
            + (f"{'host memory':>13}" if self.host_copies else "")
        )
        for device in range(self.plan.devices):
            peak = _shown(self.peak_bytes, device)
            lines.append(
                f"{device:<8}{self.busy[device]:>8.1%}{self.useful[device]:>10.4g}{self.recompute[device]:>11.4g}"
                f"{self.peak_share[device]:>13.4g}{peak:>13}"
                + (f"{_shown(self.host_peak_bytes, device):>13}" if self.host_copies else "")
            )
        return "\n".join(lines)


def _shown(sizes: Sequence[int] | None, device: int) -> str:
    return "unknown" if sizes is None else show_bytes(sizes[device])


def _rounded(difference: float, scale: float) -> float:
    """A difference of times of about ``scale``, without what is left of rounding."""
    return 0.0 if abs(difference) < 1e-11 * scale else difference


def weight_line(memory: Sequence[WeightMemory]) -> str:
    """What weights take on the device that needs most for them."""
    worst = max(memory, key=lambda own: own.total)
    words = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "stash": "stashed versions",
             "rule": "the weight rule's own"}
    parts = [f"{word} {show_bytes(size)}" for name, word in words.items() if (size := getattr(worst, name))]
    return f"weights and optimizer at most {show_bytes(worst.total)} a device: " + (", ".join(parts) or "none")


def show_bytes(count: float) -> str:
    """A size as people write it: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
