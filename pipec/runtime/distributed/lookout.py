"""The thread of a watch: it hears what other ranks say, looks whether they live, and raises the alarm.

It holds nothing of the runner but its groups, so that a runner that is garbage can end it.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from pipec.runtime.distributed.bulletin import Bulletin, Story
from pipec.runtime.distributed.notes import ALL, BEATS, NOBODY, WAITS, Note, Stand, stand_of
from pipec.runtime.distributed.posts import BYE, NOTE, STORY, Post
from pipec.runtime.distributed.sockets import Bell

BEAT = 0.5  # seconds between two signs of life
STILL = 2.5  # seconds without one after which a process stands still
GRACE = 1.0  # seconds that a rank may be gone before those are woken that do not wait for it themselves: what it has
# sent before may be all that they need
SILENCE = 30.0  # seconds without a sign of life in the store after which a rank is gone that has no post here


class Lookout:
    """What this rank knows of the others.

    Attributes:
        gone: ranks whose process or connection has ended, the first one first.
        left: those that have closed their runner.
        story: what was said first about a rank that is gone, here or elsewhere.
        alarmed: the run cannot go on: whoever waits must stop.
        alarm: readable then.
        changed: notified when any of these changes.
        posts: connections, by place of the other rank.
    """

    def __init__(
        self, me: int, note: Note, posts: Mapping[int, Post], ends: Mapping[int, int], mapped: Mapping[int, Any],
        hang_up: Callable[[], None],
    ) -> None:
        """
        Args:
            posts: by place of a rank.
            ends: by descriptor of a process the place of its rank.
            mapped: notes of other ranks, by place.
            hang_up: wakes a thread that waits for another rank by way of a process group.
        """
        self.me, self.note, self._ends, self._mapped = me, note, dict(ends), dict(mapped)
        self.posts = dict(posts)
        self._hang_up = hang_up
        self.gone: dict[int, float] = {}
        self.left: set[int] = set()
        self.story: Story | None = None
        self.bulletin: Bulletin | None = None
        self.alarmed = False
        self.alarm, self._bell = Bell(), Bell()
        self.changed = threading.Condition()
        self._told: dict[int, Stand] = {}  # notes that came by post
        self._pulse: dict[int, tuple[int, float, float]] = {}  # beats, when they changed, when they were looked at
        self._vain = 0  # beats for which this rank has waited for one that has left
        self._poll = select.poll()
        self._poll.register(self._bell.number, select.POLLIN)
        self._places = {post.number: place for place, post in self.posts.items()}
        for number in (*self._places, *self._ends):
            self._poll.register(number, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"pipec watch {me}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # -- for all threads ------------------------------------------------------------------------------------

    def where(self, place: int) -> Stand | None:
        """The note of a rank, None where it cannot be had."""
        if place == self.me:
            return stand_of(self.note.numbers)
        if place in self._mapped:
            return stand_of(self._mapped[place])
        if place in self._told:
            return self._told[place]
        return self.bulletin.looks.get(place, (None, 0.0))[0] if self.bulletin is not None else None

    def still(self, place: int) -> bool:
        """Whether a rank has not given a sign of life for a while."""
        _, changed, looked = self._pulse.get(place, (0, 0.0, 0.0))
        return looked - changed > STILL

    def fresh(self, place: int, since: float) -> bool:
        """Whether it has given one since then."""
        return place in self._pulse and self._pulse[place][1] >= since

    def tell(self, story: Story) -> Story:
        """This rank gives up: let all others know whom it misses; what is known of that."""
        first = self._learn(story)
        if first is story:
            for post in self.posts.values():
                post.story(*story)
            if self.bulletin is not None:
                self.bulletin.tell(story)
        self.raise_alarm()
        return first

    def heard(self, story: Story) -> None:
        """Another one has."""
        self._learn(story)
        self.raise_alarm()

    def _learn(self, story: Story) -> Story:
        with self.changed:
            self.story = self.story or story
            self.changed.notify_all()
            return self.story

    def raise_alarm(self) -> None:
        with self.changed:
            if self.alarmed:
                return
            self.alarmed = True
            self.changed.notify_all()
        self.alarm.ring()
        self._hang_up()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        following = monotonic()
        while True:
            for number, _ in self._poll.poll(max(0.0, following - monotonic()) * 1e3):
                if number == self._bell.number:
                    return
                if number in self._places:
                    self._hear(self._places[number])
                else:
                    self._poll.unregister(number)
                    self._hear(self._ends[number])
                    self._ended(self._ends[number])
            if monotonic() >= following:
                following = monotonic() + BEAT
                self._beat(monotonic())

    def _hear(self, place: int) -> None:
        """Take in what has come from a rank."""
        post = self.posts[place]
        try:
            while found := post.heard():
                for kind, data in found:
                    if kind == NOTE:
                        self._told[place] = stand_of(data)
                    elif kind == STORY:
                        self.heard(pickle.loads(data))
                    elif kind == BYE:
                        self._note(lambda: self.left.add(place))
        except EOFError:
            if self._places.pop(post.number, None) is not None:
                self._poll.unregister(post.number)
            self._ended(place)

    def _ended(self, place: int) -> None:
        if place not in self.left:
            self._note(lambda: self.gone.setdefault(place, monotonic()))

    def _note(self, change: Callable[[], Any]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def _beat(self, now: float) -> None:
        numbers = self.note.numbers
        numbers[BEATS] += 1
        for place, post in self.posts.items():
            if place not in self._mapped:
                post.note(self.note.data())
        for place in self.posts:
            self._felt(place, self.where(place), now)
        for place, (stand, looked) in list(self.bulletin.looks.items()) if self.bulletin is not None else ():
            self._felt(place, stand, looked)
            if looked - self._pulse[place][1] > SILENCE:
                self._ended(place)
        waits = numbers[WAITS]
        vain = waits - 1 in self.left if waits > NOBODY else bool(waits == ALL and self.left)
        self._vain = self._vain + 1 if vain else 0
        if self._vain > GRACE / BEAT or (self.gone and now - next(iter(self.gone.values())) > GRACE):
            self.raise_alarm()

    def _felt(self, place: int, stand: Stand | None, now: float) -> None:
        """Note how often a rank has given a sign of life."""
        beats = -1 if stand is None else stand.beats
        before, changed, _ = self._pulse.get(place, (beats, now, now))
        self._pulse[place] = beats, (changed if beats == before else now), now

    # -- end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say farewell, end the thread and close everything."""
        self._bell.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for post in self.posts.values():
            post.say(BYE)
            post.close()
        if self.bulletin is not None:
            self.bulletin.close()
        for number in self._ends:
            os.close(number)
        self.alarm.close()
        self._bell.close()
