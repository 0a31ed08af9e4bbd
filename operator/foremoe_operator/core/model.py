"""What the core sees and says: the job, its pods as observed, and the actions it asks for.

Plain frozen data, made by `kube/` from what the API server sent. An observation is *live* when it was read from the API
server just now and not from the watch's cache: only then does a missing pod prove anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from foremoe_operator.api.constants import EventReason, Role
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.progress import Progress
from foremoe_operator.api.status import ForeMoEJobStatus

Manifest = dict[str, object]
"""A Kubernetes object, JSON-ready."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A ForeMoEJob as it is stored. `spec` is None when it does not parse: then `problems` says why."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    spec: ForeMoEJobSpec | None
    problems: tuple[str, ...] = ()
    status: ForeMoEJobStatus = field(default_factory=ForeMoEJobStatus)
    readable: bool = True
    """False if the status does not parse: a newer operator wrote it, and only that one knows how far the job is."""
    deleting: bool = False


@dataclass(frozen=True, kw_only=True)
class Container:
    """The one container of a pod. `reason` and `message` are the kubelet's; `exit_code` is set once it has ended."""

    started: bool = False
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    finished: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod that carries a job's label. `owner_uid` tells whether it belongs to this job or an earlier namesake."""

    name: str
    uid: str
    owner_uid: str
    role: Role
    index: int = 0
    attempt: int = 1
    phase: str = "Pending"
    created: datetime
    node: str | None = None
    ip: str | None = None
    ready: bool = False
    unschedulable: str = ""
    sandbox_ready: bool = False
    reason: str = ""
    message: str = ""
    container: Container = field(default_factory=Container)
    deleting: datetime | None = None

    @property
    def ended(self) -> bool:
        """Whether its container will never run again."""
        return self.phase in ("Succeeded", "Failed") or self.container.exit_code is not None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The API server's answer to an object it did not create. `final` means that the same object never will be."""

    kind: str
    name: str
    code: int
    message: str
    final: bool


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What exists of a job. `children` holds (kind, name) of its Service and ConfigMap, `pods` all its pods."""

    pods: tuple[Pod, ...] = ()
    children: frozenset[tuple[str, str]] = frozenset()
    progress: Progress | None = None
    head_answered: bool | None = None
    """Whether the head's agent answered just now; None if it was not asked."""
    refusals: tuple[Refusal, ...] = ()
    live: bool = False


@dataclass(frozen=True, kw_only=True)
class Create:
    """Create this object unless it is already there and ours."""

    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Delete this pod, and no other of the same name."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True)
class Announce:
    """Post an event on the job once the status is stored."""

    reason: EventReason
    message: str
    warning: bool = False


Action = Create | DeletePod | Announce


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do about a job now.

    `status` is what to store, None if the job is not ours to write. `requeue_seconds` is when to look again if nothing
    happens. With `confirm` set, nothing was decided: observe the API server itself and ask again.
    """

    actions: tuple[Action, ...] = ()
    status: ForeMoEJobStatus | None = None
    requeue_seconds: float | None = None
    confirm: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The operator's own patience, in seconds; a job's deadlines are in its spec."""

    poll_seconds: float = 5.0
    """How often the head is asked how it goes: what `kubectl get` shows is at most this old."""
    start_poll_seconds: float = 1.0
    """The same while ranks are joining, when things change fast."""
    retry_seconds: float = 10.0
    """After an object was refused: a quota may have room by then."""
    head_silence_seconds: float = 300.0
    """A head that runs but does not answer is given up after this; a busy machine is silent for a while."""
    silence_notice_seconds: float = 30.0
    """A silence is shown after this: on a busy machine an answer is late now and then, and that is no news."""
    worker_grace_seconds: float = 15.0
    """After a worker has failed the head gets this long to end and to say what it knows."""
    volume_seconds: float = 20.0
    """A pod on a node whose volumes are not there after this is reported; mounting takes a few seconds."""
