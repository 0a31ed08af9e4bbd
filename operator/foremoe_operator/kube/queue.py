"""The work queue: which jobs to look at, and when.

A key is worked on by one task at a time; keys added meanwhile are worked on again afterwards, once, however often they
were added. A key that raises comes back with a growing delay. Nothing is lost and nothing is done twice at once, which
is all that a level-triggered reconcile asks for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_log = logging.getLogger(__name__)
K = TypeVar("K")

Process = Callable[[K], Awaitable[float | None]]
"""Works on a key and says after how many seconds it wants to see it again."""

FIRST_RETRY_SECONDS: Final = 1.0
LAST_RETRY_SECONDS: Final = 60.0


class WorkQueue(Generic[K]):
    """A set of keys to work on, with delays. All methods are for the event loop's thread."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._waiting: set[K] = set()
        self._busy: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._again)

    def add(self, key: K) -> None:
        """Work on the key soon."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Work on the key after a while, unless something else wakes it earlier."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def run(self, process: Process[K]) -> None:
        """Work on keys for ever; several of these may run at once."""
        while True:
            await self._step(await self._ready.get(), process)

    async def _step(self, key: K, process: Process[K]) -> None:
        self._waiting.discard(key)
        self._busy.add(key)
        try:
            again = await process(key)
            self._failures.pop(key, None)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again = min(FIRST_RETRY_SECONDS * 2 ** (failures - 1), LAST_RETRY_SECONDS)
            _log.warning(
                "%s: %s; again in %.0f s", key, str(error) or type(error).__name__, again, exc_info=failures > 3
            )
        finally:
            self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        elif again is not None:
            self.add_after(key, again)
