"""pipec over two processes beside PyTorch's own pipelining: same schedule, model, processes and run.

    python benchmarks/ranks.py [--rounds 15] [--markdown]

Two gloo processes with one thread each, 16 microbatches. Each process has a stack of Linear and ReLU, deep enough that
one microbatch, forward and backward, takes about the time named; the tables say what it took in one process alone. The
zero-bubble order cuts each stack into two stages. Contenders take turns within each round. pipec hands
values over through shared memory, as both ranks are on one host, then through sockets, as between hosts, and through
gloo, which is what remains where there can be no sockets; PyTorch and a loop written by hand use gloo. The loop does
nothing but 1f1b's forwards, backwards, sends and receives, these all posted at the beginning: what gloo allows. Costs
for the simulation are measured while both ranks compute, as they do in a step: on one host they share its memory.
"tasks alone" is the step that the plan's tasks would make if each took as long as it did and nothing but the plan's
order and waits stood between them: an executor that costs nothing cannot be faster.
``host`` measures the CPU time of each rank's main thread per microbatch with tensors so small that nothing else counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import rounds
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

import pipec
from pipec.ir import Kind
from pipec.runtime.distributed.ranks import Ranks
from pipec.runtime.distributed.ways import MEMORY, SOCKETS
from pipec.simulate import run_clock

MICROBATCHES, ROWS = 16, 64
PAIRS = {  # pipec's schedule, PyTorch's class, stages per rank
    "1f1b": ("Schedule1F1B", 1), "interleaved-zero-bubble": ("ScheduleInterleavedZeroBubble", 2),
}
SIZES = {"1 ms": 1e-3, "5 ms": 5e-3, "15 ms": 15e-3}  # of one microbatch on one process, forward and backward
ALONE, HAND = "one process", "by hand, 1f1b through gloo"
APART: dict[str, tuple[str, ...]] = {", through sockets": (SOCKETS,), ", through gloo": ()}  # as on several hosts


def stage(width: int, layers: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


def layers_for(seconds: float, width: int) -> int:
    """How many layers take ``seconds`` forward and backward on this machine, undisturbed."""
    probe, x = stage(width, 8), torch.randn(ROWS, width, requires_grad=True)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        probe(x).sum().backward()
        times.append(time.perf_counter() - begin)
    return max(1, round(seconds / (statistics.median(times) / 8)))


def batch(width: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    return (torch.randn(ROWS * MICROBATCHES, width, generator=make),
            torch.randn(ROWS * MICROBATCHES, width, generator=make))


def modules(width: int, layers: int, count: int) -> list[nn.Sequential]:
    """``count`` stages of a model of 2 x ``layers`` layers; the same weights however it is cut."""
    torch.manual_seed(0)
    whole = list(stage(width, 2 * layers))
    size = len(whole) // count
    return [nn.Sequential(*whole[n * size : (n + 1) * size]) for n in range(count)]


def ours(
    width: int, layers: int, schedule: str, count: int, ways: tuple[str, ...] = (MEMORY,)
) -> tuple[Callable[[], Any], list[nn.Sequential], Any]:
    made = modules(width, layers, count)
    net = pipec.Pipeline("stack")
    value, y = net.input("x"), net.input("y")
    for number, module in enumerate(made):
        value = net.stage(f"s{number}", module, value)
    net.loss("mse", F.mse_loss, value, y)
    plan = pipec.compile(net, 2, MICROBATCHES, schedule)
    before, Ranks.ways = Ranks.ways, ways
    run = pipec.Runner(net, plan)
    Ranks.ways = before
    x, target = batch(width)
    return partial(run.step, x=x, y=target), made, (net, plan, run)


def theirs(rank: int, width: int, layers: int, name: str, count: int) -> tuple[Callable[[], Any], list[nn.Sequential]]:
    made = modules(width, layers, count)
    own = [pipelining.PipelineStage(made[n], n, count, torch.device("cpu")) for n in range(rank, count, 2)]
    kind = getattr(pipelining, name)
    schedule = kind(own[0] if count == 2 else own, MICROBATCHES, loss_fn=F.mse_loss)
    x, target = batch(width)

    def step() -> None:
        schedule.step(x) if rank == 0 else schedule.step(target=target, losses=[])

    return step, made


def by_hand(rank: int, width: int, layers: int) -> tuple[Callable[[], Any], list[nn.Sequential]]:
    """1f1b of two stages, nothing but forwards, backwards, sends and receives."""
    made, group = modules(width, layers, 2), dist.group.WORLD
    pieces = list(zip(*(part.split(ROWS) for part in batch(width)), strict=True))

    def step() -> None:
        got = [torch.empty(ROWS, width) for _ in range(MICROBATCHES)]
        works = [dist.irecv(buffer, 1 - rank, group, number) for number, buffer in enumerate(got)]
        sent, kept = [], {}

        def forward(m: int) -> None:
            kept[m] = made[0](pieces[m][0])
            value = kept[m].detach()
            sent.append((dist.isend(value, 1, group, m), value))

        def backward(m: int) -> None:
            works[m].wait()
            torch.autograd.backward(kept.pop(m), got[m])

        if rank == 0:
            forward(0)
            for m in range(1, MICROBATCHES):
                forward(m)
                backward(m - 1)
            backward(MICROBATCHES - 1)
        else:
            for m in range(MICROBATCHES):
                works[m].wait()
                value = got[m].requires_grad_()
                (F.mse_loss(made[1](value), pieces[m][1]) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
                sent.append((dist.isend(value.grad, 0, group, m), value.grad))
        for work, _ in sent:
            work.wait()

    return step, made


def alone(width: int, layers: int) -> tuple[Callable[[], Any], list[nn.Sequential]]:
    """The whole model in this process, microbatch by microbatch."""
    made = modules(width, layers, 1)
    pieces = list(zip(*(part.split(ROWS) for part in batch(width)), strict=True))

    def step() -> None:
        for x, y in pieces:
            (F.mse_loss(made[0](x), y) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    return step, made


def clear(made: list[nn.Sequential]) -> None:
    for module in made:
        module.zero_grad()


def timed(step: Callable[[], Any], made: list[nn.Sequential]) -> tuple[float, float]:
    """Seconds by the clock and of this thread's CPU for one step on both ranks."""
    clear(made)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def tasks_alone(run: Any, seconds: float) -> float:
    """What share of a step's ``seconds`` its tasks need, in the plan's order and with its waits, copies for nothing."""
    trace = run.trace()
    spans = np.where(trace.plan.table.kind == Kind.COPY, 0.0, trace.end - trace.start)
    return float(run_clock(trace.plan, spans, pipec.Costs())[1].max()) / 1e3 / seconds


