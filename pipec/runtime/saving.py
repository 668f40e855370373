"""Checkpoints as folders of torch.distributed.checkpoint: written by one process or many, read by any number of others.

Tensors stand under ``model.NAME`` and ``optimizer.NAME.KEY`` with the user's own names; all else (learning rates, step
counts, the scaler, the random numbers) is one tensor of bytes, ``pipec``. So any tool that reads such folders finds the
model's tensors, and ``torch.distributed.checkpoint.load({"model": module.state_dict()}, ...)`` fills a plain module.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from pipec.errors import RunError

REST = "pipec"
HEAD = ".metadata"  # the file that makes a folder a checkpoint, written last
Flat = dict[str, Tensor]


def taken_apart(saved: Mapping[str, Any]) -> tuple[Flat, dict[str, Any]]:
    """Tensors by flat name, and the rest, of what ``checkpoint()`` gave."""
    flat: Flat = {}
    rest: dict[str, Any] = {key: value for key, value in saved.items() if key not in ("model", "optimizer")}
    rest["model"] = {name: value for name, value in saved["model"].items() if not isinstance(value, Tensor)}
    flat |= {f"model.{name}": value for name, value in saved["model"].items() if isinstance(value, Tensor)}
    optimizer = saved["optimizer"]
    rest["groups"], rest["more"], rest["state"], rest["keys"] = optimizer["groups"], optimizer["more"], {}, {}
    for name, state in optimizer["state"].items():
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        rest["keys"][name] = list(tensors)
        rest["state"][name] = {key: value for key, value in state.items() if key not in tensors}
        flat |= {f"optimizer.{name}.{key}": value for key, value in tensors.items()}
    return flat, rest


def put_together(flat: Flat, rest: dict[str, Any]) -> dict[str, Any]:
    """The dict that ``restore()`` takes, as far as ``flat`` goes."""
    names = [name for name, keys in rest["keys"].items() if all(f"optimizer.{name}.{key}" in flat for key in keys)]
    state = {
        name: rest["state"][name] | {key: flat[f"optimizer.{name}.{key}"] for key in rest["keys"][name]}
        for name in names
    }
    model = {key[len("model.") :]: value for key, value in flat.items() if key.startswith("model.")}
    made = {key: value for key, value in rest.items() if key not in ("groups", "more", "state", "keys")}
    return made | {
        "model": rest["model"] | model,
        "optimizer": {"groups": rest["groups"], "state": state, "more": rest["more"]},
    }


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rest of all ranks as one."""
    made = dict(parts[0])
    for key in ("model", "more", "state", "keys"):
        made[key] = {name: value for part in parts for name, value in part[key].items()}
    made["asynchronous"] = {name: value for part in parts for name, value in part["asynchronous"].items()}
    groups, seen = [], set[str]()
    for part in parts:
        for group in part["groups"]:
            fresh = [name for name in group["names"] if name not in seen]
            seen |= set(fresh)
            if fresh:
                groups.append({**group, "names": fresh})
    return made | {"groups": groups}


def begin(path: str | os.PathLike[str]) -> None:
    """Make a folder for a checkpoint; one that it holds counts no more. Its files and those of a new one, which is not
    written to its end, would look like one.

    Raises:
        RunError: there can be no such folder.
    """
    with _told(f"no checkpoint was written to {path}"):
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / HEAD).unlink(missing_ok=True)


def write(path: str | os.PathLike[str], flat: Flat, rest: dict[str, Any], group: Any) -> None:
    """Write a folder; every rank of ``group`` calls it with its own tensors and the same rest. None: no other rank.

    Raises:
        RunError: a rank cannot write.
    """
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    flat = flat | {REST: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}
    with _told(f"no checkpoint was written to {path}"):
        dcp_save(dict(flat), checkpoint_id=str(path), process_group=group, no_dist=group is None)


def read(path: str | os.PathLike[str], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What :func:`write` wrote, as far as ``names`` (with all their aliases) ask; every process reads for itself.

    Other names of the folder's model stand in the model without values, for whoever knows that nobody has them.

    Raises:
        RunError: there is no checkpoint, it is none of pipec's, or it is damaged.
    """
    if not (Path(path) / HEAD).exists():
        raise RunError(f"{path} holds no checkpoint, or one that was not written to its end; save one with "
                       f"run.save({str(path)!r})")
    damaged = f"the checkpoint in {path} is damaged"
    with _told(damaged):
        known = FileSystemReader(path).read_metadata().state_dict_metadata
    if REST not in known:
        raise RunError(f"{path} holds a checkpoint that pipec did not write; load its model's tensors with "
                       "torch.distributed.checkpoint and run.load_state_dict()")
    with _told(damaged):
        head: Flat = {REST: _room(known[REST])}
        dcp_load(head, checkpoint_id=str(path), no_dist=True)
        rest = torch.load(io.BytesIO(head[REST].numpy().tobytes()), weights_only=True)
    wanted: set[str] = set()
    for aliases in names.values():
        for name in aliases:
            keys = [f"optimizer.{name}.{key}" for key in rest["keys"].get(name, ())]
            wanted |= {key for key in (f"model.{name}", *keys) if key in known}
    with _told(damaged):
        flat: Flat = {key: _room(known[key]) for key in sorted(wanted)}
        dcp_load(flat, checkpoint_id=str(path), no_dist=True)
    state = put_together(flat, rest)
    every = [key.removeprefix("model.") for key in known if key.startswith("model.")]
    state["model"] = dict.fromkeys(every) | state["model"]
    return state


def only_model(path: str | os.PathLike[str]) -> str:
    """The advice on a folder whose optimizer states do not fit."""
    return ("load only the model with torch.distributed.checkpoint.load({'model': run.state_dict()}, "
            f"checkpoint_id={str(path)!r})")


def _room(about: Any) -> Tensor:
    return torch.empty(about.size, dtype=about.properties.dtype)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Around work on files: what goes wrong is a RunError that begins with ``what`` and ends with the first cause.

    Without the advice on what to give instead of no process group: none is what is meant.
    """
    rank, found = "", None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
            yield
    except CheckpointException as error:  # of all ranks, with their tracebacks
        place, (found, _) = next(iter(error.failures.items()))
        rank = f"device {place}: " if len(error.failures) > 1 or place else ""
    except Exception as error:
        found = error
    if found is not None and not isinstance(found, Exception):
        raise found  # an interrupt
    if found is not None:
        raise RunError(f"{what}: {rank}{type(found).__name__}: {found}") from found
