"""Tasks in the user's own ``torch.profiler``: each shows as its token and stage, ``pipec 2F0 enc1``.

``torch.profiler.profile`` records the thread that started it. The threads backend runs tasks in workers of its own,
so their tasks and operators show only when all threads are asked for::

    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], experimental_config=every) as profiler:
        run.step(x, y)

With ``backend="replay"``, and with one device, tasks run in the calling thread and need no such thing. Torch calls
this option experimental, and with it records no memory of the CPU. No call exists by which a worker could join the
profiler of another thread.
"""

from __future__ import annotations

from typing import Any

import torch.autograd.profiler
from torch.profiler import record_function

from pipec.ir import Plan


def profiling() -> bool:
    """Whether a profiler runs, in any thread (``torch.autograd._profiler_enabled`` knows its own thread only)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def recorded(plan: Plan, task: int) -> Any:
    """A context manager under which the profiler shows a task of ``plan``."""
    told = plan.table.task(task)
    stage = plan.graph.stages[told.stage].name if told.stage >= 0 else "all stages"
    return record_function(f"pipec {told} {stage}")
