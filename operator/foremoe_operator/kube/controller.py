"""The loop around the core: observe, decide, act, store. One call handles one job once.

A crash between any two steps of a call leaves a state from which the next call reaches the same end. What was just
created is remembered until the watch shows it, so that a slow watch does not look like a missing pod.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, Protocol

from foremoe_operator import metrics
from foremoe_operator.api.constants import EventReason, Role
from foremoe_operator.api.progress import Progress
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.manifests import head_name
from foremoe_operator.core.model import (
    Announce,
    Create,
    Decision,
    DeletePod,
    Job,
    Limits,
    Manifest,
    Observed,
    Pod,
    Refusal,
)
from foremoe_operator.core.reconcile import reconcile
from foremoe_operator.kube.agent import AgentClient
from foremoe_operator.kube.client import KubeClient, KubeError
from foremoe_operator.kube.convert import Key, StoredJob, job_from, owner_uid, pod_from

_log = logging.getLogger(__name__)
_REMEMBER_SECONDS: Final = 10.0
_CONFLICT_SECONDS: Final = 0.2
_FINAL_CODES: Final = frozenset({400, 422})
_REFUSED_CODES: Final = frozenset({400, 403, 404, 409, 422})
_CREATED: Final = {
    "Service": EventReason.CREATED_SERVICE,
    "ConfigMap": EventReason.CREATED_CONFIG_MAP,
    Role.HEAD: EventReason.CREATED_HEAD_POD,
    Role.WORKER: EventReason.CREATED_WORKER_POD,
}


class Cache(Protocol):
    """What the watches have seen."""

    def job(self, key: Key) -> StoredJob | None:
        """The job of that namespace and name."""

    def pods(self, key: Key) -> Iterable[Pod]:
        """All pods that carry the job's label."""

    def children(self, key: Key) -> Iterable[tuple[str, str, str]]:
        """Kind, name and owner UID of its services and config maps."""


Announcer = Callable[[StoredJob, Announce], None]


@dataclass
class _Memory:
    """What is known of a job beyond the cache; all of it can be lost."""

    created: dict[str, tuple[float, Pod]] = field(default_factory=dict)
    created_children: dict[tuple[str, str], float] = field(default_factory=dict)
    asked: float = 0.0
    heard: Progress | None = None
    heard_from: str = ""
    uid: str = ""
    written: StoredJob | None = None
    superseded: set[str] = field(default_factory=set)
    refusals: tuple[Refusal, ...] = ()


