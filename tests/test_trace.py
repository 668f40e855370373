"""Chrome/Perfetto traces: valid, exact, without overlaps, simulated and measured."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import plans, unet
from torch import nn

import pipec
from pipec.cli import main
from pipec.costs import Costs
from pipec.ir import Kind, Lane
from pipec.render.trace import microseconds, time_unit, write_trace
from pipec.timeline import Timeline

Event = dict[str, Any]


def refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def load(path: Path) -> dict[str, Any]:
    """Strict JSON: no NaN, no key twice, numbers kept as they are written."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    text = path.read_bytes().decode("ascii")
    return json.loads(text, parse_float=Decimal, parse_constant=refuse, object_pairs_hook=once)


def ns(event: Event, key: str = "ts") -> int:
    value = event[key] * 1000
    assert value == int(value)
    return int(value)


def select(trace: dict[str, Any], *phases: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases]


def by_track(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """Slices of every track in the order of the file."""
    found = defaultdict(list)
    for event in select(trace, "X"):
        found[event["pid"], event["tid"]].append(event)
    return found


def names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in select(trace, "M") if e["name"] == "thread_name"}


def check(trace: dict[str, Any], *timelines: Timeline) -> None:
    """What holds of every trace of ``timelines``."""
    assert trace["displayTimeUnit"] == "ns"
    slices, called = by_track(trace), names(trace)
    assert set(slices) <= set(called)
    assert len({tid for _, tid in called}) == len(called)
    for own in slices.values():
        for before, after in pairwise(own):
            assert ns(before) + ns(before, "dur") <= ns(after)
    for pid, timeline in enumerate(timelines, 1):
        tokens = defaultdict(int)
        for event in select(trace, "X", "i"):
            if event["pid"] == pid:
                tokens[event["args"]["task"], event["args"]["kind"]] += 1
        table = timeline.plan.table
        assert sum(tokens.values()) == len(table) + int((table.kind == Kind.COPY).sum())  # a copy has two lanes
        starts = {e["id"]: e for e in select(trace, "s") if e["pid"] == pid}
        ends = {e["id"]: e for e in select(trace, "f") if e["pid"] == pid}
        assert set(starts) == set(ends)
        assert len(starts) == timeline.copies
        for flow, start in starts.items():
            assert (start["name"], start["cat"]) == (ends[flow]["name"], ends[flow]["cat"])
            assert ns(start) <= ns(ends[flow])
            assert ends[flow]["bp"] == "e"
    flows = select(trace, "s", "f")
    assert len({(e["id"], e["ph"]) for e in flows}) == len(flows)
    for event in flows:
        around = [s for s in slices[event["pid"], event["tid"]] if inside(event, s)]
        assert around, event
    for event in select(trace, "C"):
        assert all(value >= 0 for value in event["args"].values())


def inside(event: Event, piece: Event) -> bool:
    begin, length = ns(piece), ns(piece, "dur")
    return begin <= ns(event) < begin + max(length, 1)


def written(tmp_path: Path, *timelines: Timeline, **options: Any) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    write_trace(timelines, path, **options)
    trace = load(path)
    check(trace, *timelines)
    return trace


SKIPS = Costs(latency=0.25, bandwidth=4.0, unit="us", stages={
    name: {"output_bytes": 2, "activation_bytes": 3} for name in ("enc0", "enc1", "mid", "dec0", "dec1")})


def test_a_slice_says_everything_about_its_task(tmp_path: Path) -> None:
    plan = pipec.compile(unet(), 3, 2, update="stage")
    trace = written(tmp_path, plan.simulate(SKIPS))
    found = {e["name"]: e for e in select(trace, "X")}
    assert found["0F0 enc0"] == {
        "ph": "X", "name": "0F0 enc0", "cat": "forward", "pid": 1, "tid": found["0F0 enc0"]["tid"], "ts": 0, "dur": 1,
        "args": {"task": "0F0", "kind": "forward", "stage": "enc0", "microbatch": 0, "weight version": 0},
    }
    skip = next(e for e in select(trace, "X") if e["args"].get("value") == "enc0" and not e["args"]["gradient"])
    assert skip["cat"] == "copy"
    assert skip["dur"] == Decimal("0.5")
    assert skip["args"] == {
        "task": f"v{plan.graph.values.index(next(v for v in plan.graph.values if v.name == 'enc0'))}[0]:0>2",
        "kind": "copy", "stage": "enc0", "microbatch": 0, "value": "enc0", "gradient": False, "from device": 0,
        "to device": 2, "bytes": 2,
    }


