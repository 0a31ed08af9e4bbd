"""Asks the agent of a head pod how the training goes.

Short timeouts: an agent that does not answer is a fact to be noted, not something to wait for.
"""

from __future__ import annotations

from typing import Final

import httpx
from pydantic import ValidationError

from foremoe_operator.api.constants import PATH_PROGRESS, PORT_AGENT
from foremoe_operator.api.progress import Progress

_TIMEOUT: Final = httpx.Timeout(2.0, connect=1.0)
_MAX_BYTES: Final = 1 << 20


class AgentClient:
    """HTTP client for all agents; answers None for anything but a valid report."""

    def __init__(self) -> None:
        # Pod addresses are never behind a proxy, whatever the environment says.
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)

    async def progress(self, address: str) -> Progress | None:
        """The report of the agent at that pod address."""
        host = f"[{address}]" if ":" in address else address
        try:
            response = await self._client.get(f"http://{host}:{PORT_AGENT}{PATH_PROGRESS}")
            if response.status_code != httpx.codes.OK or len(response.content) > _MAX_BYTES:
                return None
            return Progress.model_validate_json(response.content)
        except (httpx.HTTPError, ValidationError):
            return None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
