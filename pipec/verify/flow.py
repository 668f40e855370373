"""Invariants about what tasks wait for: no deadlock, every reader after its writer, copies paired."""

from __future__ import annotations

import numpy as np

from pipec.ir import FROM_HOST, TO_HOST, Kind, Lane, Plan, sends
from pipec.passes.draft import join, to_csr
from pipec.passes.linearise import deadlock
from pipec.topology import clock
from pipec.verify.facts import Facts, NotChecked, Route, some
from pipec.verify.form import lane_name
from pipec.verify.reach import Reach, Rows
from pipec.verify.tasks import UNRUNNABLE


def progress(facts: Facts) -> list[str]:
    """Lanes, waits, data and copies together contain no cycle: no device waits for ever.

    A COPY is one task at the head of two lanes, so this holds even when every send waits for its receiver.
    """
    reach, plan = facts.reach, facts.plan
    if reach.order is None:
        return [deadlock_story(plan, reach, reach.united)]
    needs = [(need.after, need.before) for need in (*facts.own_needs, *facts.data_needs)]
    place = np.empty(reach.size, np.int64)
    place[reach.order] = np.arange(reach.size)
    if all(bool((place[before] < place[after]).all()) for after, before in needs):
        return []
    edges = join([reach.united, *needs])
    ends, _ = reach.run(*to_csr(edges, reach.size))
    return [] if ends.all() else [deadlock_story(plan, reach, edges)]


def rendezvous(facts: Facts) -> list[str] | NotChecked:
    """Even a rank that does one thing after another never waits for ever: its tasks of all lanes in the order of their
    ids, where a COPY ends only when both its sender and its receiver are at it.

    That is the strictest transport there is: sends without any buffer, and one order of issue for all communicators
    of a rank, as NCCL wants it. Looser ones (receives posted ahead, sends in the background) allow more. A plan whose
    ids are mere names has no such order; it runs within one process only.
    """
    if facts.reach.order is None:
        return UNRUNNABLE
    story = issue_deadlock(facts.plan, facts.reach)
    return [] if story is None else NotChecked(story)


def issue_deadlock(plan: Plan, reach: Reach | None = None) -> str | None:
    """Where every device stands when tasks are issued one after another in the order of their ids; None: all end."""
    reach = reach or Reach(plan)
    if reach.canonical:  # the smallest id that has not ended can run: whatever it needs is smaller
        return None
    start, needs = to_csr(reach.united, reach.size)
    lists = [plan.issue_order(device).tolist() for device in range(plan.devices)]
    ends, reached = clock(lists, start, needs, [1] * reach.size)
    if ends.all():
        return None
    story = deadlock("one task after another in the order of ids", plan.table, lists, reached, start, needs, ends)
    return story.replace("its turn on the other lane", "the other device")


def deadlock_story(plan: Plan, reach: Reach, edges: tuple[Rows, Rows]) -> str:
    """Where every lane that did not reach its end stands, and what it waits for."""
    start, needs = to_csr(edges, reach.size)
    ends, reached = reach.run(start, needs)
    lists = [ids.tolist() for lanes in plan.lanes for ids in lanes]
    names = [f"device {d} {lane_name(lane)}" for d in range(plan.devices) for lane in Lane]
    return deadlock("the plan", plan.table, lists, reached, start, needs, ends, names)


def waits(facts: Facts) -> list[str] | NotChecked:
    """Whatever a task reads from another device or lane has a path of waits from the task that writes it."""
    return UNRUNNABLE if facts.reach.order is None else facts.unproved(facts.data_needs)


def copies(facts: Facts) -> list[str]:
    """Every value goes once from its producer's device to each reader's, its gradient once back; between two
    devices the order of sends is the order of receives."""
    table, wanted = facts.table, _routes(facts)
    found: list[str] = []
    for route in sorted(wanted | set(facts.copies)):
        rows = facts.copy(*route)
        if route in wanted:
            missing = np.flatnonzero(rows < 0)
            name = f"{('', 'the gradient of ', 'the recomputed ', '', '')[route[1]]}value {facts.value(route[0])}"
            found += some(missing, (
                f"the copy {_token(route, facts.item(m))} of {name} is missing" for m in missing.tolist()
            ))
        else:
            extra = rows[rows >= 0]
            found += some(extra, (
                f"{facts.task(i)} is there, but nothing on device {table.peer[i]} needs it"
                for i in extra.tolist()
            ))
    ids = np.flatnonzero(table.kind == Kind.COPY)
    producer = np.asarray([v.producer for v in facts.graph.values] + [-1])
    wrong = ids[producer[table.value[ids]] != table.stage[ids]]
    found += some(wrong, (
        f"{facts.task(i)} is listed under stage {table.stage[i]}, which does not make the value"
        for i in wrong.tolist()
    ))
    kept = np.zeros(len(table) + 1, bool)
    kept[np.concatenate([[-1], *facts.copies.values()])] = True  # the last one stands for no copy
    extra = ids[~kept[ids]]
    found += some(extra, (f"{facts.task(i)} stands more than once" for i in extra.tolist()))
    return found + _send_order(facts) + _blocked(facts)


