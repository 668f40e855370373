"""The command line: tables, JSON, pictures, exit codes, and errors as people read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CHAIN, SCRIPT, fails, run, script

import pipec
from pipec.cli import COMMANDS, main
from pipec.schedules import SCHEDULES


def test_plan_prints_what_str_prints(capsys: pytest.CaptureFixture[str]) -> None:
    plan = pipec.compile(pipec.chain(4), 2, 3, "gpipe", recompute="except_last", update="stage")
    code, out, err = run(
        capsys, "plan", *CHAIN, "--schedule", "gpipe", "--recompute", "except-last", "--update", "stage"
    )
    assert (code, err) == (0, "")
    assert out == str(plan)


def test_plan_writes_text_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = pipec.compile(pipec.chain(4), 2, 3)
    for name in ("p.json", "p.txt"):
        assert run(capsys, "plan", *CHAIN, "-o", str(tmp_path / name))[:2] == (
            0,
            f"wrote {tmp_path / name}: {len(plan)} tasks\n",
        )
    assert pipec.Plan.load(tmp_path / "p.json") == plan
    assert pipec.Plan.parse((tmp_path / "p.txt").read_text(encoding="utf-8")) == plan
    code, out, _ = run(capsys, "plan", *CHAIN, "--json")
    assert code == 0
    assert json.loads(out)["microbatches"] == 3


def test_simulate_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    costs = pipec.Costs(forward=2, backward_input=1.5, latency=0.25, unit="ms")
    timeline = pipec.compile(pipec.chain(4), 2, 3, costs=costs).simulate()
    given = ("simulate", *CHAIN, "--forward", "2", "--backward-input", "1.5", "--latency", "0.25", "--unit", "ms")
    assert run(capsys, *given)[:2] == (0, f"{timeline}\n")
    made = json.loads(run(capsys, *given, "--json")[1])
    assert made["makespan"] == timeline.makespan
    assert made["bubble"] == timeline.bubble
    assert [d["peak_share"] for d in made["per_device"]] == timeline.peak_share
    assert made["copy_bytes"] is None


def test_bytes_and_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    stages = {f"s{n}": {"output_bytes": 2**21, "activation_bytes": 1000} for n in range(4)}
    timeline = pipec.compile(pipec.chain(4), 2, 3).simulate(pipec.Costs(bandwidth=2**22, stages=stages))
    made = json.loads(
        run(
            capsys,
            "simulate",
            *CHAIN,
            "--bandwidth",
            "4MiB",
            "--output-bytes",
            "2 MiB",
            "--activation-bytes",
            "1kB",
            "--json",
        )[1]
    )
    assert made["makespan"] == timeline.makespan
    assert [d["peak_bytes"] for d in made["per_device"]] == timeline.peak_bytes
    assert made["copy_bytes"] == 6 * 2**21


@pytest.mark.parametrize(("name", "stages"), [("unet", 3), ("spec", 3), ("make", 4), ("Holder.inner", 3)])
def test_objects_of_a_script(capsys: pytest.CaptureFixture[str], script: Path, name: str, stages: int) -> None:
    code, out, err = run(capsys, "plan", f"net.py:{name}", "--devices", "3")
    assert code == 0
    assert out.count("\nstage ") == stages
    assert "microbatches=6" in out
    assert err == "loading\n"  # what the script prints does not mix with the answer


def test_a_plan_of_a_script_or_a_file(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert run(capsys, "plan", "net.py:plan", "-o", "saved.json")[0] == 0
    assert run(capsys, "simulate", "saved.json")[1] == run(capsys, "simulate", "net.py:plan")[1]
    fails(
        capsys,
        2,
        "saved is a plan already; --devices, --schedule cannot change it",
        "simulate",
        "saved.json",
        "--devices",
        "2",
        "--schedule",
        "gpipe",
    )
    fails(
        capsys,
        1,
        "error: plan 'unet': 2 problems\n  1. memory: device 0 holds",
        "simulate",
        "saved.json",
        "--memory-limit",
        "1a",
        lines=3,
    )


def test_the_script_may_hold_one_pipeline_without_naming_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import pipec\nnet = pipec.chain(2)\n", encoding="utf-8")
    assert run(capsys, "plan", str(tmp_path / "one.py"), "--devices", "2")[0] == 0


def test_devices_may_come_from_the_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import pipec\nnet = pipec.Pipeline('own')\nv = net.stage('a', None, net.input('x'), device=0)\n"
        "net.loss('l', None, net.stage('b', None, v, device=1))\n",
        encoding="utf-8",
    )
    assert "devices=2" in run(capsys, "plan", str(tmp_path / "own.py"))[1]


def test_schedules_lists_all_with_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schedules")
    assert code == 0
    for name in SCHEDULES:
        assert f"\n{name} " in out
        assert f"\n{name}: " in out
    made = json.loads(run(capsys, "schedules", "--devices", "2", "--microbatches", "4", "--json")[1])
    assert [row["name"] for row in made] == list(SCHEDULES)
    one = next(row for row in made if row["name"] == "1f1b")
    assert one["peak_share"] == 2
    assert one["bubble"] == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (2, "the following arguments are required: SUBCOMMAND", ()),
        (2, "invalid choice: 'fly'", ("fly",)),
        (2, "give file.py:object, a saved plan.json, or --stages N", ("plan",)),
        (2, "give a target or --stages, not both", ("plan", "net.py:unet", "--stages", "3")),
        (2, "--devices is needed", ("plan", "--stages", "3")),
        (2, "'x' is no whole number of at least 1", ("plan", "--stages", "3", "--devices", "x")),
        (2, "'0' is no whole number of at least 1", ("plan", "--stages", "0", "--devices", "1")),
        (2, "'unet' is no target: expected file.py:object or plan.json", ("plan", "unet")),
        (2, "is no limit; write 8GiB or 4activations", ("plan", "--stages", "3", "--memory-limit", "lots")),
        (2, "write begin and end such as 0:100", ("draw", "--stages", "3", "--time", "3")),
        (2, "write numbers such as 0-3,7", ("draw", "--stages", "3", "--show-devices", "3-1")),
        (
            2,
            "compare takes one pipeline, or several plans",
            ("compare", "net.py:make", "net.py:unet", "--devices", "2"),
        ),
        (1, "there is no file no.py", ("plan", "no.py:x")),
        (1, "there is no file no.json", ("plan", "no.json")),
        (1, "bad.json is no JSON", ("plan", "bad.json")),
        (1, "net.py has no 'nothing'; it holds unet, spec, plan", ("plan", "net.py:nothing")),
        (1, "net.py holds several: unet, spec, plan; name the pipeline", ("plan", "net.py")),
        (1, "empty.py holds no Pipeline or Plan; name a function that returns one", ("plan", "empty.py")),
        (1, "net.py:number is a int; expected a Pipeline, a Spec, a Plan, or a function", ("plan", "net.py:number")),
        (1, "net.py:broken() failed: KeyError: 'oops'", ("plan", "net.py:broken")),
        (1, "too few for 5 devices", ("plan", "net.py:unet", "--devices", "5")),
        (
            1,
            "unknown schedule 'fast'; known are gpipe",
            ("plan", "net.py:unet", "--devices", "2", "--schedule", "fast"),
        ),
        (1, "unknown schedule 'fast'; known are", ("compare", "net.py:unet", "--devices", "2", "--schedule", "fast")),
        (1, "forward must not be negative", ("simulate", "net.py:unet", "--devices", "2", "--forward", "-1")),
        (1, "fails.py:2: ValueError: two lines", ("plan", "fails.py:x")),
        (1, "exits.py:1: SystemExit: 0", ("plan", "exits.py:x")),
        (1, "syntax.py:1: SyntaxError", ("plan", "syntax.py:x")),
        (
            1,
            "error: pipeline 'a': stage 's' reads no value: pass an input or another stage's result (at ",
            ("plan", "wrong.py:a", "--devices", "1"),
        ),
        (1, "wrong.py:3: a.output(a.stage('s', None)))\n", ("plan", "wrong.py:a", "--devices", "1")),
        (1, "the suffix decides the format", ("draw", "--stages", "2", "--devices", "2", "-o", "x.jpg")),
        (
            1,
            "(on the command line: --output-bytes SIZE)",
            ("simulate", "--stages", "2", "--devices", "2", "--bandwidth", "3"),
        ),
        (
            1,
            "(on the command line: --activation-bytes SIZE, --output-bytes SIZE, --memory-limit 4activations)",
            ("plan", "--stages", "2", "--devices", "2", "--memory-limit", "3MiB"),
        ),
        (
            1,
            "(on the command line: --activation-bytes SIZE, --output-bytes SIZE, --memory shares)",
            ("draw", "--stages", "2", "--devices", "2", "--memory", "bytes"),
        ),
        (1, "net.py has no 'fast'", ("plan", "--stages", "2", "--devices", "2", "--schedule", "net.py:fast")),
        (1, "there is no file no.py", ("plan", "--stages", "2", "--devices", "2", "--schedule", "no.py:fast")),
        (1, "No such file or directory", ("plan", "--stages", "2", "--devices", "2", "-o", "no/x.txt")),
        (
            1,
            "a graph of 800 tasks cannot be read",
            ("draw", "--stages", "8", "--devices", "8", "--microbatches", "50", "--graph", "tasks"),
        ),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], script: Path, code: int, message: str, arguments: tuple[str, ...]
) -> None:
    script.write_text(SCRIPT.replace('print("loading")', ""), encoding="utf-8")
    Path("empty.py").write_text("import pipec\n")
    Path("bad.json").write_text("{", encoding="utf-8")
    Path("fails.py").write_text("import pipec\nraise ValueError('two lines')\n")
    Path("exits.py").write_text("raise SystemExit(0)\n")
    Path("syntax.py").write_text("def (:\n")
    Path("wrong.py").write_text("import pipec\na = pipec.Pipeline('a')\na.output(a.stage('s', None))\n")
    fails(capsys, code, message, *arguments)


def test_the_hint_of_a_missing_program_keeps_its_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipec.render.program.find_program", lambda: None)
    code, out, err = run(capsys, "draw", *CHAIN, "-o", str(tmp_path / "a.svg"))
    assert (code, out) == (1, "")
    assert err.startswith(f"pipec draw: error: {tmp_path / 'a.svg'} was not drawn: drawing needs a Graphviz program")
    assert "install one:\n  any platform:   pip install graphviz-pure\n" in err


def test_a_schedule_of_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from pipec.schedules import GPipe\n\ndef mine(problem):\n    return GPipe().order(problem)\n")
    code, out, err = run(capsys, "simulate", *CHAIN, "--schedule", f"{path}:mine", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["schedule"] == "mine"
    code, out, _ = run(capsys, "compare", *CHAIN, "--schedule", f"{path}:mine,gpipe", "--json")
    rows = json.loads(out)
    assert [row["name"] for row in rows] == [f"{path}:mine", "gpipe"]
    assert rows[0]["makespan"] == rows[1]["makespan"]

__all__ = ["script"]


def test_modes_with_either_dash(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {run(capsys, "plan", *CHAIN, "--recompute", mode)[1] for mode in ("except-last", "except_last")}
    assert texts == {str(pipec.compile(pipec.chain(4), 2, 3, recompute="except_last"))}


def test_help_says_what_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    told = {name: " ".join(run(capsys, name, "--help")[1].split()) for name in ("trace", "draw", "plan")}
    assert "Write the simulated timeline as a Chrome/Perfetto trace." in told["trace"]
    assert "without a suffix .svg" in told["draw"]
    assert "file.py alone when it holds one pipeline" in told["plan"]


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in COMMANDS:
        assert command.help in " ".join(out.split())
        code, text, _ = run(capsys, command.name, "--help")
        assert code == 0
        for example in command.examples:
            assert f"  {example}\n" in text


@pytest.mark.parametrize("example", [e for command in COMMANDS for e in command.examples if "--stages" in e])
def test_examples_of_the_help_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *example.split()[1:])[0] == 0


def test_unexpected_errors_are_one_line_unless_debugging(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: object) -> None:
        raise RuntimeError("a\nb")

    monkeypatch.setattr("pipec.cli.compile_given", burst)
    fails(capsys, 1, "RuntimeError: a; b", "plan", *CHAIN)
    monkeypatch.setenv("PIPEC_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a\nb"):
        main(["plan", *CHAIN])


def test_python_dash_m_pipec() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipec", "simulate", *CHAIN, "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=os.environ,
    )
    assert json.loads(done.stdout)["devices"] == 2
    done = subprocess.run(
        [sys.executable, "-m", "pipec", "plan"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = (
        f"{sys.executable} -m pipec plan --stages 16 --devices 16 --microbatches 64 | head -1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan chain")
