"""Orders as words: per device its forwards F and input halves I in order, with the weight halves W left to a rule.

A letter is a stream, the F or the I of one chunk; its n-th occurrence is microbatch n. Whatever is done to a word, the
microbatches of a stream stay in order. Where a W runs follows from time:

- in a gap before the next letter, if it fits there,
- before a forward that finds the memory full,
- where a hint asks for it: so many Ws before the letter at that place,
- and after the last letter.

The Ws of a device run in the order of their Is. :class:`Machine` times words over flat lists. A word that differs from
another one from some place on is timed from a state that the other one passed before that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from pipec.ir import Kind
from pipec.schedules.base import Op, Problem
from pipec.schedules.greedy import FORWARD, INPUT, WEIGHT

Row = list[int]
SAVE = 8  # visits of devices from one kept state to the next
CLOSE = 1e-9


@frozen(eq=False)
class Words:
    """Per device the letters, how many Ws are asked for before each, and those of the letters that are Is."""

    letters: tuple[Row, ...]
    hints: tuple[Row, ...]
    inputs: tuple[Row, ...]

    def change(self, device: int, letters: Row, hints: Row, inputs: Row) -> Words:
        """The same with another word for ``device``."""
        own, rest = slice(device), slice(device + 1, None)
        return Words((*self.letters[own], letters, *self.letters[rest]), (*self.hints[own], hints, *self.hints[rest]),
                     (*self.inputs[own], inputs, *self.inputs[rest]))

    def key(self) -> tuple[bytes, ...]:
        """Equal for equal words; for streams below 256."""
        return (*map(bytes, self.letters), *map(bytes, self.hints))


class State(NamedTuple):
    """Where a run of words stands: by device, by stream, and by task (a stream times the microbatches, plus m)."""

    at: list[int]  # letters that have run
    free: list[float]
    held: list[int]
    done: list[int]  # Ws that have run
    seen: list[int]  # by stream: its letters that have run
    ends: list[float]  # by task; -1 for those that have not run
    pulled: list[bool]  # by task: whether it waited for what it needs rather than for its device

    def copy(self) -> State:
        at, free, held, done, seen, ends, pulled = self
        return State(at[:], free[:], held[:], done[:], seen[:], ends[:], pulled[:])


@frozen(eq=False)
class Timed:
    """When words end: the last device, the devices' mean and the largest span; the states passed and the last one."""

    makespan: float
    mean: float
    span: float
    states: list[State]
    last: State


