"""Every label, condition, reason, environment name, port and exit code that more than one program relies on.

These are API: changing a value breaks running jobs or people's dashboards, so a golden test pins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final

GROUP: Final = "foremoe.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND_JOB: Final = "ForeMoEJob"
PLURAL_JOB: Final = "foremoejobs"
SHORT_JOB: Final = "fmj"
CATEGORY: Final = "foremoe"
FIELD_MANAGER: Final = "foremoe-operator"

# Labels. Every child of a job carries all of them but the worker index, which only workers have.
LABEL_JOB: Final = "foremoe.io/job"
LABEL_ROLE: Final = "foremoe.io/role"
LABEL_WORKER_INDEX: Final = "foremoe.io/worker-index"
LABEL_ATTEMPT: Final = "foremoe.io/attempt"
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_PART_OF: Final = "app.kubernetes.io/part-of"

# A pod is named `<job>-worker-<i>`, a DNS label of at most 63 characters: 50 leaves room for five digits.
JOB_NAME_MAX_LENGTH: Final = 50
RESOURCE_GPU: Final = "nvidia.com/gpu"

# Ports. Ray's own defaults, and the agent's HTTP port.
PORT_RAY_GCS: Final = 6379
PORT_RAY_DASHBOARD: Final = 8265
PORT_AGENT: Final = 8470

# Where a pod finds what the operator told it, and the environment it is started with.
BOOT_DIRECTORY: Final = "/etc/foremoe"
BOOT_FILE: Final = "boot.json"
SCRATCH_DIRECTORY: Final = "/scratch"
ENV_BOOT_FILE: Final = "FOREMOE_BOOT_FILE"
ENV_ROLE: Final = "FOREMOE_ROLE"
ENV_WORKER_INDEX: Final = "FOREMOE_WORKER_INDEX"
ENV_NODE_NAME: Final = "FOREMOE_NODE_NAME"
ENV_POD_IP: Final = "FOREMOE_POD_IP"
# The file that becomes the container's termination message (at most 4096 bytes, kubelet's limit).
ENV_TERMINATION_FILE: Final = "FOREMOE_TERMINATION_FILE"
TERMINATION_FILE: Final = "/dev/termination-log"
TERMINATION_MAX_BYTES: Final = 4096

# What the agent tells every process of the run, and what the runtime is registered under in veRL.
ENV_TRACE_DIRECTORY: Final = "FOREMOE_TRACE_DIRECTORY"
ENV_EXPERT_PARALLEL: Final = "FOREMOE_EXPERT_PARALLEL"
ENV_PLANNER_CONFIG: Final = "FOREMOE_PLANNER_CONFIG"
ENV_EVENTS_URL: Final = "FOREMOE_EVENTS_URL"
ENV_EVENTS_TOKEN: Final = "FOREMOE_EVENTS_TOKEN"
ENV_JOB: Final = "FOREMOE_JOB"
ENGINE_VENDOR: Final = "foremoe"
CPU_ROLLOUT: Final = "foremoe_hf"
CPU_PLATFORM: Final = "cpu"

# Set by the operator for the agent, or by the pod for every program in it: not for `spec.env`.
ENV_RESERVED_PREFIXES: Final = ("FOREMOE_",)
ENV_RESERVED_NAMES: Final = ("HOME", "USER", "PYTHONUNBUFFERED", "RAY_ADDRESS")

# Mounts of the pod itself, and trees of the system: not for `spec.volumes[].mountPath`.
RESERVED_MOUNTS: Final = ("/tmp", SCRATCH_DIRECTORY, "/etc", "/usr", "/bin", "/lib", "/opt", "/var", "/run")
RESERVED_TREES: Final = (BOOT_DIRECTORY, "/dev", "/proc", "/sys")

# veRL settings the job sets itself, and the field to use instead. Whoever adds an override to the driver's command
# line adds it here, else a user's override silently wins or loses.
OWNED_OVERRIDES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "actor_rollout_ref.model.external_lib": "nothing: it loads this runtime's engine",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.rollout.n_gpus_per_node": "workers.gpusPerWorker",
        "actor_rollout_ref.rollout.nnodes": "workers.replicas",
        "data.train_files": "data.trainFiles",
        "data.val_files": "data.valFiles",
        "ray_kwargs.ray_init": "nothing: the agent starts Ray",
        "trainer.device": "nothing: the agent finds out",
        "trainer.default_local_dir": "checkpoint.path",
        "trainer.n_gpus_per_node": "workers.gpusPerWorker",
        "trainer.nnodes": "workers.replicas",
        "trainer.resume_from_path": "checkpoint.resume",
        "trainer.resume_mode": "checkpoint.resume",
        "trainer.save_freq": "checkpoint.everySteps",
        "trainer.total_epochs": "totalSteps",
        "trainer.total_training_steps": "totalSteps",
    }
)

# Paths of the agent's HTTP server.
PATH_PROGRESS: Final = "/v1/progress"
PATH_HEALTH: Final = "/healthz"
PATH_METRICS: Final = "/metrics"


class Role(StrEnum):
    """What a pod of a job is."""

    HEAD = "head"
    """Runs the Ray head and veRL's driver; holds no GPU."""
    WORKER = "worker"
    """Runs a Ray node with the GPUs; one training process (rank) per GPU."""