def test_tracks_are_named_and_sorted_by_device_and_lane(tmp_path: Path) -> None:
    trace = written(tmp_path, pipec.compile(unet(), 2, 2).simulate(SKIPS), names=["mine"])
    order = {e["tid"]: e["args"]["sort_index"] for e in select(trace, "M") if e["name"] == "thread_sort_index"}
    called = {tid: name for (_, tid), name in names(trace).items()}
    assert [called[tid] for tid in sorted(called, key=order.__getitem__)] == [
        "device 0", "device 0 copies out", "device 0 copies in", "device 1", "device 1 copies out",
        "device 1 copies in",
    ]
    about = {e["name"]: e["args"] for e in select(trace, "M") if e["name"].startswith("process")}
    assert about == {
        "process_name": {"name": "mine"}, "process_labels": {"labels": "times in us"},
        "process_sort_index": {"sort_index": 1},
    }


def test_times_are_those_of_the_timeline(tmp_path: Path) -> None:
    timeline = pipec.compile(pipec.chain(4), 2, 3).simulate(Costs(1.25, 0.5, 0.125, unit="ms", latency=1e-6))
    trace = written(tmp_path, timeline)
    found = {e["args"]["task"]: e for e in select(trace, "X")}
    table = timeline.plan.table
    for index in np.flatnonzero(table.kind != Kind.COPY).tolist():
        event = found[str(table.task(index))]
        assert ns(event) == round(float(timeline.start[index]) * 1e6)
        assert ns(event) + ns(event, "dur") == round(float(timeline.end[index]) * 1e6)
    assert any(ns(e) % 1000 == 1 for e in select(trace, "X"))  # the latency of a nanosecond is seen


def test_a_flow_leads_from_the_producer_to_the_first_reader(tmp_path: Path) -> None:
    trace = written(tmp_path, pipec.compile(unet(1), 3, 1).simulate(Costs(unit="us")))
    slices = by_track(trace)

    def task(event: Event) -> str:
        return next(
            s["args"]["task"] for s in slices[event["pid"], event["tid"]] if inside(event, s))

    ends = {e["id"]: e for e in select(trace, "f")}
    assert sorted((task(e), task(ends[e["id"]])) for e in select(trace, "s")) == [
        ("0F0", "1F0"), ("0F0", "2F0"), ("1B0", "0B0"), ("1F0", "2F0"), ("2B0", "0B0"), ("2B0", "1B0")]


@pytest.mark.parametrize("nanoseconds", [0, 1, 999, 1_000, 1_001, 10**15 + 7, 2**53 - 1, 2**62 + 1])
def test_microseconds_are_exact(nanoseconds: int) -> None:
    assert Decimal(microseconds(nanoseconds)) * 1000 == nanoseconds


def test_long_times_keep_every_nanosecond(tmp_path: Path) -> None:
    long = 2**53 - 1  # 104 days: the longest odd number of nanoseconds that a timeline's floats hold
    trace = written(tmp_path, pipec.compile(pipec.chain(2), 1, 1, forward_only=True).simulate(Costs(long, unit="ns")))
    assert [(ns(e), ns(e, "dur")) for e in select(trace, "X")] == [(0, long), (long, long)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans(), data=st.data())
def test_any_plan_and_costs(tmp_path: Path, plan: pipec.Plan, data: st.DataObject) -> None:
    time = st.sampled_from([0.0, 1.0, 1 / 3, 0.1, 1e-4])
    sizes = st.sampled_from([0, 1, 3])
    bandwidth = data.draw(st.sampled_from([None, 3.0]))
    costs = Costs(
        data.draw(time), data.draw(time), data.draw(time), update=data.draw(time), latency=data.draw(time),
        bandwidth=bandwidth, unit=data.draw(st.sampled_from(["", "us", "s"])),
        stages={s.name: {"output_bytes": data.draw(sizes), "activation_bytes": 1} for s in plan.graph.stages})
    written(tmp_path, plan.simulate(costs), plan.simulate(Costs()))


