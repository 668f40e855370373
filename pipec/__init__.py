"""pipec: a functional pipeline-parallel compiler for PyTorch eager."""

from pipec.compiler import compile  # noqa: A004 - pipec.compile is the verb of this library
from pipec.costs import Costs, StageCosts, activations
from pipec.dsl import Pipeline, chain
from pipec.errors import PipecError, PlanError, RankError, RenderError, RunError, ScheduleError, SpecError
from pipec.ir import Kind, Lane, Plan, Task
from pipec.lazy import lazy
from pipec.render import draw
from pipec.runtime.asynchronous.delays import TruncatedExponential
from pipec.runtime.asynchronous.reads import WeightsRead
from pipec.runtime.asynchronous.rescheduling import Rescheduling
from pipec.runtime.batchnorm import deferred_batch_norm
from pipec.runtime.check import check
from pipec.runtime.profile import profile
from pipec.runtime.reference import reference
from pipec.runtime.result import Result
from pipec.runtime.runner import Runner
from pipec.schedules import (
    Delayed,
    LiveWeights,
    Nesterov,
    PipeDream,
    PipeDream2BW,
    PipeMare,
    Predicted,
    parse_schedule,
    torch_csv,
)
from pipec.schedules import list_schedules as schedules
from pipec.spec import Spec
from pipec.timeline import Timeline
from pipec.tuning import Tuning, tune
from pipec.values import skip

__version__ = "0.1.0"
__all__ = [
    "Costs", "Delayed", "Kind", "Lane", "LiveWeights", "Nesterov", "PipeDream", "PipeDream2BW", "PipeMare",
    "PipecError", "Pipeline", "Plan", "PlanError", "Predicted", "RankError", "RenderError", "Rescheduling",
    "Result", "RunError", "Runner", "ScheduleError", "Spec", "SpecError", "StageCosts", "Task", "Timeline",
    "TruncatedExponential", "Tuning", "WeightsRead", "activations", "chain", "check", "compile",
    "deferred_batch_norm", "draw", "lazy", "parse_schedule", "profile", "reference", "schedules", "skip",
    "torch_csv", "tune",
]