class Stage(StrEnum):
    """What a job's head is doing, as its agent reports it."""

    BOOTING = "Booting"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    STARTING = "Starting"
    """The driver runs but no step has begun: models load, weights are synchronised."""
    ROLLOUT = "Rollout"
    RECOMPUTE = "Recompute"
    """Old and reference log-probs: forward only."""
    UPDATE = "Update"
    WEIGHT_SYNC = "WeightSync"
    CHECKPOINT = "Checkpoint"
    FINISHED = "Finished"


class Phase(StrEnum):
    """A job's phase: derived from its conditions, for people and the printer column only."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Types of a job's conditions."""

    VALIDATED = "Validated"
    PODS_SCHEDULED = "PodsScheduled"
    READY = "Ready"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of a job's conditions."""

    # Validated
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    POD_REJECTED = "PodRejected"
    # PodsScheduled
    ALL_SCHEDULED = "AllScheduled"
    CREATING = "Creating"
    SCHEDULING = "Scheduling"
    CREATE_FAILED = "CreateFailed"
    UNSCHEDULABLE = "Unschedulable"
    # Ready
    ALL_RANKS_JOINED = "AllRanksJoined"
    WAITING_FOR_PODS = "WaitingForPods"
    WAITING_FOR_HEAD = "WaitingForHead"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    VOLUME_NOT_READY = "VolumeNotReady"
    HEAD_UNREACHABLE = "HeadUnreachable"
    FINISHED = "Finished"
    # Complete, Failed
    SUCCEEDED = "Succeeded"
    DRIVER_ERROR = "DriverError"
    MODEL_NOT_FOUND = "ModelNotFound"
    BOOT_FAILED = "BootFailed"
    HEAD_LOST = "HeadLost"
    WORKER_LOST = "WorkerLost"
    OOM_KILLED = "OOMKilled"
    EVICTED = "Evicted"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"


class EventReason(StrEnum):
    """Reasons of the events posted on a job. A closed list."""

    CREATED_SERVICE = "CreatedService"
    CREATED_CONFIG_MAP = "CreatedConfigMap"
    CREATED_HEAD_POD = "CreatedHeadPod"
    CREATED_WORKER_POD = "CreatedWorkerPod"
    FAILED_TO_CREATE = "FailedToCreate"
    DELETED_HEAD_POD = "DeletedHeadPod"
    DELETED_WORKER_POD = "DeletedWorkerPod"
    INVALID_SPEC = "InvalidSpec"
    JOB_RUNNING = "JobRunning"
    JOB_COMPLETED = "JobCompleted"
    JOB_FAILED = "JobFailed"


class ExitCode(IntEnum):
    """Exit codes of the agent that are its own, not the driver's (sysexits.h values)."""

    CONFIG = 78
    """The job cannot start as configured: the report's `problem` says why."""
    UNAVAILABLE = 69
    """A peer never appeared or went away: the report's `problem` says which."""
