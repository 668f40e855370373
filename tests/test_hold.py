"""Skips that wait in host memory: what is declared, planned, proved, simulated and drawn."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from mistakes import only, started
from mutate import broken, buffer_of, drop, edges_of, row, set_buffer, set_column, swap, without_wait
from plans import ancestors, needs, plans, unet

import pipec
from pipec.files import from_dict, to_dict
from pipec.ir import FROM_HOST, TO_HOST, Buffer, Lane, Plan
from pipec.races import check_races, find_races
from pipec.schedules import REGISTRY

FOLDED = [0, 1, 2, 1, 0]  # both ends of each skip on one device
COSTS = pipec.Costs(bandwidth=100, stages={
    s.name: {"output_bytes": 50, "activation_bytes": 100} for s in unet().spec.stages})


def held(schedule: Any = "1f1b", placement: Any = FOLDED, microbatches: int = 4, **options: Any) -> Plan:
    return pipec.compile(unet(hold="host"), 3, microbatches, schedule, placement=placement, **options)


# -- declared ----------------------------------------------------------------------------------------------------


def test_hold_is_host_or_nothing() -> None:
    net, x, _ = started()
    a = net.stage("a", None, x)
    net.output(net.stage("c", None, net.stage("b", None, a), pipec.skip(a, hold="disk")))
    assert only(net) == "stage 'c': skip(a, hold='disk'): hold is 'host' or None, which leaves the value on a device"


def test_an_input_does_not_wait_in_host_memory() -> None:
    net, x, _ = started()
    net.output(net.stage("b", None, net.stage("a", None, x), pipec.skip(x, hold="host")))
    assert "'x' is an input of the pipeline, and only what a stage returns can wait in host memory" in only(net)


def test_outputs_and_losses_do_not_wait_in_host_memory() -> None:
    net, x, _ = started()
    a = net.stage("a", None, x)
    net.output(pipec.skip(net.stage("b", None, a), hold="host"))
    assert only(net) == "output b: skip(hold='host') is for what a stage reads; leave it out"
    net, x, _ = started()
    a = net.stage("a", None, x)
    net.loss("loss", None, net.stage("b", None, a), pipec.skip(a, hold="host"))
    assert only(net).startswith("loss 'loss': skip(hold='host') is for what a stage reads, and this loss reads as")


def test_a_skip_of_a_skip_waits_where_either_says() -> None:
    net, x, _ = started()
    a = net.stage("a", None, x)
    c = net.stage("c", None, net.stage("b", None, a), pipec.skip(pipec.skip(a, hold="host")))
    net.output(c)
    (value,) = (value for value in net.spec.graph.values if value.name == "a")
    assert [net.spec.stages[reader].name for reader in value.host] == ["c"]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "live-weights", pipec.PipeMare(segments=2)])
@pytest.mark.parametrize(("placement", "count"), [(FOLDED, 2), ([0, 0, 1, 1, 2], 1)])
def test_asynchronous_plans_hold_values_too_and_every_step_alike(
    schedule: Any, placement: list[int], count: int
) -> None:
    recompute = "never" if isinstance(schedule, pipec.PipeMare) else "always"
    plan = held(schedule, placement, 6, update="stage", recompute=recompute)  # verified, its periods too
    assert find_races(plan) == []
    to_host, back = (plan.table.gradient == way for way in (TO_HOST, FROM_HOST))
    assert to_host.sum() == back.sum() == count * plan.microbatches
    assert plan.simulate().host_copies == 2 * count * plan.microbatches


# -- planned -----------------------------------------------------------------------------------------------------


def test_a_value_that_another_stage_of_the_device_reads_goes_straight() -> None:
    net = pipec.Pipeline("net")
    a = net.stage("a", None, net.input("x"))
    b = net.stage("b", None, a)
    c = net.stage("c", None, b, pipec.skip(a, hold="host"))
    d = net.stage("d", None, c, pipec.skip(a))
    net.loss("loss", None, net.stage("e", None, d, pipec.skip(a, hold="host")))
    plan = pipec.compile(net, 3, 1, placement=[0, 0, 1, 1, 2])
    first = {str(task) for view in plan.tasks for task in view if task.value == 0 and not task.gradient}
    assert first == {"v0[0]:0>1", "v0[0]:0>host", "v0[0]:host>2"}


def test_a_value_goes_out_once_for_all_its_readers() -> None:
    net = pipec.Pipeline("net")
    a = net.stage("a", None, net.input("x"))
    b = net.stage("b", None, a)
    c = net.stage("c", None, b, pipec.skip(a, hold="host"))
    net.loss("loss", None, net.stage("d", None, c, pipec.skip(a, hold="host")))
    plan = pipec.compile(net, 3, 2, "gpipe", placement=[0, 0, 1, 2])
    copies = [str(plan.table.task(i)) for i in range(len(plan)) if plan.table.gradient[i] >= TO_HOST]
    assert sorted(copies) == sorted(f"v0[{m}]:{way}" for m in range(2) for way in ("0>host", "host>1", "host>2"))
    assert check_races(plan)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("placement", [FOLDED, None], ids=["folded", "linear"])
@pytest.mark.parametrize("schedule", REGISTRY)
def test_every_synchronous_schedule_holds(schedule: str, placement: Any, recompute: str) -> None:
    try:
        pipec.compile(unet(), 3, 4, schedule, placement=placement, recompute=recompute)
    except pipec.PipecError:
        return  # the schedule does not take this placement, held or not
    plan = held(schedule, placement, recompute=recompute)
    kinds = plan.table.gradient
    assert (kinds == TO_HOST).sum() == (kinds == FROM_HOST).sum() == (8 if placement else 4)
    assert str(plan.verify()["rendezvous"]) == "rendezvous: holds"
    assert check_races(plan)


@given(plans(host=True))
@settings(max_examples=40)
def test_texts_and_files_hold_it_all(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert from_dict(json.loads(json.dumps(to_dict(plan)))) == plan


@given(plans(host=True))
@settings(max_examples=40)
def test_values_come_back_one_task_ahead(plan: Plan) -> None:
    """By the order of the lane alone: between the task that the copy back waits for and the reader stands one."""
    for copy in np.flatnonzero(plan.table.gradient == FROM_HOST).tolist():
        peer = int(plan.table.peer[copy])
        lane = [i for i in plan.lanes[peer][Lane.COMPUTE].tolist() if str(plan.table.task(i)).find("U") < 0]
        readers = [lane.index(i) for i in lane if copy in plan.waits.of(i)]
        gates = [lane.index(i) for i in plan.waits.of(copy).tolist() if i in lane]
        assert gates == ([min(readers) - 2] if min(readers) >= 2 else [])


def test_gradients_never_wait_in_host_memory() -> None:
    plan = held()
    back = [task for view in plan.tasks for task in view if task.gradient]
    assert back
    assert not [task for task in back if task.host]


def test_hosts_buffers_live_between_the_two_copies() -> None:
    plan = held("gpipe")
    host = plan.buffers.kind == Buffer.HOST
    assert (plan.table.gradient[plan.buffers.writer[host]] == TO_HOST).all()
    assert (plan.table.gradient[plan.buffers.free[host]] == FROM_HOST).all()
    home = (plan.buffers.kind == Buffer.VALUE) & (plan.buffers.ref == 0) & (plan.buffers.device == 0)
    assert (plan.table.gradient[plan.buffers.free[home]] == TO_HOST).all()


# -- proved ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_every_wait_that_is_needed_is_missed(schedule: str) -> None:
    plan = held(schedule, microbatches=3)
    for task, need in edges_of(plan):
        mutant = without_wait(plan, task, need)
        implied = need in ancestors(needs(mutant), task)
        assert bool(find_races(mutant)) is not implied, f"{plan.table.task(task)} without {plan.table.task(need)}"
        assert bool(broken(mutant)) is not implied, f"{plan.table.task(task)} without {plan.table.task(need)}"


def without_gate(plan: Plan) -> Plan:
    copy = row(plan, "v0[1]:host>0")
    return without_wait(plan, copy, next(w for w in plan.waits.of(copy).tolist() if plan.table.kind[w] == 0))


MUTANTS: dict[str, tuple[str, Any, str]] = {
    "not sent to the host": ("copies", lambda p: drop(p, row(p, "v0[1]:0>host")),
                             r"the copy v0\[1\]:0>host of value 'enc0' is missing"),
    "not brought back": ("copies", lambda p: drop(p, row(p, "v0[1]:host>0")),
                         r"the copy v0\[1\]:host>0 of value 'enc0' is missing"),
    "sent straight": ("copies", lambda p: pipec.Plan.parse(str(p).replace("skip 4 host 4", "skip 4")),
                      r"v0\[0\]:0>host .* is there, but nothing on device 0 needs it"),
    "brought back before it is out": (
        "waits", lambda p: without_wait(p, row(p, "v0[1]:host>0"), row(p, "v0[1]:0>host")),
        r"v0\[1\]:host>0 .*back from host memory\) reads a value but does not wait for v0\[1\]:0>host"),
    "brought back too early": ("waits", without_gate, "comes back more than one task ahead of its reader"),
    "freed in host memory before it is back": (
        "lifetimes", lambda p: set_buffer(p, "free", buffer_of(p, "hv0[1]", 0), row(p, "v0[1]:0>host")),
        r"frees hv0 on device 0 but does not wait for its reader|hv0"),
    "freed at home before it is out": (
        "lifetimes", lambda p: set_buffer(p, "free", buffer_of(p, "v0[1]", 0), row(p, "0F1")),
        r"0F1 .* frees v0 on device 0 but does not wait for its reader v0\[1\]:0>"),
    "freed by its reader's forward": (
        "lifetimes", lambda p: set_buffer(p, "free", buffer_of(p, "fv0[1]", 0), row(p, "4F1")),
        r"4F1 .* frees fv0 on device 0 but does not wait for its reader 4B1"),
    "queued before others on its lane": (
        "copies", lambda p: before_others(p, "v0[2]:host>0", "v3[0]:1>0"),
        r"v3\[0\]:1>0 .* stands behind v0\[2\]:host>0 .* but is read before that by 4F0"),
    "the host's own peer": ("form", lambda p: set_column(p, "peer", row(p, "v0[1]:0>host"), 1),
                            "goes to host memory with the peer 1; it names its own device, 0"),
    "on a lane too many": ("form", lambda p: more_lane(p, row(p, "v0[1]:0>host")),
                           r"v0\[1\]:0>host .* does not belong in the copy-in lane of device 0"),
    "held for nobody": (
        "form", lambda p: evolve(p, graph=evolve(p.graph, values=(evolve(p.graph.values[0], host=(2,)),
                                                                 *p.graph.values[1:]))),
        "value v0 is marked as a skip to 4, 2, which do not all read it"),
}


def before_others(plan: Plan, copy: str, other: str) -> Plan:
    return swap(plan, 0, Lane.IN, row(plan, copy), row(plan, other))


def more_lane(plan: Plan, task: int) -> Plan:
    out = np.sort(np.append(plan.lanes[0][Lane.IN], task)).astype(np.int32)
    return evolve(plan, lanes=((*plan.lanes[0][:2], out), *plan.lanes[1:]))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutations_are_named(name: str) -> None:
    invariant, mutate, told = MUTANTS[name]
    plan = held("gpipe")
    assert not broken(plan)
    found = broken(mutate(plan))
    assert invariant in found, found
    assert any(re.search(told, text) for text in found[invariant]), found[invariant]


# -- simulated and drawn -----------------------------------------------------------------------------------------


def test_the_simulator_counts_traffic_and_host_memory_apart() -> None:
    timeline = held("gpipe", costs=COSTS).simulate()
    straight = pipec.compile(unet(), 3, 4, "gpipe", placement=FOLDED, costs=COSTS).simulate()
    assert (timeline.copies, timeline.copy_bytes) == (straight.copies, straight.copy_bytes)
    assert (timeline.host_copies, timeline.host_copy_bytes) == (16, 16 * 50)
    assert (straight.host_copies, straight.host_copy_bytes, straight.host_peak_bytes) == (0, 0, [0, 0, 0])
    assert timeline.host_peak_bytes is not None
    assert timeline.host_peak_bytes[2] == 0
    assert all(50 <= peak <= 4 * 50 for peak in timeline.host_peak_bytes[:2])
    assert "16 to and from host memory of 800 B" in str(timeline)
    assert "host memory" not in str(straight)


def test_device_memory_while_values_wait_is_less() -> None:
    """Eight encoders' values wait for a decoder on the same device; without activations they are all there is."""
    costs = evolve(COSTS, stages={name: {"output_bytes": 50, "activation_bytes": 0} for name in COSTS.stages})
    plans_ = [pipec.compile(unet(hold=hold), 3, 8, "gpipe", placement=FOLDED, costs=costs, forward_only=True)
              for hold in (None, "host")]
    straight, waiting = (plan.simulate().peak_bytes for plan in plans_)
    assert straight is not None
    assert waiting is not None
    assert waiting[0] < straight[0]
    host = plans_[1].simulate().host_peak_bytes
    assert host is not None
    assert host[0] >= 100


