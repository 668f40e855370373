"""A small pipeline to make a mistake in, and what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pipec


class Add(torch.nn.Module):
    def forward(self, x: Any, y: Any = None, scale: float = 1.0) -> Any:
        return x * scale if y is None else x * scale + y


def problems(net: pipec.Pipeline) -> list[tuple[str, str]]:
    """Every problem of a declaration with the line of a test that is shown for it."""
    with pytest.raises(pipec.SpecError) as error:
        net.spec  # noqa: B018 - asking for it raises
    lines = str(error.value).splitlines()
    told = [re.fullmatch(r"  \d+\. (.*)", line)[1] for line in lines[1::2]]  # type: ignore[index]
    here = re.escape(str(Path(__file__).parent))
    where = [re.fullmatch(rf"      at {here}/\w+\.py:\d+: (.*)", line)[1] for line in lines[2::2]]  # type: ignore[index]
    count = "1 problem" if len(told) == 1 else f"{len(told)} problems"
    assert lines[0] == f"pipeline {net.name!r}: {count}"
    return list(zip(told, where, strict=True))


def only(net: pipec.Pipeline) -> str:
    found = problems(net)
    assert len(found) == 1, found
    return found[0][0]


def started() -> tuple[pipec.Pipeline, Any, Any]:
    """A pipeline with a first stage whose value is an output."""
    net = pipec.Pipeline("net")
    x = net.input("x")
    first = net.stage("first", None, x)
    net.output(first)
    return net, x, first
