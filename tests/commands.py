"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipec.cli import main

SCRIPT = """
import pipec

print("loading")
unet = pipec.Pipeline("unet")
a = unet.stage("enc", None, unet.input("x"))
b = unet.stage("mid", None, a)
unet.loss("loss", None, unet.stage("dec", None, b, pipec.skip(a)))
spec = unet.spec
plan = pipec.compile(unet, 3, 2)


def make():
    return pipec.chain(4, "made")


class Holder:
    inner = unet


def broken():
    raise KeyError("oops")


number = 3
if __name__ == "__main__":
    raise SystemExit("training")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "net.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys: pytest.CaptureFixture[str], code: int, message: str, *arguments: str, lines: int = 1) -> None:
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == lines
    assert err.startswith("pipec")
    assert "Traceback" not in err

CHAIN = ("--stages", "4", "--devices", "2", "--microbatches", "3")
