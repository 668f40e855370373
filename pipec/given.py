"""What was given where a pipeline or one of several names is meant: taken, or told what belongs there."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pipec.errors import PipecError, SpecError
from pipec.ir import Plan
from pipec.spec import Spec

DECLARING = """\
a pipeline says how a model is cut into stages; declare one, for example
  net = pipec.Pipeline("net")
  x, y = net.input("x"), net.input("y")
  h = net.stage("first", model.first, x)  # any module or function
  net.loss("loss", torch.nn.functional.mse_loss, net.stage("second", model.second, h), y)"""


def spec_of(pipeline: Any, what: str, kind: type[PipecError] = SpecError) -> Spec:
    """The spec of a Pipeline or Spec. ``what`` names the function that was called.

    Raises:
        PipecError: of ``kind``, when it is neither. SpecError: the pipeline's declaration is at fault.
    """
    spec = None if isinstance(pipeline, type) else getattr(pipeline, "spec", None)
    if isinstance(spec, Spec):
        return spec
    if isinstance(pipeline, Plan):
        raise kind(f"{what}: expected the pipeline, got a plan, which is what pipec.compile(pipeline, ...) returns")
    got = f"the class {pipeline.__name__}" if isinstance(pipeline, type) else type(pipeline).__name__
    raise kind(f"{what}: expected a Pipeline, got {got}; {DECLARING}")


def meant(name: Any, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where one of the known names is close to ``name``, else nothing."""
    by_form = {other.lower().replace("_", "-"): other for other in known}
    found = get_close_matches(str(name).lower().replace("_", "-"), by_form, n=1, cutoff=0.6)
    return f" (did you mean {by_form[found[0]]!r}?)" if found else ""


def misnamed(signature: inspect.Signature, kwargs: dict[str, Any]) -> str:
    """Keyword arguments that the signature does not have: Python names the missing ones first, not the typo."""
    if any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        return ""
    known = [name for name, one in signature.parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD,
                                                                               one.KEYWORD_ONLY)]
    return "; ".join(f"it has no argument {name!r}{meant(name, known)}" for name in kwargs if name not in known)
