"""In which way values travel between ranks of a pipeline on CPUs: for each pair the first one that both can take."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from pipec.runtime.distributed.calls import called
from pipec.runtime.distributed.far import FarChannels
from pipec.runtime.distributed.far_lines import FarLines
from pipec.runtime.distributed.group import Place
from pipec.runtime.distributed.lines import Lines, attention, neighbours
from pipec.runtime.distributed.mixed import MixedChannels, MixedLines
from pipec.runtime.distributed.near import NearChannels

MEMORY, SOCKETS, GLOO = "shared memory", "sockets", "gloo"

AnyLines = Lines | FarLines | MixedLines


def lines_between(group: Any, place: Place, timeout: float, ways: Sequence[str]) -> tuple[AnyLines | None, str]:
    """Lines between all ranks of ``group``, and the words for the way they are; None where values travel through gloo.

    Ranks of one host share memory, others have sockets; where a pair of ranks has neither, all take gloo.

    Args:
        timeout: seconds after which a rank is given up whose line is full, as it does not read.
        ways: those that may be taken.
    """
    me, size, ranks = place.device, place.devices, place.ranks[place.replica]
    near: dict[int, socket.socket] = {}
    if MEMORY in ways:
        near, whole = neighbours(group, me, size)
        if whole:
            return Lines(me, near, timeout, attention()), MEMORY
    if SOCKETS not in ways:
        _drop(near)
        return None, GLOO
    calls = called(group, me, size, near)
    if calls.lines is None:
        _drop(near)
        return None, f"{GLOO}, as there are no sockets between all ranks: {calls.why}"
    if not near:
        return FarLines(me, calls.lines), SOCKETS
    if not calls.lines:
        return Lines(me, near, timeout, attention()), MEMORY
    mixed = MixedLines(
        me, lambda poll: Lines(me, near, timeout, poll=poll), partial(FarLines, me, calls.lines), attention()
    )
    kinds = {MEMORY: near, SOCKETS: calls.lines}
    return mixed, ", ".join(f"{way} with {_named(ranks[peer] for peer in own)}" for way, own in kinds.items())


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _drop(sockets: dict[int, socket.socket]) -> None:
    for one in sockets.values():
        one.close()


def channels_of(lines: AnyLines, *args: Any) -> NearChannels | FarChannels:
    """Channels over lines; the arguments are those of any kind behind the lines."""
    if isinstance(lines, MixedLines):
        return MixedChannels(lines, *args)
    return FarChannels(lines, *args) if isinstance(lines, FarLines) else NearChannels(lines, *args)
