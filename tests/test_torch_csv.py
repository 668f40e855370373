"""The CSV of PyTorch's pipelining: what is exported, what is read back, and what is refused with which words."""

from __future__ import annotations

from types import SimpleNamespace

import plans
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import pipec
from pipec.cli import main
from pipec.compiler import with_microbatches
from pipec.schedules import REGISTRY, B, F, parse_torch_csv

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1I1,1W1\n"


def order(plan: pipec.Plan) -> list[list[str]]:
    return [[str(task) for task in plan.compute(device)] for device in range(plan.devices)]


def again(plan: pipec.Plan, net: pipec.Pipeline) -> pipec.Plan:
    return pipec.compile(net, schedule=parse_torch_csv(plan.to_torch_csv()))


# There and back.


@pytest.mark.parametrize("schedule", REGISTRY)
@pytest.mark.parametrize(("devices", "microbatches", "each"), [(1, 1, 2), (3, 5, 2), (4, 8, 3)])
def test_every_schedule_comes_back_as_it_went(schedule: str, devices: int, microbatches: int, each: int) -> None:
    net = pipec.chain(devices * each)
    plan = pipec.compile(net, devices, microbatches, schedule, chunks=2 if schedule.startswith("inter") else None)
    back = again(plan, net)
    assert (back.table, back.chunks, back.waits, back.buffers) == (plan.table, plan.chunks, plan.waits, plan.buffers)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.data())
def test_any_order_comes_back_or_breaks_the_rule_of_losses(seed, split, devices, each, microbatches, data) -> None:
    stages = devices * each
    placement = [*range(devices), *data.draw(st.lists(st.integers(0, devices - 1), min_size=stages - devices,
                                                      max_size=stages - devices))]
    net = pipec.chain(stages)
    plan = pipec.compile(net, devices, microbatches, plans.any_order(seed, split), placement=placement)
    last = [task.microbatch for row in plan.tasks for task in row
            if task.kind is pipec.Kind.FORWARD and task.stage == stages - 1]
    if last != sorted(last):
        with pytest.raises(pipec.PlanError, match="takes the wrong losses unless microbatches ascend"):
            plan.to_torch_csv()
    else:
        back = again(plan, pipec.chain(len(plan.chunks)))
        assert [chunk.device for chunk in back.chunks] == [chunk.device for chunk in plan.chunks]
        assert back.to_torch_csv() == plan.to_torch_csv()


def test_the_file(tmp_path) -> None:
    path = tmp_path / "order.csv"
    text = pipec.compile(pipec.chain(8), 2, 2, "zb-v", update="stage").to_torch_csv(path)
    assert path.read_bytes().decode() == text
    assert text == (
        "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n"
        "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n"
    )
    plan = pipec.compile(pipec.chain(4), schedule=pipec.torch_csv(path))
    assert ",".join(order(plan)[0]) == text.splitlines()[0]


