"""Every exception of the runtime, in one tree.

    ForeMoEError
    ├── PlannerError    loads, placements, topologies or settings that no plan can be made of
    ├── TraceError      a trace that is corrupt, truncated, foreign or does not fit
    ├── RoutingError    recorded expert choices that do not fit the model or the tokens
    ├── TransferError   expert weights or gradients that could not be moved between ranks
    └── LaunchError     a job that cannot be started: said before any process is

Every error can carry the layer, expert and rank it is about; they are part of the message, so that a log line alone
tells where to look. Errors cross process boundaries (Ray, multiprocessing), hence the explicit pickling.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ForeMoEError", "LaunchError", "PlannerError", "RoutingError", "TraceError", "TransferError"]


class ForeMoEError(Exception):
    """Base of all errors raised by the runtime."""

    def __init__(
        self,
        message: str,
        *,
        layer: int | None = None,
        expert: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.message = message
        self.layer = layer
        self.expert = expert
        self.rank = rank
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("layer", layer), ("expert", expert), ("rank", rank))
            if value is not None
        )
        super().__init__(f"{message} ({where})" if where else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the keyword context instead of the formatted message."""
        return _rebuild, (type(self), self.message, self.layer, self.expert, self.rank)


def _rebuild(
    kind: type[ForeMoEError], message: str, layer: int | None, expert: int | None, rank: int | None
) -> ForeMoEError:
    return kind(message, layer=layer, expert=expert, rank=rank)


class PlannerError(ForeMoEError, ValueError):
    """Input of which no valid plan can be made."""


class TraceError(ForeMoEError, ValueError):
    """A trace file that cannot be read or written as asked."""


class RoutingError(ForeMoEError, ValueError):
    """Recorded expert choices that do not fit the model or its tokens."""


class TransferError(ForeMoEError, RuntimeError):
    """Expert weights or gradients could not be moved between ranks."""


class LaunchError(ForeMoEError, RuntimeError):
    """A job that cannot be started; the message says what to change."""
