"""What kopf is told to watch.

Only indices and event handlers: those keep no state, so kopf puts neither finalizers nor annotations on anything. Jobs,
pods, services and config maps all do the same when something happens to them: they wake their job.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Mapping
from typing import Any, Final

import kopf

from foremoe_operator import metrics
from foremoe_operator.api.constants import FIELD_MANAGER, GROUP, LABEL_JOB, PLURAL_JOB, VERSION
from foremoe_operator.core.model import Announce, Pod
from foremoe_operator.handlers.cache import IndexCache
from foremoe_operator.kube.convert import Key, StoredJob, job_from, key_of_child, owner_uid, pod_from
from foremoe_operator.kube.queue import WorkQueue

_CHILDREN: Final = ("pods", "services", "configmaps")
_LABELLED: Final = {LABEL_JOB: kopf.PRESENT}


class Handlers:
    """All registrations of the operator, and the way from the controller back to kopf: posting events."""

    def __init__(self, *, cache: IndexCache, queue: WorkQueue[Key]) -> None:
        self.registry = kopf.OperatorRegistry()
        self._cache = cache
        self._queue = queue
        self._last_event = time.time()
        # kopf finds its event queue through context variables that exist only inside a handler.
        self._context: contextvars.Context | None = None
        self._register()

    def announce(self, stored: StoredJob, announcement: Announce) -> None:
        """Post an event on a job."""
        if self._context is not None:
            kind = "Warning" if announcement.warning else "Normal"
            body = kopf.Body(stored.identity)  # type: ignore[arg-type]  # kopf's TypedDict of the same content
            self._context.copy().run(
                kopf.event, body, type=kind, reason=announcement.reason, message=announcement.message
            )

    def _register(self) -> None:
        registry = self.registry
        kopf.on.login(registry=registry, id="login")(kopf.login_via_client)
        kopf.on.startup(registry=registry, id="settings")(configure)
        kopf.on.probe(registry=registry, id="seconds-since-last-event")(self._age)
        job = (GROUP, VERSION, PLURAL_JOB)
        kopf.index(*job, registry=registry, id="jobs")(index_job)
        kopf.on.event(*job, registry=registry, id="job")(self._on_job)
        kopf.index("", "v1", "pods", registry=registry, id="pods", labels=_LABELLED)(index_pod)
        for plural in ("services", "configmaps"):
            kopf.index("", "v1", plural, registry=registry, id="children", labels=_LABELLED)(index_child)
        for plural in _CHILDREN:
            kopf.on.event("", "v1", plural, registry=registry, id=f"child-{plural}", labels=_LABELLED)(self._on_child)

    async def _age(self, **_: Any) -> int:
        return int(time.time() - self._last_event)

    def _seen(self, kind: str) -> None:
        self._last_event = time.time()
        metrics.WATCH_TIMESTAMP.labels(kind=kind).set(self._last_event)

    async def _on_job(self, body: Mapping[str, Any], **indices: Any) -> None:
        if self._context is None:
            self._context = contextvars.copy_context()
            self._cache.connect(**{name: indices[name] for name in ("jobs", "pods", "children")})
        self._seen("ForeMoEJob")
        metadata = body["metadata"]
        self._queue.add((metadata["namespace"], metadata["name"]))

    async def _on_child(self, body: Mapping[str, Any], resource: Any, **_: Any) -> None:
        self._seen(str(resource.kind))
        self._queue.add(key_of_child(body))


async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """kopf's own settings; why, is said in the design notes of the operator's documentation."""
    # The watched kinds are fixed and checked before the start: no need to watch CRDs and namespaces.
    settings.scanning.disabled = True
    # Never used, but kopf's defaults are shared by all operators of a cluster.
    settings.persistence.finalizer = f"{GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.watching.chunk_size = 500
    for plural in _CHILDREN:
        settings.watching.label_selectors[plural] = LABEL_JOB
    settings.posting.reporting_component = FIELD_MANAGER


async def index_job(body: Mapping[str, Any], **_: Any) -> dict[Key, StoredJob]:
    """Jobs by namespace and name."""
    stored = job_from(_plain(body))
    return {(stored.job.namespace, stored.job.name): stored}


async def index_pod(body: Mapping[str, Any], **_: Any) -> dict[Key, Pod]:
    """Pods by their job."""
    return {key_of_child(body): pod_from(_plain(body))}


async def index_child(body: Mapping[str, Any], resource: Any, **_: Any) -> dict[Key, tuple[str, str, str]]:
    """Services and config maps by their job."""
    plain = _plain(body)
    return {key_of_child(body): (str(resource.kind), str(plain["metadata"]["name"]), owner_uid(plain))}


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    """kopf's live view of an object as the dict it stands for."""
    return dict(body)
