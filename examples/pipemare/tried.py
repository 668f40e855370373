"""The search for an asynchronous setting of the digits that is as good as a synchronous one: what was tried, in order.

Judged by 300 rows that no reported figure uses. A list of seeds that is longer than one is a setting that looked
promising with the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from methods import Method

FULL = Method("pipemare", correction=0.135, warm=0.2)
HALF = replace(FULL, inflight="1f1b")
ADAMW = Method(optimizer="adamw")
MARE = replace(HALF, optimizer="adamw", reschedule=0.8)
DREAM = replace(MARE, schedule="pipedream", inflight="full", correction=None)
AHEAD = replace(MARE, schedule="predicted", correction=None)
LEANING = replace(MARE, schedule="nesterov", inflight="full", correction=None)

Tried = tuple[str, Method, float, tuple[int, ...]]

# SGD with momentum, and first settings with AdamW.
FIRST: list[Tried] = [
    ("synchronous, SGD", Method(), 0.1, (10,)),
    ("T1 + T3, no momentum", replace(FULL, correction=None, reschedule=0.25, momentum=0.0), 0.1, (10,)),
    ("T1 + T3, momentum 0.5", replace(FULL, correction=None, reschedule=0.25, momentum=0.5), 0.1, (10,)),
    ("T1 + T2 + T3, no momentum", replace(FULL, reschedule=0.8, momentum=0.0), 0.1, (10,)),
    ("T1 + T3, 1f1b", replace(HALF, correction=None, reschedule=0.25), 0.1, (10,)),
    ("T1 + T2 + T3, 1f1b", replace(HALF, reschedule=0.25), 0.1, (10,)),
    ("T3, PipeDream", Method("pipedream", warm=0.2), 0.1, (10,)),
    ("T3, prediction", Method("predicted", inflight="1f1b", warm=0.2), 0.1, (10,)),
    ("T1 + T3, prediction", Method("predicted", inflight="1f1b", warm=0.2, reschedule=0.25), 0.1, (10,)),
    ("T3, Nesterov", Method("nesterov", warm=0.2), 0.1, (10,)),
    ("T3, Nesterov", Method("nesterov", warm=0.2), 0.5, (10,)),
]

# AdamW, at rates near the synchronous one's best.
SECOND: list[Tried] = [
    ("synchronous, AdamW", ADAMW, 0.005, (10,)),
    ("synchronous, AdamW", ADAMW, 0.01, (10,)),
    ("synchronous, AdamW", ADAMW, 0.02, (10,)),
    ("synchronous, AdamW", ADAMW, 0.04, (10,)),
    ("T1 + T2 + T3, 1f1b, AdamW", MARE, 0.01, (10,)),
    ("T1 + T2 + T3, 1f1b, AdamW", MARE, 0.02, (10,)),
    ("T1 + T3, 1f1b, AdamW", replace(MARE, correction=None), 0.02, (10,)),
    ("T1 + T2 + T3, 1f1b, AdamW beta 0.5", replace(MARE, momentum=0.5), 0.02, (10,)),
    ("T1 + T3, PipeDream, AdamW", DREAM, 0.02, (10,)),
    ("T1 + T3, PipeDream, AdamW beta 0.5", replace(DREAM, momentum=0.5), 0.02, (10,)),
    ("T3, prediction, AdamW", replace(AHEAD, reschedule=0.0), 0.01, (10,)),
    ("T1 + T3, prediction, AdamW", AHEAD, 0.01, (10,)),
    ("T1 + T3, prediction, AdamW", AHEAD, 0.02, (10,)),
    ("T1 + T3, Nesterov, AdamW", LEANING, 0.02, (10,)),
    ("T1 + T3, PipeDream, NAdam", replace(DREAM, optimizer="nadam"), 0.02, (10,)),
    ("T1 + T2 + T3, AdamW", replace(MARE, inflight="full"), 0.01, (10,)),
    ("T1 + T2 + T3, AdamW", replace(MARE, inflight="full"), 0.02, (10,)),
    ("T3, AdamW", replace(MARE, inflight="full", correction=None, reschedule=0.0), 0.01, (10,)),
    ("T1 + T3, AdamW", replace(MARE, inflight="full", correction=None), 0.01, (10,)),
]


def settings() -> Iterator[tuple[str, Method, float, int]]:
    """Each with each of its seeds."""
    return ((label, method, lr, seed) for label, method, lr, seeds in [*SECOND, *FIRST] for seed in seeds)
