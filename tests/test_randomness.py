"""Each task draws from a stream of its own, whatever thread runs it and whatever else is being drawn."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import (
    SEED,
    STEP,
    _nothing_left,
    in_threads,
    plainly,
    ramp,
    same,
    streams,
)
from torch import Tensor, nn

from pipec.errors import RunError
from pipec.runtime import randomness, rng_kernels
from pipec.runtime.randomness import Position, Purpose, Streams, task_seed

__all__ = ["_nothing_left", "streams"]


# --- seeds ------------------------------------------------------------------------------------------------


def test_task_seeds_are_what_they_have_always_been() -> None:
    assert [
        task_seed(0, 0, 0, 0),
        task_seed(1, 2, 3, 4),
        task_seed(1, 2, 3, 4, Purpose.BACKWARD),
        task_seed(2**64 - 1, 10**9, 70000, 5),
        task_seed(-1, 10**9, 70000, 5),
    ] == GOLDEN


GOLDEN = [
    15015783522758916010,
    13676479252090880729,
    10316060738070974283,
    8974109276604957016,
    8974109276604957016,
]


def test_no_two_tasks_of_a_step_share_the_bits_that_the_generator_uses() -> None:
    grid = list(itertools.product(range(64), range(512)))
    for step in (0, 1, 2**40):
        assert len({task_seed(SEED, step, s, m) & 0xFFFFFFFF for s, m in grid}) == len(grid)


def test_every_part_of_the_key_matters() -> None:
    seeds = {
        task_seed(*key, purpose)
        for key in itertools.product((0, 1, 2**32, 2**63), (0, 1, 2**32), (0, 1, 2**16), (0, 1, 2**16))
        for purpose in Purpose
    }
    assert len(seeds) == 4 * 3 * 3 * 3 * len(Purpose)


def test_neighbouring_tasks_draw_unrelated_numbers() -> None:
    """Correlations of 20,000 uniform numbers each are within five standard errors of nothing."""
    with Streams() as streams:
        rows = []
        for step, stage, microbatch in itertools.product(range(3), range(3), range(3)):
            with streams.task(SEED, step, stage, microbatch):
                rows.append(torch.rand(20000, dtype=torch.float64))
    correlations = torch.corrcoef(torch.stack(rows)) - torch.eye(len(rows), dtype=torch.float64)
    assert correlations.abs().max() < 5 / 20000**0.5


def test_a_generator_of_the_users_own_is_left_alone(streams: Streams) -> None:
    def draw(own: torch.Generator) -> list[Tensor]:
        return [torch.rand(4, generator=own), torch.poisson(ramp(4) * 9, own), ramp(4).normal_(generator=own)]

    with streams.task(SEED, STEP, 0, 0) as stream:
        got = draw(torch.Generator().manual_seed(3))
        assert stream._generator is None, "the stream was used"
    assert same(got, draw(torch.Generator().manual_seed(3)))


def test_nothing_is_left_when_the_last_run_closes() -> None:
    names = torch._C._dispatch_get_all_op_names()
    tables = {name: torch._C._dispatch_dump_table(name) for name in names if name.startswith("aten::")}
    first = Streams()
    second = Streams()
    first.close()
    first.close()
    assert torch.random.default_generator is not torch.default_generator, "the second run still needs it"
    with second.task(SEED, STEP, 0, 0) as stream:
        assert torch.equal(torch.rand(3), plainly(lambda: torch.rand(3), stream.seed)[0])
    del second, stream
    gc.collect()  # a run that was dropped, not closed
    assert torch.random.default_generator is torch.default_generator
    assert {name: torch._C._dispatch_dump_table(name) for name in tables} == tables
    with pytest.raises(RunError, match="closed"):
        first.task(SEED, STEP, 0, 0)


def test_meta_tensors_draw_nothing(streams: Streams) -> None:
    with streams.task(SEED, STEP, 0, 0):
        assert torch.rand(3, device="meta").is_meta
        assert F.dropout(torch.ones(3, device="meta"), 0.5).is_meta


# --- nesting and failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("outer_mode", [False, True])
@pytest.mark.parametrize("inner_mode", [False, True])
def test_a_pipeline_inside_a_stage_leaves_the_stages_stream_where_it_was(
    outer_mode: bool, inner_mode: bool
) -> None:
    with Streams(with_mode=outer_mode) as outer, Streams(with_mode=inner_mode) as inner:
        with outer.task(SEED, STEP, 0, 0):
            first = torch.rand(3)
            seed = torch.initial_seed()
            with inner.task(seed, 0, 0, 0) as stream:
                inside = [torch.rand(3), F.dropout(torch.ones(30))]
            rest = torch.rand(3)
            want = plainly(lambda: [torch.rand(3), F.dropout(torch.ones(30))], stream.seed)
        assert same(inside, want)
        with outer.task(SEED, STEP, 0, 0):
            assert same([first, rest], [torch.rand(3), torch.rand(3)])


def test_an_exception_ends_the_stream_and_keeps_its_type(streams: Streams) -> None:
    class MineError(Exception):
        pass

    def outside() -> str:
        with pytest.raises(RuntimeError) as caught:
            ramp(3).bernoulli_(2.0)
        return str(caught.value)

    def failing() -> None:
        with streams.task(SEED, STEP, 0, 0):
            torch.rand(3)
            raise MineError

    with pytest.raises(MineError):
        failing()
    assert rng_kernels.THREAD.stream is None
    torch.manual_seed(4)
    got = torch.rand(3)
    torch.manual_seed(4)
    assert torch.equal(got, torch.rand(3))
    message = outside()
    with streams.task(SEED, STEP, 0, 0):
        assert outside() == message


def test_a_task_that_draws_nothing_makes_no_generator(streams: Streams) -> None:
    with streams.task(SEED, STEP, 0, 0) as stream:
        nn.Linear(4, 4, device="meta")
        ramp(3, 4) @ ramp(4, 3)
        assert stream._generator is None


def test_two_runs_in_two_threads_open_and_close_at_will() -> None:
    def work(thread: int) -> None:
        for item in range(8):
            with Streams() as streams, streams.task(SEED, item, thread, 0) as stream:
                got = F.dropout(torch.ones(50), 0.5)
                plain = torch.Generator().manual_seed(stream.seed)
                assert torch.equal(got, 2 * torch.empty(50).bernoulli_(0.5, generator=plain))

    in_threads(3, work)


def test_kernels_come_and_go_under_threads_that_draw() -> None:
    """Draws that are under way while the kernels are put in or taken out end right."""
    stop = threading.Event()
    want = plainly(lambda: torch.randn(20000), 3)[0]

    def work(thread: int) -> None:
        if thread == 0:
            for _ in range(40):
                Streams().close()
            stop.set()
        while not stop.is_set():
            assert torch.equal(torch.randn(20000, generator=torch.Generator().manual_seed(3)), want)

    in_threads(4, work)


def test_the_mode_serves_where_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(op: object, key: str) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(rng_kernels, "get_kernel", refuse)
    with Streams() as streams:
        assert streams.with_mode
        with streams.task(SEED, STEP, 0, 0) as stream:
            got = torch.rand(3)
        assert same([got], plainly(lambda: torch.rand(3), stream.seed))


def test_the_mode_serves_where_kernels_are_installed_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(op: object, own: Any) -> Callable[..., object]:
        return lambda keyset, *args, **kwargs: own.call_boxed(keyset, *args, **kwargs)

    monkeypatch.setattr(rng_kernels, "_kernel", idle)
    with Streams() as streams:
        assert streams.with_mode
        assert "library.py" not in torch._C._dispatch_dump("aten::uniform_"), "useless kernels are taken out again"


def test_the_mode_names_an_operation_that_it_cannot_serve() -> None:
    with torch.library._scoped_library("pipec_test", "FRAGMENT") as library, Streams(with_mode=True) as mode:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("noise", torch.rand_like, "CPU")
        with mode.task(SEED, STEP, 0, 0), pytest.raises(RunError, match=r"pipec_test\.noise.*no generator"):
            torch.ops.pipec_test.noise(ramp(3))


def test_no_way_that_works_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "streams_work", lambda *, with_mode: False)
    with pytest.raises(RunError, match="apart"):
        Streams()


# --- the position of a run --------------------------------------------------------------------------------


def test_the_position_follows_manual_seed_and_counts_steps() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        position = Position().pinned()
        assert (position.seed, position.step) == (3, 0)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(4)
        assert Position().pinned() == position, "draws do not change the seed"
        torch.manual_seed(4)
        assert Position(step=2).pinned() == Position(4, 2)
        assert position.pinned() is position
        assert Position().advanced().advanced() == Position(None, 2)
        assert copy.deepcopy(position) == position
