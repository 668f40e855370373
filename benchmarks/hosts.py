"""pipec between two hosts that are network namespaces of this machine: the same bits, and an error that names a lost
host.

    sudo python benchmarks/hosts.py [--rate 1gbit] [--delay 0.2ms] [--per-host 1] [--same-name]

Needs Linux, root and iproute2. Each host has its own network, host name, System V memory and folder for temporary
files; a pair of virtual interfaces connects them, slowed to the given rate, and by the delay where the kernel has
netem. torchrun starts one node on each. Every schedule runs three steps over them and, in the same processes, on
threads: losses must be the same bits. Steps are timed through sockets (and memory where there are several ranks on each
host) and through gloo, in turns: training with small tasks, and between one rank per host forwards that read three
values while others come, by tasks about as long as the values travel at 1 Gbit/s. Then the processes of one host are
killed in the middle of a run, or one of them is stopped, and the other host must name that rank. Everything made for
this is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime.distributed.ranks import Ranks
from pipec.schedules import SCHEDULES

HOSTS = tuple(f"pipec{os.getpid() % 10_000}{name}" for name in "ab")  # of this run alone
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT, MICROBATCHES, WIDTH = 29563, 8, 64
SIZES = ((32, "8 KiB"), (4096, "1 MiB"), (32768, "8 MiB"))  # rows of a value, and its size
READY, PATIENCE = "runs", 300.0
GIVEN_UP = 20.0  # seconds after which a rank that does not answer is given up

# -- on a host ------------------------------------------------------------------------------------------------------


def pipeline(stages: int, width: int) -> pipec.Pipeline:
    torch.manual_seed(0)
    net = pipec.Pipeline("hosts")
    value, y = net.input("x"), net.input("y")
    first = None
    for number in range(stages):
        inner = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        value = net.stage(f"s{number}", inner, value)
        first = value if first is None else first
    value = net.stage("sum", torch.add, value, pipec.skip(first))
    net.loss("mse", F.mse_loss, value, y)
    return net


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def losses(schedule: str, backend: str | None) -> list[Any]:
    """Of three steps, and of what a flush finishes."""
    devices = dist.get_world_size()
    net = pipeline(2 * devices - 1, WIDTH)
    plan = pipec.compile(net, devices, MICROBATCHES, schedule, update="stage")
    found = []
    with pipec.Runner(net, plan, optimizer=sgd, **({} if backend is None else {"backend": backend})) as run:
        for step in range(3):
            torch.manual_seed(step)
            found.append(run.step(x=torch.randn(19, WIDTH), y=torch.randn(19, WIDTH)).losses)
        if plan.asynchronous:
            found.append(run.flush())
    return [str(one) if not isinstance(one, dict) else {k: repr(v) for k, v in one.items()} for one in found]


def numbers() -> None:
    """Every schedule, here and over both hosts."""
    wrong = [name for name in SCHEDULES if losses(name, None) != losses(name, "threads")]
    if wrong:
        raise SystemExit(f"other numbers than in one process: {', '.join(wrong)}")
    if dist.get_rank() == 0:
        print(f"{len(SCHEDULES)} schedules: the same bits as in one process", flush=True)


class Busy(nn.Module):
    """Works on three values for a while, without a core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return a + b + c


def bursts(seconds: float) -> tuple[pipec.Pipeline, pipec.Plan]:
    """Three values for each task of the second device."""
    torch.manual_seed(0)
    net = pipec.Pipeline("bursts")
    value, made = net.input("x"), []
    for number in range(3):
        value = net.stage(f"s{number}", nn.Linear(WIDTH, WIDTH), value)
        made.append(value)
    net.output(net.stage("busy", Busy(seconds), value, pipec.skip(made[0]), pipec.skip(made[1])))
    return net, pipec.compile(net, 2, MICROBATCHES, placement=(0, 0, 0, 1), forward_only=True)


def trained() -> tuple[pipec.Pipeline, pipec.Plan]:
    net = pipeline(dist.get_world_size(), WIDTH)
    return net, pipec.compile(net, dist.get_world_size(), MICROBATCHES, "1f1b")


def times() -> None:
    """Steps with values of several sizes."""
    for rows, size in SIZES:
        compare(f"a step with values of {size}", trained, rows, True)
        if rows > 1000 and dist.get_world_size() == 2:
            seconds = 3 * rows * WIDTH * 4 / 125e6
            compare(f"three values of {size} per task of {seconds * 1e3:.0f} ms", partial(bursts, seconds), rows, False)


def compare(what: str, build: Callable[[], tuple[pipec.Pipeline, pipec.Plan]], rows: int, train: bool) -> None:
    """What a call takes in the way that pipec chooses, and through gloo, in turns."""
    runs = {}
    for name, ways in (("as chosen", Ranks.ways), ("gloo", ())):
        before, Ranks.ways = Ranks.ways, ways
        runs[name] = pipec.Runner(*build())
        Ranks.ways = before
    way = runs["as chosen"].transport
    if "sockets" not in way or ("memory" in way) != (int(os.environ["LOCAL_WORLD_SIZE"]) > 1):
        raise SystemExit(f"values travel through {way}")
    x = torch.randn(rows * MICROBATCHES, WIDTH)
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(12 if rows < 10_000 else 6):
        for name, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            if train:
                run.step(x=x, y=x)
            else:
                run.evaluate(x=x)
            took[name].append(time.perf_counter() - begin)
    for run in runs.values():
        run.close()
    if dist.get_rank() == 0:
        one, two = (f"{statistics.median(own[2:]) * 1e3:.1f} ms through" for own in took.values())
        print(f"{what}: {one} {way}; {two} gloo", flush=True)


