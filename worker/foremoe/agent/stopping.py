"""Being told to stop, and waiting for the first of several things."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Stop:
    """Set by the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.number: int = signal.SIGTERM

    @classmethod
    def on_signals(cls) -> Stop:
        """Listen on the running loop; must be called in the main thread."""
        stop = cls()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set, number)
        return stop

    def set(self, number: int) -> None:
        """Ask to stop as if by signal `number`."""
        if not self._event.is_set():
            self.number = number
            self._event.set()

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self._event.is_set()

    @property
    def exit_code(self) -> int:
        """Exit code of a process ended by that signal, as shells count."""
        return 128 + self.number

    async def wait(self) -> None:
        """Wait for a signal."""
        await self._event.wait()


async def first_of(*, timeout: float | None = None, **things: Coroutine[Any, Any, Any]) -> str | None:
    """Name of the first coroutine to end, the earliest named if several have; None after `timeout` seconds.

    The others are cancelled; an exception of the first is raised.
    """
    tasks = {name: asyncio.create_task(thing) for name, thing in things.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for name, task in tasks.items():
            if task.done():
                task.result()
                return name
        return None
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
