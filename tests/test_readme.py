"""README and docs say what is so: their Python runs, its output is what they print, their links lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from pipec.cli import main
from pipec.schedules import list_schedules

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("viz/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", [n for n in names(PAGES) if any(k == "python" for k, _ in blocks(ROOT / n))])
def test_code_on_a_page_runs_and_prints_what_the_page_shows(name: str) -> None:
    space: dict[str, object] = {"__name__": "page"}
    printed = ""
    for kind, text in blocks(ROOT / name):
        if kind == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(text, name, "exec"), space)
            printed = out.getvalue()
        elif kind == "text":
            assert printed.rstrip() == text.rstrip()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", ["README.md", "docs/command-line.md"])
def test_commands_of_a_page_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = blocks(ROOT / name)
    Path("net.py").write_text(next(text for kind, text in page if kind == "python"), encoding="utf-8")
    lines = [line for kind, text in page if kind == "sh" for line in text.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pipec ")]
    assert commands
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err


def test_make_targets_that_pages_name_exist() -> None:
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        wanted = set(re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert wanted <= made, page


@pytest.mark.parametrize("name", names(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], link


@pytest.mark.parametrize("page", ["README.md", "docs/schedules.md"])
def test_every_schedule_is_on_the_page_with_its_formulas(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for row in list_schedules():
        assert row.name in text
        assert row.bubble.split(" ")[0] in text
        if page.startswith("docs"):
            assert row.source in text
