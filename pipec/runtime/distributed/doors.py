"""How ranks of one host get a socket for each pair of them.

Every rank opens a door whose address is none on any other host, and calls those before it. Whoever is reached so is on
the same host; the others are not, and no name has to tell.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
from contextlib import nullcontext
from typing import Any

from pipec.runtime.distributed.blocks import PAGE, Block
from pipec.runtime.distributed.group import gather_objects

PATIENCE = 10.0  # seconds for all calls


def reached(group: Any, me: int, size: int, most: int) -> tuple[dict[int, socket.socket], bool]:
    """Sockets to the ranks of ``group`` that are processes of this user on this Linux host, by rank; and whether every
    pair of all ranks has one.

    Args:
        most: ranks from beyond which on there are none.
    """
    lines: dict[int, socket.socket] = {}
    door, address = _opened(size, most)
    with door or nullcontext():
        addresses = gather_objects(group, address, size)
        for peer in range(me) if door is not None and address is not None else ():
            made = None if addresses[peer] is None else _called(addresses[peer], me, peer)
            if made is not None:
                lines[peer] = made
        calls = gather_objects(group, sorted(lines), size)  # then every call has been made
        if door is not None:
            _answered(door, lines, {peer for peer in range(me + 1, size) if me in calls[peer]})
    both = gather_objects(group, sorted(lines), size)
    for peer in sorted(lines):
        if me not in both[peer]:
            lines.pop(peer).close()
    whole = all(len(own) == size - 1 for own in both)
    return dict(sorted(lines.items())), whole


def _opened(size: int, most: int) -> tuple[socket.socket | None, str | None]:
    """A door where others can call, and its address; None where that cannot be."""
    if not (sys.platform == "linux" and hasattr(os, "memfd_create") and 1 < size <= most):
        return None, None
    door = None
    try:
        os.close(Block(0, PAGE).file)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0pipec-{secrets.token_hex(16)}"
        door.bind(address)
        door.listen(size)
        return door, address
    except (OSError, RuntimeError):
        return door, None


def _called(address: str, me: int, peer: int) -> socket.socket | None:
    """Call rank ``peer``; None where it is on another host."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(address)
        if _mine(line):
            line.send(me.to_bytes(4, "little"))
            return line
    except OSError:
        pass
    line.close()
    return None


def _answered(door: socket.socket, lines: dict[int, socket.socket], callers: set[int]) -> None:
    """Take the calls of some ranks, which all have been made."""
    door.settimeout(PATIENCE)
    try:
        while callers - lines.keys():
            line, _ = door.accept()
            line.settimeout(PATIENCE)
            if not _mine(line):
                line.close()
                continue
            lines[int.from_bytes(line.recv(4), "little")] = line
            line.settimeout(None)
    except OSError:
        return


def _mine(line: socket.socket) -> bool:
    """Whether the other end is a process of this user: what comes on a line is trusted."""
    return owner(line)[1] == os.getuid()


def owner(line: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return process, user
