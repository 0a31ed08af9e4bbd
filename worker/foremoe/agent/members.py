"""Which workers have joined: told by their agents, which call again every few seconds.

A worker that stops calling, or says that it leaves, is lost. Silence counts only after a long time: on a machine with
too few cores an agent may be starved for a while, and veRL notices a dead node by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from pydantic import BaseModel, ConfigDict

SILENCE_SECONDS = 90.0


class Call(BaseModel):
    """What a worker's agent says when it calls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    index: int
    joined: bool
    """Its Ray node is up."""
    ray_version: str
    accelerator: bool
    leaving: str = ""
    """Why it goes, if it does."""


class Answer(BaseModel):
    """What the head's agent answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ready: bool = False
    """The Ray head is up; a node started earlier would use up its time to register."""
    finished: bool = False
    """The driver has ended; the worker may go."""
    exit_code: int | None = None
    refused: str = ""
    """Why this worker cannot take part."""


@dataclass(kw_only=True)
class Member:
    """A worker that has called."""

    call: Call
    heard: float
    knows_end: bool = False


@dataclass(kw_only=True)
class Members:
    """The workers of a job."""

    expected: int
    ray_version: str
    clock: Callable[[], float] = monotonic
    on_change: Callable[[int], None] = lambda joined: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _members: dict[int, Member] = field(default_factory=dict)

    def receive(self, call: Call, *, ready: bool = True, finished: bool, exit_code: int | None) -> Answer:
        """Take a call and answer it."""
        refusal = self._refusal(call)
        if refusal:
            return Answer(refused=refusal)
        before = self.joined
        self._members[call.index] = Member(call=call, heard=self.clock(), knows_end=finished)
        if self.joined != before:
            self.on_change(self.joined)
        self.changed.set()
        return Answer(ready=ready, finished=finished, exit_code=exit_code)

    def _refusal(self, call: Call) -> str:
        if not 0 <= call.index < self.expected:
            return f"worker {call.index} is not one of the job's {self.expected}"
        if call.ray_version != self.ray_version:
            return (
                f"worker {call.index} has Ray {call.ray_version}, the head {self.ray_version}: "
                "head and workers must run the same image"
            )
        return ""

    @property
    def joined(self) -> int:
        """Workers whose Ray node is up."""
        return sum(member.call.joined for member in self._members.values())

    @property
    def missing(self) -> list[int]:
        """Workers that have not joined, ascending."""
        present = {index for index, member in self._members.items() if member.call.joined}
        return [index for index in range(self.expected) if index not in present]

    @property
    def accelerators(self) -> set[bool]:
        """Whether the joined workers have accelerators: one value if they agree."""
        return {member.call.accelerator for member in self._members.values()}

    @property
    def all_know_end(self) -> bool:
        """True once every worker that called has been told that the driver ended."""
        return all(member.knows_end for member in self._members.values())

    def lost(self) -> str | None:
        """Which worker is lost, in words; None if all are there."""
        for index, member in sorted(self._members.items()):
            if member.call.leaving:
                return f"worker {index} left: {member.call.leaving}"
            silent = self.clock() - member.heard
            if silent > SILENCE_SECONDS:
                return f"worker {index} has been silent for {silent:.0f} s"
        return None
