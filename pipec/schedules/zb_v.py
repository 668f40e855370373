"""The V-shaped zero-bubble schedules: two chunks per device, down the devices and back up, with split backwards.

ZB-V (arXiv 2401.10241, section 6) holds what 1F1B holds, P activations, on every device, and with F = B = W and free
hand-overs leaves no bubble inside a device's span: makespan M(F+B+W) + (P-1)/2, the least there is for two chunks.

A rhythm has that for a few devices only; :func:`zero_bubble_lists` has it for any number of them, given M >= 2P-1, and
:func:`late_forward_lists` ends sooner where hand-overs are not free.

V-Half and V-Min (arXiv 2405.15362) hold about a half and a third of that, (P+2)//2 and (P+4)//3 activations, for a
larger bubble.

All three are one policy with three caps: the rhythms below, run under the problem's own costs, and polished where
the problem is small (:mod:`pipec.schedules.polish`).
``problem.memory_limit`` in activations lowers the cap. Any placement is served; "v" is what the figures are for.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from pipec.costs import Activations
from pipec.schedules.base import F, I, Op, Order, Problem, W
from pipec.schedules.greedy import Keep
from pipec.schedules.limits import chunk_caps, share_limit
from pipec.schedules.played import play
from pipec.schedules.polish import LARGE, MOVES, length
from pipec.schedules.rhythm import Rhythm, best_order
from pipec.schedules.words import Machine, Row

WIDE = (
    Rhythm((3, 4), (1, 2), (3, 6, 2), slack=2, window=12, patience=0.5),
    Rhythm((3, 3), (1, 3), (1, 3, 1), window=3, patience=0.5),
    Rhythm((1, 3), (4, 3), (3, 3, 5), slack=1, window=12, patience=0.5),
    Rhythm((1, 3), (1, 2), (5, 6, 3), window=20),
    Rhythm((2, 6), (1, 3), (2, 5, 1), window=30, keep=Keep.ROOM, drain=False),
    Rhythm((3, 3), (1, 1), (4, 7, 2), slack=1, window=10, patience=0.51),
)
HALF = (
    Rhythm((1, 3), (1, 1), (7, 4, 6), slack=2, window=11, patience=0.15, keep=Keep.ORDER, drain=False),
    Rhythm((1, 2), (2, 1), (1, 3, 1), window=12, patience=0.5),
    Rhythm((2, 1), (4, 2), (3, 5, 3), slack=1, window=3, patience=1.0),
    Rhythm((2, 3), (2, 2), (2, 6, 6), slack=2, window=12, patience=1.0),
)
NARROW = (
    Rhythm((1, 2), (1, 1), (1, 2, 6), slack=2, window=6),
    Rhythm((2, 1), (1, 1), (3, 1, 3), slack=2, window=12),
    Rhythm((1, 1), (1, 1), (1, 6, 3), slack=2, window=6, patience=0.5),
)
BETWEEN = (  # for caps that none of the three has
    Rhythm((1, 1), (1, 3), (1, 3, 5), window=12, patience=1.0),
    Rhythm((2, 2), (1, 1), (2, 6, 4), window=6, patience=0.5),
    Rhythm((1, 1), (1, 4), (5, 6, 5), slack=2, window=12, keep=Keep.ROOM),
)


def v_order(problem: Problem, shares: float, rhythms: tuple[Rhythm, ...], moves: int) -> list[list[Op]]:
    """The best order for at most ``shares`` activations per device, or for the memory limit where that is lower."""
    limit = share_limit(problem, shares)
    tried = rhythms if limit == shares else WIDE + HALF + NARROW + BETWEEN
    found = best_order(problem, limit, tried, moves=moves, makers=(zero_bubble_lists,))
    in_bytes = problem.memory_limit is not None and not isinstance(problem.memory_limit, Activations)
    if in_bytes or 3 * len(problem.chunks) * problem.microbatches >= LARGE:
        return found
    other = late_forward_lists(problem, chunk_caps(problem, limit))
    # Compared at the end, not a start of the search: whatever that finds, the shorter of the two is taken.
    return found if other is None else min((found, other), key=lambda lists: length(play(problem, lists)))


def zero_bubble_lists(problem: Problem, caps: list[int]) -> list[list[Op]] | None:
    """Lists without a gap from a device's first task to its last at F = B = W and c = 0, for M >= 2P-1.

    Per device d of P, with a its chunk on the way down and b the one on the way up:

    1. 2(P-d)-1 forwards of a, and d times a forward of b and one of a: now 2P-1 activations are held,
    2. P-d times forward, input half and weight half of b,
    3. M-P times a forward (while there is one), input half and weight half of a, then the same of b,
    4. d times an input half of a and one of b, then P-d times an input half and a weight half of a,
    5. the weight halves that are left, d of each chunk.

    Device d starts at time d, in tasks, and every device is ready when its microbatch comes: those of a come down at
    four tasks per device, and go back up at two, those of b the other way round.

    Returns:
        None where the chunks do not lie in a V or ``caps`` is below the 2P activations that are held. With fewer
        microbatches the lists are those of 2P-1 without the others.
    """
    devices, count = problem.devices, 2 * problem.devices
    in_a_v = all(chunk.device == min(chunk.index, count - 1 - chunk.index) for chunk in problem.chunks)
    if not in_a_v or len(problem.chunks) != count or min(caps) < min(count, 2 * problem.microbatches):
        return None
    return [_gapless(devices, device, problem.microbatches) for device in range(devices)]


def _gapless(devices: int, device: int, microbatches: int) -> list[Op]:
    down, up, after = device, 2 * devices - 1 - device, devices - device
    size = max(microbatches, 2 * devices - 1)
    late = size - (2 * devices - 1 - device)  # forwards of the chunk on the way down after the start
    tasks = [(F, down)] * (2 * after - 1) + [(F, up), (F, down)] * device + [(F, up), (I, up), (W, up)] * after
    for turn in range(size - devices):
        tasks += [(F, down)] * (turn < late) + [(I, down), (W, down), (F, up), (I, up), (W, up)]
    tasks += [(I, down), (I, up)] * device + [(I, down), (W, down)] * after + [(W, up)] * device + [(W, down)] * device
    made: list[Op] = []
    seen: dict[tuple[object, int], int] = {}
    for make, chunk in tasks:
        m = seen[make, chunk] = seen.get((make, chunk), -1) + 1
        if m < microbatches:
            made.append(make(chunk, m))
    return made


def late_forward_lists(problem: Problem, caps: list[int]) -> list[list[Op]] | None:
    """The lists of :func:`zero_bubble_lists` with another end, for hand-overs that cost something or W below F and B.

    There the last forwards hold up the input halves that the other devices wait for. So

    - the last forward of b comes after the input half of b behind it; on the last device that of a, likewise,
    - on devices 1 to P/2 the input halves that follow run as one of b, one of a, not the other way round,
    - and weight halves go where there is a gap for them (:mod:`pipec.schedules.words`).

    With the costs that arXiv 2401.10241 measured (table 9: 8 devices, F, B, W and c of 18.522, 18.086, 9.337 and
    0.601) and 32 microbatches that ends when device 0 does, whose own end is what bounds the span.

    Returns:
        None where there are no gapless lists, fewer than 2P-1 microbatches or one device, or where it deadlocks.
        Takes O(tasks squared) in the worst case: for problems small enough to be polished.
    """
    gapless, devices = zero_bubble_lists(problem, caps), problem.devices
    if gapless is None or devices < 2 or problem.microbatches < 2 * devices - 1:
        return None
    machine = Machine(problem, caps)
    words = machine.words(gapless, hinted=False)
    for device in range(1, devices):
        letters = _late(words.letters[device], device, devices)
        words = words.change(device, letters, words.hints[device], machine.inputs(letters))
    timed = machine.time(words, [machine.begin()])
    return None if timed is None else machine.lists(words, timed)


def _late(word: Row, device: int, devices: int) -> Row:
    """The letters of one device with the last forward one letter later; F of chunk c is c, its I 2P + c."""
    down, up, count = device, 2 * devices - 1 - device, 2 * devices
    moved = up if device < devices - 1 else down
    last = max(i for i, stream in enumerate(word) if stream == moved)
    head, rest = [*word[:last], word[last + 1], moved], word[last + 2 :]
    if moved == up and 2 * device <= devices:
        ups, downs = rest.count(count + up), rest.count(count + down)
        rest = [count + up, count + down] * ups + [count + down] * (downs - ups)
    return head + rest


@frozen
class ZBV:
    """Two chunks per device in a V, split backwards: almost no bubble in 1f1b's memory.

    ``moves``: how many changed orders to try where the problem is small enough, see :mod:`pipec.schedules.polish`.
    """

    bubble: ClassVar[str] = "(P-1)/2, span 0, at F=B=W=1, c=0"
    peak: ClassVar[str] = "P"
    source: ClassVar[str] = "arXiv 2401.10241"
    split: ClassVar[bool] = True

    name: str = "zb-v"
    placement: str = "v"
    moves: int = MOVES

    def order(self, problem: Problem) -> Order:
        return v_order(problem, problem.devices, WIDE, self.moves)
