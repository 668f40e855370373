"""The weights of one stage while minibatches overlap: the live parameters, and copies of older versions.

The live parameters are the user's own, updated in place, and always the newest version. A task that reads another
one is given leaf tensors of that version's values, which stand in the modules while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import RaceError
from pipec.runtime.stages import Stage
from pipec.tree import tree_map


class Leaves:
    """Tensors that a stage computes with, one per trainable parameter, and how to know them by their memory.

    Attributes:
        tensors: in the order of the stage's parameters; all leaves that require a gradient.
        live: they are the user's own parameters.
        delta: the mean change that belongs to an older version, where the weight rule reads it.
        begins, ends: from where to where their storages reach, ascending; empty before :meth:`look`.
    """

    __slots__ = ("_among", "_bare", "_storages", "begins", "delta", "ends", "live", "tensors")

    def __init__(self, tensors: Sequence[Tensor], live: bool = False) -> None:
        self.tensors, self.live = list(tensors), live
        self.delta: list[Tensor] | None = None
        self._storages: dict[int, list[int]] | None = None
        self._bare: list[Tensor] | None = None
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._among: list[list[int]] = []  # per storage, indices of tensors

    @property
    def kind(self) -> str:
        """The type of the device they are on."""
        return self.tensors[0].device.type if self.tensors else "cpu"

    @property
    def storages(self) -> dict[int, list[int]]:
        """Indices of tensors by the address of their storage."""
        if self._storages is None:
            found: dict[int, list[int]] = {}
            for index, tensor in enumerate(self.tensors):
                if tensor.layout is torch.strided and tensor.numel():
                    found.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
            self._storages = found
        return self._storages

    def moved(self) -> list[int]:
        """Tensors that do not lie any more where :attr:`storages` found them."""
        return [] if self._storages is None else [
            index for index, tensor in enumerate(self.tensors)
            if tensor.layout is torch.strided and tensor.numel()
            and tensor.untyped_storage().data_ptr() not in self._storages
        ]

    @property
    def bare(self) -> list[Tensor]:
        """The same memory as tensors that require no gradient."""
        if self._bare is None:
            self._bare = [tensor.detach() for tensor in self.tensors]
        return self._bare

    def look(self) -> None:
        """Note where the storages lie, for :meth:`find`."""
        if not self.begins:
            found = sorted(self.storages.items())
            self._among = [among for _, among in found]
            self.ends = [begin + self.tensors[among[0]].untyped_storage().nbytes() for begin, among in found]
            self.begins = [begin for begin, _ in found]

    def find(self, tensor: Tensor, place: int) -> int:
        """The parameter that ``tensor`` is a view of, or -1 for a view that strides cannot tell.

        Args:
            place: the storage that it lies in, by :attr:`begins`.
        """
        among = self._among[place]
        for index in among:
            own = self.tensors[index]
            if own is tensor:
                return index
            begin = own.storage_offset()
            if own.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg():
                continue
            if begin <= tensor.storage_offset() and (len(among) == 1 or _end(tensor) <= _end(own)):
                return index
        return -1


def _end(tensor: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1)


@torch.no_grad()
def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that views of the original can be taken of it."""
    copy = tensor.detach().clone()
    if copy.stride() == tensor.stride():
        return copy
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class StageWeights:
    """The weights of one stage.

    Attributes:
        version: the newest version, as the plan counts.
        updates: how many asynchronous updates the stage ever had.
        kept: older versions, by number.
        history: how many updates back versions are kept whoever reads them; 0 in every ordinary run.
        buffers: what the weight rule keeps, by name, one tensor per parameter (``delta``, say).
        rates: the learning rates of the last update, one per parameter group.
        made: weights that a rule made of the newest version, under a key of its own; gone with the next update.
        corrected: those that backwards read, where the rule keeps them; gone with the next update as well.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.version = self.updates = self.history = 0
        self.kept: dict[int, Leaves] = {}
        self.buffers: dict[str, list[Tensor]] = {}
        self.rates: list[Any] = []
        self.made: tuple[Any, Leaves] | None = None
        self.corrected: list[Tensor] | None = None
        self.names: list[str] = []
        self.live = Leaves([], live=True)
        self._places: list[tuple[dict[str, Any], str, int]] = []
        self._flat: list[nn.Module] = []
        self._index: dict[int, int] = {}
        self.refresh()

    @property
    def parameters(self) -> list[Tensor]:
        return self.live.tensors

    def refresh(self) -> None:
        """Look for the trainable parameters anew, when nothing is in flight."""
        named = [(name, p) for name, p in self.stage.named_parameters() if p.requires_grad]
        before = dict(zip(self.names, self.parameters, strict=True))
        if any(p is not before.get(name) for name, p in named) or len(named) != len(before):
            position = {name: place for place, name in enumerate(self.names)}
            fitting = [name in before and before[name].shape == p.shape for name, p in named]
            for key, own in list(self.buffers.items()):
                self.buffers[key] = [
                    own[position[name]] if fits else torch.zeros_like(p)
                    for (name, p), fits in zip(named, fitting, strict=True)
                ]
        self.names = [name for name, _ in named]
        self.live = Leaves([p for _, p in named], live=True)
        self._index = {id(p): index for index, p in enumerate(self.parameters)}
        modules = [] if self.stage.module is None else list(self.stage.module.modules())
        self._places = [
            (module._parameters, name, self._index[id(p)]) for module in modules
            for name, p in module._parameters.items() if id(p) in self._index
        ]
        self._flat = [module for module in modules if isinstance(module, nn.RNNBase)]  # it lists its weights again

    def changes(self) -> list[str]:
        """What happened to the parameters since they were looked for that minibatches in flight cannot live with."""
        told = [f"{name} does not require a gradient any more"
                for name, p in zip(self.names, self.parameters, strict=True) if not p.requires_grad]
        told += [f"{self.names[index]} was replaced by another parameter" for held, name, index in self._places
                 if held.get(name) is not self.parameters[index]]
        return told + [f"{self.names[index]} lies in other memory now (its .data was set)"
                       for index in self.live.moved()]

    def of(self, version: int) -> Leaves:
        """The weights of ``version``, live or kept.

        Raises:
            RaceError: there are none: a task came before the UPDATE that makes them, or after they were given back.
        """
        if version == self.version:
            return self.live
        found = self.kept.get(version)
        if found is None:
            gone = "not been made yet" if version > self.version else "been replaced and given back"
            raise RaceError(
                f"a task of stage {self.stage.name!r} reads weight version {version}, which has {gone} (the newest is "
                f"{self.version}); nothing in the plan keeps it in order with the stage's UPDATEs, or frees the version"
                " after it"
            )
        return found

    def keep(self) -> None:
        """Copy the newest version, before an UPDATE replaces it."""
        self.kept[self.version] = self.leaves([copy_of(p) for p in self.parameters])

    def leaves(self, values: Sequence[Tensor]) -> Leaves:
        """Tensors of the parameters' shapes as leaves; the user's own gradient hooks are theirs too."""
        made = [value.detach().requires_grad_() for value in values]
        for parameter, leaf in zip(self.parameters, made, strict=True):
            for hook in (parameter._backward_hooks or {}).values():
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        return Leaves(made)

    def drop(self, versions: Sequence[int]) -> None:
        """Forget versions that nobody reads any more, unless ``history`` keeps them for random delays."""
        if self.history:
            return
        for version in versions:
            self.kept.pop(version, None)

    def advanced(self) -> None:
        """The parameters hold a new version now."""
        self.version += 1
        self.updates += 1
        self.made = self.corrected = None
        if self.history:
            self.kept = {v: own for v, own in self.kept.items() if v >= self.version - self.history}

    def begin(self) -> None:
        """Nothing is in flight: count versions from 0 and look for parameters anew."""
        self.version, self.made, self.corrected, self.kept = 0, None, None, {}
        self.refresh()

    def shift(self, by: int) -> None:
        """Count versions from ``by`` versions later on."""
        self.version -= by
        self.made = None
        self.kept = {version - by: leaves for version, leaves in self.kept.items()}

    def buffer(self, name: str) -> list[Tensor]:
        """What the rule keeps under ``name``; zeros at first."""
        if name not in self.buffers:
            self.buffers[name] = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        return self.buffers[name]

    @contextmanager
    def standing_in(self, leaves: Leaves) -> Iterator[None]:
        """Let ``leaves`` stand in the modules and in ``params=`` for what runs inside."""
        if leaves.live:
            yield
            return
        tensors, stage = leaves.tensors, self.stage
        params = stage.params
        try:
            for held, name, index in self._places:
                held[name] = tensors[index]
            if params is not None:
                stage.params = tree_map(self._stand_in(tensors), params)
            self._list_again()
            yield
        finally:
            for held, name, index in self._places:
                held[name] = self.parameters[index]
            stage.params = params
            self._list_again()

    def _stand_in(self, tensors: list[Tensor]) -> Any:
        return lambda leaf: tensors[self._index[id(leaf)]] if id(leaf) in self._index else leaf

    def _list_again(self) -> None:
        for module in self._flat:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]  # type: ignore


def named(weights: StageWeights, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of the stage's parameters."""
    return dict(zip(weights.names, tensors, strict=True))
