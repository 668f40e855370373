"""A look at a few elements of every input: enough to see that ranks were given different minibatches.

Ranks that skip a batch or shuffle in another order would go on without any error, with the input of one minibatch and
the target of another.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipec.errors import RankError
from pipec.runtime.batch import MISSING
from pipec.spec import Spec
from pipec.tree import flatten

ELEMENTS = 64  # about as many of each tensor are looked at
NOTHING = -1  # for an input that was left out, or is not looked at
NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
PLAIN = (bool, int, float, str, bytes, type(None))


def sample_of(value: Any) -> int:
    """A number that differs where values differ in form or in one of the elements looked at; -1 for no value, and for
    one that is on a device."""
    if value is MISSING:
        return NOTHING
    found = 0
    for leaf in flatten(value)[0]:
        if isinstance(leaf, Tensor):
            if leaf.device.type != "cpu":
                return NOTHING  # the host would have to wait for it, and another rank may have the same on the CPU
            found = zlib.crc32(f"{tuple(leaf.shape)}".encode(), found)
            if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.numel():
                found = zlib.crc32(_elements(leaf), found)
        elif isinstance(leaf, PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def _elements(tensor: Tensor) -> bytes:
    """Elements spread over all dimensions, away from their beginnings, which padding and borders often fill alike."""
    own, most = tensor.detach(), 2
    while most ** max(own.dim(), 1) < ELEMENTS:
        most += 1
    steps = [max(1, size // most) for size in own.shape]
    places = tuple(slice(step // 2, None, step) for step in steps)
    if own.dtype in NUMPY and not own.is_neg():  # where it is cheaper, which counts in a step of tiny tasks
        return own.numpy()[places].tobytes()
    some = own[places]
    data: bytes = some.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def check_samples(
    table: Sequence[Sequence[float]], first: int, spec: Spec, replicas: Sequence[Sequence[int]], steps: Sequence[str]
) -> None:
    """Raise RankError for an input of which two ranks of a replica were given different values.

    Args:
        table: per rank a row with the sample of every input from column ``first`` on.
        steps: per rank the words for where it is.
    """
    everyone = [rank for ranks in replicas for rank in ranks]
    for ranks in replicas:
        for index, item in enumerate(spec.inputs):
            given: dict[float, int] = {}
            for rank in ranks:
                sample = table[everyone.index(rank)][first + index]
                if sample != NOTHING:
                    given.setdefault(sample, rank)
            if len(given) > 1:
                one, other = list(given.values())[:2]
                where = [f"rank {rank} in {steps[everyone.index(rank)]}" for rank in (one, other)]
                raise RankError(
                    f"input {item.name!r} is not the same on ranks {one} and {other} ({', '.join(where)}); all ranks "
                    "of a pipeline are given the same minibatch: did one of them skip a batch, or shuffle in another "
                    "order? What no stage of a rank reads may be left out there", other,
                )
