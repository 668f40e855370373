"""Real processes for the tests of distributed runs: a crew of ranks on gloo that runs one function after another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PATIENCE = 60.0  # seconds for one function on all ranks
STARTER = multiprocessing.get_context("forkserver")  # one process imports torch, the ranks are its copies
STARTER.set_forkserver_preload([
    "torch", "torch.distributed", "torch._dynamo", "models", "pipec.runtime.distributed.ranks",
])


class RankError(Exception):
    """A function raised in one of the ranks, whose traceback this is."""


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch.distributed as dist

    from pipec.runtime.randomness import Streams

    torch.set_num_threads(1)
    streams = Streams()  # kept between runners, as installing takes time
    streams.__enter__()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            order = None
        if order is None:
            break
        fn, args = order
        try:
            pipe.send(("done", fn(rank, *args)))
        except BaseException as error:
            told = [type(error).__name__, str(error), getattr(error, "rank", None)]
            pipe.send(("raised", [*told, traceback.format_exc()]))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class Crew:
    """``size`` processes with an initialised process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.mkdtemp(prefix="crew")
        self._pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = STARTER.Pipe()
            process = STARTER.Process(
                target=_serve, args=(rank, size, os.path.join(self._folder, "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``fn(rank, *args)`` gives on every rank.

        Raises:
            RankError: it raised in one.
        """
        answers = self.answers(fn, *args)
        for rank, (word, value) in enumerate(answers):
            if word != "done":
                raise RankError(f"rank {rank}: {value if word == 'gone' else value[3]}")
        return [value for _, value in answers]

    def answers(
        self, fn: Callable[..., Any], *args: Any, patience: float = PATIENCE, of: int | None = None
    ) -> list[tuple[str, Any]]:
        """Per rank (only ``of`` the first ones) ("done", value), ("raised", [type, text, its rank, traceback]) or
        ("gone", exit code)."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((fn, args))
        end = time.monotonic() + patience
        found: list[tuple[str, Any]] = []
        for rank, (pipe, process) in enumerate(list(zip(self._pipes, self.processes, strict=True))[:of]):
            try:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise AssertionError(f"rank {rank} of {self.size} did not answer in {patience} s")
                found.append(pipe.recv())
            except (EOFError, OSError):
                process.join(5)
                found.append(("gone", process.exitcode))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def crew(size: int) -> Iterator[Crew]:
    """A crew for a block; none of its processes outlives it."""
    made = Crew(size)
    try:
        yield made
    finally:
        made.close()


def left_behind(made: Crew) -> list[str]:
    """Files that runners of these processes have left."""
    pids = [process.pid for process in made.processes]
    return [str(path) for pid in pids for path in Path(tempfile.gettempdir()).glob(f"pipec-{pid}-*")]
