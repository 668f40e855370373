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


NAMES = {"1f1b": "synchronous", "pipemare": "PipeMare", "pipedream": "PipeDream", "pipedream-2bw": "2BW",
         "predicted": "prediction", "nesterov": "Nesterov"}
OPTIMIZERS = {"momentum": "SGD momentum", "adamw": "AdamW beta", "nadam": "NAdam beta"}


@dataclass(frozen=True)
class Method:
    """A way to train.

    ``microbatches``: per minibatch. ``devices``: 0 is one for every stage. ``inflight``, ``correction`` (T2): of the
    asynchronous schedule. ``reschedule`` (T1): K as a part of all updates; 0 is without. ``warm`` (T3): the part of all
    updates that are synchronous. ``momentum``: of SGD, the first beta of AdamW and NAdam, Nesterov's look-ahead.
    """

    schedule: str = "1f1b"
    microbatches: int = 4
    devices: int = 0
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

    def words(self) -> str:
        """What a table of settings calls it: the schedule, T1 with K, T2 with D, T3, the optimizer."""
        order = ", 1f1b" if self.schedule == "pipemare" and self.inflight == "1f1b" else ""
        parts = {f"T1 {self.reschedule:g}": self.reschedule, f"T2 {self.correction}": self.correction, "T3": self.warm}
        used = [word for word, on in parts.items() if on]
        used.append(f"{OPTIMIZERS[self.optimizer]} {self.momentum:g}")
        for more, plain in (("microbatches", Method.microbatches), ("devices", Method.devices)):
            if getattr(self, more) != plain:
                used.append(f"{getattr(self, more)} {more}")
        return ", ".join([NAMES[self.schedule] + order, *used])

    def key(self) -> str:
        """The options that are not the default, as text."""
        plain = asdict(Method())
        return " ".join(f"{name}={value}" for name, value in asdict(self).items()
                        if value != plain[name] or name == "schedule")


def compared(microbatches: int, optimizer: str, reschedule: float) -> dict[str, Method]:
    """The methods of parts (b) and (c), in this order; 2BW on as many devices as it can have."""
    plain = Method(microbatches=microbatches, optimizer=optimizer)
    mare = replace(plain, schedule="pipemare")
    t1, t2, t3 = {"reschedule": reschedule}, {"correction": 0.135}, {"warm": 0.2}
    return {
        "synchronous": plain,
        "no correction": mare,
        "T1": replace(mare, **t1),
        "T1 + T2": replace(mare, **t1, **t2),
        "T1 + T3": replace(mare, **t1, **t3),
        "T1 + T2 + T3": replace(mare, **t1, **t2, **t3),
        "PipeDream": replace(plain, schedule="pipedream"),
        "2BW": replace(plain, schedule="pipedream-2bw", devices=microbatches),
        "weight prediction": replace(plain, schedule="predicted", inflight="1f1b"),
    }
