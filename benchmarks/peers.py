"""pipec's thread backend beside other pipelines on the same two cores: torchgpipe, and PyTorch's own pipelining.

    python benchmarks/peers.py [--rounds 21] [--only unet transformer host] [--markdown]

torchgpipe is needed by this benchmark only and skipped with a note when it is absent:

    pip install --no-deps torchgpipe

* torchgpipe as shipped has one worker thread per distinct device, so on two CPU "devices" one worker does all. It is
  also run with a worker per partition, as it has on GPUs. Its backward is left to autograd, which has one thread for
  the whole CPU; on GPUs it has one per device. So only its forwards can overlap here.
* PyTorch's pipelining (Transformer only: it has no skips) runs as two processes that hand borders over through gloo:
  no interpreter lock between them, but a copy through a socket per border.

``host`` compares host costs: CPU time per task with tiny tensors, against a plain loop.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import host_cost
import models
import rounds
import torch
from loops import Pipec, Plain, check, clear
from models import Model, Part
from torch import Tensor, nn

import pipec

ONE, OURS = "one thread", "pipec 1f1b"
ABSENT = "torchgpipe is not installed and left out; to include it: pip install --no-deps torchgpipe"


# -- torchgpipe -------------------------------------------------------------------------------------------------


@contextmanager
def worker_per_partition() -> Iterator[None]:
    """Let torchgpipe start a worker for every partition, though all are on the CPU."""
    pipeline: Any = importlib.import_module("torchgpipe.pipeline")
    original = pipeline.spawn_workers

    @contextmanager
    def spawn(devices: Sequence[torch.device]) -> Iterator[tuple[list[Any], list[Any]]]:
        with ExitStack() as stack:
            pairs = [stack.enter_context(original([device])) for device in devices]
            yield [ins[0] for ins, _ in pairs], [outs[0] for _, outs in pairs]

    pipeline.spawn_workers = spawn
    try:
        yield
    finally:
        pipeline.spawn_workers = original


def sequential(parts: Sequence[Part]) -> nn.Sequential:
    """The parts as torchgpipe wants them: a value that is not read by the next part alone travels as a skip."""
    last = {name: index for index, part in enumerate(parts) for name in part.reads[1:]}
    return nn.Sequential(*(layer(part, part.name in last) for part in parts))


def layer(part: Part, stashes: bool) -> nn.Module:
    """A part with its first value from the layer before and the others from skips."""
    popped = part.reads[1:]
    if not stashes and not popped:
        return part.module
    skip = importlib.import_module("torchgpipe.skip")

    @skip.skippable(stash=[part.name] if stashes else [], pop=list(popped))
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = part.module

        def forward(self, value: Tensor) -> Generator[Any, Any, Tensor]:
            others: list[Tensor] = []
            for name in popped:
                others.append((yield skip.pop(name)))
            result: Tensor = self.inner(value, *others)
            if stashes:
                yield skip.stash(part.name, result)
            return result

    made: nn.Module = Layer()
    return made


class TorchGPipe:
    """torchgpipe without checkpointing: forwards by its workers, then one backward of the whole minibatch."""

    def __init__(self, model: Model, microbatches: int, workers: bool) -> None:
        self.model, self.workers = model, workers
        balance = [model.split, len(model.parts) - model.split]
        self.net = importlib.import_module("torchgpipe").GPipe(
            sequential(model.parts), balance, devices=["cpu", "cpu"], chunks=microbatches, checkpoint="never"
        )

    def __call__(self) -> Tensor:
        x, y = self.model.batch
        clear(self.model)
        with worker_per_partition() if self.workers else ExitStack():
            loss: Tensor = self.model.loss(self.net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def close(self) -> None:
        pass


# -- PyTorch's pipelining ---------------------------------------------------------------------------------------


def serve(rank: int, store: str, pipe: Connection, build: Callable[[], Model], microbatches: int) -> None:
    """A rank: runs a step of the schedule that the other end of ``pipe`` names, None to end.

    It answers with its loss (0 on rank 0). ``"norms"`` instead asks for the norms of the last step's gradients.
    """
    import torch.distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    steps: dict[str, tuple[Model, Any]] = {}
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        model = build()
        own = model.parts[model.split :] if rank else model.parts[: model.split]
        half = nn.Sequential(*(part.module for part in own))
        stage = pipelining.PipelineStage(half, rank, 2, torch.device("cpu"))
        steps[name] = model, getattr(pipelining, name)(stage, microbatches, loss_fn=model.loss)
    pipe.send("ready")
    model = build()
    while (name := pipe.recv()) is not None:
        if name == "norms":
            pipe.send(norms(model))
            continue
        model, schedule = steps[name]
        x, y = model.batch
        clear(model)
        losses: list[Tensor] = []
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
        pipe.send(float(torch.stack(losses).detach().mean()) if losses else 0.0)
    dist.destroy_process_group()


def norms(model: Model) -> list[float]:
    """Of the gradients that are there, in the order of the parameters."""
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


class Ranks:
    """Two processes of PyTorch's pipelining, idle in a read of their pipe until a step is asked for."""

    def __init__(self, build: Callable[[], Model], microbatches: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(2):
            mine, theirs = context.Pipe()
            arguments = (rank, str(Path(self.folder.name) / "store"), theirs, build, microbatches)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(mine)
        for pipe in self.pipes:
            pipe.recv()

    def ask(self, question: str) -> list[Any]:
        """What both ranks answer."""
        for pipe in self.pipes:
            pipe.send(question)
        return [pipe.recv() for pipe in self.pipes]

    def check(self, schedule: str, plain: Plain) -> None:
        """Raise RuntimeError unless a step gives the plain loop's loss and gradient norms within rounding."""
        found, expected = [sum(self.ask(schedule))], [float(plain())]
        for own in self.ask("norms"):
            found += own
        expected += norms(plain.model)
        if not torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-3):
            raise RuntimeError(f"{schedule} does not compute what the plain loop does on {plain.model.name}")

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
        self.folder.cleanup()


