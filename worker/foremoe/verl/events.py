"""Telling the head's agent what the run does: stages, finished steps, balance.

veRL's controller and the training ranks may sit on any node, so they report over HTTP. Sending happens on one daemon
thread: training never waits for it, and a report that cannot be delivered is dropped after some tries, because progress
is worth less than the run. Order is kept within a process.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import threading
import time
import urllib.request
from typing import Any

from foremoe.verl.settings import Settings

logger = logging.getLogger(__name__)

_TRIES = 4
_TIMEOUT_SECONDS = 3.0
_QUEUE_LENGTH = 1024
_DRAIN_SECONDS = 3.0


class EventSender:
    """Posts events, each a JSON object with a `kind`, to the agent; does nothing if there is no agent."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.events_url
        self._token = settings.events_token
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(_QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Queue one event; returns at once, also when nobody listens."""
        if self._url is None:
            return
        self._start()
        try:
            self._queue.put_nowait({"kind": kind, **fields})
        except queue.Full:
            logger.warning("foremoe: the agent does not take events, dropped one of kind %s", kind)

    def drain(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Wait until everything queued has been tried, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.02)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="foremoe-events", daemon=True)
                self._thread.start()
                # Without this the last step's event would die with the process.
                atexit.register(self.drain)

    def _run(self) -> None:
        while True:
            event = self._queue.get()
            try:
                self._deliver(event)
            finally:
                self._queue.task_done()

    def _deliver(self, event: dict[str, Any]) -> None:
        body = json.dumps(event).encode()
        for attempt in range(_TRIES):
            request = urllib.request.Request(
                str(self._url),
                data=body,
                headers={"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
            )
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
                    return
            except OSError as error:
                if attempt == _TRIES - 1:
                    logger.warning("foremoe: cannot report to the agent at %s: %s", self._url, error)
                else:
                    time.sleep(0.2 * 2**attempt)


_sender: EventSender | None = None


def sender() -> EventSender:
    """The sender of this process, made on first use from the environment."""
    global _sender
    if _sender is None:
        _sender = EventSender(Settings.from_environment())
    return _sender
