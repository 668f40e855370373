"""Who is gone, who stands still, and where every rank stands: told over sockets of its own.

Every rank has a connection to every other one for this alone, whichever way values travel: on one host a Unix socket,
between hosts one of TCP, and torch.distributed's store where neither can be had. A thread listens there. The kernel
tells it at once when a process has ended; a rank that gives up says first whom it misses, so that those who lose their
connection only because of that name the right one; and a rank whose process stops gives no sign of life any more. What
a rank is at, and for whom it waits, is in its note: mapped by ranks of its host, sent to others.

When somebody is gone, the thread wakes the one that runs the tasks: by a descriptor where that polls its lines, by
hanging up the groups of gloo where it waits for one of those.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, time_ns
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipec.runtime.distributed.blame import Seen, blamed
from pipec.runtime.distributed.bulletin import Bulletin, Story
from pipec.runtime.distributed.calls import called
from pipec.runtime.distributed.doors import reached
from pipec.runtime.distributed.group import Groups, gather_objects
from pipec.runtime.distributed.lookout import GRACE, STILL, Lookout
from pipec.runtime.distributed.notes import ALL, CALL, MICROBATCHES, NOBODY, TASK, WAITS, Note, Stand, numbers_of
from pipec.runtime.distributed.posts import Post, process_of

MOST = 256  # ranks: beyond, each would hold too many sockets
LOOK = 0.1  # seconds between two looks at who waits for whom
TAG = 8  # of messages that never come


class Found(NamedTuple):
    """Who is to blame.

    Attributes:
        story: what another rank has said about it; the rest is empty then.
        path: the places of ranks that wait for each other, from this one to the one to blame; this one alone: unknown.
        left: that one has closed its runner.
        still: its process has stopped.
    """

    story: Story | None
    path: Sequence[int] = ()
    left: bool = False
    still: bool = False


class Watch:
    """What this rank tells the others, and knows of them.

    Attributes:
        look: what is known, and the thread that hears it.
    """

    def __init__(self, groups: Groups, me: int, near: bool = True, far: bool = True) -> None:
        """
        Args:
            me: this rank's place among all of ``groups.everyone``, which make theirs together.
            near, far: whether sockets of one host, and between hosts, may be used.
        """
        size = len(groups.place.everyone)
        self.me, self.size, self._note = me, size, Note()
        lines, whole = reached(groups.everyone, me, size, MOST) if near else ({}, size == 1)
        mapped = _shared(lines, self._note)
        if far and not whole:
            others = called(groups.everyone, me, size, lines, MOST).lines
            whole = others is not None
            lines |= others or {}
        posts = {peer: Post(line) for peer, line in lines.items()}
        ends = {number: peer for peer, line in lines.items() if (number := process_of(line)) is not None}
        self.look = Lookout(me, self._note, posts, ends, mapped, lambda: hang_up(groups))
        self._finalizer = weakref.finalize(self, _close, self.look, os.getpid())
        self._numbers = self._note.numbers
        if not whole:
            name = gather_objects(groups.everyone, f"{time_ns()}", size)[0]
            unreached = [place for place in range(size) if place != me and place not in posts]
            self.look.bulletin = Bulletin(name, me, unreached, self._note.data, self.look.heard)
        self.look.start()

    # -- what this rank does --------------------------------------------------------------------------------

    def at(self, task: int) -> None:
        """This rank begins ``task``; -1: it has none."""
        self._numbers[TASK] = task

    def begin(self) -> None:
        """A call of the runner begins."""
        self._numbers[CALL] += 1
        self._numbers[MICROBATCHES] = 0

    def runs(self, microbatches: int, training: bool) -> None:
        """It is a step, or an evaluation, of so many microbatches."""
        self._numbers[MICROBATCHES] = microbatches if training else -microbatches

    def waiting(self, first: int) -> Waiting:
        """To note for whom this rank waits, among those whose places begin with ``first``."""
        return Waiting(self.look, first)

    # -- what others do -------------------------------------------------------------------------------------

    @property
    def alarmed(self) -> bool:
        """Whether a rank is gone, so that the run cannot go on."""
        return self.look.alarmed

    def where(self, place: int) -> Stand | None:
        """The note of a rank, None when it cannot be had."""
        return self.look.where(place)

    def tell(self, story: Story) -> Story:
        """This rank gives up: let all others know whom it misses; the story that was told first, if there was one."""
        return self.look.tell(story)

    def found(self, first: int, late: bool) -> Found:
        """Who is to blame when this rank cannot go on.

        Args:
            first: the place of the rank that it waits for, ``ALL`` for every other one.
            late: nothing has come in time; else a connection has ended.
        """
        look = self.look
        with look.changed:
            if not late or look.gone or look.story is not None or look.alarmed:
                look.changed.wait_for(lambda: look.story or look.gone or self._has_left(first), timeout=1.5 * GRACE)
                if look.story is not None:
                    return Found(look.story)
                if look.gone:
                    return Found(None, [self.me, next(iter(look.gone))])
                if self._has_left(first):
                    return Found(None, [self.me, next(iter(look.left)) if first == ALL else first], left=True)
                return Found(None, [self.me, first] if first != ALL else [self.me])
        return self._late(first)

    def _has_left(self, first: int) -> bool:
        return bool(self.look.left) if first == ALL else first in self.look.left

    def _late(self, first: int) -> Found:
        """Follow who waits for whom, as all of them say now."""
        look, since = self.look, monotonic()
        while True:
            path = blamed(self.me, first, self.size, self._seen)
            known = all(look.still(place) or look.fresh(place, since) for place in path[1:])
            if known or monotonic() - since > STILL + GRACE:
                break
            unseen = [place for place in path[1:] if place not in look.posts]
            if look.bulletin is not None and unseen:
                look.bulletin.look(unseen)
            with look.changed:
                if look.changed.wait_for(lambda: look.story or look.gone, timeout=LOOK):
                    break
        if look.story is not None or look.gone:
            return self.found(first, False)
        last = path[-1]
        return Found(None, path, last in look.left, look.still(last) and last not in look.left)

    def _seen(self, place: int) -> Seen:
        stand = self.look.where(place)
        still = self.look.still(place) or place in self.look.left
        return Seen(NOBODY if stand is None else stand.waits, still)

    def close(self) -> None:
        self._finalizer()


class Waiting:
    """For whom a rank waits, in its note. Ranks of one group are counted from 0.

    Attributes:
        alarm: a descriptor that is readable when the run cannot go on.
    """

    def __init__(self, look: Lookout, first: int) -> None:
        self._look, self._numbers, self._first = look, look.note.numbers, first + 1
        self.alarm = look.alarm.number

    @property
    def alarmed(self) -> bool:
        return self._look.alarmed

    def begins(self, peer: int) -> None:
        """For a rank of the group, or ``ALL`` of all groups."""
        self._numbers[WAITS] = self._first + peer if peer >= 0 else ALL

    def ends(self) -> None:
        self._numbers[WAITS] = NOBODY


def hang_up(groups: Groups) -> None:
    """End all connections of the groups of gloo, so that whoever waits for something there, here or at their other
    ends, is told at once. That is what gloo does when somebody has waited too long for a message."""
    for group in groups.made():
        size = group.size()
        if size < 2 or "gloo" not in dist.get_backend(group):
            continue
        for tag in range(TAG, TAG + 1 + os.environ.get("GLOO_SOCKET_IFNAME", "").count(",")):  # each has its own
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], (group.rank() + 1) % size, tag).wait(timedelta(milliseconds=1))


def _shared(lines: dict[int, socket.socket], note: Note) -> dict[int, Any]:
    """Give the note to all ranks of this host, and map theirs."""
    mapped: dict[int, Any] = {}
    for line in lines.values():
        with suppress(OSError):
            socket.send_fds(line, [b"note"], [note.file])
    for peer, line in lines.items():
        with suppress(OSError):
            line.settimeout(10.0)
            _, files, _, _ = socket.recv_fds(line, 16, 1)
            for file in files:
                mapped[peer] = numbers_of(file)
                os.close(file)
    note.shared()
    return mapped


def _close(look: Lookout, process: int) -> None:
    """Not in a child that this process has forked, which shares its descriptors."""
    if os.getpid() == process:
        look.close()