class Machine:
    """A problem in flat lists. Stream c is the F of chunk c, stream ``count`` + c its I.

    ``caps``: per device how many chunk activations it may hold, from the start of an F to the end of its W.
    """

    def __init__(self, problem: Problem, caps: Sequence[int]) -> None:
        chunks = problem.chunks
        self.count, self.size, self.devices, self.caps = len(chunks), problem.microbatches, problem.devices, list(caps)
        self.owner = [chunk.device for chunk in chunks] * 2
        self.cost = [problem.cost(kind, c) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT) for c in range(self.count)]
        self.weight = [problem.cost(Kind.BACKWARD_WEIGHT, c) for c in range(self.count)] * 2
        self.sources: list[list[tuple[int, float]]] = [[] for _ in self.cost]  # by stream: streams it needs, hand-overs
        for source, reader in shortest(problem.edges, self.count):
            lag = problem.costs.latency if self.owner[source] != self.owner[reader] else 0.0
            self.sources[reader].append((source, lag))
            self.sources[self.count + source].append((self.count + reader, lag))
        self.needs = [[(other * self.size, lag) for other, lag in row] for row in self.sources]

    def words(self, lists: Sequence[Sequence[Op]], hinted: bool) -> Words:
        """The words of lists of split tasks, with a hint where each W stands, or without hints."""
        letters: list[Row] = [[] for _ in lists]
        hints: list[Row] = [[] for _ in lists]
        for row, word, asked in zip(lists, letters, hints, strict=True):
            late = 0
            for kind, chunk, _ in row:
                if kind == WEIGHT:
                    late = min(255, late + hinted)
                else:
                    word.append(chunk if kind == FORWARD else self.count + chunk)
                    asked.append(late)
                    late = 0
        return Words(tuple(letters), tuple(hints), tuple(map(self.inputs, letters)))

    def inputs(self, word: Row) -> Row:
        """The Is of a word."""
        return [stream for stream in word if stream >= self.count]

    def begin(self) -> State:
        tasks = len(self.cost) * self.size
        zeros = [0] * self.devices
        return State(zeros[:], [0.0] * self.devices, zeros[:], zeros[:], [0] * len(self.cost), [-1.0] * tasks,
                     [False] * tasks)

    def time(self, words: Words, states: list[State]) -> Timed | None:
        """Times of ``words`` on from the last of ``states``; None where they deadlock or ask for more memory.

        The states are those of other words that are the same up to there. Takes O(letters after it).
        """
        letters, hints, inputs = words.letters, words.hints, words.inputs
        needs, cost, weight, caps, count, size = self.needs, self.cost, self.weight, self.caps, self.count, self.size
        state, passed = states[-1].copy(), states[:]
        at, free, held, done, seen, ends, pulled = state
        waits: dict[int, list[int]] = {}
        stack = list(range(self.devices))
        visits = 0
        while stack:
            visits += 1
            if not visits % SAVE:
                passed.append(state.copy())
            device = stack.pop()
            word, hint, own, cap = letters[device], hints[device], inputs[device], caps[device]
            i, now, here, ran = at[device], free[device], held[device], done[device]
            while i < len(word):
                stream = word[i]
                m = seen[stream]
                ready = 0.0
                for other, lag in needs[stream]:
                    end = ends[other + m]
                    if end < 0.0:
                        waits.setdefault(other + m, []).append(device)
                        break
                    end += lag
                    if end > ready:
                        ready = end
                else:
                    late = i - here - 2 * ran  # Is whose W has not run: of the i letters here + ran are Fs
                    if late and (ready > now or hint[i]):
                        asked = hint[i]
                        while late:
                            span = weight[own[ran]]
                            if asked <= 0 and ready - now < span - CLOSE:
                                break
                            now += span
                            asked, late, here, ran = asked - 1, late - 1, here - 1, ran + 1
                    if stream < count:
                        if here >= cap:
                            if not late:
                                return None
                            now += weight[own[ran]]
                            here, ran = here - 1, ran + 1
                        here += 1
                    task = stream * size + m
                    if ready > now:
                        now = ready
                        pulled[task] = True
                    else:
                        pulled[task] = False
                    now += cost[stream]
                    ends[task] = now
                    seen[stream] = m + 1
                    i += 1
                    if task in waits:
                        stack += waits.pop(task)
                    continue
                break
            at[device], free[device], held[device], done[device] = i, now, here, ran
        if any(i < len(word) for i, word in zip(at, letters, strict=True)):
            return None
        for device, own in enumerate(inputs):
            for stream in own[done[device] :]:
                free[device] += weight[stream]
        spans = [end - (ends[word[0] * size] - cost[word[0]]) for end, word in zip(free, letters, strict=True) if word]
        return Timed(max(free), sum(free) / len(free), max(spans), passed, state)

    def lists(self, words: Words, timed: Timed) -> list[list[Op]]:
        """The tasks of timed words in order, Ws included."""
        made: list[list[Op]] = []
        for device, word in enumerate(words.letters):
            row: list[Op] = []
            late: list[Op] = []
            seen, now, held = [0] * len(self.cost), 0.0, 0
            for stream, hint in zip(word, words.hints[device], strict=True):
                m, asked = seen[stream], hint
                ready = max((timed.last.ends[other + m] + lag for other, lag in self.needs[stream]), default=0.0)
                while late and (asked > 0 or ready - now >= self.weight[late[0][1]] - CLOSE
                                or (stream < self.count and held >= self.caps[device])):
                    now += self.weight[late[0][1]]
                    row.append(late.pop(0))
                    asked, held = asked - 1, held - 1
                if stream < self.count:
                    row.append((FORWARD, stream, m))
                    held += 1
                else:
                    row.append((INPUT, stream - self.count, m))
                    late.append((WEIGHT, stream - self.count, m))
                seen[stream] = m + 1
                now = timed.last.ends[stream * self.size + m]
            made.append(row + late)
        return made


def shortest(edges: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The edges that no longer way stands for: that one takes the same hand-overs at least."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in edges:
        readers[source].append(reader)
    reached: list[set[int]] = [set() for _ in range(count)]
    beyond: list[set[int]] = [set() for _ in range(count)]  # reached in two steps or more
    for chunk in reversed(range(count)):
        beyond[chunk] = {other for reader in readers[chunk] for other in reached[reader]}
        reached[chunk] = beyond[chunk] | set(readers[chunk])
    return [(source, reader) for source, reader in edges if reader not in beyond[source]]
