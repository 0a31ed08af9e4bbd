"""The processes of `foremoe run`: head and workers as agents, watched until the head ends.

Each agent gets a loopback address (127.x.y.n), a working directory and a Ray directory of its own. The agents of all
workers start at once with the head. When the head has ended, the workers follow by themselves; whoever does not is
stopped. Always: on every way out, Ctrl-C included, no process of the job is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import ValidationError
from rich.console import Console

from foremoe.agent.process import Child
from foremoe.agent.stopping import Stop, first_of
from foremoe.cli.progress_view import ProgressView
from foremoe_operator.api import constants as c
from foremoe_operator.api.boot import BootConfig
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.progress import Progress

_POLL_SECONDS = 0.25
# A worker calls the head every few seconds and gives its Ray node ten to end.
_FOLLOW_SECONDS = 30.0
_STOP_SECONDS = 30.0


@dataclass(kw_only=True)
class LocalJob:
    """One run of a job on this machine."""

    name: str
    spec: ForeMoEJobSpec
    logs: Path
    console: Console
    verbose: bool = False
    progress: Progress = field(default_factory=Progress)

    def run(self) -> int:
        """Run to the end; the exit code is the head's, 130 after Ctrl-C."""
        self.logs.mkdir(parents=True, exist_ok=True)
        # Ray keeps sockets there, and a socket's path may have 107 characters at most.
        ray_root = Path(tempfile.mkdtemp(prefix="fm-"))
        try:
            return asyncio.run(self._run(ray_root))
        finally:
            shutil.rmtree(ray_root, ignore_errors=True)

    async def _run(self, ray_root: Path) -> int:
        stop = Stop.on_signals()
        network = loopback_network()
        boot = self._write_boot(network)
        children: list[Child] = []
        try:
            for index in range(-1, self.spec.workers.replicas):
                children.append(await self._start_agent(boot, network, index, ray_root))
            with ProgressView(self.name, self.console, workers=self.spec.workers.replicas) as view:
                code = await self._watch(children[0], boot, stop, view)
            await self._await_workers(children[1:], stop)
        finally:
            # Workers first would be reported as lost by the head.
            for child in children:
                await child.stop(grace_seconds=_STOP_SECONDS)
        self._explain(code, stop)
        return code

    async def _watch(self, head: Child, boot: BootConfig, stop: Stop, view: ProgressView) -> int:
        url = f"http://{boot.head_host}:{boot.agent_port}{c.PATH_PROGRESS}"
        asked = False
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValidationError):
                    self.progress = Progress.model_validate_json((await client.get(url)).content)
                    view.show(self.progress)
                if asked:
                    came = await first_of(ended=head.wait(), timeout=_POLL_SECONDS)
                else:
                    came = await first_of(ended=head.wait(), stop=stop.wait(), timeout=_POLL_SECONDS)
                if came == "stop":
                    asked = True
                    self.console.print("stopping the job ...")
                    head.signal(signal.SIGTERM)
                if came == "ended":
                    self._read_last_word(view)
                    code = await head.wait()
                    return stop.exit_code if asked else code

    async def _await_workers(self, workers: list[Child], stop: Stop) -> None:
        if stop.asked:
            return
        # How the job ended is told by the head alone; a worker that is slow to follow is stopped with the rest.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_SECONDS):
                await asyncio.gather(*(worker.wait() for worker in workers))

    def _read_last_word(self, view: ProgressView) -> None:
        """The head's report has what came after the last look at it."""
        with contextlib.suppress(OSError, ValidationError):
            self.progress = Progress.model_validate_json((self.logs / "head" / "termination.json").read_bytes())
            view.show(self.progress)

    def _explain(self, code: int, stop: Stop) -> None:
        if code == 0:
            self.console.print(f"job {self.name} is complete; logs are in {self.logs}", markup=False, soft_wrap=True)
        elif not stop.asked:
            for line in self.progress.log_tail.splitlines()[-15:]:
                self.console.print(f"  {line}", markup=False, soft_wrap=True)
            self.console.print(
                f"job {self.name} failed with exit code {code}; logs are in {self.logs}", markup=False, soft_wrap=True
            )

    def _write_boot(self, network: str) -> BootConfig:
        boot = BootConfig(
            job=self.name,
            namespace="local",
            head_host=f"{network}.1",
            ray_port=free_port(f"{network}.1"),
            spec=self.spec,
        )
        (self.logs / c.BOOT_FILE).write_text(boot.model_dump_json(by_alias=True, exclude_none=True, indent=1))
        return boot

    async def _start_agent(self, boot: BootConfig, network: str, index: int, ray_root: Path) -> Child:
        """Start the head (index -1) or worker number `index`."""
        role, name = (c.Role.HEAD, "head") if index < 0 else (c.Role.WORKER, f"worker-{index}")
        directory, ray_directory = self.logs / name, ray_root / str(index + 1)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "termination.json").unlink(missing_ok=True)
        ray_directory.mkdir()
        environment = {
            **os.environ,
            # Within this job only its own processes may use Ray, also on a machine with other users.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._ray_token,
            "RAY_TMPDIR": str(ray_directory),
            "PYTHONUNBUFFERED": "1",
            **{entry.name: entry.value for entry in self.spec.env},
            c.ENV_ROLE: str(role),
            c.ENV_BOOT_FILE: str(self.logs / c.BOOT_FILE),
            c.ENV_POD_IP: f"{network}.{index + 2}",
            c.ENV_NODE_NAME: socket.gethostname(),
            c.ENV_TERMINATION_FILE: str(directory / "termination.json"),
        }
        if index >= 0:
            environment[c.ENV_WORKER_INDEX] = str(index)
        log = (directory / "log").open("w", encoding="utf-8", buffering=1)

        def on_line(line: str) -> None:
            log.write(line + "\n")
            if self.verbose and role is c.Role.HEAD:
                self.console.print(line, markup=False, soft_wrap=True)

        return await Child.start(
            [sys.executable, "-m", "foremoe.agent"],
            name=name,
            environment=environment,
            on_line=on_line,
            directory=directory,
        )

    _ray_token: str = field(default_factory=lambda: secrets.token_hex(32))


def loopback_network() -> str:
    """The first three bytes of a loopback network that no other run on this machine is likely to use."""
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}"


def free_port(host: str) -> int:
    """A port that is free now; Ray's control service may listen on all addresses, so its own would collide."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
