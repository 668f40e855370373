"""Lines and channels of a rank that shares its host with some ranks of its pipeline and not with others: memory to and
from the first, sockets to and from the rest.

Each pair of ranks talks as it would alone; what waits for any of them waits for all of them at once.
"""

from __future__ import annotations

import select
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipec.runtime.distributed.backend import Traffic
from pipec.runtime.distributed.channels import Lost
from pipec.runtime.distributed.far import FarChannels
from pipec.runtime.distributed.far_lines import FarLines
from pipec.runtime.distributed.lines import Lines, readable
from pipec.runtime.distributed.links import Key
from pipec.runtime.distributed.near import NearChannels
from pipec.runtime.distributed.recorded import RecordChannels
from pipec.runtime.distributed.records import RecordLines
from pipec.runtime.distributed.wire import Frame
from pipec.runtime.program import Route


class MixedLines(RecordLines):
    """The lines of one rank, of both kinds.

    Attributes:
        near, far: those of one host, and those between hosts. What has come, and who has ended, is kept once for both.
    """

    def __init__(
        self, me: int, near: Callable[[Any], Lines], far: Callable[[Any], FarLines], awake: float = 0.0
    ) -> None:
        """
        Args:
            near, far: make the lines, given what they wait with.
            awake: seconds to look for a record before the thread sleeps.
        """
        self._poll, self._awake = select.poll(), awake
        self.near, self.far = near(self._poll), far(self._poll)
        super().__init__(me, sorted((*self.near.inbox, *self.far.inbox)))
        for own in (self.near, self.far):
            own.share(self)
        self._kind: dict[int, Any] = {peer: self.near if peer in self.near.pools else self.far for peer in self._others}

    @property
    def accounts(self) -> Mapping[int, Any]:
        """Per rank what is under way there."""
        return ChainMap(self.near.pools, self.far.accounts)

    @property
    def heavy(self) -> set[int]:
        """Ranks that send large contents through sockets."""
        return self.far.heavy

    def next_turn(self) -> None:
        self.near.next_turn()
        self.far.next_turn()
        self.turn = self.near.turn

    def tell(self, peer: int, *args: Any, **rest: Any) -> None:
        self._kind[peer].tell(peer, *args, **rest)

    def take(self, peer: int) -> bool:
        return bool(self._kind[peer].take(peer))

    def give_up(self, story: tuple[int, str]) -> None:
        self.near.give_up(story)
        self.far.give_up(story)

    def _look(self, seconds: float) -> bool:
        ready = readable(self._poll, seconds, self._awake)
        for number, _ in ready:
            self.near.came(number)
            self.far.came(number)
        return bool(ready)

    def _listen(self, number: int, wanted: bool) -> None:
        self.near._listen(number, wanted)

    def close(self) -> None:
        self.near.close()
        self.far.close()

    # -- of one kind only -----------------------------------------------------------------------------------

    def announce(self, *args: Any) -> None:
        self.near.announce(*args)

    def seen(self, peer: int, block: int) -> Any:
        return self.near.seen(peer, block)

    def give(self, *args: Any) -> None:
        self.far.give(*args)

    def writing(self, peer: int) -> bool:
        return self._kind[peer] is self.far and self.far.writing(peer)

    def expect(self, peer: int, count: int) -> None:
        if self._kind[peer] is self.far:
            self.far.expect(peer, count)

    def fetch(self, peer: int, count: int) -> None:
        self.far.fetch(peer, count)


class MixedChannels(NearChannels, FarChannels):
    """Through shared memory and sockets."""

    _lines: Any  # MixedLines

    def __init__(
        self, lines: MixedLines, rank: int, traffic: Traffic, frames: dict[Key, Frame], forms: Sequence[Any] | None,
        timeout: float, lost: Lost, received: Mapping[Route, int] | None = None,
    ) -> None:
        self._lines = lines
        self._near = lines.near.pools.keys()
        RecordChannels.__init__(
            self, lines, lines.accounts, rank, traffic, frames, forms, timeout, lost, received
        )

    def _payload(self, link: Any, message: Any, record: Any) -> Any:
        return self._of(link)._payload(self, link, message, record)

    def _give(self, link: Any, *args: Any) -> None:
        self._of(link)._give(self, link, *args)

    def _say(self, link: Any, *args: Any, **rest: Any) -> None:
        self._of(link)._say(self, link, *args, **rest)

    def _of(self, link: Any) -> Any:
        return NearChannels if link.peer in self._near else FarChannels
