"""The agents' HTTP server, up before anything else is.

On the head it answers progress and metrics, and takes reports of the run's processes and calls of the workers; on a
worker it answers the health probe alone. Reports need the run's token, so that nothing else in the cluster can write a
job's status by accident.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from foremoe.agent import metrics
from foremoe.agent.members import Call, Members
from foremoe.agent.tracker import Tracker
from foremoe.errors import LaunchError
from foremoe_operator.api import constants as c

logger = logging.getLogger(__name__)

PATH_EVENTS = "/v1/events"
PATH_WORKERS = "/v1/workers"
_MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HeadApi:
    """What the head's server serves."""

    tracker: Tracker
    members: Members
    collector: metrics.ProgressCollector
    token: str

    def application(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route(c.PATH_HEALTH, _healthy),
                Route(c.PATH_PROGRESS, self._progress),
                Route(c.PATH_METRICS, self._metrics),
                Route(PATH_EVENTS, self._event, methods=["POST"]),
                Route(PATH_WORKERS, self._worker, methods=["POST"]),
            ]
        )

    async def _progress(self, request: Request) -> Response:
        return JSONResponse(self.tracker.progress.dump())

    async def _metrics(self, request: Request) -> Response:
        return Response(metrics.render(self.collector), media_type="text/plain; version=0.0.4")

    async def _event(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return JSONResponse({"error": "wrong token"}, status_code=401)
        body = await request.body()
        try:
            event = json.loads(body) if len(body) <= _MAX_EVENT_BYTES else None
        except ValueError:
            event = None
        if not isinstance(event, dict) or not self.tracker.handle(event):
            return JSONResponse({"error": "no such event"}, status_code=422)
        return Response(status_code=204)

    async def _worker(self, request: Request) -> Response:
        try:
            call = Call.model_validate_json(await request.body())
        except ValidationError as error:
            return JSONResponse({"error": str(error)}, status_code=422)
        progress = self.tracker.progress
        answer = self.members.receive(
            call,
            ready=progress.stage is not c.Stage.BOOTING,
            finished=progress.stage is c.Stage.FINISHED,
            exit_code=progress.exit_code,
        )
        return JSONResponse(answer.model_dump())


def worker_application() -> Starlette:
    """The worker's routes: its health."""
    return Starlette(routes=[Route(c.PATH_HEALTH, _healthy)])


async def _healthy(request: Request) -> Response:
    return Response("ok", media_type="text/plain")


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn without its signal handlers: the agent has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(application: Starlette, *, host: str, port: int) -> AsyncIterator[None]:
    """Serve while the block runs. Raises LaunchError if it is taken."""
    server = _Server(
        uvicorn.Config(application, host=host, port=port, log_level="warning", access_log=False, lifespan="off")
    )
    task = asyncio.create_task(_serve(server, host, port))
    try:
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        # A reader that keeps its connection open must not keep the pod.
        server.force_exit = True
        await asyncio.gather(task, return_exceptions=True)


async def _serve(server: _Server, host: str, port: int) -> None:
    try:
        await server.serve()
    except SystemExit as error:
        raise LaunchError(f"cannot listen on {host}:{port}: is another agent running there?") from error
