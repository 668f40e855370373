"""Weight rules of asynchronous schedules, one a file, and the registry of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import fields

from pipec.errors import PipecError, PlanError
from pipec.ir import Plan
from pipec.rules.base import Reads, Rule, declared_versions, newest_by_row, update_every
from pipec.rules.corrected import Corrected
from pipec.rules.delayed import Delayed
from pipec.rules.live import Live
from pipec.rules.nesterov import Nesterov
from pipec.rules.predicted import Predicted
from pipec.rules.stash import Stash
from pipec.rules.two_buffered import TwoBuffered

RULES: dict[str, Callable[..., Rule]] = {
    rule.name: rule for rule in (Stash, TwoBuffered, Corrected, Predicted, Live, Nesterov, Delayed)
}


def find_rule(text: str) -> Rule:
    """The rule whose ``text`` is ``text``.

    Raises:
        PlanError: an unknown rule or option.
    """
    words = text.split()
    if not words or words[0] not in RULES:
        raise PlanError(
            f"unknown weight rule {text!r}; known are {', '.join(RULES)}. A plan from a file or text has only the name "
            "of its rule: give one of your own with its schedule, as in pipec.Plan.load(path, schedule=...) or "
            "Plan.parse(text, schedule=...)"
        )
    make: Any = RULES[words[0]]
    options = dict(word.partition("=")[::2] if "=" in word else (word, True) for word in words[1:])
    known = {option.name for option in fields(make)}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise PlanError(f"weight rule {text!r}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    try:
        return make(**{name: _read(value) for name, value in options.items()})  # type: ignore[no-any-return]
    except (PipecError, ValueError) as error:
        raise PlanError(f"weight rule {text!r}: {error}") from None


def rule_of(plan: Plan) -> Rule | None:
    """The weight rule of a plan, None for a synchronous one: its policy's own, or the one of that text.

    Raises:
        PlanError: the text names no rule.
    """
    if not plan.asynchronous:
        return None
    own = getattr(getattr(plan.recipe, "policy", None), "weights", None)
    return own if isinstance(own, Rule) and own.text == plan.weights else find_rule(plan.weights)


def _read(value: Any) -> Any:
    """A whole number as one; everything else as it is, for the rule's own converter."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


__all__ = [
    "RULES", "Corrected", "Delayed", "Live", "Nesterov", "Predicted", "Reads", "Rule", "Stash", "TwoBuffered",
    "declared_versions", "find_rule", "newest_by_row", "rule_of", "update_every",
]