def check(rank: int, mine: list[nn.Sequential], other: list[nn.Sequential], count: int) -> None:
    """Raise RuntimeError unless both contenders have made the same gradients of this rank's stages."""
    for number in range(rank, count, 2):
        for p, q in zip(mine[number].parameters(), other[number].parameters(), strict=True):
            if p.grad is None or q.grad is None or not torch.allclose(p.grad, q.grad, rtol=1e-3, atol=1e-5):
                raise RuntimeError("pipec and PyTorch do not give the same gradients")


def contest(rank: int, width: int, layers: int, count: int, simulated: bool) -> dict[str, Any]:
    """Times of every contender on this rank, round by round."""
    contenders: dict[str, tuple[Callable[[], Any], list[nn.Sequential]]] = {}
    runs: dict[str, Any] = {}
    makespans: dict[str, float] = {}
    shares: dict[str, list[float]] = {}
    for schedule, (name, per_rank) in PAIRS.items():
        mine, made, (net, plan, run) = ours(width, layers, schedule, 2 * per_rank)
        contenders[f"pipec {schedule}"] = mine, made
        runs[f"pipec {schedule}"] = run
        for way, ways in APART.items():
            far, other, (_, _, second) = ours(width, layers, schedule, 2 * per_rank, ways)
            contenders[f"pipec {schedule}{way}"] = far, other
            runs[f"pipec {schedule}{way}"] = second
        contenders[f"torch {name}"] = theirs(rank, width, layers, name, 2 * per_rank)
        added = [f"pipec {schedule}", *(f"pipec {schedule}{way}" for way in APART), f"torch {name}"]
        if per_rank == 1:
            contenders[HAND] = by_hand(rank, width, layers)
            added.append(HAND)
        for key in added:
            timed(*contenders[key])
            check(rank, made, contenders[key][1], 2 * per_rank)
        if simulated:
            x, y = batch(width)
            dist.barrier()
            costs = pipec.profile(net, x=x[:ROWS], y=y[:ROWS])
            makespans |= dict.fromkeys(added, plan.simulate(costs).makespan / 1e3)
            dist.barrier()
    single = alone(width, layers)
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in [*contenders, ALONE]}
    keys = list(contenders)
    for number in range(count + 2):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            found = timed(*contenders[key])
            if number >= 2:
                times[key].append(found)
                if simulated and key in runs:
                    shares.setdefault(key, []).append(tasks_alone(runs[key], found[0]))
        if simulated:
            found = timed(*single) if rank == 0 else timed(lambda: None, [])
            if number >= 2:
                times[ALONE].append(found)
    for run in runs.values():
        run.close()
    return {"times": times, "makespans": makespans, "shares": shares}


