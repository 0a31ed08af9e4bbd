"""Child processes: started in a session of their own, their output passed on, ended without leaving anyone behind.

A Ray node is a tree of processes of which some leave their parent's process group. So ending a child means: ask it,
wait, then kill what is left of the tree it had. Only descendants of a child that was started here are ever touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

Line = Callable[[str], None]
# A line of output may be longer than asyncio's default of 64 KiB: a printed configuration, a progress bar.
_LINE_LIMIT = 1 << 22
_EXIT_POLL_SECONDS = 0.05
_OUTPUT_SECONDS = 2.0
_FOLLOW_SECONDS = 3.0


class Child:
    """One child process and its descendants."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, on_line: Line) -> None:
        self._process = process
        self.name = name
        self._reader = asyncio.create_task(self._read(on_line))
        self._end = asyncio.create_task(self._exit_and_output())
        self._family: dict[int, psutil.Process] = {}

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        on_line: Line,
        directory: Path | None = None,
    ) -> Child:
        """Start a process; standard output and error go line by line to `on_line`."""
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            cwd=directory,
            start_new_session=True,
            limit=_LINE_LIMIT,
        )
        return cls(process, name, on_line)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process itself has ended."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the end; the exit code, 128 + n if signal n ended it."""
        # Shielded: who waits a second at a time must not start the wait for the output anew each time.
        return await asyncio.shield(self._end)

    async def _exit_and_output(self) -> int:
        code = await self._exit()
        # Descendants may hold the pipe open after their parent is gone; what was written by then is read.
        await asyncio.wait([self._reader], timeout=_OUTPUT_SECONDS)
        return code if code >= 0 else 128 - code

    async def _exit(self) -> int:
        # asyncio's own wait() also waits for the pipe, which descendants may hold open for as long as they live.
        while (code := self._process.returncode) is None:
            await asyncio.sleep(_EXIT_POLL_SECONDS)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its descendants."""
        self._note_family()
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, *, grace_seconds: float) -> int:
        """Ask it to end, wait, then kill what is left of it and its descendants; the exit code."""
        self._note_family()
        if not self.ended:
            self.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._exit(), grace_seconds)
            except TimeoutError:
                logger.warning("%s did not end within %.0f s of SIGTERM, killing it", self.name, grace_seconds)
                self._note_family()
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        code = await self.wait()
        await self._end_family()
        if not self._reader.done():
            self._reader.cancel()
        return code

    def _note_family(self) -> None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._family.setdefault(child.pid, child)

    async def _end_family(self) -> None:
        """Wait shortly for descendants to follow, then kill those that do not, and see them gone."""
        if await self._family_gone(_FOLLOW_SECONDS):
            return
        for process in self._family.values():
            # psutil compares start times, so a process id that was given out again is not hit.
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not await self._family_gone(_FOLLOW_SECONDS):
            logger.warning("descendants of %s are still there after SIGKILL", self.name)

    async def _family_gone(self, seconds: float) -> bool:
        deadline = asyncio.get_running_loop().time() + seconds
        while any(_runs(process) for process in self._family.values()):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_EXIT_POLL_SECONDS)
        return True

    async def _read(self, on_line: Line) -> None:
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:
                on_line("[a line of output was too long and is left out]")
                continue
            if not raw:
                return
            on_line(raw.decode(errors="replace").rstrip("\n"))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
