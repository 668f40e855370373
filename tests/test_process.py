"""A runner and the process around it: fork, the end of the interpreter, and interrupts from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
    import os, signal, sys, threading, time
    import torch, pipec
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    slow = [False]

    class Middle(nn.Linear):
        def forward(self, x):
            if slow[0]:
                time.sleep(0.2)
            return super().forward(x)

    net = pipec.Pipeline("net")
    x, y = net.input("x"), net.input("y")
    value = net.stage("c", nn.Linear(4, 4), net.stage("b", Middle(4, 4), net.stage("a", nn.Linear(4, 4), x)))
    net.loss("loss", nn.functional.mse_loss, value, y)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    run = pipec.Runner(net, pipec.compile(net, devices=3, microbatches=4))
    loss = run.step(**batch).loss
"""


def python(body: str) -> subprocess.CompletedProcess[str]:
    """Run the script and ``body`` in a process of its own; a hang fails the test."""
    code = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_the_interpreter_ends_with_a_runner_that_was_never_closed() -> None:
    done = python("print('end')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_step_at_exit_still_runs() -> None:
    done = python("import atexit; atexit.register(lambda: print(torch.equal(run.step(**batch).loss, loss)))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_an_exit_inside_a_stage_ends_the_process_with_its_code() -> None:
    done = python("""
        run.spec.stages[1].fn.register_forward_hook(lambda *_: sys.exit(7))
        run.step(**batch)
    """)
    assert done.returncode == 7


def test_a_forked_child_gets_workers_of_its_own() -> None:
    done = python("""
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits for its parent's threads must not wait for ever
            equal = torch.equal(run.step(**batch).loss, loss)
            run.close()
            os._exit(10 if equal else 11)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), torch.equal(run.step(**batch).loss, loss))
    """)
    assert (done.returncode, done.stdout) == (0, "10 True\n"), done.stderr


def test_an_interrupt_from_outside_ends_the_step_but_not_the_runner() -> None:
    done = python("""
        slow[0] = True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            run.step(**batch)
        except KeyboardInterrupt:
            slow[0] = False
            print("interrupted", torch.equal(run.step(**batch).loss, loss))
    """)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr
