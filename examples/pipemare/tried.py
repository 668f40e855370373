"""The search for asynchronous settings that are as good as synchronous ones: what was tried, in order.

Judged by rows that no reported figure uses. More seeds than one are for what looked promising with the first, and for
what it is compared with. With T3, which all but one have, a fifth of the updates are synchronous.
"""

from __future__ import annotations

from dataclasses import replace

from methods import Method

Tried = tuple[Method, float, tuple[int, ...]]  # with its learning rate and seeds
ONE, THREE = (10,), (10, 11, 12)

SGD, ADAMW = Method(), Method(optimizer="adamw")
FULL = Method("pipemare", warm=0.2)
HALF, DREAM = replace(FULL, inflight="1f1b"), replace(FULL, schedule="pipedream")
AHEAD, LEANING = replace(HALF, schedule="predicted"), replace(FULL, schedule="nesterov")


def adam(method: Method, reschedule: float = 0.8, beta: float = 0.9, correction: float | None = None) -> Method:
    return replace(method, optimizer="adamw", reschedule=reschedule, momentum=beta, correction=correction)


def sgd(method: Method, reschedule: float = 0.25, momentum: float = 0.9, correction: float | None = None) -> Method:
    return replace(method, reschedule=reschedule, momentum=momentum, correction=correction)


def eight(method: Method) -> Method:
    """With microbatches of 5 rows instead of 10."""
    return replace(method, microbatches=8)


def four(method: Method) -> Method:
    """The 19 stages on 4 devices."""
    return replace(method, devices=4)


# 19 devices, 4 microbatches, 24 epochs, where nothing else is said.
DIGITS: list[Tried] = [
    # AdamW at rates near the best synchronous one
    (ADAMW, 0.005, ONE),
    (ADAMW, 0.01, ONE),
    (ADAMW, 0.02, THREE),
    (ADAMW, 0.04, THREE),
    (adam(HALF, correction=0.135), 0.01, ONE),
    (adam(HALF, correction=0.135), 0.02, ONE),
    (adam(HALF), 0.02, ONE),
    (adam(HALF, beta=0.5, correction=0.135), 0.02, THREE),
    (adam(DREAM), 0.02, ONE),
    (adam(DREAM, beta=0.5), 0.02, THREE),
    (adam(AHEAD, reschedule=0.0), 0.01, ONE),
    (adam(AHEAD), 0.01, ONE),
    (adam(AHEAD), 0.02, ONE),
    (adam(LEANING), 0.02, ONE),
    (replace(adam(DREAM), optimizer="nadam"), 0.02, ONE),
    (adam(FULL, correction=0.135), 0.01, ONE),
    (adam(FULL, correction=0.135), 0.02, ONE),
    (adam(FULL, reschedule=0.0), 0.01, ONE),
    (adam(FULL), 0.01, ONE),
    # SGD
    (SGD, 0.1, THREE),
    (sgd(FULL, momentum=0.0), 0.1, ONE),
    (sgd(FULL, momentum=0.5), 0.1, THREE),
    (sgd(FULL, 0.8, momentum=0.0, correction=0.135), 0.1, ONE),
    (sgd(HALF), 0.1, ONE),
    (sgd(HALF, correction=0.135), 0.1, ONE),
    (sgd(DREAM, 0.0), 0.1, ONE),
    (sgd(AHEAD, 0.0), 0.1, ONE),
    (sgd(AHEAD), 0.1, ONE),
    (sgd(LEANING, 0.0), 0.1, ONE),
    (sgd(LEANING, 0.0), 0.5, ONE),
    # less momentum, on both sides
    (adam(FULL, beta=0.5, correction=0.135), 0.02, THREE),
    (adam(ADAMW, 0.0, beta=0.5), 0.02, THREE),
    (sgd(SGD, 0.0, momentum=0.5), 0.1, THREE),
    (sgd(SGD, 0.0, momentum=0.5), 0.3, ONE),
    (sgd(FULL, 0.8, momentum=0.5), 0.1, THREE),
    (sgd(FULL, momentum=0.5), 0.2, ONE),
    (sgd(HALF, momentum=0.5), 0.1, THREE),
    (sgd(HALF, momentum=0.5), 0.3, ONE),
    (sgd(DREAM, momentum=0.5), 0.1, ONE),
    (adam(HALF, beta=0.5, correction=0.135), 0.04, ONE),
    (adam(DREAM, beta=0.5), 0.04, THREE),
    (adam(AHEAD, beta=0.5), 0.02, ONE),
    (adam(AHEAD, beta=0.5), 0.04, ONE),
    (adam(FULL, beta=0.5, correction=0.135), 0.04, ONE),
    # a longer K for SGD with less momentum; twice the microbatches, which halve the delay
    (sgd(HALF, 0.8, momentum=0.5), 0.1, THREE),
    (adam(ADAMW, 0.0, beta=0.5), 0.04, THREE),
    (eight(adam(HALF, beta=0.5, correction=0.135)), 0.02, THREE),
    (eight(adam(HALF, beta=0.5, correction=0.135)), 0.04, ONE),
    (eight(sgd(HALF, 0.8, momentum=0.5)), 0.1, THREE),
    # fewer devices, as for the letters
    (four(adam(HALF, correction=0.135)), 0.02, THREE),
    (four(adam(HALF, correction=0.135)), 0.04, THREE),
    (four(adam(HALF, beta=0.5, correction=0.135)), 0.02, THREE),
    (four(replace(adam(HALF, reschedule=0.0), warm=0.0)), 0.02, THREE),
    # what was best on 4 devices, on 19 with half the delay
    (eight(adam(HALF, correction=0.135)), 0.02, THREE),
]

# 4 devices, 4 microbatches, 16 epochs.
FEW, FEW_HALF = replace(ADAMW, devices=4), replace(HALF, devices=4)
LETTERS: list[Tried] = [
    *((FEW, lr, ONE) for lr in (0.005, 0.01, 0.02, 0.04)),
    *((adam(FEW, 0.0, beta=0.5), lr, ONE) for lr in (0.01, 0.02)),
    *((adam(FEW_HALF, beta=0.5, correction=0.135), lr, ONE) for lr in (0.005, 0.01, 0.02, 0.04)),
]
