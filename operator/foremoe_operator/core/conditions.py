"""Conditions and the phase.

A condition keeps its transition time while its status stays the same. The phase is a function of the conditions alone,
first match wins, so that no two readers of a status can disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from foremoe_operator.api.constants import ConditionType, Phase, Reason
from foremoe_operator.api.status import Condition, ConditionStatus

MESSAGE_MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is to be said under one condition type."""

    type: ConditionType
    status: ConditionStatus
    reason: Reason
    message: str = ""


def shortened(text: str, limit: int = MESSAGE_MAX_LENGTH) -> str:
    """The text on one budget of characters; the cut is marked."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def tail(text: str, limit: int = 2048) -> str:
    """The last characters of a log, from the start of a line if that is near."""
    if len(text) <= limit:
        return text
    cut = text[-limit:]
    newline = cut.find("\n")
    return cut[newline + 1 :] if 0 <= newline < limit // 4 else cut


def merge(old: Iterable[Condition], findings: Iterable[Finding], *, now: datetime, generation: int) -> list[Condition]:
    """The old conditions with the findings written over them, in the order of ConditionType."""
    by_type = {each.type: each for each in old}
    for finding in findings:
        before = by_type.get(finding.type)
        same = before is not None and before.status == finding.status
        by_type[finding.type] = Condition(
            type=finding.type,
            status=finding.status,
            reason=finding.reason,
            message=shortened(finding.message),
            last_transition_time=before.last_transition_time if before is not None and same else now,
            observed_generation=generation,
        )
    return [by_type[kind] for kind in ConditionType if kind in by_type]


def phase_of(conditions: Iterable[Condition]) -> Phase:
    """The summary of the conditions."""
    true = {each.type for each in conditions if each.status == "True"}
    if ConditionType.COMPLETE in true:
        return Phase.COMPLETE
    if ConditionType.FAILED in true:
        return Phase.FAILED
    if ConditionType.PODS_SCHEDULED not in true:
        return Phase.PENDING
    return Phase.RUNNING if ConditionType.READY in true else Phase.STARTING
