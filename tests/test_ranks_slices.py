"""Slices of a sequence over real processes: the numbers of the reference, whatever the schedule and the placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import same
from test_ranks_numbers import differences
from test_slices import Attention, batch, language

import pipec

LAYERS = ("attention", "gru", "plain", "dropout", "decay")


def batches() -> list[dict[str, Any]]:
    """The second has other shapes, the third fewer positions than slices and fewer rows than microbatches."""
    return [batch(4, 9), batch(5, 7, 1), batch(1, 2, 2), batch(4, 9, 3)]


def sliced(rank: int, size: int, how: dict[str, Any], reduction: str) -> list[str]:
    how = {"devices": size, "slices": 3, "update": "stage"} | how
    return differences(lambda: language(LAYERS, reduction), how, batches(), 2, evaluate=True)


@pytest.mark.parametrize("how", [
    {"schedule": "seq-1f1b"}, {"schedule": "seq-1f1b", "recompute": "always", "slices": 4}, {"schedule": "zb-h1"},
    {"schedule": "gpipe", "placement": "looped"}, {"schedule": "zb-v"},
], ids=lambda how: "-".join(map(str, how.values())))
@pytest.mark.parametrize("size", [2, 4])
def test_slices_have_the_numbers_of_the_reference(how: dict[str, Any], size: int, crew2: Any, crew4: Any) -> None:
    reduction = "count" if "recompute" in how else "mean"
    assert (crew2 if size == 2 else crew4)(sliced, size, how, reduction) == [[]] * size


def partly(rank: int) -> Any:
    """Each rank is given what its stages read; one is given another length, then the runner goes on."""
    net = language(("attention",))
    plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=3, placement=[0, 0, 0, 1])
    given = batch(4, 9)
    own = {name: given[name] for name in (("tokens", "positions"), ("targets",))[rank]}
    with pipec.Runner(net, plan) as run:
        result = run.step(**own)
        with pytest.raises(pipec.RankError) as error:
            run.step(**(batch(4, 8) if rank else given))
        again = run.step(**given)
    expected = pipec.reference(language(("attention",)), 2, slices=3).step(**given)
    return same([result.loss, again.loss], [expected.loss] * 2), result.slices, str(error.value)


def test_all_ranks_cut_the_same_sequences(crew2: Any) -> None:
    for equal, slices, told in crew2(partly):
        assert equal
        assert slices == 3
        assert told == "the sequences have 9 positions on rank 0, 8 positions on rank 1; all ranks of a pipeline are " \
                       "given the same ones"


class Fails(Attention):
    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        if carry is not None and len(carry) == 2:
            raise ValueError("no third slice")
        return super().forward(x, carry)


def fails(rank: int) -> str:
    net = pipec.Pipeline("net")
    x = net.stage("first", torch.nn.Identity(), net.input("x", slice_dim=1))
    net.loss("mean", lambda h: h.mean(), net.stage("second", Fails(), x, carry=True))
    plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=3)
    with pipec.Runner(net, plan) as run, pytest.raises((ValueError, pipec.RankError)) as error:
        run.step(x=torch.ones(4, 6, 8))
    return f"{error.value} {getattr(error.value, '__notes__', '')}"


def test_a_failure_names_its_slice(crew2: Any) -> None:
    for told in crew2(fails):
        assert "no third slice" in told
        assert "stage 'second', microbatch 0.2, FORWARD (1F0.2) on device 1" in told


def replicated(rank: int) -> list[str]:
    """Two replicas with sequences of other lengths: each row counts alike."""
    net, plain = language(("attention",)), language(("attention",))
    plan = pipec.compile(net, 2, 2, "seq-1f1b", slices=3, data_parallel=2)
    with pipec.Runner(net, plan) as run:
        found = [float(run.step(**batch(4, 9 + rank // 2, rank // 2)).loss)]
    loops = [pipec.reference(plain, 2, slices=3).step(**batch(4, 9 + replica, replica)).loss for replica in range(2)]
    return [f"{got} instead of {sum(loops) / 2}" for got in found if abs(got - float(sum(loops)) / 2) > 1e-5]


def test_replicas_may_have_other_lengths(crew4: Any) -> None:
    assert crew4(replicated) == [[]] * 4
