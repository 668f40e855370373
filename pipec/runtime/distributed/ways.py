"""In which way values travel between the ranks of a pipeline on CPUs: the first one that all of them can take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipec.runtime.distributed.calls import called
from pipec.runtime.distributed.far import FarChannels
from pipec.runtime.distributed.far_lines import FarLines
from pipec.runtime.distributed.group import Place
from pipec.runtime.distributed.lines import Lines, connected
from pipec.runtime.distributed.near import NearChannels

MEMORY, SOCKETS, GLOO = "shared memory", "sockets", "gloo"


def lines_between(
    group: Any, place: Place, timeout: float, ways: Sequence[str]
) -> tuple[Lines | FarLines | None, str]:
    """Lines between all ranks of ``group``, and the words for the way they are; None where values travel through gloo.

    Args:
        timeout: seconds after which a rank is given up whose line is full, as it does not read.
        ways: those that may be taken.
    """
    near = connected(group, place.device, place.devices, timeout) if MEMORY in ways else None
    if near is not None:
        return near, MEMORY
    if SOCKETS not in ways:
        return None, GLOO
    calls = called(group, place.device, place.devices)
    if calls.lines is None:
        return None, f"{GLOO}, as there are no sockets between all ranks: {calls.why}"
    return FarLines(place.device, calls.lines), SOCKETS


def channels_of(lines: Lines | FarLines, *args: Any) -> NearChannels | FarChannels:
    """Channels over lines; the arguments are those of either kind behind the lines."""
    return FarChannels(lines, *args) if isinstance(lines, FarLines) else NearChannels(lines, *args)
