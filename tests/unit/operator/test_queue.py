"""The work queue: one key at a time, nothing lost, failures come back later."""

from __future__ import annotations

import asyncio

import pytest

from foremoe_operator.kube import queue as queue_module
from foremoe_operator.kube.queue import WorkQueue


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_key_is_never_worked_on_twice_at_once_and_never_forgotten() -> None:
    queue, running, seen = WorkQueue[str](), 0, []
    gate = asyncio.Event()

    async def process(key: str) -> None:
        nonlocal running
        running += 1
        assert running == 1
        seen.append(key)
        await gate.wait()
        running -= 1

    workers = [asyncio.create_task(queue.run(process)) for _ in range(4)]
    for _ in range(5):
        queue.add("a")
    await _settle()
    for _ in range(5):
        queue.add("a")
    await _settle()
    assert seen == ["a"] and len(queue) == 1
    gate.set()
    await _settle()
    assert seen == ["a", "a"] and len(queue) == 0
    for worker in workers:
        worker.cancel()


async def test_different_keys_are_worked_on_at_once() -> None:
    queue, seen, gate = WorkQueue[str](), [], asyncio.Event()

    async def process(key: str) -> None:
        seen.append(key)
        await gate.wait()

    workers = [asyncio.create_task(queue.run(process)) for _ in range(2)]
    for key in ("a", "b", "c"):
        queue.add(key)
    await _settle()
    assert seen == ["a", "b"]
    gate.set()
    await _settle()
    assert seen == ["a", "b", "c"]
    for worker in workers:
        worker.cancel()


async def test_a_key_comes_back_when_it_asks_to() -> None:
    queue, seen = WorkQueue[str](), []

    async def process(key: str) -> float | None:
        seen.append(key)
        return 0.0 if len(seen) < 3 else None

    worker = asyncio.create_task(queue.run(process))
    queue.add("a")
    await asyncio.sleep(0.05)
    assert len(seen) == 3
    worker.cancel()


async def test_a_key_that_fails_comes_back_with_a_growing_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, delays, failures = WorkQueue[str](), [], 3

    async def process(key: str) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise RuntimeError("no")

    def add_after(key: str, seconds: float) -> None:
        delays.append(seconds)
        queue.add(key)

    monkeypatch.setattr(queue, "add_after", add_after)
    worker = asyncio.create_task(queue.run(process))
    queue.add("a")
    await _settle()
    first = queue_module.FIRST_RETRY_SECONDS
    assert delays == [first, 2 * first, 4 * first]
    worker.cancel()