def test_tasks_and_copies_that_take_no_time_stay_visible(tmp_path: Path) -> None:
    plan = pipec.compile(pipec.chain(2), 2, 2, update="stage")
    trace = written(tmp_path, plan.simulate(Costs(0.0, 0.0, 0.0)))
    assert {e["dur"] for e in select(trace, "X")} == {0}
    assert len(select(trace, "X")) == int((plan.table.kind != Kind.COPY).sum())
    assert {e["s"] for e in select(trace, "i")} == {"t"}
    assert len(select(trace, "i")) == 2 * 4


def test_measured_copies_that_overlap_get_a_track_of_their_own(tmp_path: Path) -> None:
    plan = pipec.compile(unet(1), 3, 1)
    start, end = np.zeros(len(plan)), np.ones(len(plan))
    compute = np.flatnonzero(plan.table.kind != Kind.COPY)
    start[compute], end[compute] = np.arange(len(compute)), np.arange(len(compute)) + 1.0
    copies = plan.lanes[2][Lane.IN]
    assert len(copies) == 2
    start[copies], end[copies] = [1.0, 1.5], [2.0, 2.5]
    other = np.setdiff1d(np.flatnonzero(plan.table.kind == Kind.COPY), copies)
    start[other], end[other] = np.arange(len(other)) + 3.0, np.arange(len(other)) + 4.0
    path = tmp_path / "t.json"
    write_trace(Timeline(plan, Costs(unit="ms"), start, end, np.full(len(plan), -1, np.int32), True), path)
    trace = load(path)
    called = names(trace)
    assert {called[key] for key in by_track(trace)} >= {"device 2 copies in", "device 2 copies in (2)"}
    for own in by_track(trace).values():
        assert all(ns(a) + ns(a, "dur") <= ns(b) for a, b in pairwise(own))


def test_counters_reach_the_peaks_and_end_at_zero(tmp_path: Path) -> None:
    timeline = pipec.compile(unet(), 3, 4, update="stage").simulate(SKIPS)
    levels = defaultdict(list)
    for event in select(written(tmp_path, timeline), "C"):
        ((unit, value),) = event["args"].items()
        levels[event["name"], unit].append((ns(event), value))
    assert timeline.peak_bytes is not None
    for device in range(3):
        shares = levels[f"device {device} live activations", "shares"]
        memory = levels[f"device {device} live memory", "bytes"]
        assert float(max(v for _, v in shares)) == pytest.approx(timeline.peak_share[device])
        assert max(v for _, v in memory) == timeline.peak_bytes[device]
        for steps in (shares, memory):
            assert steps[0][0] == 0
            assert steps[-1][1] == 0
            assert all(a[0] < b[0] for a, b in pairwise(steps))
    without = written(tmp_path, timeline.plan.simulate(Costs()))
    assert not [e for e in select(without, "C") if "memory" in e["name"]]


@pytest.mark.parametrize(("unit", "options", "scale", "said"), [
    ("", {}, 10**6, "1 unit of time shown as 1 ms"),
    ("", {"unit": "us"}, 10**3, "1 unit of time shown as 1 us"),
    ("ticks", {"unit": "seconds"}, 10**9, "1 ticks shown as 1 s"),
    ("Seconds", {}, 10**9, "times in s"),
    ("µs", {"unit": "s"}, 10**3, "times in µs"),
    ("ns", {}, 1, "times in ns"),
])
def test_how_units_are_scaled_is_said(
    tmp_path: Path, unit: str, options: dict[str, str], scale: int, said: str
) -> None:
    timeline = pipec.compile(pipec.chain(2), 1, 1).simulate(Costs(unit=unit))
    trace = written(tmp_path, timeline, names=["p"], **options)
    assert ns(select(trace, "X")[0], "dur") == scale
    assert trace["otherData"]["p"] == said
    assert {"labels": said} in [e["args"] for e in select(trace, "M")]


def test_units() -> None:
    assert [time_unit(u) for u in ("MS", " minutes", "secs", "", "s", "step", "us")] == [
        "ms", "min", "s", None, "s", None, "us"]


