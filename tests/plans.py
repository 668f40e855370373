"""Random pipelines and plans for hypothesis, and slow oracles that share no code with the compiler."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import strategies as st

import pipec
from pipec import LiveWeights, Nesterov, PipeDream, PipeMare, Predicted
from pipec.ir import Chunk, Lane, Plan
from pipec.schedules.base import B, F, I, Op, Problem, W


def pipeline(sources: list[list[int]], losses: list[int], name: str = "net", host: int = 0) -> pipec.Pipeline:
    """Stage i reads the stages in ``sources[i]`` (-1: the input); the ends that no loss reads are outputs.

    Every ``host``-th skip waits in host memory; 0: none does.
    """
    count = itertools.count(1)
    net = pipec.Pipeline(name)
    made = {-1: net.input("x")}
    for number, read in enumerate(sources):
        values = []
        for s in read:
            held = "host" if host and 0 <= s < number - 1 and next(count) % host == 0 else None
            values.append(made[s] if s >= number - 1 else pipec.skip(made[s], hold=held))
        made[number] = net.stage(f"s{number}", None, *values)
    for number, stage in enumerate(losses):
        net.loss(f"loss{number}", None, made[stage])
    used = {s for read in sources for s in read} | set(losses)
    for stage in set(range(len(sources))) - used:
        net.output(made[stage])
    if -1 not in used:
        net.loss("input", None, made[len(sources) - 1], made[-1])
    return net


@st.composite
def pipelines(draw: Any, least: int = 1, most: int = 6, host: bool = False) -> pipec.Pipeline:
    count = draw(st.integers(least, most))
    sources = [
        sorted(draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=3))) for number in range(count)
    ]
    losses = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)))
    return pipeline(sources, losses, host=draw(st.integers(0, 2)) if host else 0)


def unet(depth: int = 2, hold: str | None = None) -> pipec.Pipeline:
    """An encoder and a decoder with a skip at every level."""
    net = pipec.Pipeline("unet")
    value, target, kept = net.input("image"), net.input("target"), []
    for level in range(depth):
        value = net.stage(f"enc{level}", None, value)
        kept.append(value)
    value = net.stage("mid", None, value)
    for level in reversed(range(depth)):
        value = net.stage(f"dec{level}", None, value, pipec.skip(kept[level], hold=hold))
    net.output(value)
    net.loss("mse", None, value, target)
    return net


def problem_of(
    devices: list[int], microbatches: int, edges: list[tuple[int, int]] | None = None, costs: pipec.Costs | None = None
) -> Problem:
    """Chunks of one stage each on ``devices``; a chain unless edges are given."""
    chunks = tuple(Chunk(i, d, (i,)) for i, d in enumerate(devices))
    edges = [(c, c + 1) for c in range(len(devices) - 1)] if edges is None else edges
    names = tuple(f"s{i}" for i in range(len(devices)))
    return Problem(chunks, max(devices) + 1, microbatches, tuple(edges), costs or pipec.Costs(), names)


def any_order(seed: int, split: bool) -> Any:
    """A policy that orders tasks in a random legal way, backwards whole or in halves."""

    def random_order(problem: Problem) -> list[list[Op]]:
        rng = random.Random(seed)
        count, lists = len(problem.chunks), [[] for _ in range(problem.devices)]
        left: list[Op] = []
        for m in range(problem.microbatches):
            for c in range(count):
                halves = split and rng.random() < 0.7
                left += [F(c, m), *((I(c, m), W(c, m)) if halves else (B(c, m),))]
        done: set[Op] = set()
        readers = {c: [b for a, b in problem.edges if a == c] for c in range(count)}
        producers = {c: [a for a, b in problem.edges if b == c] for c in range(count)}

        def ready(op: Op) -> bool:
            kind, chunk, m = op
            if kind == 0:
                return all(F(p, m) in done for p in producers[chunk])
            if kind == 4:
                return I(chunk, m) in done
            return F(chunk, m) in done and all(B(r, m) in done or I(r, m) in done for r in readers[chunk])

        while left:
            op = rng.choice([op for op in left if ready(op)])
            left.remove(op)
            done.add(op)
            lists[problem.chunks[op[1]].device].append(op)
        return lists

    return random_order


@st.composite
def plans(draw: Any, training: bool | None = None, most: int = 6, host: bool = False, **options: Any) -> Plan:
    """A compiled plan: any graph, placement, schedule, recompute and update mode; ``host``: skips may wait there."""
    net = draw(pipelines(most=most, host=host))
    stages = [s.name for s in net.spec.stages]
    devices = draw(st.integers(1, min(4, len(stages))))
    kinds = ["linear", "mapping", "looped"] + (["v"] if len(stages) >= 2 * devices else [])
    placement: Any = draw(st.sampled_from(kinds))
    if placement == "mapping":
        extra = draw(
            st.lists(
                st.integers(0, devices - 1), min_size=len(stages) - devices, max_size=len(stages) - devices
            )
        )
        placement = dict(zip(stages, draw(st.permutations([*range(devices), *extra])), strict=True))
    forward_only = draw(st.booleans()) if training is None else not training
    schedule: Any = draw(st.sampled_from(["gpipe", "1f1b", "random"]))
    if schedule == "random":
        schedule = any_order(draw(st.integers(0, 1000)), draw(st.booleans()))
    modes = st.sampled_from(["never", "always", "except_last"])
    recompute = "never" if forward_only else draw(st.one_of(modes, st.dictionaries(st.sampled_from(stages), modes)))
    update = None if forward_only else draw(st.sampled_from([None, "stage", "all"]))
    early = update == "stage" and draw(st.booleans())
    return pipec.compile(
        net,
        devices,
        draw(st.integers(1, most)),
        schedule,
        placement=placement,
        recompute=recompute,
        update=update,
        update_early=early,
        forward_only=forward_only,
        **options,
    )


POLICIES: tuple[Any, ...] = (
    PipeDream(), PipeDream(vertical_sync=True), PipeMare(), PipeMare("1f1b"), PipeMare(correction=None), Predicted(),
    PipeMare(segments=2), PipeMare("1f1b", segments=1),
    Predicted("full"), LiveWeights(), Nesterov(), Nesterov(stash=False),
)


@st.composite
def asynchronous_plans(draw: Any, most: int = 5) -> Plan:
    net = draw(pipelines(most=most))
    count = len(net.spec.stages)
    devices = draw(st.integers(1, min(3, count)))
    placement = draw(st.sampled_from(["linear", "looped"] + (["v"] if count >= 2 * devices else [])))
    microbatches = draw(st.integers(1, 5))
    policy = draw(st.sampled_from(POLICIES))
    if draw(st.booleans()):
        policy = LiveWeights(draw(st.sampled_from([a for a in range(1, 6) if microbatches % a == 0])))
    own = getattr(policy, "segments", None) is not None
    return pipec.compile(net, devices, microbatches, policy, placement=placement, update="stage",
                         recompute="never" if own else draw(st.sampled_from(["never", "always"])))


def needs(plan: Plan) -> list[set[int]]:
    """Per task the tasks right before it: by waits and on each of its lanes."""
    made = [set(plan.waits.of(task).tolist()) for task in range(len(plan))]
    for lanes in plan.lanes:
        for lane in Lane:
            ids = lanes[lane].tolist()
            for earlier, later in itertools.pairwise(ids):
                made[later].add(earlier)
    return made


def ancestors(before: list[set[int]], task: int) -> set[int]:
    """All tasks that have ended when ``task`` starts."""
    seen, stack = set(), [task]
    while stack:
        for need in before[stack.pop()] - seen:
            seen.add(need)
            stack.append(need)
    return seen
