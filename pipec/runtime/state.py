"""What a Runner knows of its state: parameters and optimizers by name, state dicts, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipec.errors import RunError, raise_all
from pipec.ir import Plan
from pipec.runtime import checkpoint, names, saving
from pipec.runtime.alone import Alone, Path
from pipec.runtime.asynchronous.result import CLIP
from pipec.runtime.optim import Updater
from pipec.runtime.randomness import Position
from pipec.runtime.stages import Stage
from pipec.spec import Spec

if TYPE_CHECKING:
    from pipec.runtime.asynchronous.flow import Flow

ONLY_MODEL = "load only the model with load_state_dict(checkpoint['model'])"


class Stateful:
    """The part of a Runner that is saved and loaded."""

    spec: Spec
    plan: Plan
    stages: list[Stage]
    _owners: list[names.Owner]
    _updater: Updater
    _position: Position
    _flow: Flow | None
    _party: Alone

    if TYPE_CHECKING:
        def _alone(self) -> AbstractContextManager[None]: ...
        def _drain(self) -> tuple[int, ...]: ...
        def _saved_rules(self) -> dict[str, dict[str, Any]]: ...
        def _load_rules(self, saved: Mapping[str, Mapping[str, Any]]) -> None: ...

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by stage name, or under "all"."""
        return {self.stages[s].name if s >= 0 else "all": made for s, made in self._updater.per_stage.items()}

    def parameters(self) -> Iterator[Tensor]:
        """Every parameter of the pipeline once."""
        seen: set[int] = set()
        for stage in self.stages:
            for _, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, a scalar.

        As ``torch.nn.utils.clip_grad_norm_`` over the parameters of all stages, each counted once, with equal numbers
        in one process and over ranks, where all of them call it. After ``step()`` where the script steps its own
        optimizer; with UPDATE tasks inside ``before_update``: ``before_update=lambda _: run.clip_grad_norm_(1.0)``.

        Raises:
            RunError: the plan is asynchronous, or it updates the stages and this is not inside ``before_update``.
            RuntimeError: the norm is not finite and ``error_if_nonfinite``.
        """
        if self.plan.asynchronous:
            raise RunError(f"asynchronous schedule {self.plan.schedule!r}: clip_grad_norm_() sees no gradient, every "
                           f"stage updates on its own; {CLIP}")
        if self._updater.update is not None and not self._updater.in_hook:
            raise RunError(
                f"clip_grad_norm_: the plan was compiled with update={self._updater.update!r}, so step() has used the "
                "gradients already and there is nothing left to clip; clip before the updates, "
                "Runner(..., before_update=lambda _: run.clip_grad_norm_(1.0)), or compile with update=None"
            )
        norm = self._party.norm(self.stages, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {float(norm)}, so they cannot be clipped")
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), max_norm, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of all stages, tied ones under each name; the values share memory with the model.

        Names are those of ``model=``, else ``stage.key`` (``loss.key`` for a loss that is a module). Over ranks, the
        part of this one.
        """
        return names.state_dict(self._owners, self._party.elsewhere(self.spec, self.stages))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or what ``model.state_dict()`` gives where ``model=`` was given.

        Raises:
            RunError: listing every name that is missing, unknown or of another shape; nothing is loaded then.
        """
        part = names.PART, bool(self._party.elsewhere(self.spec, self.stages))
        raise_all(f"state of pipeline {self.spec.name!r}", names.model_problems(self._owners, state, *part), RunError)
        self._drain()
        names.load_model(self._owners, state)

    def checkpoint(self) -> dict[str, Any]:
        """Everything for a bit-equal continuation: model, optimizers, scaler, number of steps, random numbers.

        A dict of tensors and plain Python for ``torch.save``, read by ``torch.load(..., weights_only=True)``; later
        steps do not change it. Take it between steps. What the script owns is not in it: its learning-rate
        schedulers (save their ``state_dict()``), its data loader, ``.grad`` that was not used yet, and optimizers of
        a plan without UPDATE.

        Raises:
            RunError: an optimizer has parameters that are in no stage nor in ``model=``.
        """
        with self._alone():
            self._drain()
            return self._checkpoint()

    def _checkpoint(self) -> dict[str, Any]:
        saved = checkpoint.save(self._owners, self.optimizers, self._updater.scaler, self._position.pinned(),
                                self._party.elsewhere(self.spec, self.stages))
        return saved | {"asynchronous": self._saved_rules()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`checkpoint`.

        Devices, schedule and ``update=`` may be others than when it was taken, with ``model=`` the stages too; the
        step after it is bit-equal as far as the plans' numbers are (random numbers belong to a stage's place, so
        dropout in other stages draws others). Options of the checkpoint's optimizers, such as the learning rate,
        replace those given here; so make a learning-rate scheduler first, restore, then load the scheduler's state.

        Raises:
            RunError: listing everything that does not fit; nothing is loaded then.
        """
        with self._alone():
            self._restoring(state)()

    def _restoring(self, state: Mapping[str, Any], path: Path | None = None) -> Callable[[], None]:
        """A function that goes on from a checkpoint which was found to fit, a dict or read from ``path``."""
        told = ("checkpoint", names.PART, ONLY_MODEL) if path is None else (f"{path}", "", saving.only_model(path))
        load = checkpoint.restoring(self._owners, self.optimizers, self._updater.scaler, state,
                                    self._party.elsewhere(self.spec, self.stages), *told)

        def restore() -> None:
            self._position = load()
            if self._flow is not None:
                self._flow.drop()
                self._flow.pending = [own for own in self._flow.pending if own.minibatch < self._position.step]
            self._load_rules(state.get("asynchronous", {}))

        return restore

    def save(self, path: Path) -> None:
        """Write a :meth:`checkpoint` to a folder with torch.distributed.checkpoint. Over ranks all of them call it.

        Tensors stand under ``model.NAME`` and ``optimizer.NAME.KEY``, each written by the rank that has it.

        Raises:
            RunError: an optimizer has parameters that are in no stage nor in ``model=``.
        """
        with self._alone():
            self._drain()
            self._party.save(path, self._checkpoint)

    def load(self, path: Path) -> None:
        """Go on from what :meth:`save` wrote, with any number of ranks, devices and, with ``model=``, stages.

        Every rank reads what its own stages need. See :meth:`restore`. Only the model, for other optimizers or none,
        is loaded by ``torch.distributed.checkpoint.load({"model": run.state_dict()}, checkpoint_id=path)``.

        Raises:
            RunError: it cannot be read, or listing everything that does not fit; nothing is loaded then, on any rank.
        """
        with self._alone():
            self._party.load(path, self._owners, self._party.elsewhere(self.spec, self.stages), self._restoring)