class Controller:
    """Reconciles jobs one call at a time; calls for different jobs may run at once, for one job never."""

    def __init__(
        self, *, cache: Cache, client: KubeClient, agents: AgentClient, announce: Announcer, limits: Limits
    ) -> None:
        self._cache = cache
        self._client = client
        self._agents = agents
        self._announce = announce
        self._limits = limits
        self._memories: dict[Key, _Memory] = {}

    async def process(self, key: Key) -> float | None:
        """Bring one job a step further; returns after how many seconds to look again, None if not by itself."""
        begun = time.monotonic()
        try:
            again = await self._process(key)
        except Exception:
            metrics.RECONCILE_SECONDS.labels(result="error").observe(time.monotonic() - begun)
            metrics.RECONCILE_ERRORS.inc()
            raise
        metrics.RECONCILE_SECONDS.labels(result="ok").observe(time.monotonic() - begun)
        return again

    async def _process(self, key: Key) -> float | None:
        stored = self._cache.job(key)
        if stored is None:
            self._memories.pop(key, None)
            metrics.forget(key)
            return None
        memory = self._memories.setdefault(key, _Memory(uid=stored.job.uid))
        if memory.uid != stored.job.uid:
            memory = self._memories[key] = _Memory(uid=stored.job.uid)
        stored = _newest(stored, memory)
        observed = await self._observe(key, stored, memory)
        now = datetime.now(UTC)
        decision = reconcile(stored.job, observed, now, self._limits)
        if decision.confirm:
            observed = replace(observed, pods=await self._live_pods(key), live=True)
            decision = reconcile(stored.job, observed, now, self._limits)
        try:
            return await self._carry_out(key, stored, memory, decision)
        except KubeError as error:
            if error.code == 409:  # someone else changed the job: the watch is about to tell
                return _CONFLICT_SECONDS
            raise

    async def _observe(self, key: Key, stored: StoredJob, memory: _Memory) -> Observed:
        pods = {pod.uid: pod for pod in self._cache.pods(key)}
        now = time.monotonic()
        for uid, (since, pod) in list(memory.created.items()):
            if uid in pods or now - since > _REMEMBER_SECONDS:
                del memory.created[uid]
            else:
                pods[uid] = pod
        children = {(kind, name) for kind, name, uid in self._cache.children(key) if uid == stored.job.uid}
        children |= {each for each, since in memory.created_children.items() if now - since <= _REMEMBER_SECONDS}
        answered = await self._ask_head(stored.job, pods.values(), memory)
        return Observed(
            pods=tuple(pods.values()),
            children=frozenset(children),
            progress=memory.heard,
            head_answered=answered,
            refusals=memory.refusals,
        )

    async def _live_pods(self, key: Key) -> tuple[Pod, ...]:
        return tuple(pod_from(raw) for raw in await self._client.pods_of(*key))

    async def _ask_head(self, job: Job, pods: Iterable[Pod], memory: _Memory) -> bool | None:
        """Fetch the head's report if it is time; None if the head was not asked."""
        head = next((pod for pod in pods if pod.name == head_name(job.name) and pod.owner_uid == job.uid), None)
        if head is None or head.ip is None or head.ended or not head.container.started or head.deleting:
            if head is not None and head.ended:
                memory.heard = None
            return None
        if head.uid != memory.heard_from:
            memory.heard, memory.heard_from = None, head.uid
        if time.monotonic() - memory.asked < self._limits.start_poll_seconds / 2:
            return None
        memory.asked = time.monotonic()
        report = await self._agents.progress(head.ip)
        if report is not None:
            memory.heard = report
            return True
        # Before its first answer a head is starting, not silent; the start-up deadline covers that.
        return False if head.ready or memory.heard is not None else None

    async def _carry_out(self, key: Key, stored: StoredJob, memory: _Memory, decision: Decision) -> float | None:
        """Deletions, then the status, then events, then creations.

        The status comes before what is created, so that a job is seen to be taken up at once; and after what is
        deleted, so that a job that has ended holds no GPU.
        """
        deletions = [each for each in decision.actions if isinstance(each, DeletePod)]
        await asyncio.gather(*(self._client.delete_pod(key[0], each.name, each.uid) for each in deletions))
        written = await self._store(stored, memory, decision.status)
        if written is None:  # the job is gone, as its watch will tell: nothing more is created for it
            return self._limits.retry_seconds
        stored = written
        for each in decision.actions:
            if isinstance(each, Announce):
                self._announce(stored, each)
        if deletions:
            self._announce(stored, _deleted(deletions, stored.job))
        manifests = [each.manifest for each in decision.actions if isinstance(each, Create)]
        if not manifests:
            return decision.requeue_seconds
        await self._create_all(stored, memory, manifests)
        return self._limits.retry_seconds if memory.refusals else 0.0

    async def _create_all(self, stored: StoredJob, memory: _Memory, manifests: list[Manifest]) -> None:
        """Service and ConfigMap first, because pods refer to them; then all pods at once."""
        begun = time.monotonic()
        memory.refusals = ()
        first = [each for each in manifests if each["kind"] != "Pod"]
        pods = [each for each in manifests if each["kind"] == "Pod"]
        answers = list(await asyncio.gather(*(self._create(each, stored.job) for each in first)))
        if not any(isinstance(each, Refusal) for each in answers):
            answers += await asyncio.gather(*(self._create(each, stored.job) for each in pods))
        made = [each for each in answers if not isinstance(each, Refusal)]
        memory.refusals = tuple(each for each in answers if isinstance(each, Refusal))
        for raw in made:
            if raw["kind"] == "Pod":
                pod = pod_from(raw)
                memory.created[pod.uid] = (time.monotonic(), pod)
            else:
                metadata = raw["metadata"]
                assert isinstance(metadata, dict)
                memory.created_children[str(raw["kind"]), str(metadata["name"])] = time.monotonic()
        seconds = time.monotonic() - begun
        metrics.CREATE_SECONDS.observe(seconds)
        _log.info("%s/%s: %d objects created in %.3f s", stored.job.namespace, stored.job.name, len(made), seconds)
        for refusal in memory.refusals:
            _log.warning("%s/%s: not created: %s", stored.job.namespace, stored.job.name, refusal.message)
        for announcement in _creations(made, memory.refusals):
            self._announce(stored, announcement)

    async def _create(self, manifest: Manifest, job: Job) -> Manifest | Refusal:
        """Create an object, or find that it is there already and ours; an earlier job's or a stranger's is refused."""
        metadata = manifest["metadata"]
        assert isinstance(metadata, dict)
        kind, name = str(manifest["kind"]), str(metadata["name"])
        try:
            return {"kind": kind, **await self._client.create(manifest)}
        except KubeError as error:
            if error.code not in _REFUSED_CODES:
                raise
            if error.code != 409 or error.reason != "AlreadyExists":
                final = error.code in _FINAL_CODES
                return Refusal(kind=kind, name=name, code=error.code, message=str(error), final=final)
        try:
            existing = await self._client.read(manifest)
            if owner_uid(existing) == job.uid:
                # Pods and immutable config maps cannot have drifted; a service can.
                return {"kind": kind, **(await self._client.apply(manifest) if kind == "Service" else existing)}
        except KubeError as error:
            if error.code != 404:
                raise
        message = "an object of this name exists and does not belong to this job; it is waited for until it is gone"
        return Refusal(kind=kind, name=name, code=409, message=message, final=False)

    async def _store(self, stored: StoredJob, memory: _Memory, status: ForeMoEJobStatus | None) -> StoredJob | None:
        """Write the status if it differs from what is stored; None if the job was deleted meanwhile."""
        job = stored.job
        if status is None:
            return stored
        metrics.observe(job, status)
        if status == job.status and stored.raw_status:
            return stored
        try:
            answer = await self._client.write_status({**stored.identity, "status": status.dump()})
        except KubeError as error:
            if error.code == 404:
                return None
            raise
        if job.status.phase is not status.phase:
            _log.info("%s/%s: %s", job.namespace, job.name, status.phase)
        memory.superseded.add(stored.resource_version)
        memory.written = job_from(answer)
        return memory.written


