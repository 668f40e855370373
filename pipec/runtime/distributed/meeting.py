"""Before ranks make their groups: whether every process can make its runner, and would make the same groups.

All processes of the world make all groups in one order, and each waits for the others there. So what goes wrong on one
of them before, or lets it make other groups, is told to all through the store of the process group.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from pipec.errors import RankError, RunError
from pipec.ir import Plan
from pipec.runtime.distributed.agree import compare
from pipec.runtime.distributed.fit import check_plan
from pipec.runtime.distributed.group import layouts, own_store
from pipec.runtime.distributed.local import tied_parameters
from pipec.runtime.distributed.records import MOST
from pipec.runtime.distributed.watch import MOST as WATCHED
from pipec.runtime.failure import told
from pipec.spec import Spec

SHORTEST, LONGEST = 0.0005, 0.1  # seconds between two looks into the store
ROLL = 3.0  # seconds for all to say that they could not make their runner


def met(check: Callable[[], dict[str, str]], timeout: float) -> None:
    """Run ``check`` on every process of the world; when it raises on one, or gives something else, it fails on all.

    Runners are counted, so the first one of a process meets the first ones of the others.

    Raises:
        RankError: another process failed, would make other groups, or makes no runner within ``timeout`` seconds.
        BaseException: what ``check`` raised here.
    """
    rank, size, store = dist.get_rank(), dist.get_world_size(), own_store("pipec/runners")
    number = store.add(f"count/{rank}", 1)
    try:
        mine = check()
    except BaseException as error:
        store.set(f"{number}/{rank}", pickle.dumps({"failed": told(error)}))
        raise
    store.set(f"{number}/{rank}", pickle.dumps(mine))
    keys = [f"{number}/{other}" for other in range(size)]
    try:
        _await(store, keys, timeout)
        rows = [pickle.loads(store.get(key)) for key in keys]
        with contextlib.suppress(RuntimeError):  # all have read it, as they have come to the one after it
            store.delete_key(f"{number - 2}/{rank}")
    except RuntimeError as error:
        raise RankError(f"the store of the process group is gone: {error}; its process, rank 0's as a rule, has "
                        "ended") from error
    compare(rows, range(size), rank)


def absent(ranks: Sequence[int]) -> list[int]:
    """Of the processes that make a runner together those that do not say, soon, that they could not.

    Called on all of them when one is lost before their watch is made: the others say so here.
    """
    rank, store = dist.get_rank(), own_store("pipec/runners")
    try:
        number, end = store.add(f"count/{rank}", 0), monotonic() + ROLL
        store.set(f"{number}/lost/{rank}", b"here")
        keys = [f"{number}/lost/{other}" for other in ranks]
        while not store.check(keys) and monotonic() < end:
            sleep(LONGEST)
        return [other for other, key in zip(ranks, keys, strict=True) if not store.check([key])]
    except RuntimeError:  # the store has gone with a process
        return []


def apart(ranks: Sequence[int], timeout: float, error: Exception) -> RankError:
    """The error when not all processes make the runner that they have begun."""
    gone = absent(ranks)
    who = f"rank {gone[0]} has ended or does" if len(gone) == 1 else "a rank has ended or does"
    if len(gone) > 1:
        who = f"ranks {', '.join(map(str, gone))} have ended or do"
    return RankError(f"{who} not answer while the ranks make this runner together, within "
                     f"{timeout:g} s: {error}", gone[0] if len(gone) == 1 else -1)


def _await(store: Any, keys: Sequence[str], timeout: float) -> None:
    """Wait for all keys, looking again and again: an interrupt ends it, and so does time."""
    end, pause = monotonic() + timeout, SHORTEST
    while not store.check(list(keys)):
        if monotonic() > end:
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if late:
                who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
                raise RankError(f"{who} made no runner within {timeout:g} s after this rank; every rank makes the same "
                                "runners in the same order", late[0] if len(late) == 1 else -1)
        sleep(pause)
        pause = min(2 * pause, LONGEST)


def check_files(devices: int, replicas: int) -> None:
    """Raise RunError when this process may not open the sockets of a rank: some libraries abort or wait then."""
    try:
        import resource

        limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):
        return
    if limit != resource.RLIM_INFINITY and limit - used < (need := files_of(devices, replicas)):
        raise RunError(
            f"a rank of {devices * replicas} needs about {need} sockets and files, and this process may open only "
            f"{limit - used} more ({used} of {limit} are open); raise the limit (ulimit -n {used + need}, or more)"
        )


def files_of(devices: int, replicas: int) -> int:
    """About how many descriptors a rank holds: of groups, of the watch, of values that travel by lines, and a few."""
    others = devices * replicas - 1
    groups = others + (devices + replicas + 4 if replicas > 1 else 0)
    return 14 + groups + (2 * others if others < WATCHED else 0) + (2 * devices if devices <= MOST else 0)


def able(spec: Spec, plan: Plan, mesh: Any) -> dict[str, str]:
    """What decides about the groups that a process makes, when it can be a rank of this plan.

    Raises:
        RunError: it cannot.
    """
    homes = [plan.stage_device(stage) for stage in range(len(spec.stages))]
    check_plan(spec, plan, tied_parameters(spec, homes))
    blocks = layouts(plan, mesh, plan.data_parallel)
    check_files(plan.devices, plan.data_parallel)
    return {
        "devices": str(plan.devices), "replicas": str(plan.data_parallel),
        "ranks of the mesh": "; ".join(str([list(row) for row in ranks]) for ranks in blocks),
    }
