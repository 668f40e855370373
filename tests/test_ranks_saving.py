"""Checkpoints over processes: saved under one number of ranks, loaded under another, under the model's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import WIDTH, chain, data, of_modules, parameters, same
from test_ranks_reduce import Head
from torch import Tensor, nn

import pipec


class Model(nn.Module):
    """A whole model with tied weights, batch norm, dropout and a part that is in no stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
        self.deep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = Head(self.first.weight)
        self.unused = nn.Linear(2, 2)


def cut(model: Model, stages: int) -> pipec.Pipeline:
    parts: list[nn.Module] = [model.first, model.norm, model.deep, model.head]
    if stages == 2:
        parts = [nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])]
    return of_modules(*parts)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def make(size: int, stages: int, update: str = "stage", backend: str | None = None, replicas: int = 1) -> Any:
    torch.manual_seed(21)
    model = Model()
    net = cut(model, stages)
    plan = pipec.compile(net, size, 4, update=update, data_parallel=replicas)
    used = [p for name, p in model.named_parameters() if not name.startswith("unused")]
    optimizer = adam if update == "stage" else adam(used)
    return model, pipec.Runner(net, plan, optimizer=optimizer, model=model, backend=backend)


def train(run: Any, steps: range, replica: int = 0) -> None:
    for step in steps:
        run.step(**data(8, 100 * replica + step))