# -- the contests -----------------------------------------------------------------------------------------------


def contest(build: Callable[[], Model], microbatches: int, count: int, ranks: bool) -> rounds.Table:
    """One table: throughput of every contender, and of pipec against it."""
    plain = Plain(build(), microbatches)
    own: dict[str, Any] = {OURS: Pipec(build(), microbatches), "pipec gpipe": Pipec(build(), microbatches, "gpipe")}
    if importlib.util.find_spec("torchgpipe"):
        own["torchgpipe as shipped, one worker"] = TorchGPipe(build(), microbatches, workers=False)
        own["torchgpipe, a worker per partition"] = TorchGPipe(build(), microbatches, workers=True)
    for contender in own.values():
        check(contender, contender.model, plain)
    contenders: dict[str, Callable[[], Any]] = {ONE: plain, **own}
    with ExitStack() as stack:
        if ranks:
            processes = Ranks(build, microbatches)
            stack.callback(processes.close)
            for schedule in ("ScheduleGPipe", "Schedule1F1B"):
                processes.check(schedule, plain)
                contenders[f"torch {schedule}, two processes"] = partial(processes.ask, schedule)
        times = rounds.interleave(contenders, count)
    for contender in own.values():
        contender.close()
    return rounds.Table(
        f"{plain.model.name}, {microbatches} microbatches",
        ("", "ms a step", "throughput / one thread", "throughput of pipec 1f1b / its"),
        [(name, rounds.milliseconds(found.wall), str(rounds.ratio(times[ONE].wall, found.wall)),
          str(rounds.ratio(found.wall, times[OURS].wall))) for name, found in times.items()],
    )


def host(count: int) -> rounds.Table:
    """CPU time per task with tiny tensors, of pipec and of torchgpipe."""
    chunks, stages = host_cost.MICROBATCHES, host_cost.STAGES
    x, y = torch.randn(2 * chunks, 8), torch.randn(2 * chunks, 8)

    def clear_of(parameters: list[nn.Parameter], step: Callable[[], Any]) -> Callable[[], Any]:
        def once() -> None:
            for parameter in parameters:
                parameter.grad = None
            step()

        return once

    _, modules = host_cost.pipeline()
    weights = [p for module in modules for p in module.parameters()]
    contenders = {"plain loop": clear_of(weights, partial(host_cost.plain, modules, x, y))}
    for devices in (1, 2, 4):
        net, modules = host_cost.pipeline()
        weights = [p for module in modules for p in module.parameters()]
        run = pipec.Runner(net, pipec.compile(net, devices, chunks))
        contenders[f"pipec, {devices} devices"] = clear_of(weights, partial(run.step, x, y))
    if importlib.util.find_spec("torchgpipe"):
        for devices in (1, 2, 4):
            _, modules = host_cost.pipeline()
            weights = [p for module in modules for p in module.parameters()]
            gpipe = importlib.import_module("torchgpipe").GPipe(
                nn.Sequential(*modules), [stages // devices] * devices, devices=["cpu"] * devices, chunks=chunks,
                checkpoint="never",
            )

            def step(gpipe: Any = gpipe) -> None:
                with worker_per_partition():
                    out = gpipe(x)
                nn.functional.mse_loss(out, y).backward()  # type: ignore[no-untyped-call]

            contenders[f"torchgpipe, {devices} devices"] = clear_of(weights, step)
    steps, tasks = 20, 2 * stages * chunks
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(count + 2):
        for name, once in contenders.items():
            begin = time.process_time()
            for _ in range(steps):
                once()
            if number >= 2:
                times[name].append((time.process_time() - begin) / steps / tasks)
    rows = [
        (name, f"{statistics.median(own) * 1e6:.0f}", str(rounds.ratio(own, times["plain loop"])))
        for name, own in times.items()
    ]
    return rounds.Table(f"Host cost: tiny tensors, {stages} stages, {chunks} microbatches",
                        ("", "us of CPU time per task", "against the plain loop"), rows)


def main() -> None:
    rounds.prepare()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    cases = ("unet", "transformer", "host")
    parser.add_argument("--only", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    quiet = rounds.Quiet()
    if not importlib.util.find_spec("torchgpipe"):
        print(ABSENT, end="\n\n")
    tables = []
    for name, build in (("unet", models.unet), ("transformer", models.transformer)):
        if name in options.only:
            for microbatches in options.microbatches:
                tables.append(contest(build, microbatches, options.rounds, ranks=name == "transformer"))
    if "host" in options.only:
        tables.append(host(options.rounds))
    rounds.publish("peers", f"{rounds.machine()}; {options.rounds} rounds; {quiet}.", tables, options.markdown)


if __name__ == "__main__":
    main()
