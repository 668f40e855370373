"""Polishing: finished orders made shorter by moving tasks of their critical path.

The shortest order of a small problem is a search, as in a job shop with a cap on activations. It is done as there:
*walks* by simulated annealing (van Laarhoven, Aarts and Lenstra, Operations Research 40, 1992) over the orders of F and
I, from several orders at once, the worse half of them given up after each round. A move takes a task of a critical
path. Mostly that is the first or last of a *block*, tasks in a row on one device, which moves inwards, or any of the
block, which moves to one of its ends: only such moves can shorten the path (Balas and Vazacopoulos, Management Science
44, 1998). Else it moves some places either way, for tasks that hold memory are not on the path of those that wait for
it. Ws follow by the rule of :mod:`pipec.schedules.words`; some walks also move the hints that delay others for a W.

What is made smaller is the makespan plus the mean of the devices' ends, since the makespan alone hardly tells one move
from another. The search is the same every time: random numbers of a fixed seed, and so many moves, whatever the time
they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from pipec.ir import Kind
from pipec.schedules.base import Op, Problem
from pipec.schedules.greedy import Outcome
from pipec.schedules.played import play
from pipec.schedules.words import CLOSE, Machine, Row, Timed, Words

MOVES = 15_000  # orders that are tried, in all
WORK = 3_000_000  # moves times tasks, at most
LARGE = 3000  # tasks from which on nothing is tried
STREAMS = 256  # so many are not tried either
SEED = 2
PLAIN, HINTED = 4, 2  # walks without and with hints at the start
ROUNDS = ((6, 0.15, 1 / 12), (6, 0.45, 1 / 3), (3, 0.3, 2 / 3), (1, 0.1, 1.0))  # walks, part of all moves, cooling
ALONE = 300  # moves that a walk has in a round at least, or there are fewer walks
HOT, COLD = 0.4, 0.12  # of a mean task: what a move may lose, about, at the start and at the end
NEAR = 0.6  # part of the moves that are to an end of a block
REACH = 12  # places of any other move, at most
CALM = 0.4  # of those temperatures is that of walks with hints, which lose more by a move
ASK = 0.1  # part of the moves that change a hint, on walks that have some
Spot = tuple[int, int, int, int]  # a task of a critical path: device, place, and the places where its block ends
Length = tuple[float, float]  # makespan and span


def polish(
    problem: Problem, caps: Sequence[int], best: Outcome, orders: Sequence[list[list[Op]]], moves: int
) -> Outcome:
    """``best``, or a shorter order: less makespan, or the same and less span.

    ``best`` and ``orders``, where walks may begin, are complete lists of F, I and W that hold no more than ``caps``
    chunk activations per device; so does what comes out. Takes O(moves x tasks); with many tasks fewer moves are tried,
    and from LARGE on none.
    """
    tasks = sum(map(len, best.lists))
    moves = min(moves, WORK // max(1, tasks))
    least = lower_bound(problem)
    if moves < 1 or tasks >= LARGE or 2 * len(problem.chunks) >= STREAMS or length(best) <= least:
        return best
    machine, random = Machine(problem, caps), Random(SEED)
    walks = starts(machine, orders)
    task = (sum(machine.cost) + sum(machine.weight) / 2) / (3 * machine.count)
    warm = task * HOT
    for number, (count, share, chill) in enumerate(ROUNDS):
        ahead = int(moves * share)
        walks = sorted(walks, key=lambda walk: walk.length)[: min(count, max(1, ahead // ALONE))]
        hot, warm = warm, task * HOT * (COLD / HOT) ** chill
        for walk in walks:
            walk.run(random, ahead // len(walks), hot, warm)
            if walk.length <= least:
                break
        shortest = min((walk.length for walk in walks), default=least)
        if shortest <= least or (number == 0 and shortest >= length(best)):
            break
    found = [play(problem, machine.lists(*walk.best)) for walk in walks if walk.length < length(best)]
    return min([best, *found], key=length)


def length(outcome: Outcome | Timed) -> Length:
    """Makespan and span, without what rounding adds."""
    return round(outcome.makespan, 9), round(outcome.span, 9)


def lower_bound(problem: Problem) -> Length:
    """No order of ``problem`` is shorter, whatever memory it has; for chunks in a row.

    A device begins when a microbatch has come to it, then does its work; after its last I the one before follows.
    """
    count, latency = len(problem.chunks), problem.costs.latency
    work = [sum(problem.cost(kind, c) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)) for c in range(count)]
    late = [problem.cost(Kind.BACKWARD_WEIGHT, c) for c in range(count)]
    makespan = span = 0.0
    for device in range(problem.devices):
        own = problem.on(device)
        if not own:
            continue
        before = range(own[0])
        hops = latency * sum(problem.chunks[c].device != problem.chunks[c + 1].device for c in before)
        if not set(zip(range(own[0]), range(1, own[0] + 1), strict=True)) <= set(problem.edges):
            before, hops = range(0), 0.0
        head = sum(problem.cost(Kind.FORWARD, c) for c in before) + hops
        tail = sum(problem.cost(Kind.BACKWARD_INPUT, c) for c in before) + hops
        busy = problem.microbatches * sum(work[c] for c in own)
        weights = problem.microbatches * sum(late[c] for c in own)
        makespan = max(makespan, head + busy + max(weights, tail + (late[0] if tail else late[own[0]])))
        span = max(span, busy + weights)
    return round(makespan, 9), round(span, 9)


def starts(machine: Machine, orders: Sequence[list[list[Op]]]) -> list[Walk]:
    """Walks from the shortest of ``orders`` as words without hints, and from the shortest with hints."""
    walks: list[Walk] = []
    for hinted, most in ((False, PLAIN), (True, HINTED)):
        made: dict[tuple[bytes, ...], Walk] = {}
        for order in orders:
            words = machine.words(order, hinted)
            if words.key() not in made and (timed := machine.time(words, [machine.begin()])) is not None:
                made[words.key()] = Walk(machine, words, timed, hinted)
        walks += sorted(made.values(), key=lambda walk: walk.length)[:most]
    return walks


class Walk:
    """A walk over words: where it is, and the shortest it has met."""

    def __init__(self, machine: Machine, words: Words, timed: Timed, hinted: bool) -> None:
        self.machine, self.words, self.timed, self.hinted = machine, words, timed, hinted
        self.best, self.length = (words, timed), length(timed)
        self.dead: set[tuple[bytes, ...]] = set()  # words that deadlock

    def run(self, random: Random, moves: int, hot: float, cold: float) -> None:
        """Try ``moves`` words near by, under a temperature that falls from ``hot`` to ``cold``."""
        machine, draw = self.machine, random.random
        if self.hinted:
            hot, cold = CALM * hot, CALM * cold
        path = self.critical(random)
        tried, heat, cool = 0, hot, (cold / hot) ** (1.0 / max(1, moves))
        for _ in range(20 * moves):
            if tried == moves:
                break
            move = self.near(random, path[int(draw() * len(path))])
            if move is None or (key := move[0].key()) in self.dead:
                continue
            words, device, low = move
            tried, heat = tried + 1, heat * cool
            states = self.timed.states
            known = len(states)
            while known > 1 and states[known - 1].at[device] > low:
                known -= 1
            timed = machine.time(words, states[:known])
            if timed is None:
                self.dead.add(key)
                continue
            loss = timed.makespan + timed.mean - self.timed.makespan - self.timed.mean
            if loss <= CLOSE or draw() < exp(-loss / heat):
                self.words, self.timed = words, timed
                path = self.critical(random)
                if length(timed) < self.length:
                    self.best, self.length = (words, timed), length(timed)

    def near(self, random: Random, spot: Spot) -> tuple[Words, int, int] | None:
        """Words with one task moved, or one hint changed, at ``spot``: with the device and the first place changed.

        None for a move that changes nothing, puts an I before its F or needs more memory.
        """
        draw, machine, words = random.random, self.machine, self.words
        device, i, first, last = spot
        word, hints, inputs = words.letters[device], words.hints[device], words.inputs[device]
        if self.hinted and draw() < ASK:
            return words.change(device, word, [*hints[:i], 0 if hints[i] else 1, *hints[i + 1 :]], inputs), device, i
        if draw() < NEAR:
            which = int(4 * draw())
            if which < 2:
                step = 1 + int(2 * draw())
                i, j = (first, first + step) if which else (last, last - step)
            else:
                j = first if which == 2 else last
        else:
            step = 1 + int(REACH * draw())
            j = i + step if draw() < 0.5 else i - step
        j = max(0, min(len(word) - 1, j))
        low, high = min(i, j), max(i, j)
        made = word[:]
        made.insert(j, made.pop(i))
        if made == word or not possible(made, low, high, word[i] % machine.count, machine.count, machine.caps[device]):
            return None
        return words.change(device, made, hints, machine.inputs(made)), device, low

    def critical(self, random: Random) -> list[Spot]:
        """The tasks of a critical path: back from the end of a device that ends last, over what each one waited for."""
        machine, letters = self.machine, self.words.letters
        last, size = self.timed.last, machine.size
        places: list[Row] = [[] for _ in machine.cost]  # by stream and microbatch
        numbers: list[Row] = []  # by device and place
        for word in letters:
            row = []
            for i, stream in enumerate(word):
                row.append(len(places[stream]))
                places[stream].append(i)
            numbers.append(row)
        ends = [device for device, end in enumerate(last.free) if end >= self.timed.makespan - CLOSE]
        device = ends[int(random.random() * len(ends))]
        found: list[Spot] = []
        i = block = len(letters[device]) - 1
        while i >= 0:
            stream, m = letters[device][i], numbers[device][i]
            if last.pulled[stream * size + m]:
                found += [(device, place, i, block) for place in range(i, block + 1)]
                _, other = max((last.ends[other * size + m] + lag, other) for other, lag in machine.sources[stream])
                device = machine.owner[other]
                i = block = places[other][m]
            else:
                i -= 1
        return found + [(device, place, 0, block) for place in range(block + 1)]


def possible(word: Row, low: int, high: int, chunk: int, count: int, cap: int) -> bool:
    """Whether a word that changed from ``low`` to ``high`` has every F of ``chunk`` before its I, and room for each F.

    There is room where as many Is come before as leave no more than ``cap`` activations with each W run at once.
    """
    back = count + chunk
    head = word[:low]
    ahead = head.count(chunk) - head.count(back)
    held = 2 * sum(stream < count for stream in head) - low
    for stream in word[low : high + 1]:
        step = 1 if stream < count else -1
        held += step
        if stream in (chunk, back):
            ahead += step
        if held > cap or ahead < 0:
            return False
    return True