def test_a_file_decides_devices_microbatches_and_placement() -> None:
    plan = pipec.compile(pipec.chain(2), schedule=parse_torch_csv(GOOD, "mine.csv"))
    assert (plan.devices, plan.microbatches, plan.schedule) == (2, 2, "mine.csv")
    assert order(plan) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1I1", "1W1"]]
    fewer = pipec.compile(pipec.chain(2), microbatches=1, schedule=parse_torch_csv(GOOD))
    assert order(fewer) == [["0F0", "0B0"], ["1F0", "1B0"]]
    folded = pipec.compile(pipec.chain(8), schedule=parse_torch_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"))
    assert [(c.device, c.stages) for c in folded.chunks] == [(0, (0, 1)), (1, (2, 3)), (1, (4, 5)), (0, (6, 7))]


def test_fused_tasks_become_an_overlap() -> None:
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    plan = pipec.compile(pipec.chain(2), schedule=parse_torch_csv(text))
    assert plan.to_torch_csv() == text
    assert [str(task) for task in plan.compute(0) if task.group] == ["0F2", "0B0"]
    fewer = pipec.compile(pipec.chain(2), microbatches=2, schedule=parse_torch_csv(text))
    assert fewer.to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    with pytest.raises(pipec.PipecError, match="1B1"):
        pipec.compile(pipec.chain(2), schedule=parse_torch_csv(text.replace("1F1,1B1", "(1F1;1B1)OVERLAP_F_B")))


def test_a_plan_of_a_file_serves_smaller_batches() -> None:
    plan = pipec.compile(pipec.chain(2), schedule=parse_torch_csv(GOOD))
    assert order(with_microbatches(plan, 1)) == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize("name", ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
                                  "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_what_pytorch_writes_is_compiled(name: str, tmp_path) -> None:
    """Its constructors ask their stages for numbers only."""
    folded = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    ranks = [0, 1, 2, 3, 3, 2, 1, 0] if folded else [0, 1, 2, 3] * 2
    stages = [
        SimpleNamespace(stage_index=s, num_stages=8, group_size=4, group_rank=0, is_last=s == 7, submod=None)
        for s, rank in enumerate(ranks) if rank == 0
    ]
    schedule = getattr(torch_schedules, name)(stages, 8, loss_fn=lambda *_: None)
    path = tmp_path / "theirs.csv"
    schedule._dump_csv(path, format="compute_only")
    plan = pipec.compile(pipec.chain(8), schedule=pipec.torch_csv(path))
    assert [chunk.device for chunk in plan.chunks] == ranks
    theirs = [",".join(str(action) for action in schedule.pipeline_order[d] if action) for d in range(4)]
    assert plan.to_torch_csv().splitlines() == theirs


@pytest.mark.parametrize("schedule", REGISTRY)
def test_pytorch_takes_every_exported_schedule(schedule: str, tmp_path) -> None:
    """It checks the order and adds its sends and receives; every one of pipec's copies has a send there."""
    plan = pipec.compile(pipec.chain(6), 3, 6, schedule)
    plan.to_torch_csv(tmp_path / "mine.csv")
    stages = [SimpleNamespace(stage_index=0, num_stages=len(plan.chunks), group_size=3, group_rank=0, is_last=False)]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, 6, loss_fn=lambda *_: None)
    runtime._load_csv(str(tmp_path / "mine.csv"))
    assert runtime.stage_index_to_group_rank == {chunk.index: chunk.device for chunk in plan.chunks}
    words = [str(action) for row in runtime.pipeline_order_with_comms.values() for action in row]
    assert sum("SEND_" in word for word in words) == sum("RECV_" in word for word in words) == plan.simulate().copies


# What cannot be exported.


def test_skips_are_refused_with_every_offending_edge() -> None:
    plan = pipec.compile(plans.unet(2), 5, 4)
    with pytest.raises(pipec.PlanError) as error:
        plan.to_torch_csv()
    assert str(error.value) == (
        "plan 'unet' cannot be exported for PyTorch's pipelining: 2 problems\n"
        "  1. 'enc0' goes from stage 'enc0' (chunk 0) to 'dec0' (chunk 4); its runtime hands values to the next chunk "
        "only\n"
        "  2. 'enc1' goes from stage 'enc1' (chunk 1) to 'dec1' (chunk 3); its runtime hands values to the next chunk "
        "only"
    )


def test_skips_inside_a_chunk_or_to_the_next_one_are_exported() -> None:
    net = plans.unet(2)
    assert pipec.compile(net, 2, 2, "gpipe").to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"


def test_graphs_and_tasks_that_have_no_word_are_refused_together() -> None:
    net = plans.pipeline([[-1], [0], [-1, 1], [2]], losses=[1, 3])
    with pytest.raises(pipec.PlanError) as error:
        pipec.compile(net, 4, 2, recompute="always").to_torch_csv()
    assert str(error.value) == (
        "plan 'net' cannot be exported for PyTorch's pipelining: 3 problems\n"
        "  1. input 'x' is read by stage 's2' (chunk 2); its runtime gives inputs to the first chunk, and the target "
        "to the loss of the last one, only\n"
        "  2. stage 's1' (chunk 1) computes a loss; its runtime has a loss in the last chunk only\n"
        "  3. it has RECOMPUTE tasks, for which there is no word; compile with recompute='never' and wrap the modules "
        "in torch.utils.checkpoint, which recomputes inside the backward"
    )
    with pytest.raises(pipec.PlanError, match="it has no backwards; its runtime runs one for every forward"):
        pipec.compile(pipec.chain(2), 2, forward_only=True).to_torch_csv()
    with pytest.raises(pipec.PlanError, match="schedule 'pipedream' is asynchronous; its runtime has one version of"):
        pipec.compile(pipec.chain(2), 2, 2, "pipedream", update="stage").to_torch_csv()
    aside = plans.pipeline([[-1], [0], [1]], losses=[1])
    with pytest.raises(pipec.PlanError, match=r"chunk 2 \('s2'\) has no backward, as no loss depends on it"):
        pipec.compile(aside, 3, 2).to_torch_csv()


def test_updates_are_the_scripts() -> None:
    plain = pipec.compile(pipec.chain(3), 3, 2).to_torch_csv()
    assert pipec.compile(pipec.chain(3), 3, 2, update="stage", update_early=True).to_torch_csv() == plain
    assert pipec.compile(pipec.chain(3), 3, 2, update="all").to_torch_csv() == plain


def test_losses_out_of_order_are_refused() -> None:
    def mine(problem):
        return [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [F(1, 1), F(1, 0), B(1, 0), B(1, 1)]]

    with pytest.raises(pipec.PlanError, match=r"the last chunk runs its forwards in the order 1 0; its runtime takes"):
        pipec.compile(pipec.chain(2), 2, 2, mine).to_torch_csv()


def test_chunks_that_are_interrupted_are_refused() -> None:
    text = str(pipec.compile(pipec.chain(3), 1, 2, "gpipe"))
    one, two = (next(line for line in text.splitlines() if f" {task} " in line) for task in ("2F0", "0F1"))
    moved = text.replace(one, "?").replace(two, one).replace("?", two)
    assert moved != text
    swapped = pipec.Plan.parse(text)
    table = swapped.table
    ids = table.kind * 100 + table.stage * 10 + table.microbatch
    rows = list(range(len(table)))
    a, b = (ids.tolist().index(number) for number in (20, 1))
    rows[a], rows[b] = rows[b], rows[a]
    with pytest.raises(pipec.PlanError, match=r"0F0 is interrupted: other tasks run between the stages of chunk 0"):
        evolve(swapped, table=table.take(rows)).to_torch_csv()


# What cannot be read.

HEAD = ("schedule 'mine.csv' (PyTorch's pipelining CSV: a row per rank, cells such as 1F0, 3B1, 2I3, 2W3 or empty, no "
        "header): ")


def refused(text: str, *told: str) -> None:
    with pytest.raises(pipec.ScheduleError) as error:
        parse_torch_csv(text, "mine.csv")
    count = "1 problem" if len(told) == 1 else f"{len(told)} problems"
    assert str(error.value) == "\n".join([HEAD + count, *(f"  {n}. {line}" for n, line in enumerate(told, 1))])


def test_cells_that_cannot_be_read_are_told_by_row_and_column() -> None:
    refused(
        "rank,0F0,0X1\n1F0,1SEND_F0,(0F3)OVERLAP_F_B,(0F1;x)OVERLAP_F_B\n\n" + "9" * 50 + "F0",
        "row 1, column 1: 'rank' is no task",
        "row 1, column 3: '0X1' is no task",
        "row 2, column 2: '1SEND_F0' is communication, which pipec adds itself; dump it with format='compute_only'",
        "row 2, column 3: '(0F3)OVERLAP_F_B' fuses no two tasks; written as (0F3;3B1)OVERLAP_F_B",
        "row 2, column 4: '(0F1;x)OVERLAP_F_B' fuses no two tasks; written as (0F3;3B1)OVERLAP_F_B",
        "row 4, column 1: '9999999999999999999999999999999999999...' is no task",
        "row 3 has no task; every rank runs at least one stage",
        "row 4 has no task; every rank runs at least one stage",
    )


def test_tasks_in_the_wrong_place_are_told_together() -> None:
    refused(
        "0B0,0F0,0F1,0W1,0I1,1F0\n1F0,1F0,1B0",
        "row 1, column 1: 0B0 stands before 0F0, or that is missing",
        "row 1, column 4: 0W1 stands before 0I1, or that is missing",
        "row 2, column 1: 1F0: stage 1 is on rank 0 already (row 1)",
    )
    refused("0F0,0F0,0B0,0B0", "row 1, column 2: 0F0 stands in column 1 already",
            "row 1, column 4: 0B0 stands in column 3 already")


def test_what_is_missing() -> None:
    refused("", "it is empty")
    refused("0F0,0F2,0B0,0B2\n2F0,2F2,2B0,2B2",
            "stage 1 stands nowhere, but the largest is 2; both are numbered from 0",
            "microbatch 1 stands nowhere, but the largest is 2; both are numbered from 0")
    refused("99999999F0,99999999B0",
            "stages 0, 1, 2, 3 ... stand nowhere, but the largest is 99999999; both are numbered from 0")
    refused("0F0,0F1,0B0,0I0,0W0\n1F0,1I0,1F1,1I1,1W1", "row 1, column 3: 0B0 is there whole and in halves; choose one",
            "0B1 is missing", "1W0 is missing, its other half is there")


CELLS = st.sampled_from(
    ["0F0", "1F0", "0B0", "1B0", "1I0", "1W0", "0F1", "(0F1;0B0)OVERLAP_F_B", "(", "F", "2B1", "", " "]
)


@settings(max_examples=100)
@given(st.one_of(st.text(max_size=40), st.lists(st.lists(CELLS, max_size=8).map(",".join), max_size=3).map("\n".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = parse_torch_csv(text)
        plan = pipec.compile(pipec.chain(len(schedule.placement)), schedule=schedule)
    except pipec.PipecError:
        return
    assert parse_torch_csv(plan.to_torch_csv()).rows == schedule.rows


def test_a_deadlock_is_told_when_it_is_compiled() -> None:
    with pytest.raises(pipec.PlanError, match="schedule 'torch-csv' deadlocks:\n  device 0 stands at 0B0, which waits"):
        pipec.compile(pipec.chain(2), schedule=parse_torch_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))


def test_pipelines_that_do_not_fit_the_file() -> None:
    schedule = parse_torch_csv(GOOD, "mine.csv")
    with pytest.raises(pipec.ScheduleError, match="has 1 stages, too few for the 2 chunks that the schedule is writ"):
        pipec.compile(pipec.chain(1), schedule=schedule)
    with pytest.raises(pipec.ScheduleError, match="is written for 2 devices, but devices=3; leave devices out"):
        pipec.compile(pipec.chain(3), 3, schedule=schedule)
    with pytest.raises(pipec.ScheduleError) as error:
        pipec.compile(pipec.chain(3), 3, 4, schedule, placement="linear")
    assert str(error.value) == (
        "schedule 'mine.csv': 2 problems\n"
        "  1. it places 2 stages on the ranks 0 1, but the pipeline has 3 chunks on the devices 0 1 2; leave out "
        "placement=, chunks= and device= of the stages, then the file decides\n"
        "  2. it is written for 2 microbatches, but there are 4; export it for as many, or use a schedule that pipec "
        "knows by name"
    )
    with pytest.raises(pipec.ScheduleError, match="devices= is needed: schedule '1f1b' does not say for how many it"):
        pipec.compile(pipec.chain(3))


def test_files_that_are_no_text(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(pipec.ScheduleError, match=r"mine\.csv is no text"):
        pipec.torch_csv(path)
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n\r\n")
    assert pipec.torch_csv(path).rows == (((0, 0, 0), (2, 0, 0)),)


# The command line.


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return (code, *capsys.readouterr())


def test_export_prints_or_writes_what_simulate_reads(capsys, tmp_path) -> None:
    chain = ("--stages", 4, "--devices", 2, "--microbatches", 3, "--schedule", "zb-v")
    text = pipec.compile(pipec.chain(4), 2, 3, "zb-v").to_torch_csv()
    assert run(capsys, "export", *chain) == (0, text, "")
    path = tmp_path / "order.csv"
    told = f"wrote {path}: 2 ranks, 4 stages, 3 microbatches\n"
    assert run(capsys, "export", *chain, "-o", path) == (0, told, "")
    assert path.read_bytes().decode() == text
    code, read, _ = run(capsys, "simulate", "--stages", 4, "--schedule", path)
    _, own, _ = run(capsys, "simulate", *chain)
    assert (code, read) == (0, own.replace("chain: zb-v", "chain: order.csv"))


def test_what_cannot_be_exported_or_read_on_the_command_line(capsys, tmp_path) -> None:
    saved, broken = tmp_path / "plan.json", tmp_path / "broken.csv"
    pipec.compile(plans.unet(1), 3, 2).save(saved)
    code, _, error = run(capsys, "export", saved)
    assert (code, "'enc0' goes from stage 'enc0' (chunk 0) to 'dec0' (chunk 2)" in error) == (1, True)
    broken.write_text("0F0,0X0\n1F0", encoding="utf-8")
    code, _, error = run(capsys, "simulate", "--stages", 4, "--schedule", broken)
    assert (code, "row 1, column 2: '0X0' is no task" in error) == (1, True)
    code, _, error = run(capsys, "simulate", "--stages", 4, "--schedule", "none.csv")
    assert (code, error) == (1, "pipec simulate: error: there is no file none.csv\n")


def test_a_file_that_cannot_be_read_is_told_in_words(tmp_path) -> None:
    for path, told in (
        (tmp_path, "is a folder"), (tmp_path / "nope.csv", "cannot read .*nope.csv: No such file"),
        (None, "expected the path of a file, got NoneType"), (3, "expected the path of a file, got int"),
        ("", "is no path"), ("a\0b", "is no path"),
    ):
        with pytest.raises(pipec.ScheduleError, match=told):
            pipec.torch_csv(path)
    (tmp_path / "bom.csv").write_text("\ufeff" + GOOD, encoding="utf-8")
    assert pipec.torch_csv(tmp_path / "bom.csv").rows == parse_torch_csv(GOOD).rows
    with pytest.raises(pipec.ScheduleError, match="is no task"):
        parse_torch_csv("\u0660F0,0B0")  # a digit, but not of this format
