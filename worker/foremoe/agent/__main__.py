"""Entry point: `python -m foremoe.agent`, told by environment which role it has and where its boot file is."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from foremoe.agent import head, limits, report, worker
from foremoe.agent.context import AgentContext
from foremoe.errors import LaunchError
from foremoe_operator.api.constants import ExitCode, Reason, Role
from foremoe_operator.api.progress import Problem, Progress

logger = logging.getLogger("foremoe.agent")


def main() -> int:
    """Run the agent to its end; its exit code is the driver's on the head."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stdout, force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        context = AgentContext.from_environment(os.environ)
    except LaunchError as error:
        logger.error("%s", error)
        problem = Problem(reason=Reason.BOOT_FAILED, message=str(error)[:1024])
        report.write(report.default_file(os.environ), Progress(problem=problem))
        return ExitCode.CONFIG
    limits.raise_open_files()
    logger.info("%s of job %s/%s", context.name, context.boot.namespace, context.boot.job)
    run = head.run if context.role is Role.HEAD else worker.run
    return asyncio.run(run(context))


if __name__ == "__main__":
    sys.exit(main())
