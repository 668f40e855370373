"""The checks of gpu_check.py. Each takes a target, a GPU or the CPU's lanes, and gives rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from gpu_models import Borders, mixed, tied
from gpu_readings import Row, memory_row, overlap_row
from gpu_target import Target
from models import Model, transformer, unet
from torch import Tensor

import pipec
from pipec.schedules import REGISTRY, find_schedule
from pipec.schedules.base import is_asynchronous


def same(mine: Any, theirs: Any) -> bool:
    """Bit-equal lists of tensors; None equals None only."""
    return len(mine) == len(theirs) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )


def state(net: pipec.Pipeline) -> list[Tensor | None]:
    """Gradients and buffers of all stages."""
    modules = [stage.fn for stage in net.spec.stages]
    return [p.grad for m in modules for p in m.parameters()] + [b for m in modules for b in m.buffers()]


# -- equality ----------------------------------------------------------------------------------------------------


def equality(
    target: Target, devices: Sequence[int] = (1, 2, 4), schedules: Sequence[str] | None = None, microbatches: int = 8,
    steps: int = 2,
) -> list[Row]:
    """Losses, outputs, gradients and buffers of every schedule against the plain loop on the same device; of
    asynchronous ones losses, weights and buffers against a replay."""
    rows = []
    for count in devices:
        ran, wrong, refused = 0, [], []
        for name in schedules or REGISTRY:
            for recompute in ("never", "always"):
                net = mixed(target.device)
                update = "stage" if is_asynchronous(find_schedule(name)) else None
                try:
                    plan = pipec.compile(net, count, microbatches, name, recompute=recompute, update=update)
                except pipec.PipecError:
                    refused.append(name)
                    continue
                ran += 1
                if not _equal(target, net, plan, microbatches, steps):
                    wrong.append(f"{name} (recompute {recompute})")
        told = f"{ran - len(wrong)} of {ran} plans" + (f", wrong: {', '.join(wrong)}" if wrong else "")
        told += f"; refused: {', '.join(sorted(set(refused)))}" if refused else ""
        rows.append(Row(f"bit-equal, {count} logical devices", told, "all", ran > 0 and not wrong))
    return rows


def _equal(target: Target, net: pipec.Pipeline, plan: Any, microbatches: int, steps: int) -> bool:
    if plan.asynchronous:
        return _equal_to_replay(target, net, plan, microbatches, steps)
    other = mixed(target.device)
    loop = pipec.reference(other, microbatches, seed=3)
    with target.runner(net, plan, seed=3) as run:
        for step in range(steps):
            make = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, 3 * microbatches, 6, 32, generator=make)
            got = run.step(x, y)  # from the host: the runner moves it
            expected = loop.step(x.to(target.device), y.to(target.device))
            if not same([got.loss, got.output], [expected.loss, expected.output]):
                return False
    return same(state(net), state(other))


def _equal_to_replay(target: Target, net: pipec.Pipeline, plan: Any, microbatches: int, steps: int) -> bool:
    """An asynchronous plan: the same tasks, one after another on one stream, with the weight versions they declare."""
    other, results = mixed(target.device), []
    for make, own in ((target.runner, net), (target.replay, other)):
        with make(own, plan, optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), seed=3) as run:
            losses = []
            for step in range(steps + 1):
                given = torch.Generator().manual_seed(step)
                x, y = torch.randn(2, 3 * microbatches, 6, 32, generator=given)
                if own is other:  # the runner on streams moves what comes from the host, the replay does not
                    x, y = x.to(target.device), y.to(target.device)
                losses += run.step(x, y).microbatch_losses.get("mse", ())
            results.append([*losses, *run.flush().microbatch_losses.get("mse", ())])
    weights = [[p for stage in own.spec.stages for p in stage.fn.parameters()] for own in (net, other)]
    return same(*results) and same(*weights) and same(state(net), state(other))


def precision(target: Target, steps: int = 3) -> list[Row]:
    """bfloat16 autocast against the plain loop, and loss scaling on 4 devices against 1."""
    kind = target.device.type
    net, other = mixed(target.device), mixed(target.device)
    x, y = torch.randn(2, 24, 6, 32, generator=torch.Generator().manual_seed(1)).to(target.device)
    with target.runner(net, pipec.compile(net, 4, 8), seed=3) as run, torch.autocast(kind, torch.bfloat16):
        run.step(x, y)
        pipec.reference(other, 8, seed=3).step(x, y)
    rows = [Row("bfloat16 autocast, 4 devices", "equal" if same(state(net), state(other)) else "differs", "equal",
                same(state(net), state(other)))]
    results = []
    for count in (1, 4):
        net = mixed(target.device)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
        plan = pipec.compile(net, count, 8, update="stage")
        with target.runner(
            net, plan, optimizer=lambda p: torch.optim.AdamW(p, 1e-3), scaler=scaler, seed=3
        ) as run:
            losses = [run.step(x, y).loss for _ in range(steps)]
        weights = [p.detach() for stage in net.spec.stages for p in stage.fn.parameters()]
        results.append([*losses, *weights])
    ok = same(*results)
    return [*rows, Row("GradScaler and AdamW, 4 devices against 1", "equal" if ok else "differ", "equal", ok)]


def shared(target: Target, steps: int = 3) -> list[Row]:
    """Tied weights under AdamW against the plain loop on one device; on several GPUs stages compute with replicas."""
    rows = []
    for gpus in (1, 2):
        name = f"tied weights, 4 logical devices on {gpus} GPU" + "s" * (gpus > 1)
        if gpus > target.gpus():
            rows.append(Row(name, f"not run: it needs {gpus} GPUs, there is {target.gpus()}"))
            continue
        results = []
        for plan in (None, pipec.compile(tied(target.device), 4, 8, "1f1b", recompute="except_last")):
            net = tied(target.device)
            weights = list({id(p): p for stage in net.spec.stages for p in stage.fn.parameters()}.values())
            optimizer, losses = torch.optim.AdamW(weights, 1e-3), []
            with _stepping(target, net, plan, gpus) as run:
                for step in range(steps):
                    ids, y = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(step))
                    if plan is None:
                        ids, y = ids.to(target.device), y.to(target.device)
                    losses.append(run.step(ids, y).loss)
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([tensor.detach().cpu() for tensor in (*losses, *weights)])
        ok = same(*results)
        rows.append(Row(name, "equal" if ok else "differ", "equal", ok))
    return rows


def _stepping(target: Target, net: pipec.Pipeline, plan: Any, gpus: int) -> Any:
    """What steps ``net``: a runner of ``plan``, or without one the plain loop."""
    return nullcontext(pipec.reference(net, 8)) if plan is None else target.spread(net, plan, gpus)


# -- races -------------------------------------------------------------------------------------------------------


def stress(target: Target, steps: int = 200, mebibytes: float = 64, cycles: int = 200_000) -> list[Row]:
    """Large borders, sleeps before producers, little free memory, the caller on a side stream: all as the plain loop.

    The host waits for nothing until the end, so that every copy and every reuse of memory can go wrong.
    """
    mine, theirs = Borders(target.device, cycles), Borders(target.device, 0)
    rows = max(4, int(mebibytes * 2**20 / 4 / mine.width) * 4)
    plan = pipec.compile(mine.net, 4, 4, "1f1b")
    loop = pipec.reference(theirs.net, 4)
    make = torch.Generator(target.device).manual_seed(0)
    x, y = torch.randn(2, rows, mine.width, generator=make, device=target.device)
    with target.side_stream(), target.runner(mine.net, plan) as run:
        run.step(x, y)
        loop.step(x, y)
        with target.little_memory():
            sums = []
            for step in range(steps):
                given = x * (1 + step / steps)  # made on the caller's stream, right before
                sums.append(run.step(given, y).loss * 1.0)  # used there, right after
        expected = [loop.step(x * (1 + step / steps), y).loss for step in range(steps)]
        losses = sum(not torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
        gradients = same(state(mine.net), state(theirs.net))
    told = f"{losses} of {steps} losses differ, gradients {'equal' if gradients else 'differ'}"
    return [Row(f"{steps} steps, borders of {mebibytes:g} MiB, sleeps", told, "none", not losses and gradients)]


# -- speed -------------------------------------------------------------------------------------------------------


GOALS = {1: 0.03, 4: 0.08}  # how much longer than plain training a step may take, by logical devices


def speed(
    target: Target, models: dict[str, Callable[[], Model]] | None = None, microbatches: int = 4, rounds: int = 10,
) -> list[Row]:
    """Step time and the host's part of it, against a loop over the microbatches of the plain model."""
    made = models or {
        "U-Net": lambda: unet(32, 64, 256), "Transformer": lambda: transformer(32, 512, 1024, 8),
    }
    rows = []
    for name, make in made.items():
        ways: dict[str, Callable[[], Any]] = {"plain": _plain(target, make(), microbatches)}
        runners = []
        for count in GOALS:
            model = make()
            net, (x, y) = model.pipeline(), (part.to(target.device) for part in model.batch)
            run = target.runner(net, pipec.compile(net, count, microbatches, "1f1b"))
            runners.append(run)
            ways[str(count)] = lambda run=run, x=x, y=y: run.step(x, y)
        took = in_turns(target, ways, rounds)
        for run in runners:
            run.close()
        plain = took["plain"][1]
        rows.append(Row(f"{name}, plain training", f"{plain:.1f} ms, host {took['plain'][0]:.1f} ms"))
        for count, most in GOALS.items():
            host, whole = took[str(count)]
            more = whole / plain - 1
            rows.append(Row(
                f"{name}, {count} logical device{'s' if count > 1 else ''}",
                f"{more:+.1%} ({whole:.1f} ms, host {host:.1f} ms)", f"{most:+.0%}", more <= most,
            ))
    return rows


