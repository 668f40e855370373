"""A schedule written down as text: one row per device, tokens as in ``0F0 1F0 1B0``, ``0F3&3B1`` for an overlap,
``0F3.1`` for a slice."""

from __future__ import annotations

import re

from attrs import frozen

from pipec.errors import ScheduleError
from pipec.ir import LETTERS
from pipec.schedules.base import Op, Order, Overlap, Problem, op_name

_TOKEN = re.compile(r"([0-9]+)([FBIW])([0-9]+)(?:\.([0-9]+))?")


@frozen
class TextSchedule:
    """The schedule that :func:`parse_schedule` read."""

    rows: tuple[tuple[Op | Overlap, ...], ...]
    name: str = "text"
    placement: str = "linear"

    def order(self, problem: Problem) -> Order:
        if len(self.rows) != problem.devices:
            raise ScheduleError(
                f"schedule {self.name!r} has {len(self.rows)} rows, but there are {problem.devices} "
                "devices; write one row per device"
            )
        return self.rows


def parse_schedule(text: str, name: str = "text", placement: str = "linear") -> TextSchedule:
    """Read a schedule: one line per device, tokens ``{chunk}{F|B|I|W}{microbatch}`` between blanks or commas.

    All tasks may be of slices, ``{chunk}{F|B|I|W}{microbatch}.{slice}``. Tasks joined by ``&`` run as one (see
    :func:`pipec.schedules.overlap`). Lines that are empty or start with ``#`` are skipped; a line may start with
    ``device n:`` or ``n:``.

    Raises:
        ScheduleError: naming every token that cannot be read.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"schedule {name!r}: expected text, got {type(text).__name__}")
    rows, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"^\s*(device\s+)?\d+\s*:", "", line.split("#")[0]).strip()
        if not line:
            continue
        row: list[Op | Overlap] = []
        for token in re.split(r"[\s,]+", line):
            ops = [_read(part) for part in token.split("&")]
            problems += [f"line {number}: {token!r} is no task"] if None in ops else []
            there = tuple(op for op in ops if op is not None)
            row += there if len(there) < 2 else [Overlap(there)]
        rows.append(tuple(row))
    if problems:
        raise ScheduleError(
            f"schedule {name!r}: " + "; ".join(problems)
            + ". A task is written chunk, letter, microbatch: 0F3, 1B0"
        )
    return TextSchedule(tuple(rows), name, placement)


def _read(token: str) -> Op | None:
    match = _TOKEN.fullmatch(token)
    if match is None:
        return None
    slice_ = () if match[4] is None else (int(match[4]),)
    return (int(LETTERS[match[2]]), int(match[1]), int(match[3]), *slice_)


def format_schedule(order: Order) -> str:
    """The text that :func:`parse_schedule` reads back."""
    return "\n".join(" ".join(str(op) if isinstance(op, Overlap) else op_name(op) for op in row) for row in order)
