"""The editable install of `make demo`: a script beside the checkout imports pipec and not the checkout's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_editable(sys.argv[1]))"


def test_a_script_beside_the_checkout_imports_pipec(tmp_path: Path) -> None:
    checkout, made, site = (tmp_path / name for name in ("home/pipec", "made", "site"))
    shutil.copytree(ROOT / "pipec", checkout / "pipec", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    made.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(made)], cwd=checkout, check=True, capture_output=True, timeout=90)
    with zipfile.ZipFile(next(made.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    run = f"import sys, site; sys.path.insert(0, {str(checkout.parent)!r}); site.addsitedir({str(site)!r}); " \
          "import importlib.util; print(importlib.util.find_spec('pipec').origin)"
    # -I -S: nothing of this environment is there, which has a pipec of its own
    told = subprocess.run([sys.executable, "-I", "-S", "-c", run], capture_output=True, text=True, timeout=90)
    assert told.stdout.strip() == str(checkout / "pipec" / "__init__.py"), told.stderr