def _blocked(facts: Facts) -> list[str]:
    """What stands behind a copy back from host memory on its lane must not wait for it longer than it takes: the task
    that the copy back waits for comes, on its device, before every task that reads what stands behind."""
    gates: dict[int, int] = {}
    for value, info in enumerate(facts.graph.values):
        for device, stages in facts.hosted_on(value).items():
            rows = facts.copy(value, FROM_HOST, int(facts.home[info.producer]), device)
            gate = facts.gate(device, stages)
            gates |= dict(zip(rows[gate >= 0].tolist(), gate[gate >= 0].tolist(), strict=True))
    found: list[str] = []
    if not gates:
        return found
    place = facts.reach.place[0]
    first = _first_readers(facts)
    for lanes in facts.plan.lanes:
        furthest, last = -1, -1
        for task in lanes[Lane.IN].tolist():
            reader = first[task]
            if furthest >= 0 and reader >= 0 and place[reader] <= place[furthest]:
                found.append(
                    f"{facts.task(task)} stands behind {facts.task(last)}, which waits for {facts.task(furthest)}, but "
                    f"is read before that by {facts.task(reader)}; let it come first"
                )
            own = gates.get(task, -1)
            if own >= 0 and (furthest < 0 or place[own] > place[furthest]):
                furthest, last = own, task
    return some(np.arange(len(found)), iter(found))


def _first_readers(facts: Facts) -> Rows:
    """Per copy the first task on its target's compute lane that waits for it, -1 without any."""
    task, need = facts.reach.edges
    table, place = facts.table, facts.reach.place[0]
    own = (table.kind[need] == Kind.COPY) & (table.kind[task] != Kind.COPY) & ~sends(table)[task]
    own &= table.device[task] == table.peer[need]
    task, need = task[own], need[own]
    order = np.lexsort((-place[task], need))
    first = np.full(len(table), -1, np.int64)
    first[need[order]] = task[order]  # of several the last one written, which comes first on its lane
    return first


def _token(route: Route, item: str) -> str:
    value, gradient, source, target = route
    start, end = "host" if gradient == FROM_HOST else source, "host" if gradient == TO_HOST else target
    return f"{('', 'd', 'r', '', '')[gradient]}v{value}[{item}]:{start}>{end}"


def _routes(facts: Facts) -> set[Route]:
    made = set()
    for value, info in enumerate(facts.graph.values):
        home = int(facts.home[info.producer])
        made |= {(value, 0, home, d) for d in facts.readers_on(value) if d != home}
        made |= {(value, 1, d, home) for d in facts.gradients_on(value) if d != home}
        made |= {(value, 2, home, d) for d in facts.again_on(value) if d != home}
        made |= {(value, TO_HOST, home, home) for _ in facts.hosted_on(value)}
        made |= {(value, FROM_HOST, home, d) for d in facts.hosted_on(value)}
    return made


def _send_order(facts: Facts) -> list[str]:
    """Between two devices sends and receives are the same tasks in the same order."""
    table, lanes = facts.table, facts.plan.lanes
    found = []
    for device in range(facts.plan.devices):
        for peer in np.unique(table.peer[lanes[device][Lane.OUT]]).tolist():
            if peer < 0:  # a REDUCE, which has no single receiver
                continue
            out, into = (ids[table.gradient[ids] < TO_HOST] for ids in (lanes[device][Lane.OUT], lanes[peer][Lane.IN]))
            out, into = out[table.peer[out] == peer], into[table.device[into] == device]
            differ = np.flatnonzero(out != into)  # of one length: every COPY stands in both lanes
            if len(differ):
                sent, received = table.task(int(out[differ[0]])), table.task(int(into[differ[0]]))
                found.append(
                    f"device {device} sends {sent} where device {peer} receives {received}; the order of sends "
                    "must be the order of receives"
                )
    return found