def _plain(target: Target, model: Model, microbatches: int) -> Callable[[], None]:
    whole = model.whole().to(target.device)
    x, y = (part.to(target.device) for part in model.batch)

    def step() -> None:
        for piece, aim in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            (result,) = whole(piece)
            (model.loss(result, aim) * (len(piece) / len(x))).backward()

    return step


def in_turns(target: Target, ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Of every way the median milliseconds until the host goes on, and until the device has ended."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, once in ways.items():
            target.synchronize()
            began = time.perf_counter()
            once()
            host = time.perf_counter() - began
            target.synchronize()
            if number >= 2:  # the first rounds warm up
                took[name].append((host * 1e3, (time.perf_counter() - began) * 1e3))
    return {
        name: (statistics.median(h for h, _ in own), statistics.median(w for _, w in own))
        for name, own in took.items()
    }


# -- overlap and memory ------------------------------------------------------------------------------------------


def overlap(target: Target, mebibytes: float = 64) -> list[Row]:
    """Copies between logical devices beside compute, read from a profiler trace."""
    made = Borders(target.device, 0, products=True)
    rows = max(4, int(mebibytes * 2**20 / 4 / made.width)) * 8
    x, y = torch.randn(2, rows, made.width, device=target.device)
    with target.runner(made.net, pipec.compile(made.net, 4, 8, "gpipe")) as run:
        run.step(x, y)
        return [overlap_row(target.trace(lambda: run.step(x, y)))]


def memory(target: Target, microbatches: int = 8) -> list[Row]:
    """The measured peak of a step against the simulator's; kernels' transients and what stays are counted apart."""
    made = transformer(2 * microbatches, 8, 16, 4) if target.small else transformer(4 * microbatches, 256, 512, 6)
    net, (x, y) = made.pipeline(), (part.to(target.device) for part in made.batch)
    plan = pipec.compile(net, 1, microbatches, "gpipe")
    with target.runner(net, plan) as run:
        costs = pipec.profile(net, x, y, microbatches=microbatches, repeats=1)
        run.step(x, y)  # gradients are there from now on, and grow no more
        before, peak = target.peak(lambda: run.step(x, y))
    gradients = sum(p.numel() * p.element_size() for p in made.parameters())
    return [memory_row(before, peak, gradients, (plan.simulate(costs).peak_bytes or [None])[0])]


def peers(target: Target, microbatches: int = 4, rounds: int = 10) -> list[Row]:
    """Others beside pipec where they run, for information."""
    from gpu_models import torch_pipelining, torchgpipe_step

    rows = []
    for name, make in (("torchgpipe", torchgpipe_step), ("PyTorch pipelining", torch_pipelining)):
        try:
            with make(target.device, microbatches) as step:
                host, whole = in_turns(target, {name: step}, rounds)[name]
            rows.append(Row(f"{name}, Transformer, 1 device", f"{whole:.1f} ms, host {host:.1f} ms"))
        except Exception as error:
            rows.append(Row(name, f"does not run here: {type(error).__name__}: {str(error).splitlines()[0][:60]}"))
    return rows