def serve(rank: int, store: str, answers: Any, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    width = 256
    for name, seconds in SIZES.items():
        depth = [layers_for(seconds, width) if rank == 0 else 0]
        dist.broadcast_object_list(depth)
        depth[0] += depth[0] % 2  # two stages per rank need an even number
        answers.put((name, rank, contest(rank, width, depth[0], count if seconds < 1e-2 else max(3, count // 2), True)))
    answers.put(("host", rank, contest(rank, 8, 2, count, False)))
    dist.destroy_process_group()


def tables(found: dict[str, dict[int, Any]]) -> list[rounds.Table]:
    made = []
    for name in SIZES:
        both = found[name]
        times = {
            key: [max(a[0], b[0]) for a, b in zip(both[0]["times"][key], both[1]["times"][key], strict=True)]
            for key in both[0]["times"]
        }
        single = statistics.median(times[ALONE]) / (2 * MICROBATCHES) * 1e3
        rows = []
        for key, own in times.items():
            peer = next((f"torch {PAIRS[s][0]}" for s in PAIRS if key.startswith(f"pipec {s}")), None)
            peer = f"torch {PAIRS['1f1b'][0]}" if key == HAND else peer
            predicted = both[0]["makespans"].get(key)
            share = "" if predicted is None else str(rounds.ratio([predicted] * len(own), own))
            busy = both[0]["shares"].get(key)
            bound = "" if busy is None else str(rounds.ratio(busy, [1.0] * len(busy)))
            rows.append((
                key, rounds.milliseconds(own), str(rounds.ratio(times[ALONE], own)),
                "" if peer is None else str(rounds.ratio(times[peer], own)), share, bound,
            ))
        made.append(rounds.Table(
            f"{MICROBATCHES} microbatches of about {name} in each of two processes; {single:.2g} ms measured",
            ("", "ms a step", "throughput / one process", "throughput / torch's", "simulated / measured",
             "tasks alone / measured"), rows,
        ))
    rows = []
    for key in found["host"][0]["times"]:
        if key == ALONE:
            continue
        per = [statistics.median(t[1] for t in found["host"][rank]["times"][key]) / MICROBATCHES for rank in (0, 1)]
        rows.append((key, *(f"{seconds * 1e3:.2f}" for seconds in per)))
    made.append(rounds.Table("main thread's CPU time per microbatch, tiny tensors, ms", ("", "rank 0", "rank 1"), rows))
    return made


def main() -> None:
    rounds.prepare()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--markdown", action="store_true", help="replace this script's section in RESULTS.md")
    options = parser.parse_args()
    quiet = rounds.Quiet()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = context.Queue()
        processes = [
            context.Process(target=serve, args=(rank, f"{folder}/store", answers, options.rounds), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found: dict[str, dict[int, Any]] = {}
        for _ in range(2 * len(SIZES) + 2):
            name, rank, result = answers.get(timeout=300)
            found.setdefault(name, {})[rank] = result
        for process in processes:
            process.join(30)
    made = tables(found)
    rounds.publish("ranks", f"{rounds.machine()}; {options.rounds} rounds; {quiet}.", made, options.markdown)


if __name__ == "__main__":
    main()
