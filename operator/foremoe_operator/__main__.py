"""`python -m foremoe_operator`: settings from the environment, a look at the CRD, then kopf until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final

import kopf
from prometheus_client import start_http_server

from foremoe_operator import __version__, metrics
from foremoe_operator.handlers.cache import IndexCache
from foremoe_operator.handlers.registry import Handlers
from foremoe_operator.kube.agent import AgentClient
from foremoe_operator.kube.client import KubeClient, KubeError
from foremoe_operator.kube.controller import Controller
from foremoe_operator.kube.convert import Key
from foremoe_operator.kube.queue import WorkQueue
from foremoe_operator.kube.startup import crd_problem
from foremoe_operator.settings import Settings, SettingsError, describe

_log = logging.getLogger("foremoe_operator")
_USAGE: Final = """Usage: python -m foremoe_operator [--help | --version]

Runs the ForeMoE operator against the cluster it is in, or that of $KUBECONFIG.

Environment:
"""


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if arguments in (["--help"], ["-h"]):
        print(_USAGE + describe())
        return 0
    if arguments == ["--version"]:
        print(__version__)
        return 0
    if arguments:
        print(f"unknown argument {arguments[0]}; see --help", file=sys.stderr)
        return 2
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    kopf.configure(log_format=kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL)
    logging.getLogger().setLevel(settings.log_level)
    if settings.log_level == "INFO":
        # A line for every event of every pod and every probe; what matters is logged by the controller.
        for name in ("kopf.objects", "kopf.activities.probe", "aiohttp.access", "httpx"):
            logging.getLogger(name).setLevel(logging.WARNING)
    try:
        client = KubeClient.from_environment()
        problem = crd_problem(client)
    except KubeError as error:
        problem = f"cannot reach the API server: {error}"
    if problem is not None:
        _log.error("not started: %s", problem)
        return 1
    return asyncio.run(_serve(settings, client))


async def _serve(settings: Settings, client: KubeClient) -> int:
    cache, queue, agents = IndexCache(), WorkQueue[Key](), AgentClient()
    handlers = Handlers(cache=cache, queue=queue)
    controller = Controller(
        cache=cache, client=client, agents=agents, announce=handlers.announce, limits=settings.limits
    )
    metrics.OPERATOR_INFO.labels(version=__version__).set(1)
    metrics.QUEUE_LENGTH.set_function(lambda: len(queue))
    start_http_server(settings.metrics_port, addr=settings.listen_host)
    workers = [asyncio.create_task(queue.run(controller.process)) for _ in range(settings.workers)]
    try:
        await kopf.operator(
            registry=handlers.registry,
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://{settings.listen_host}:{settings.health_port}/healthz",
        )
    finally:
        for worker in workers:
            worker.cancel()
        await agents.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