def test_gzip_holds_the_same_bytes_and_is_reproducible(tmp_path: Path) -> None:
    timeline = pipec.compile(unet(), 2, 2).simulate(SKIPS)
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        timeline.to_chrome_trace(str(tmp_path / name))
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()


def test_any_characters_in_names(tmp_path: Path) -> None:
    odd = 'a"\\\n\u2028\U0001f600</script>'
    net = pipec.Pipeline(odd)
    net.output(net.stage(odd, None, net.input("x")))
    trace = written(tmp_path, pipec.compile(net, 1, 1, forward_only=True).simulate())
    assert [e["name"] for e in select(trace, "X")] == [f"0F0 {odd}"]
    assert odd in next(e for e in select(trace, "M") if e["name"] == "process_name")["args"]["name"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    plan = pipec.compile(pipec.chain(2), 1, 1)
    good, path = plan.simulate(), tmp_path / "t.json"
    for what, options, message in [
        ([], {}, "the list of timelines is empty"),
        ([plan], {}, r"got Plan; use plan.simulate\(\)"),
        ([good], {"names": ["a", "b"]}, "names: expected a list of 1"),
        ([good], {"names": "a"}, "names: expected a list of 1"),
        ([good], {"unit": "fortnight"}, "unit='fortnight': expected one of ns, us"),
        ([Timeline(plan, Costs(), good.start, good.end + np.inf, good.cause)], {}, "a task that never ends"),
        ([plan.simulate(Costs(1e15, unit="s"))], {}, "smaller unit"),
    ]:
        with pytest.raises(pipec.RenderError, match=message):
            write_trace(what, path, **options)
        assert not path.exists()
    with pytest.raises(pipec.RenderError, match=r"cannot write .*No such file or directory"):
        good.to_chrome_trace(tmp_path / "none" / "t.json")


def test_the_command_line_writes_the_simulated_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["trace", "--stages", "4", "--devices", "2", "--microbatches", "3", "--schedule", "gpipe"]
    assert main([*common, "--forward", "2", "--unit", "us", "-o", "out.json"]) == 0
    assert capsys.readouterr().out.startswith("wrote out.json: ")
    pipec.compile(pipec.chain(4), 2, 3, "gpipe").simulate(Costs(2.0, unit="us")).to_chrome_trace("same.json")
    assert Path("out.json").read_bytes() == Path("same.json").read_bytes()
    assert main(common) == 0
    assert "1 unit of time shown as 1 ms" in capsys.readouterr().out
    assert len(select(load(Path("chain.trace.json")), "X")) == 24


# -- measured ---------------------------------------------------------------------------------------------------


def runner(**options: Any) -> tuple[pipec.Runner, pipec.Plan]:
    torch.manual_seed(0)
    net = pipec.Pipeline("tiny")
    value, target = net.input("x"), net.input("y")
    first = value = net.stage("enc0", nn.Linear(4, 4), value)
    value = net.stage("enc1", nn.Linear(4, 4), value)
    value = net.stage("dec", nn.Bilinear(4, 4, 4), value, pipec.skip(first))
    net.loss("mse", nn.functional.mse_loss, value, target)
    plan = pipec.compile(net, 3, 2, recompute="except_last", update="stage")
    return pipec.Runner(net, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options), plan


def step(run: pipec.Runner) -> None:
    run.step(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize("backend", ["threads", "replay"])
def test_simulated_and_measured_in_one_file(tmp_path: Path, backend: str) -> None:
    run, plan = runner(backend=backend)
    with run:
        step(run)
        simulated, measured = plan.simulate(), run.trace()
    path = tmp_path / "both.json"
    simulated.to_chrome_trace(path, measured)
    trace = load(path)
    check(trace, simulated, measured)
    called = {e["pid"]: e["args"]["name"] for e in select(trace, "M") if e["name"] == "process_name"}
    assert called == {1: "tiny: 1f1b, simulated", 2: "tiny: 1f1b, measured"}
    twice = written(tmp_path, measured, measured)
    assert [e["args"]["name"] for e in select(twice, "M") if e["name"] == "process_name"] == [
        "tiny: 1f1b, measured", "tiny: 1f1b, measured (2)"]