def save(rank: int, size: int, stages: int, path: str, update: str = "stage", replicas: int = 1) -> Any:
    _, run = make(size, stages, update, replicas=replicas)
    with run:
        train(run, range(3), rank // size)
        run.save(path)
        train(run, range(3, 6), rank // size)
        return sorted(run.state_dict()), dict(run.state_dict())


def resume(rank: int, size: int, stages: int, path: str, update: str = "stage") -> Any:
    _, run = make(size, stages, update)
    with run:
        run.load(path)
        train(run, range(3, 6))
        return dict(run.state_dict())


def alone(size: int, stages: int, path: Path | None, steps: range, update: str = "stage") -> dict[str, Tensor]:
    model, run = make(size, stages, update, backend="replay")
    with run:
        if path is not None:
            run.load(path)
        train(run, steps)
        return {name: value.clone() for name, value in sorted(model.state_dict().items())}


def whole(parts: list[Any]) -> dict[str, Tensor]:
    found = {name: value for part in parts for name, value in part.items()}
    return {name: found[name] for name in sorted(found)}


def test_saved_by_two_ranks_and_gone_on_with_anywhere(crew2: Any, crew4: Any, tmp_path: Path) -> None:
    expected = alone(2, 4, None, range(6))
    answers = crew2(save, 2, 4, str(tmp_path / "two"))
    assert same(whole([state for _, state in answers]), expected)
    assert sorted({name for names, _ in answers for name in names}) == sorted(Model().state_dict())
    for update in ("stage", "all"):
        assert same(whole(crew2(resume, 2, 4, str(tmp_path / "two"), update)), expected)
    assert same(whole(crew4(resume, 4, 4, str(tmp_path / "two"))), expected)
    assert same(alone(1, 4, tmp_path / "two", range(3, 6)), expected)


def test_saved_by_one_process_and_gone_on_with_by_two(crew2: Any, tmp_path: Path) -> None:
    _, run = make(1, 4, backend="replay")
    with run:
        train(run, range(3))
        run.save(tmp_path / "one")
    assert same(whole(crew2(resume, 2, 4, str(tmp_path / "one"))), alone(2, 4, None, range(6)))


def test_another_cut_of_the_same_model_takes_it(crew2: Any, tmp_path: Path) -> None:
    """Four stages on two ranks, then two stages: the weights and the optimizer's state are the same."""
    crew2(save, 2, 4, str(tmp_path / "four"), "all")
    _, run = make(2, 2, "all", backend="replay")
    with run:
        run.load(tmp_path / "four")
        mine = run.checkpoint()
    _, other = make(2, 4, "all", backend="replay")
    with other:
        other.load(tmp_path / "four")
        theirs = other.checkpoint()
    assert same(mine["model"], theirs["model"])
    assert same(mine["optimizer"]["state"], theirs["optimizer"]["state"])


def test_the_first_of_two_replicas_writes(crew4: Any, tmp_path: Path) -> None:
    crew4(save, 2, 4, str(tmp_path / "replicas"), "stage", 2)
    _, run = make(1, 4, backend="replay")
    with run:
        run.load(tmp_path / "replicas")
        train(run, range(3, 4))


def test_a_plain_module_is_filled_without_pipec(crew2: Any, tmp_path: Path) -> None:
    crew2(save, 2, 4, str(tmp_path / "plain"))
    torch.manual_seed(0)
    model = Model()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    model.load_state_dict(state["model"])
    assert same(dict(sorted(model.state_dict().items())), alone(1, 4, None, range(3)))


def without_model(rank: int, path: str) -> Any:
    """Names of stages where no model is given; shared ones under both."""
    torch.manual_seed(4)
    layer = nn.Linear(WIDTH, WIDTH)
    net = of_modules(layer, nn.Linear(WIDTH, WIDTH), Head(layer.weight))
    plan = pipec.compile(net, 2, 4, update="stage")
    with pipec.Runner(net, plan, optimizer=adam) as run:
        train(run, range(2))
        run.save(path)
        before = [p.clone() for p in run.parameters()]
        train(run, range(2, 4))
        run.load(path)
        return same(before, list(run.parameters())), sorted(run.state_dict())


def test_names_of_stages(crew2: Any, tmp_path: Path) -> None:
    (one, first), (two, second) = crew2(without_model, str(tmp_path / "stages"))
    assert one
    assert two
    assert sorted({*first, *second}) == ["a.bias", "a.weight", "b.bias", "b.weight", "c.weight"]


def own_checkpoint(rank: int, folder: str) -> str:
    net = chain(3)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        torch.save(run.checkpoint(), f"{folder}/{rank}.pt")
        with pytest.raises(pipec.RunError) as error:
            run.load_state_dict({})
    return str(error.value)


def test_one_ranks_checkpoint_is_told_from_the_whole(crew2: Any, tmp_path: Path) -> None:
    advice = "what one rank of several has is only its own part: write with run.save(folder) on all ranks"
    assert all(advice in text for text in crew2(own_checkpoint, str(tmp_path)))
    net = chain(3)
    with pipec.Runner(net, pipec.compile(net, 1, 4), backend="replay") as run:
        for rank, missing in ((0, "s2.0.weight"), (1, "s0.0.weight")):
            with pytest.raises(pipec.RunError) as error:
                run.restore(torch.load(tmp_path / f"{rank}.pt"))
            assert f"missing: {missing}" in str(error.value)
            assert advice in str(error.value)
        with pytest.raises(pipec.RunError) as error:
            run.load_state_dict({"other.weight": torch.zeros(1)})
        assert advice not in str(error.value)  # no part of this model


def wrong(rank: int, path: str) -> str:
    net = chain(3)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run, pytest.raises(pipec.RunError) as error:
        run.load(path)
    assert same(parameters(net), parameters(chain(3)))
    return f"{type(error.value).__name__}: {error.value}"


def test_checkpoints_that_do_not_fit(crew2: Any, tmp_path: Path) -> None:
    assert all("holds no checkpoint" in text for text in crew2(wrong, str(tmp_path / "nowhere")))
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 1, 4), backend="replay") as run:
        run.save(tmp_path / "short")
    first, second = crew2(wrong, str(tmp_path / "short"))
    assert "missing: s2.0.weight, s2.0.bias" in first + second
    assert "run.save" not in first + second  # that is what wrote it
    assert {first.split(":")[0], second.split(":")[0]} == {"RunError", "RankError"}


# -- checkpoints that are refused, on all ranks or on none -------------------------------------------------------------


def refused(rank: int, folder: str, loads: list[tuple[str, int, str | None]]) -> list[Any]:
    """Load what does not fit: the error, and whether everything is as before and the next step is right."""
    found: list[Any] = []
    for name, stages, update in loads:
        net = chain(stages)
        plan = pipec.compile(net, 2, 4, update=update)
        with pipec.Runner(net, plan, optimizer=adam if update else None) as run:
            before = run.checkpoint()
            with pytest.raises(pipec.RunError) as error:
                run.load(f"{folder}/{name}")
            after = run.checkpoint()
            ok = same([before["model"], before["random"]], [after["model"], after["random"]])
            found.append((str(error.value), ok, same(run.step(**data()).loss, first_loss(stages))))
    return found


def first_loss(stages: int) -> Tensor:
    return pipec.reference(chain(stages), 4).step(**data()).loss


def saved(folder: Path, stages: int, update: str | None = "stage") -> None:
    net = chain(stages)
    plan = pipec.compile(net, 1, 4, update=update)
    with pipec.Runner(net, plan, optimizer=adam if update else None, backend="replay") as run:
        run.step(**data(8, 5))
        run.save(folder)


