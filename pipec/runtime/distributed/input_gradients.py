"""Gradients of inputs, over ranks.

Every rank that was given a tensor that requires a gradient gets all of its gradient, whoever reads it. So a script that
makes an input from parameters of its own does the same on all ranks, and these parameters stay bit-equal; and where one
rank alone holds what made an input, it alone gets the gradient. When all tasks have ended, each rank that reads such an
input sends what its stages found to the others that want it, and every one of them adds up by itself, from the last
reader to the first, as one process does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RankError
from pipec.ir import Plan
from pipec.runtime.batch import MISSING
from pipec.runtime.borders import Parcel
from pipec.runtime.distributed.carriers import join
from pipec.runtime.distributed.group import Groups, LostError, gather_objects
from pipec.runtime.distributed.wire import Frame, frame_of, payload_of, rebuilt
from pipec.runtime.step import Batch, Step, moved_gradient
from pipec.spec import Spec
from pipec.tree import flatten

TAG = 10  # of messages with gradients of inputs
NOTHING, NONE = -1.0, 0.0  # in a table: an input that was left out, one that requires no gradient
HOST = torch.device("cpu")

Told = dict[int, list[tuple[Any, ...]]]  # by input, per piece the frame of what a rank has found


def mask_of(value: Any) -> float:
    """A number that says which leaves of an input require a gradient."""
    if value is MISSING:
        return NOTHING
    leaves = flatten(value)[0]
    wanted = bytes(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    return 1.0 + zlib.crc32(wanted) if any(wanted) else NONE


class InputGradients:
    """Who wants the gradients of which inputs in a step, and how they get there.

    Attributes:
        wanted: by input the devices of this replica that were given one that requires a gradient.
        asked: whether any rank of any replica wants one.
    """

    def __init__(self, spec: Spec, plan: Plan, groups: Groups, timeout: float) -> None:
        homes = [plan.stage_device(stage) for stage in range(len(spec.stages))]
        self._readers = [sorted({homes[stage] for stage in item.readers}) for item in plan.graph.inputs]
        self._spec, self._groups, self._timeout = spec, groups, timedelta(seconds=timeout)
        self._me = groups.place.device
        self.wanted: dict[int, list[int]] = {}
        self.asked = False

    def agree(self, table: Sequence[Sequence[float]], first: int, batch: Batch, elsewhere: Sequence[int]) -> None:
        """Note who wants what; inputs ``elsewhere`` that want a gradient here are put by.

        Args:
            table: per rank a row with the mask of every input from column ``first`` on.

        Raises:
            RankError: two ranks that read an input do not require the same gradients of it.
        """
        place, count = self._groups.place, len(self._spec.inputs)
        self.wanted = {}
        self.asked = any(mask > NONE for row in table for mask in row[first : first + count])
        if not self.asked:
            return
        for replica, ranks in enumerate(place.ranks):
            rows = table[replica * place.devices : (replica + 1) * place.devices]
            for index in (index for index in range(count) if self._readers[index]):
                masks = [row[first + index] for row in rows]
                self._check(index, masks, ranks)
                wanting = [device for device, mask in enumerate(masks) if mask > NONE]
                if replica == place.replica and wanting:
                    self.wanted[index] = wanting
        batch.apart = {
            index: batch.values[index] for index in elsewhere if self._me in self.wanted.get(index, ())
        }

    def _check(self, index: int, masks: Sequence[float], ranks: Sequence[int]) -> None:
        """Whoever reads an input makes its gradient; others may want it, too."""
        readers = self._readers[index]
        mask = masks[readers[0]]
        for device, other in enumerate(masks):
            if other == mask or (device not in readers and other <= NONE):
                continue
            one, two, name = ranks[readers[0]], ranks[device], self._spec.inputs[index].name
            if NONE in (mask, other):
                with_, without = (one, two) if mask > NONE else (two, one)
                told = f"requires a gradient on rank {with_}, but not on rank {without}, which reads it"
            else:
                told = f"has other tensors that require a gradient on rank {one} than on rank {two}"
            raise RankError(
                f"input {name!r} {told}; give the ranks that read an input the same, and others the same or one that "
                "requires none", two,
            )

    def exchange(self, step: Step) -> None:
        """Give every rank that wants them the gradients that all ranks have found. All tasks have ended.

        Raises:
            RankError: a rank has ended or does not answer.
        """
        own = {index: self._found(step, index) for index in self.wanted if self._me in self._readers[index]}
        frames = {index: [frame_of(parcel) for parcel in column] for index, column in own.items()}
        told: list[Told] = gather_objects(self._groups.pipeline, {
            index: [(f.kind, f.leaves, f.rest, f.steady) for f, _ in column] for index, column in frames.items()
        }, self._groups.place.devices)
        came = self._sent({index: _joined(column) for index, column in frames.items()}, told)
        for index, wanting in self.wanted.items():
            if self._me not in wanting:
                continue
            columns = [own[index] if device == self._me else _parcels(told[device][index], came[index, device])
                       for device in self._readers[index]]
            step.input_gradients[index] = [_together(parcels) for parcels in zip(*columns, strict=True)]
        for index, value in step.batch.apart.items():
            step.batch.values[index] = value

    def _found(self, step: Step, index: int) -> list[Parcel]:
        """What the stages of this rank have found, on the host."""
        column = step.input_gradients[index] or []
        return [parcel.mapped(lambda gradient: moved_gradient(gradient, HOST)) for parcel in column]

    def _sent(self, mine: dict[int, Tensor], told: Sequence[Told]) -> dict[tuple[int, int], Tensor]:
        """Send what this rank has found to all that want it; by input and device what the others have."""
        group, works = self._groups.pipeline, list[Any]()
        came: dict[tuple[int, int], Tensor] = {}
        for index, wanting in self.wanted.items():
            for device in self._readers[index]:
                for other in wanting:
                    if device == other or self._me not in (device, other):
                        continue
                    if device == self._me:
                        works.append(group.send([mine[index]], other, TAG))
                    else:
                        size = sum(Frame(*frame).span for frame in told[device][index])
                        came[index, device] = torch.empty(size, dtype=torch.uint8)
                        works.append(group.recv([came[index, device]], device, TAG))
        try:
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise LostError(f"the gradients of inputs did not arrive: {error}") from error
        return came


def _joined(column: Sequence[tuple[Frame, list[Tensor]]]) -> Tensor:
    """Everything of one input in one buffer."""
    buffer, at = torch.empty(sum(frame.span for frame, _ in column), dtype=torch.uint8), 0
    for frame, tensors in column:
        join(frame, tensors, buffer[at : at + frame.span])
        at += frame.span
    return buffer


def _parcels(told: Sequence[tuple[Any, ...]], buffer: Tensor) -> list[Parcel]:
    """What :func:`_joined` has put together on another rank."""
    made, at = [], 0
    for one in told:
        frame = Frame(*one)
        part = buffer[at : at + frame.span]
        tensors = [rebuilt(frame, number, part, place) for number, place in enumerate(frame.offsets)]
        made.append(payload_of(frame, tensors))
        at += frame.span
    return made


def _together(parcels: Sequence[Parcel]) -> Parcel:
    """The gradients of one piece from all ranks that read it."""
    made = Parcel(())
    for parcel in parcels:
        made.receive(parcel)
    return made
