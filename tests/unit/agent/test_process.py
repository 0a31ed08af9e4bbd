"""Child processes: output, signals, nobody left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import psutil

from foremoe.agent.process import Child
from foremoe.agent.stopping import first_of


async def start(code: str, lines: list[str]) -> Child:
    return await Child.start(
        [sys.executable, "-uc", code], name="child", environment=dict(os.environ), on_line=lines.append
    )


async def until(lines: list[str], count: int) -> None:
    async with asyncio.timeout(20):
        while len(lines) < count:
            await asyncio.sleep(0.02)


async def test_output_and_exit_code() -> None:
    lines: list[str] = []
    child = await start("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", lines)
    assert await child.wait() == 7
    assert sorted(lines) == ["err", "out"]


async def test_a_signal_is_passed_on() -> None:
    lines: list[str] = []
    child = await start(
        "import signal,sys,time\nsignal.signal(signal.SIGINT, lambda *a: sys.exit(3))\nprint('up')\ntime.sleep(60)",
        lines,
    )
    await until(lines, 1)
    child.signal(signal.SIGINT)
    assert await child.wait() == 3


async def test_death_by_signal_is_told_as_shells_do() -> None:
    lines: list[str] = []
    child = await start("import time\nprint('up')\ntime.sleep(60)", lines)
    await until(lines, 1)
    assert await child.stop(grace_seconds=10) == 128 + signal.SIGTERM


async def test_descendants_in_other_sessions_do_not_outlive_the_child() -> None:
    lines: list[str] = []
    code = (
        "import subprocess,sys,time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "print(p.pid)\ntime.sleep(300)"
    )
    child = await start(code, lines)
    await until(lines, 1)
    await child.stop(grace_seconds=5)
    process = psutil.Process(int(lines[0])) if psutil.pid_exists(int(lines[0])) else None
    assert process is None or process.status() == psutil.STATUS_ZOMBIE


async def test_the_end_is_seen_by_who_waits_in_short_turns_while_a_descendant_holds_the_output() -> None:
    lines: list[str] = []
    code = (
        "import subprocess,sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(p.pid)"
    )
    child = await start(code, lines)
    await until(lines, 1)
    try:
        turns = [await first_of(ended=child.wait(), timeout=0.25) for _ in range(40)]
        assert "ended" in turns
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)
        await child.stop(grace_seconds=5)


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    lines: list[str] = []
    child = await start(
        "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(300)", lines
    )
    await until(lines, 1)
    assert await child.stop(grace_seconds=0.2) == 128 + signal.SIGKILL


async def test_a_very_long_line_does_not_stop_the_reader() -> None:
    lines: list[str] = []
    child = await start("print('x' * 5_000_000); print('after')", lines)
    await child.wait()
    assert lines[-1] == "after"


async def test_the_first_of_several() -> None:
    async def soon() -> None:
        await asyncio.sleep(0.01)

    async def never() -> None:
        await asyncio.Event().wait()

    assert await first_of(never=never(), soon=soon()) == "soon"
    assert await first_of(never=never(), timeout=0.01) is None