def test_a_checkpoint_that_one_rank_cannot_take_is_taken_by_none(crew2: Any, tmp_path: Path) -> None:
    """Two stages in the folder, three on two ranks: the first rank has all that it needs."""
    saved(tmp_path / "two", 2)
    saved(tmp_path / "four", 4)
    saved(tmp_path / "plain", 2, None)
    tries = [("two", 3, "stage"), ("four", 2, "stage"), ("two", 2, None), ("plain", 2, "stage")]
    first, second = crew2(refused, str(tmp_path), tries)
    assert all(kept and right for _, kept, right in first + second)
    assert first[0][0].startswith(f"rank 1 failed: RunError: {tmp_path / 'two'}: 2 problems")
    assert first[0][0].endswith("this rank is as before")
    assert "missing: s2.0.weight, s2.0.bias" in second[0][0]
    only = "load only the model with torch.distributed.checkpoint.load({'model': run.state_dict()}, checkpoint_id="
    for answers in (first, second):
        assert "1. unknown: s2.0.weight, s2.0.bias, s3.0.weight, s3.0.bias" in answers[1][0]
        assert f"but this plan has no UPDATE; {only}'{tmp_path / 'two'}')" in answers[2][0]
        assert f"it has no optimizer states, since its plan had no UPDATE; {only}" in answers[3][0]


def only_the_model(rank: int, path: str) -> list[bool]:
    """What the advice says, with shared parameters and without."""
    net = of_modules(*(layer := nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), Head(layer.weight))
    with pipec.Runner(net, pipec.compile(net, 2, 4, update="stage"), optimizer=adam) as run:
        run.step(**data())
        run.save(path)
        expected = [p.clone() for p in run.parameters()]
    with torch.no_grad():
        for p in parameters(net):
            p.add_(rank + 1.0)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        dcp.load({"model": run.state_dict()}, checkpoint_id=path)
        return [same(p.detach(), q) for p, q in zip(run.parameters(), expected, strict=True)]


def test_only_the_model_is_loaded(crew2: Any, tmp_path: Path) -> None:
    assert all(all(own) and own for own in crew2(only_the_model, str(tmp_path / "model")))


def damage(folder: Path, how: str) -> None:
    file = sorted(folder.glob("*.distcp"))[-1]
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:500])
    elif how == "noise":
        file.write_bytes(b"x" * file.stat().st_size)
    else:
        (folder / ".metadata").write_bytes(b"nonsense")


def test_damaged_checkpoints(crew2: Any, tmp_path: Path) -> None:
    kinds = ["gone", "cut", "noise", "head"]
    for how in kinds:
        saved(tmp_path / how, 2)
        damage(tmp_path / how, how)
    first, second = crew2(refused, str(tmp_path), [(how, 2, "stage") for how in kinds])
    for answers in zip(first, second, kinds, strict=True):
        for text, kept, right in answers[:2]:
            assert f"the checkpoint in {tmp_path / answers[2]} is damaged: " in text
            assert kept
            assert right
    assert "FileNotFoundError" in first[0][0]
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 1, 4), backend="replay") as run, pytest.raises(pipec.RunError) as error:
        run.load(tmp_path / "head")
    assert "is damaged: UnpicklingError" in str(error.value)


def unwritten(rank: int, folder: str) -> list[Any]:
    """A folder that cannot be made, and one in which a checkpoint is written over and the writing does not end."""
    net = chain(2)
    with pipec.Runner(net, pipec.compile(net, 2, 4)) as run:
        found: list[Any] = []
        with pytest.raises(pipec.RunError) as error:
            run.save(f"{folder}/file/below")
        found.append(str(error.value))
        run.save(f"{folder}/over")
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", full)
            with pytest.raises(pipec.RunError) as error:
                run.save(f"{folder}/over")
        found.append(str(error.value))
        with pytest.raises(pipec.RunError, match="holds no checkpoint, or one that was not written to its end"):
            run.load(f"{folder}/over")
        run.save(f"{folder}/over")
        run.load(f"{folder}/over")
        return [*found, same(run.step(**data()).loss, first_loss(2))]


def full(*_: Any) -> None:
    raise OSError("no space left")


def test_a_checkpoint_that_is_not_written_to_its_end_is_none(crew2: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = crew2(unwritten, str(tmp_path))
    told = f"no checkpoint was written to {tmp_path / 'file' / 'below'}: NotADirectoryError"
    assert first[0].startswith(told)
    assert second[0].startswith(f"rank 0 failed: RunError: {told}")
    for answers in (first, second):
        assert answers[1] == f"no checkpoint was written to {tmp_path / 'over'}: device 1: OSError: no space left"
        assert answers[2]