def _newest(stored: StoredJob, memory: _Memory) -> StoredJob:
    """The job as we wrote it last, while the watch still shows a version from before."""
    if memory.written is not None and stored.resource_version in memory.superseded:
        return memory.written
    memory.written = None
    memory.superseded.clear()
    return stored


def _creations(made: list[Manifest], refusals: tuple[Refusal, ...]) -> Iterable[Announce]:
    names: dict[EventReason, list[str]] = {}
    for raw in made:
        kind, metadata = str(raw.get("kind")), raw["metadata"]
        assert isinstance(metadata, dict)
        reason = _CREATED[pod_from(raw).role if kind == "Pod" else kind]
        names.setdefault(reason, []).append(str(metadata["name"]))
    for reason, each in names.items():
        yield Announce(reason=reason, message=_listed(each))
    if refusals:
        message = f"{refusals[0].kind} {refusals[0].name}: {refusals[0].message}"
        yield Announce(reason=EventReason.FAILED_TO_CREATE, message=message[:1024], warning=True)


def _deleted(deletions: list[DeletePod], job: Job) -> Announce:
    workers = [each.name for each in deletions if each.name != head_name(job.name)]
    reason = EventReason.DELETED_WORKER_POD if workers else EventReason.DELETED_HEAD_POD
    return Announce(reason=reason, message=_listed([each.name for each in deletions]))


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)})"
