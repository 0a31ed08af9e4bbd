"""The head's agent: checks, starts the Ray head, waits for the workers, runs the driver, reports, cleans up.

Always: the HTTP server is up from before the checks until the report is written; the exit code is the driver's, or one
of the agent's own with a problem in the report; whatever was started is gone when the agent ends, and so is nothing
else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from foremoe.agent import checks, overrides, ray_node, report, server
from foremoe.agent.context import AgentContext
from foremoe.agent.members import Members
from foremoe.agent.metrics import ProgressCollector
from foremoe.agent.process import Child
from foremoe.agent.stopping import Stop, first_of
from foremoe.agent.tracker import Tracker
from foremoe.errors import LaunchError
from foremoe_operator.api.constants import ExitCode, Reason, Stage
from foremoe_operator.api.progress import Problem

logger = logging.getLogger(__name__)

_RAY_GRACE_SECONDS = 10.0
_FAREWELL_SECONDS = 6.0
_WATCH_SECONDS = 1.0


async def run(context: AgentContext) -> int:
    """Run the head to its end; the exit code."""
    return await _Head(context).run()


@dataclass
class _Head:
    context: AgentContext
    tracker: Tracker = field(init=False)
    members: Members = field(init=False)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    ray: Child | None = None
    driver: Child | None = None

    def __post_init__(self) -> None:
        boot = self.context.boot
        self.tracker = Tracker(boot.spec)
        self.members = Members(
            expected=boot.spec.workers.replicas, ray_version=ray_node.version(), on_change=self._joined
        )

    async def run(self) -> int:
        boot = self.context.boot
        api = server.HeadApi(
            tracker=self.tracker,
            members=self.members,
            collector=ProgressCollector(self.tracker, job=boot.job, namespace=boot.namespace),
            token=self.token,
        )
        stop = Stop.on_signals()
        try:
            async with server.serving(api.application(), host=self.context.bind_host, port=boot.agent_port):
                code = await self._run(stop)
                await self._part(stop)
        except LaunchError as error:
            code = self._give_up(Reason.BOOT_FAILED, str(error), ExitCode.CONFIG)
        finally:
            await self._clean_up()
        report.write(self.context.termination_file, self.tracker.progress)
        logger.info("the head ends with exit code %d", code)
        return code

    async def _run(self, stop: Stop) -> int:
        spec = self.context.boot.spec
        problem = await asyncio.to_thread(checks.find_problem, spec, self._arguments(accelerator=False))
        if problem is not None:
            return self._give_up(problem.reason, problem.message, ExitCode.CONFIG)
        deadline = asyncio.get_running_loop().time() + spec.startup_deadline_seconds
        code = await self._start_ray(stop, deadline)
        if code is None:
            self.tracker.enter(Stage.WAITING_FOR_WORKERS)
            code = await self._await_workers(stop, deadline)
        if code is None:
            code = await self._drive(stop)
        return code

    async def _start_ray(self, stop: Stop, deadline: float) -> int | None:
        """Start the Ray head; None once it is up, else the exit code."""
        for number in range(1, ray_node.START_TRIES + 1):
            came = await self._try_ray(stop, deadline)
            if came == "up":
                return None
            if came == "stop":
                return stop.exit_code
            if came == "late" or number == ray_node.START_TRIES:
                break
            logger.warning("the Ray head did not come up, trying again")
            assert self.ray is not None
            await self.ray.stop(grace_seconds=_RAY_GRACE_SECONDS)
        what = "did not start in time" if came == "late" else f"ended {ray_node.START_TRIES} times"
        return self._give_up(Reason.BOOT_FAILED, f"the Ray head {what}; see the log of the head", ExitCode.UNAVAILABLE)

    async def _try_ray(self, stop: Stop, deadline: float) -> str:
        """Start `ray start` once: "up", "ended", "stop" or "late"."""
        up = asyncio.Event()

        def on_line(line: str) -> None:
            logger.info("ray: %s", line)
            if ray_node.is_up(line):
                up.set()

        self.ray = await Child.start(
            ray_node.start_command(self.context, accelerator=ray_node.has_accelerator()),
            name="ray head",
            environment=ray_node.environment(self.context.environment, directory=Path.cwd()),
            on_line=on_line,
        )
        remaining = deadline - asyncio.get_running_loop().time()
        came = await first_of(up=up.wait(), ended=self.ray.wait(), stop=stop.wait(), timeout=remaining)
        return came or "late"

    async def _await_workers(self, stop: Stop, deadline: float) -> int | None:
        """Wait until all workers have joined; None once they have, else the exit code."""
        assert self.ray is not None
        while self.members.missing:
            self.members.changed.clear()
            if not self.members.missing:
                break
            remaining = deadline - asyncio.get_running_loop().time()
            came = await first_of(
                changed=self.members.changed.wait(),
                ended=self.ray.wait(),
                stop=stop.wait(),
                timeout=min(remaining, _WATCH_SECONDS),
            )
            if came == "stop":
                return stop.exit_code
            if came == "ended":
                return self._give_up(Reason.BOOT_FAILED, "the Ray head ended", ExitCode.UNAVAILABLE)
            if lost := self.members.lost():
                return self._give_up(Reason.WORKER_LOST, lost, ExitCode.UNAVAILABLE)
            if remaining <= 0:
                return self._give_up(Reason.STARTUP_DEADLINE_EXCEEDED, self._late(), ExitCode.UNAVAILABLE)
        if len(self.members.accelerators) > 1:
            message = "some workers have an accelerator and some have none: choose nodes of one kind"
            return self._give_up(Reason.BOOT_FAILED, message, ExitCode.CONFIG)
        return None

    async def _drive(self, stop: Stop) -> int:
        """Run the driver to its end; its exit code."""
        assert self.ray is not None
        accelerator = self.members.accelerators == {True}
        arguments = self._arguments(accelerator=accelerator)
        self.tracker.driver_started()
        environment = {
            **ray_node.environment(self.context.environment),
            **self._run_environment(accelerator=accelerator),
            "RAY_ADDRESS": f"{self.context.address}:{self.context.boot.ray_port}",
        }
        self.driver = await Child.start(
            [sys.executable, "-m", overrides.DRIVER_MODULE, *arguments],
            name="driver",
            environment=environment,
            on_line=self._driver_line,
            directory=Path.cwd(),
        )
        logger.info("the driver runs as process %d", self.driver.pid)
        while True:
            came = await first_of(
                driver=self.driver.wait(), ray=self.ray.wait(), stop=stop.wait(), timeout=_WATCH_SECONDS
            )
            if came == "driver":
                code = await self.driver.stop(grace_seconds=0)
                self.tracker.finish(code)
                return code
            if came == "stop":
                return await self._stop_driver(stop)
            lost = "the Ray head ended" if came == "ray" else self.members.lost()
            if lost is not None:
                await self.driver.stop(grace_seconds=_RAY_GRACE_SECONDS)
                reason = Reason.DRIVER_ERROR if came == "ray" else Reason.WORKER_LOST
                return self._give_up(reason, lost, ExitCode.UNAVAILABLE)

    async def _stop_driver(self, stop: Stop) -> int:
        """Relay a signal: the driver gets most of the pod's grace period, Ray the rest."""
        assert self.driver is not None
        grace = max(self.context.boot.spec.termination_grace_period_seconds - _RAY_GRACE_SECONDS, 3.0)
        logger.info("told to stop by %s, telling the driver", signal.Signals(stop.number).name)
        self.driver.signal(stop.number)
        code = await self.driver.stop(grace_seconds=grace)
        self.tracker.finish(code or stop.exit_code)
        return code or stop.exit_code

    async def _part(self, stop: Stop) -> None:
        """Let the workers hear of the end before the server goes: their exit codes depend on it."""
        if self.tracker.progress.stage is not Stage.FINISHED:
            self.tracker.finish(None)
        deadline = asyncio.get_running_loop().time() + (_FAREWELL_SECONDS if not stop.asked else 2.0)
        while not self.members.all_know_end and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)

    async def _clean_up(self) -> None:
        for child in (self.driver, self.ray):
            if child is not None:
                await child.stop(grace_seconds=_RAY_GRACE_SECONDS)

    def _give_up(self, reason: Reason, message: str, code: ExitCode) -> int:
        logger.error("%s: %s", reason, message)
        self.tracker.fail(Problem(reason=reason, message=message[:1024]))
        self.tracker.finish(None)
        return code

    def _late(self) -> str:
        seconds = self.context.boot.spec.startup_deadline_seconds
        missing = ", ".join(map(str, self.members.missing[:10]))
        return f"after {seconds} s these workers had not joined: {missing}; are their pods running?"

    def _joined(self, workers: int) -> None:
        logger.info("%d of %d workers have joined", workers, self.members.expected)
        self.tracker.joined(workers)

    def _driver_line(self, line: str) -> None:
        line = line.replace(self.token, "***")
        self.tracker.log(line)
        print(line, flush=True)

    def _arguments(self, *, accelerator: bool) -> list[str]:
        environment = self._run_environment(accelerator=accelerator)
        return overrides.driver_arguments(self.context.boot, accelerator=accelerator, environment=environment)

    def _run_environment(self, *, accelerator: bool) -> dict[str, str]:
        events = overrides.Events(
            url=f"http://{self.context.address}:{self.context.boot.agent_port}{server.PATH_EVENTS}", token=self.token
        )
        return overrides.run_environment(self.context.boot, accelerator=accelerator, events=events)
