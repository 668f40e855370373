"""Recompute: a RECOMPUTE before the backward of every microbatch whose forward keeps nothing.

The task needs only what the forward read, no gradient, so it runs while its device waits for one. It stands before
the whole overlap group of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import evolve

from pipec.errors import ScheduleError
from pipec.given import meant
from pipec.ir import Kind, concat_tables
from pipec.passes.draft import Draft, index_of, leaders

MODES = ("never", "always", "except_last")


def recompute(draft: Draft, mode: str | Mapping[str, str] = "never") -> Draft:
    """Insert RECOMPUTE tasks.

    Args:
        mode: "never", "always", "except_last" (every microbatch but the one whose forward a stage runs last; on
            the last stage its backward follows at once; "except-last" is the same), or a mapping from stage names to
            these, "never" for stages not named.

    Raises:
        ScheduleError: an unknown mode or stage.
    """
    mode = _underscored(mode)
    modes = stage_modes(draft, mode)
    if draft.rule is not None and "except_last" in modes:
        raise ScheduleError(
            f"recompute='except_last' spares the last microbatch of a step, but schedule {draft.schedule!r} is "
            "asynchronous: its microbatches never end; choose 'always', or 'never' for the last stage"
        )
    if draft.recompute != "never":
        if set(modes) != {"never"}:
            raise ScheduleError(
                f"schedule {draft.schedule!r} recomputes by segments itself; leave recompute= out, or its segments"
            )
        return draft
    index, leader = index_of(draft), leaders(draft.table)
    microbatch = draft.table.microbatch
    tables, keys = [draft.table], [np.arange(len(draft.table)) * 2 + 1]
    for number, own in enumerate(modes):
        backward = index.input_backward(number)
        if own == "except_last":
            last = microbatch[index.of(Kind.FORWARD, number).max()]
            backward = backward[np.arange(index.items) % draft.microbatches != last]
        rows = backward[backward >= 0]
        if own == "never" or not len(rows):
            continue
        table = draft.table.take(rows)
        tables.append(evolve(table, kind=np.full(len(rows), Kind.RECOMPUTE), group=np.zeros(len(rows))))
        keys.append(leader[rows] * 2)
    joined = concat_tables(tables).take(np.argsort(np.concatenate(keys), kind="stable"))
    return evolve(draft, table=joined, recompute=_text(mode))


def _underscored(mode: Any) -> Any:
    """``except-last``, as the command line writes it, is the same mode."""
    if isinstance(mode, Mapping):
        return {name: _underscored(own) for name, own in mode.items()}
    return "except_last" if mode == "except-last" else mode


def stage_modes(draft: Draft, mode: Any) -> list[str]:
    names = [stage.name for stage in draft.graph.stages]
    if isinstance(mode, str):
        given = dict.fromkeys(names, mode)
    elif isinstance(mode, Mapping):
        given = dict(mode)
    else:
        raise ScheduleError(f"recompute must be {', '.join(MODES)}, or a mapping from stage names, got {mode!r}")
    wrong = [f"{name!r} is no stage{meant(name, names)}" for name in given if name not in names]
    wrong += [f"unknown mode {m!r}" for m in dict.fromkeys(given.values()) if m not in MODES]
    if wrong:
        raise ScheduleError(f"recompute: {'; '.join(wrong)}; modes are {', '.join(MODES)}")
    return [given.get(name, "never") for name in names]


def _text(mode: str | Mapping[str, str]) -> str:
    return mode if isinstance(mode, str) else ",".join(f"{name}={own}" for name, own in mode.items()) or "never"