def forever(folder: str) -> None:
    """Steps until the other host is gone."""
    net = pipeline(dist.get_world_size(), WIDTH)
    x = torch.randn(32, WIDTH)
    with pipec.Runner(net, pipec.compile(net, dist.get_world_size(), MICROBATCHES), timeout=GIVEN_UP) as run:
        for step in range(1_000_000):
            run.step(x=x, y=x)
            if step == 20:
                Path(folder, f"{READY}{dist.get_rank()}").write_text(str(os.getpid()))


def work(part: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"numbers": numbers, "times": times, "forever": lambda: forever(folder)}[part]()
    dist.destroy_process_group()


# -- the hosts ------------------------------------------------------------------------------------------------------


def do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(rate: str, delay: str) -> Iterator[str]:
    """Two namespaces that reach each other; what the link is like."""
    link = rate
    try:
        for number, host in enumerate(HOSTS):
            do("ip", "netns", "add", host)
            do("ip", "-n", host, "link", "set", "lo", "up")
            if number:
                do("ip", "link", "add", f"{host}-0", "netns", host, "type", "veth", "peer", "name", f"{HOSTS[0]}-0",
                   "netns", HOSTS[0])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            name = f"{host}-0"
            do("ip", "-n", host, "address", "add", f"{address}/24", "dev", name)
            do("ip", "-n", host, "link", "set", name, "up")
            try:
                do("tc", "-n", host, "qdisc", "add", "dev", name, "root", "netem", "rate", rate, "delay", delay)
                link = f"{rate}, {delay} one way"
            except subprocess.CalledProcessError:  # without netem there is no delay
                do("tc", "-n", host, "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "256kb",
                   "latency", "50ms")
        yield link
    finally:
        for host in HOSTS:
            subprocess.run(("ip", "netns", "delete", host), capture_output=True, check=False)


def node(number: int, part: str, folder: str, given: argparse.Namespace) -> subprocess.Popen[str]:
    """torchrun on one of the hosts."""
    own = Path(folder, HOSTS[number])
    own.mkdir(exist_ok=True)
    name = HOSTS[0 if given.same_name else number]
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(given.per_host),
           "--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", str(PORT), __file__,
           "--work", part, folder]
    return subprocess.Popen(
        ["ip", "netns", "exec", HOSTS[number], "unshare", "--uts", "--ipc", "sh", "-c", f'hostname {name}; exec "$@"',
         "sh", *run],
        env=os.environ | {"TMPDIR": str(own), "GLOO_SOCKET_IFNAME": f"{HOSTS[number]}-0"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )


def both(part: str, folder: str, given: argparse.Namespace) -> str:
    """Run a part on both hosts; what the first one says."""
    nodes = [node(number, part, folder, given) for number in (0, 1)]
    try:
        told = [one.communicate(timeout=PATIENCE)[0] for one in nodes]
    finally:
        for one in nodes:
            stop(one)
    if any(one.returncode for one in nodes):
        raise SystemExit("\n".join(told))
    return told[0]


def stop(one: subprocess.Popen[str]) -> None:
    """Kill what is left of a host's processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)
    one.wait()


def lost(folder: str, gone: int, given: argparse.Namespace, stopped: bool) -> str:
    """What one host says when the other one's processes are killed, or one of them is stopped."""
    left, count = 1 - gone, given.per_host
    ranks = range(gone * count, gone * count + (1 if stopped else count))
    nodes = [node(number, "forever", folder, given) for number in (0, 1)]
    notes = [Path(folder, f"{READY}{rank}") for rank in range(2 * count)]
    try:
        end = time.monotonic() + PATIENCE
        while not all(note.exists() and note.read_text() for note in notes):
            if time.monotonic() > end or any(one.poll() is not None for one in nodes):
                for one in nodes:
                    stop(one)
                raise SystemExit("\n".join(one.communicate()[0] for one in nodes))
            time.sleep(0.1)
        begin = time.monotonic()
        for rank in ranks:
            os.kill(int(notes[rank].read_text()), signal.SIGSTOP if stopped else signal.SIGKILL)
        if not stopped:
            stop(nodes[gone])
        told = nodes[left].communicate(timeout=60)[0]
        took = time.monotonic() - begin
    finally:
        for one in nodes:
            stop(one)
    for note in notes:
        note.unlink()
    verb = f"has not answered for {GIVEN_UP:g} s, its process stands still" if stopped else "has ended"
    words = tuple(f"RankError: rank {rank} {verb}; rank " for rank in ranks)
    found = [line for line in told.splitlines() if any(word in line for word in words)]
    if not 1 <= len(found) <= count:  # torchrun ends the others when one has raised
        raise SystemExit(f"the other host's {count} processes do not name one of those that are gone:\n{told}")
    return f"{found[0].strip()} ({took:.1f} s after it was {'stopped' if stopped else 'killed'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay", default="0.2ms")
    parser.add_argument("--same-name", action="store_true", help="both hosts have one name, as containers may")
    parser.add_argument("--per-host", type=int, default=1, help="processes on each host")
    parser.add_argument("--parts", nargs="+", choices=("numbers", "times", "lost"),
                        default=["numbers", "times", "lost"])
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    needed = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if needed or os.geteuid():
        raise SystemExit(f"needs root, and {', '.join(needed or ['ip', 'tc', 'unshare'])}")
    with tempfile.TemporaryDirectory(prefix="pipec-hosts-") as folder, hosts(options.rate, options.delay) as link:
        print(f"two hosts, {link}")
        for part in options.parts:
            if part == "lost":
                for stopped in (False, True):
                    for gone in (1, 0):  # the second one has torch.distributed's store
                        print(lost(folder, gone, options, stopped))
            else:
                print(both(part, folder, options).strip())


if __name__ == "__main__":
    main()
