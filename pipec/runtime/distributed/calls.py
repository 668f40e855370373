"""How ranks on different hosts get a connection for each pair of them.

Every rank opens a door at an address of its own, and all tell each other theirs and a key through the process group.
Each calls those before it; both ends show that they know the key, so nobody else's call is taken for a rank's. What one
rank finds wrong is told to all, and none keeps a connection then.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from time import monotonic
from typing import Any

import torch.distributed as dist
from attrs import define

from pipec.runtime.distributed.group import gather_objects
from pipec.runtime.distributed.records import MOST

PATIENCE = 10.0  # seconds for a call, and for all answers
SIGNED = hashlib.sha256().digest_size
ADDRESS_OF = 0x8915  # what Linux is asked for an interface's address


@define(eq=False)
class Calls:
    """What came of the calls.

    Attributes:
        lines: a connection to every other rank, by rank; None unless all have one.
        why: the first thing that went wrong, on any rank.
    """

    lines: dict[int, socket.socket] | None
    why: str = ""


def called(group: Any, me: int, size: int, near: Collection[int] = (), most: int | None = None) -> Calls:
    """A connection to every other rank of ``group``, or on all of them none.

    Args:
        near: ranks that need none; they leave this one out as well.
        most: ranks from beyond which on there are none; by default ``MOST``.
    """
    lines: dict[int, socket.socket] = {}
    door, place, why = _opened(size, MOST if most is None else most)
    try:
        told = gather_objects(group, (place, why, secrets.token_bytes(32)), size)
        why = next((f"device {n}: {text}" for n, (_, text, _) in enumerate(told) if text), "")
        if why:
            return Calls(None, why)
        key = told[0][2]
        wrong = ""
        try:
            for peer in (one for one in range(me) if one not in near):
                lines[peer] = _call(told[peer][0], peer)
                lines[peer].sendall(struct.pack("<q", me) + _signature(key, me, peer))
        except OSError as error:
            wrong = f"device {me} does not reach device {peer} at {_spelt(told[peer][0])}: {error}"
        why = _first(gather_objects(group, wrong, size))  # then every call has been made
        if why:
            return Calls(None, _dropped(lines, why))
        if door is not None:
            wrong = _answered(door, lines, key, me, size, near)
        for peer in [one for one in lines if one < me] if not wrong else ():
            if _received(lines[peer], SIGNED, monotonic() + PATIENCE) != _signature(key, peer, me):
                wrong = f"device {me} has called device {peer} at {_spelt(told[peer][0])}, and somebody else answers"
                break
        why = _first(gather_objects(group, wrong, size))
        return Calls(None, _dropped(lines, why)) if why else Calls(dict(sorted(lines.items())))
    finally:
        if door is not None:
            door.close()


def _first(told: list[str]) -> str:
    return next(filter(None, told), "")


def _dropped(lines: dict[int, socket.socket], why: str) -> str:
    for line in lines.values():
        line.close()
    return why


def _opened(size: int, most: int) -> tuple[socket.socket | None, Any, str]:
    """A door where others can call, its address, and why there is none."""
    if not hasattr(select, "poll") or not hasattr(socket, "MSG_DONTWAIT"):
        return None, None, "this system has no poll()"
    if size > most:
        return None, None, f"{size} ranks are more than the {most} that get a socket for each pair"
    host = own_address()
    door = None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, socket.SOCK_STREAM)
        door.bind(where)
        door.listen(size + 16)  # somebody else may call as well
        return door, door.getsockname()[:2], ""
    except (OSError, UnicodeError) as error:  # the second one about a name that is none
        if door is not None:
            door.close()
        return None, None, f"no socket can be opened at {host}: {error}"


def own_address() -> str:
    """The address at which other hosts reach this one: that of the interface of ``GLOO_SOCKET_IFNAME``, else the one
    from which this host reaches the process group's store, else that of its name."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        found = _of_interface(name.strip())
        if found:
            return found
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for host, port in ((getattr(store, "host", None), getattr(store, "port", 0)), (socket.gethostname(), 0)):
        found = _towards(host, port) if host else None
        if found:
            return found
    return "127.0.0.1"


def _of_interface(name: str) -> str | None:
    """The address of an interface, of version 4."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        import fcntl

        answer = fcntl.ioctl(asked.fileno(), ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _towards(host: str, port: int) -> str | None:
    """The address from which this host would send to another; nothing is sent."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, where in socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as asked:
                asked.connect(where)
                return str(asked.getsockname()[0])
    return None


def _call(place: Any, peer: int) -> socket.socket:
    """Connect to another rank's door."""
    line = socket.create_connection(place, timeout=PATIENCE)
    line.settimeout(PATIENCE)
    return line


def _answered(
    door: socket.socket, lines: dict[int, socket.socket], key: bytes, me: int, size: int, near: Collection[int] = ()
) -> str:
    """Take the calls of the ranks after this one, which all have been made; what went wrong, if anything did."""
    end = monotonic() + PATIENCE
    waiting: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(door, select.POLLIN)
    door.setblocking(False)
    try:
        while len(lines) + len(near) < size - 1:
            ready = poll.poll(max(0.0, end - monotonic()) * 1e3)
            if not ready:
                missing = ", ".join(str(n) for n in range(me + 1, size) if n not in lines and n not in near)
                return f"device {me} has waited {PATIENCE:g} s for calls of devices {missing}"
            for number, _ in ready:
                if number == door.fileno():
                    with suppress(OSError):
                        line, _ = door.accept()
                        waiting[line.fileno()] = line
                        poll.register(line, select.POLLIN)
                    continue
                poll.unregister(number)
                line = waiting.pop(number)
                peer = _known(line, key, me, size)
                if peer is None or peer in lines or peer in near:  # somebody else
                    line.close()
                    continue
                lines[peer] = line
                line.settimeout(PATIENCE)
                line.sendall(_signature(key, me, peer))
    except OSError as error:
        return f"device {me} could not answer: {error}"
    finally:
        for line in waiting.values():
            line.close()
    return ""


def _known(line: socket.socket, key: bytes, me: int, size: int) -> int | None:
    """Which rank calls; None: none of this pipeline's. What a rank says has come in one piece, or comes soon."""
    said = _received(line, 8 + SIGNED, monotonic() + 1.0)
    if len(said) < 8 + SIGNED:
        return None
    (peer,) = struct.unpack_from("<q", said)
    fine = me < peer < size and hmac.compare_digest(said[8:], _signature(key, peer, me))
    return peer if fine else None


def _received(line: socket.socket, count: int, end: float) -> bytes:
    """The first ``count`` bytes, or those that have come by then."""
    made = b""
    with suppress(OSError):
        while len(made) < count and (left := end - monotonic()) > 0:
            line.settimeout(left)
            more = line.recv(count - len(made))
            if not more:
                break
            made += more
    return made


def _signature(key: bytes, source: int, target: int) -> bytes:
    """What only a rank can say, about itself and whom it speaks to."""
    return hmac.digest(key, struct.pack("<2q", source, target), "sha256")


def _spelt(place: Any) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
