"""A stand-in accelerator for tests: a device type of its own, "standin", that computes on the CPU and detects races.

``load()`` builds it with the machine's C++ compiler, once for each version of its source and of torch, and makes it
PyTorch's accelerator for the rest of the process: four devices with streams, events, pinned memory and generators of
their own, under ``torch.accelerator`` as any other. Load it before the first backward of the process: PyTorch starts
its threads for backward then, one for each device that it knows.

Kernels are those of the CPU on the same bits, so results are equal to it to the last bit; what counts is the order in
which streams *may* run them, see ``tracker.h``. :func:`problems` tells what no event or wait puts in order.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "standin"
SOURCES = ("device.cpp", "kernels.cpp")
COUNT = 4


def build(folder: Path = BUILT) -> Path:
    """The library, compiled if it is not there. RuntimeError with the compiler's words where that fails."""
    compiler = os.environ.get("CXX", "g++")
    place = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    text = b"".join(path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h"))
    key = hashlib.sha256(repr((torch.__version__, compiler, flags, text)).encode()).hexdigest()[:16]
    library = folder / f"standin-{key}{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    own = f"{key}-{os.getpid()}"
    objects = [str(folder / f"{Path(name).stem}-{own}.o") for name in SOURCES]
    _run([[compiler, *flags, "-c", str(HERE / name), "-o", out] for name, out in zip(SOURCES, objects, strict=True)])
    made = folder / f"{own}.so"
    libraries = [f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    _run([[compiler, "-shared", *objects, *libraries, "-o", str(made)]])
    os.replace(made, library)  # whole or not at all, also beside another process that builds it
    for path in objects:
        os.unlink(path)
    return library


def _run(commands: list[list[str]]) -> None:
    """Run all at once; RuntimeError with what the failed ones said."""
    try:
        running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    except OSError as error:
        raise RuntimeError(
            f"the tests on the stand-in accelerator need a C++ compiler: {commands[0][0]} cannot be run ({error}); "
            "install one, or name it in CXX"
        ) from None
    said = [process.communicate()[0] for process in running]
    failed = [text for process, text in zip(running, said, strict=True) if process.returncode]
    if failed:
        raise RuntimeError("the stand-in accelerator cannot be built:\n" + "\n".join(failed))


@cache
def load() -> ModuleType:
    """The device module, ``torch.standin``, with the library built, loaded and registered."""
    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend("standin")
    module = _device_module()
    torch._register_device_module("standin", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _start_backward()
    return module


def _start_backward() -> None:
    """Start PyTorch's threads for backward, one per device, and see that they are there."""
    try:
        for number in range(COUNT):
            torch.ones(1, device=torch.device("standin", number), requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError("load the stand-in before the first backward of the process") from error


def _device_module() -> ModuleType:
    ops = torch.ops.standin
    module: Any = ModuleType("torch.standin")
    module.is_available = module.is_initialized = lambda: True
    module._initialized = True  # torch.utils.checkpoint asks
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: COUNT
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = torch.accelerator.synchronize
    module.device = _Device
    module.default_generators = tuple(ops.generator(number) for number in range(COUNT))
    module.Stream, module.Event = torch.Stream, torch.Event
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device("standin" if device is None else device).index if not isinstance(device, int) else device
        found: torch.Generator = module.default_generators[module.current_device() if index is None else index]
        return found

    def manual_seed_all(seed: int) -> None:
        for one in module.default_generators:
            one.manual_seed(seed)

    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    return module  # type: ignore[no-any-return]


class _Device:
    """Makes a device the current one: ``torch.standin.device``."""

    def __init__(self, device: Any) -> None:
        self._index = device if isinstance(device, int) else torch.device(device).index
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._index is not None and self._index >= 0:
            torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def problems() -> list[str]:
    """What was found since the last call: races, memory that went back too early, pinned memory used too early."""
    return list(torch.ops.standin.problems())


def reset() -> None:
    """Begin anew, as if all work so far had ended: no problems, no clocks, an event is seen when it is asked for."""
    torch.ops.standin.reset()


def slow(on: bool) -> None:
    """Whether work takes long: queries of an event say no a few times, those of a stream until the host has waited."""
    torch.ops.standin.slow(on)


def works() -> int:
    """How many kernels and copies ran since the last reset."""
    return int(torch.ops.standin.works())


def live(device: int) -> int:
    """Bytes that are allocated on a device."""
    return int(torch.ops.standin.live(device))


def named(stream: torch.Stream, name: str) -> torch.Stream:
    """Give a stream a name for the problems in which it appears."""
    torch.ops.standin.name_stream(stream.device_index, stream.stream_id, name)
    return stream


if __name__ == "__main__":
    print(build(), file=sys.stderr)