def test_the_hosts_bandwidth_and_latency_are_its_own_where_given() -> None:
    plan = held("gpipe", costs=COSTS)
    out = row(plan, "v0[0]:0>host")

    def took(**costs: Any) -> float:
        timeline = plan.simulate(evolve(COSTS, **costs))
        return float(timeline.end[out] - timeline.start[out])

    assert took() == 0.5
    assert took(host_bandwidth=25) == 2.0
    assert took(bandwidth=None, host_bandwidth=25) == 2.0
    assert took(bandwidth=None) == 0.0
    back = row(plan, "v0[0]:host>0")
    late = plan.simulate(evolve(COSTS, host_latency=100.0))
    assert late.start[back] >= late.end[out] + 100
    with pytest.raises(pipec.SpecError, match="host_bandwidth must be positive"):
        pipec.Costs(host_bandwidth=0)


def test_a_slow_host_delays_no_other_copy_by_waiting() -> None:
    """Copies behind one that waits for its turn arrive before their readers' turn: only its transfer costs."""
    plan = held("1f1b")
    free = evolve(COSTS, bandwidth=None)
    assert plan.simulate(free).makespan == pipec.compile(unet(), 3, 4, placement=FOLDED).simulate().makespan


def test_pictures_and_traces_name_the_host(tmp_path: Any) -> None:
    plan = held("gpipe", costs=COSTS)
    text = plan.draw(lanes=True, copies=True, memory=True).dot
    assert "device 0 to host memory" in text
    assert "host memory to device 0" in text
    assert "in host memory" in text
    plan.simulate().to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event["args"] for event in events if "host>" in event["name"] or ">host" in event["name"]]
    assert {(about["from device"], about["to device"]) for about in slices} == {
        (0, "host"), ("host", 0), (1, "host"), ("host", 1)}
