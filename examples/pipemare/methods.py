"""What is compared: each method as a schedule with its options, and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import pipec

ASYNCHRONOUS = {
    "pipemare": lambda m: pipec.PipeMare(inflight=m.inflight, correction=m.correction),
    "pipedream": lambda m: pipec.PipeDream(),
    "pipedream-2bw": lambda m: pipec.PipeDream2BW(),
    "predicted": lambda m: pipec.Predicted(inflight=m.inflight),
    "nesterov": lambda m: pipec.Nesterov(momentum=m.momentum),
}


@dataclass(frozen=True)
class Method:
    """A way to train.

    ``microbatches``: per minibatch. ``inflight``, ``correction`` (T2): of the asynchronous schedule. ``reschedule``
    (T1): K as a part of all updates; 0 is without. ``warm`` (T3): the part of all updates that are synchronous.
    """

    schedule: str = "1f1b"
    microbatches: int = 4
    inflight: str = "full"
    correction: float | None = None
    reschedule: float = 0.0
    warm: float = 0.0
    optimizer: str = "momentum"
    momentum: float = 0.9

    @property
    def asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    def policy(self) -> Any:
        """What ``pipec.compile`` takes as the schedule."""
        return ASYNCHRONOUS[self.schedule](self) if self.asynchronous else self.schedule

    def key(self) -> str:
        """The options that are not the default, as text."""
        plain = asdict(Method())
        return " ".join(f"{name}={value}" for name, value in asdict(self).items()
                        if value != plain[name] or name == "schedule")


MARE = Method("pipemare")
T1, T2, T3 = {"reschedule": 0.25}, {"correction": 0.135}, {"warm": 0.2}

# Part (b) and (c) of the report, in this order.
COMPARED = {
    "synchronous": Method(),
    "PipeMare, no correction": MARE,
    "T1": replace(MARE, **T1),
    "T1 + T2": replace(MARE, **T1, **T2),
    "T1 + T3": replace(MARE, **T1, **T3),
    "T1 + T2 + T3": replace(MARE, **T1, **T2, **T3),
    "PipeDream": Method("pipedream"),
    "weight prediction": Method("predicted", inflight="1f1b"),
}
