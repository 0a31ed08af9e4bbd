"""A worker's agent: waits for the head, runs a Ray node with this pod's GPUs, goes when the head goes.

It calls the head's agent every few seconds. That tells the head that it is there, and tells it when the driver has
ended: then it stops its Ray node and ends with 0. A head that answers no more, or a Ray node that ends by itself, is an
error with a report that says which.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import httpx

from foremoe.agent import ray_node, report, server
from foremoe.agent.context import AgentContext
from foremoe.agent.members import Answer, Call
from foremoe.agent.process import Child
from foremoe.agent.stopping import Stop, first_of
from foremoe.errors import LaunchError
from foremoe_operator.api.constants import ExitCode, Reason, Stage
from foremoe_operator.api.progress import Problem, Progress

logger = logging.getLogger(__name__)

_CALL_SECONDS = 1.0
_CALL_TIMEOUT_SECONDS = 5.0
# A head that is starved of CPU answers late; one that is gone refuses connections at once, so this can be patient.
_HEAD_SILENCE_SECONDS = 45.0
_RAY_GRACE_SECONDS = 10.0


async def run(context: AgentContext) -> int:
    """Run the worker to its end; the exit code."""
    return await _Worker(context).run()


class _Ended(Exception):
    """The worker is to end."""

    def __init__(self, code: int, problem: Problem | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.problem = problem


@dataclass
class _Worker:
    context: AgentContext
    ray: Child | None = None
    ray_starts: int = 0

    async def run(self) -> int:
        stop = Stop.on_signals()
        try:
            async with server.serving(
                server.worker_application(), host=self.context.bind_host, port=self.context.boot.agent_port
            ):
                try:
                    await self._run(stop)
                finally:
                    if self.ray is not None:
                        await self.ray.stop(grace_seconds=_RAY_GRACE_SECONDS)
        except _Ended as end:
            code, problem = end.code, end.problem
        except LaunchError as error:
            code, problem = ExitCode.CONFIG, Problem(reason=Reason.BOOT_FAILED, message=str(error)[:1024])
        if problem is not None:
            logger.error("%s: %s", problem.reason, problem.message)
            report.write(self.context.termination_file, Progress(stage=Stage.FINISHED, problem=problem))
        logger.info("worker %d ends with exit code %d", self.context.worker_index, code)
        return code

    async def _run(self, stop: Stop) -> None:
        boot = self.context.boot
        timeout = httpx.Timeout(_CALL_TIMEOUT_SECONDS)
        base = f"http://{boot.head_host}:{boot.agent_port}"
        # No proxy of the environment: the head is a pod of this job.
        async with httpx.AsyncClient(base_url=base, timeout=timeout, trust_env=False) as client:
            await self._reach_ray(client, stop)
            up = await self._start_ray()
            try:
                await self._stay(client, stop, up)
            except _Ended as end:
                if end.problem is not None or stop.asked:
                    await self._say_goodbye(client, end)
                raise

    async def _reach_ray(self, client: httpx.AsyncClient, stop: Stop) -> None:
        """Wait until the head's agent says that Ray is up there."""
        boot = self.context.boot
        loop = asyncio.get_running_loop()
        deadline = loop.time() + boot.spec.startup_deadline_seconds
        while True:
            answer = await self._call(client, joined=False)
            if answer is not None:
                self._heed(answer)
                if answer.ready:
                    return
            if loop.time() > deadline:
                where = f"{boot.head_host}:{boot.ray_port}"
                message = f"no Ray head at {where} after {boot.spec.startup_deadline_seconds} s: is the head running?"
                raise _Ended(ExitCode.UNAVAILABLE, Problem(reason=Reason.STARTUP_DEADLINE_EXCEEDED, message=message))
            if await first_of(stop=stop.wait(), timeout=0.25) == "stop":
                raise _Ended(stop.exit_code)

    async def _start_ray(self) -> asyncio.Event:
        up = asyncio.Event()

        def on_line(line: str) -> None:
            logger.info("ray: %s", line)
            if ray_node.is_up(line):
                up.set()

        self.ray_starts += 1
        self.ray = await Child.start(
            ray_node.start_command(self.context, accelerator=ray_node.has_accelerator()),
            name="ray node",
            environment=ray_node.environment(self.context.environment, directory=Path.cwd()),
            on_line=on_line,
        )
        return up

    async def _stay(self, client: httpx.AsyncClient, stop: Stop, up: asyncio.Event) -> None:
        """Call the head until there is a reason to end; always raises _Ended."""
        assert self.ray is not None
        loop = asyncio.get_running_loop()
        heard = loop.time()
        announced = False
        while True:
            answer = await self._call(client, joined=up.is_set())
            if answer is not None:
                heard = loop.time()
                announced = up.is_set()
                self._heed(answer)
            elif loop.time() - heard > _HEAD_SILENCE_SECONDS:
                message = f"the head has not answered for {_HEAD_SILENCE_SECONDS:.0f} s"
                raise _Ended(ExitCode.UNAVAILABLE, Problem(reason=Reason.HEAD_LOST, message=message))
            waits = {"stop": stop.wait(), "ended": self.ray.wait()}
            if not announced:
                waits["up"] = up.wait()
            came = await first_of(timeout=_CALL_SECONDS if not up.is_set() or announced else 0.0, **waits)
            if came == "stop":
                raise _Ended(stop.exit_code)
            if came == "ended":
                if up.is_set() or self.ray_starts >= ray_node.START_TRIES:
                    raise await self._ray_ended(client)
                logger.warning("the Ray node did not come up, trying again")
                await self.ray.stop(grace_seconds=_RAY_GRACE_SECONDS)
                up = await self._start_ray()

    async def _ray_ended(self, client: httpx.AsyncClient) -> _Ended:
        """A Ray node ends when its head does: ask once more whether that was the normal end."""
        answer = await self._call(client, joined=False)
        if answer is not None and answer.finished:
            return _Ended(0 if answer.exit_code == 0 else ExitCode.UNAVAILABLE)
        reason = Reason.WORKER_LOST if answer is not None else Reason.HEAD_LOST
        where = "; the head is gone too" if answer is None else ""
        return _Ended(ExitCode.UNAVAILABLE, Problem(reason=reason, message=f"the Ray node of this worker ended{where}"))

    def _heed(self, answer: Answer) -> None:
        if answer.refused:
            raise _Ended(ExitCode.CONFIG, Problem(reason=Reason.BOOT_FAILED, message=answer.refused[:1024]))
        if answer.finished:
            raise _Ended(0 if answer.exit_code == 0 else ExitCode.UNAVAILABLE)

    async def _call(self, client: httpx.AsyncClient, *, joined: bool, leaving: str = "") -> Answer | None:
        """Call the head's agent; None if it does not answer."""
        assert self.context.worker_index is not None
        call = Call(
            index=self.context.worker_index,
            joined=joined,
            ray_version=ray_node.version(),
            accelerator=ray_node.has_accelerator(),
            leaving=leaving,
        )
        try:
            response = await client.post(server.PATH_WORKERS, json=call.model_dump())
            return Answer.model_validate_json(response.content) if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    async def _say_goodbye(self, client: httpx.AsyncClient, end: _Ended) -> None:
        reason = end.problem.message if end.problem is not None else "its pod was told to stop"
        await self._call(client, joined=False, leaving=reason[:256])
