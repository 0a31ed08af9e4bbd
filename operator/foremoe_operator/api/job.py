"""`ForeMoEJob.spec`: one veRL training run on a Ray cluster of its own.

Field descriptions become the text of `kubectl explain`; bounds and rules become the CRD's, so that a mistake is refused
by the API server and not found out in a pod. Every string, list and map has an upper bound: without them the API
server's estimate of what the CEL rules cost exceeds its budget. Fields are here only once they work.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from foremoe_operator.api.base import ApiModel, map_list, rule, rules
from foremoe_operator.api.constants import (
    ENV_RESERVED_NAMES,
    ENV_RESERVED_PREFIXES,
    OWNED_OVERRIDES,
    RESERVED_MOUNTS,
    RESERVED_TREES,
)


def _cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _owned_override_pattern() -> str:
    """RE2 pattern of Hydra overrides that set an owned key, something below it, or a whole mapping above it."""
    parents = {key.rsplit(".", depth)[0] for key in OWNED_OVERRIDES for depth in range(1, key.count(".") + 1)}
    exact, above = (
        "|".join(key.replace(".", "[.]") for key in sorted(keys)) for keys in (OWNED_OVERRIDES.keys(), parents)
    )
    return f"^[+~]*(({exact})([=.@:]|$)|({above})(=|$))"


_INSIDE = "({path} == v.mountPath || {path}.startsWith(v.mountPath + '/'))"


def _on_a_volume(path: str) -> str:
    return f"self.volumes.exists(v, {_INSIDE.format(path=path)})"


def _on_a_writable_volume(path: str) -> str:
    """True if the innermost volume around `path` can be written."""
    inside = _INSIDE.format(path=path)
    inner = inside.replace("v.", "w.")
    shadowed = f"self.volumes.exists(w, w.readOnly && {inner} && size(w.mountPath) > size(v.mountPath))"
    return f"self.volumes.exists(v, !v.readOnly && {inside} && !{shadowed})"


AbsolutePath = Annotated[
    str,
    Field(
        pattern=r"^(/[^/:\x00]+)+$",
        max_length=1024,
        json_schema_extra=rules(
            rule("!self.matches('/[.][.]?(/|$)')", "a path must not have '.' or '..' as a part: write it out")
        ),
    ),
]
DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
DnsName = Annotated[
    str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253)
]
_POSITIVE = r"^(0[.]0*[1-9][0-9]*|[1-9][0-9]*([.][0-9]+)?)"
CpuQuantity = Annotated[str, Field(pattern=_POSITIVE + r"m?$", max_length=16)]
MemoryQuantity = Annotated[str, Field(pattern=_POSITIVE + r"(k|M|G|T|Ki|Mi|Gi|Ti)?$", max_length=16)]
LabelValue = Annotated[str, Field(pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", max_length=63)]
_LABEL_KEY = "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
NodeSelector = Annotated[
    dict[str, LabelValue],
    Field(
        max_length=16,
        json_schema_extra=rules(
            rule(
                f"self.all(k, size(k) <= 317 && k.matches('{_LABEL_KEY}'))",
                "nodeSelector: every key must be a label key, for example topology.kubernetes.io/zone",
            )
        ),
    ),
]
Override = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        pattern=r"^([+]{0,2}[A-Za-z_][A-Za-z0-9_./@:-]*=.*|~[A-Za-z_][A-Za-z0-9_./@:-]*(=.*)?)$",
        json_schema_extra=rules(
            rule(
                f"!self.matches('{_owned_override_pattern()}')",
                "args must not set what other fields of the job set: " + ", ".join(OWNED_OVERRIDES),
                reason="FieldValueForbidden",
            )
        ),
    ),
]


class ImagePullPolicy(StrEnum):
    """When the kubelet pulls the image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ResumePolicy(StrEnum):
    """What to do with checkpoints that are already there."""

    AUTO = "Auto"
    """Continue from the newest complete checkpoint, if there is one."""
    NEVER = "Never"
    """Start from the model given, whatever is there."""


class Resources(ApiModel):
    """CPU and memory of one pod. GPUs are set by `workers.gpusPerWorker`."""

    cpu: CpuQuantity | None = Field(
        None, description="CPU request, for example 8 or 500m. Default: 100m. No CPU limit is set."
    )
    memory: MemoryQuantity | None = Field(
        None, description="Memory request and limit, for example 64Gi. Default: no request and no limit."
    )


class Head(ApiModel):
    """The pod that runs the Ray head and veRL's driver. It needs no GPU."""

    resources: Resources = Field(default_factory=Resources, description="CPU and memory of the head pod.")
    node_selector: NodeSelector = Field(default_factory=dict, description="Labels a node must carry to run the head.")


class Workers(ApiModel):
    """The pods that train: one training process (rank) per GPU."""

    replicas: int = Field(ge=1, le=4096, description="Number of worker pods.")
    gpus_per_worker: int = Field(8, ge=1, le=64, description="GPUs of each worker pod, and so its number of ranks.")
    resources: Resources = Field(default_factory=Resources, description="CPU and memory of each worker pod.")
    node_selector: NodeSelector = Field(default_factory=dict, description="Labels a node must carry to run a worker.")


class Parallelism(ApiModel):
    """How the ranks are grouped."""

    expert: int = Field(
        1,
        ge=1,
        le=4096,
        description="Expert-parallel size: over how many ranks each layer's experts are spread. "
        "Must divide workers.replicas * workers.gpusPerWorker.",
    )


class Model(ApiModel):
    """The model to train."""

    path: AbsolutePath = Field(
        description="Directory of a Hugging Face Mixture-of-Experts model with its tokenizer, inside a mounted volume."
    )


class Data(ApiModel):
    """Training prompts in veRL's parquet layout."""

    train_files: list[AbsolutePath] = Field(
        min_length=1, max_length=64, description="Parquet files to train on, inside mounted volumes."
    )
    val_files: list[AbsolutePath] = Field(
        default_factory=list, max_length=64, description="Parquet files to validate on; the training files if empty."
    )


class Volume(ApiModel):
    """A persistent volume claim mounted into every pod of the job."""

    name: DnsLabel = Field(description="Name of the volume, unique in the job.")
    claim_name: DnsName = Field(
        description="PersistentVolumeClaim in the job's namespace; ReadWriteMany if pods sit on several nodes."
    )
    mount_path: AbsolutePath = Field(description="Where the volume appears in the pods.")
    read_only: bool = Field(False, description="Mount the volume read-only.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"!(self.mountPath in {_cel_list(RESERVED_MOUNTS)})"
                f" && !{_cel_list(RESERVED_TREES)}.exists(t, "
                "self.mountPath == t || self.mountPath.startsWith(t + '/'))",
                "volumes: mountPath must not be one the pod needs itself: "
                + ", ".join((*RESERVED_MOUNTS, *(f"{tree}/..." for tree in RESERVED_TREES))),
                field=".mountPath",
                reason="FieldValueForbidden",
            ),
            rule(
                "!(self.name in ['tmp', 'scratch', 'shm', 'boot'])",
                "volumes: the names tmp, scratch, shm and boot are taken by the pod's own volumes",
                field=".name",
                reason="FieldValueForbidden",
            ),
        )
    )


class Checkpoint(ApiModel):
    """Where and how often training state is saved."""

    path: AbsolutePath = Field(description="Directory for checkpoints, on a volume that all pods share.")
    every_steps: int = Field(50, ge=1, le=1_000_000, description="Save after every so many steps, and after the last.")
    resume: ResumePolicy = Field(
        ResumePolicy.AUTO,
        description="Auto: continue from the newest checkpoint, if there is one. Never: start from the model.",
    )


class Trace(ApiModel):
    """Where the recorded routing of the run is kept."""

    path: AbsolutePath = Field(description="Directory of the routing trace, on a volume that all pods share.")


class EnvVar(ApiModel):
    """One environment variable of every pod of the job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] = Field(description="Its name.")
    value: Annotated[str, Field(max_length=4096)] = Field("", description="Its value, taken literally.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"!(self.name in {_cel_list(ENV_RESERVED_NAMES)})"
                f" && !{_cel_list(ENV_RESERVED_PREFIXES)}.exists(p, self.name.startsWith(p))",
                "env: these names belong to the pod: "
                + ", ".join((*ENV_RESERVED_NAMES, *(f"{prefix}*" for prefix in ENV_RESERVED_PREFIXES))),
                field=".name",
                reason="FieldValueForbidden",
            )
        )
    )


class ForeMoEJobSpec(ApiModel):
    """Desired state of a ForeMoEJob. It cannot be changed: delete the job and create it again."""

    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] = Field(
        description="Image of head and workers; it must contain foremoe[worker]."
    )
    image_pull_policy: ImagePullPolicy = Field(
        ImagePullPolicy.IF_NOT_PRESENT, description="When the kubelet pulls the image: Always, IfNotPresent or Never."
    )
    model: Model = Field(description="The model to train.")
    data: Data = Field(description="The prompts to train on.")
    total_steps: int = Field(ge=1, le=10_000_000, description="Number of RL steps to train for.")
    args: list[Override] = Field(
        default_factory=list,
        max_length=128,
        description="Further settings of veRL's trainer, as Hydra overrides (key=value, +key=value, ~key). What the "
        "job sets itself (model path, data, nodes, steps, checkpoints) is refused here.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    head: Head = Field(default_factory=Head, description="The pod that runs the Ray head and the driver.")
    workers: Workers = Field(description="The pods that train.")
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How the ranks are grouped.")
    volumes: list[Volume] = Field(
        default_factory=list,
        max_length=16,
        description="Claims mounted into every pod of the job.",
        json_schema_extra=map_list("name"),
    )
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables of every pod of the job.",
        json_schema_extra=map_list("name"),
    )
    checkpoint: Checkpoint = Field(description="Where and how often training state is saved.")
    trace: Trace | None = Field(None, description="Keep the recorded routing of the run. Default: not kept.")
    startup_deadline_seconds: int = Field(
        1800, ge=10, le=604_800, description="Fail the job if its ranks have not all joined after so many seconds."
    )
    active_deadline_seconds: int | None = Field(
        None,
        ge=10,
        le=31_536_000,
        description="Fail the job if it runs longer than this many seconds. Default: no limit.",
    )
    termination_grace_period_seconds: int = Field(
        60, ge=0, le=3600, description="Seconds a pod gets to stop after it was told to."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self == oldSelf", "spec is immutable: delete the job and create it again", reason="FieldValueForbidden"
            ),
            rule(
                "(self.workers.replicas * self.workers.gpusPerWorker) % self.parallelism.expert == 0",
                "parallelism.expert must divide workers.replicas * workers.gpusPerWorker",
                field=".parallelism.expert",
            ),
            rule(
                "self.volumes.all(v, self.volumes.exists_one(w, w.mountPath == v.mountPath))",
                "volumes: two volumes have the same mountPath",
                field=".volumes",
            ),
            rule(
                _on_a_volume("self.model.path"),
                "model.path must lie inside the mountPath of one of the volumes",
                field=".model.path",
            ),
            rule(
                f"self.data.trainFiles.all(f, {_on_a_volume('f')})",
                "data.trainFiles must all lie inside the mountPath of one of the volumes",
                field=".data.trainFiles",
            ),
            rule(
                f"self.data.valFiles.all(f, {_on_a_volume('f')})",
                "data.valFiles must all lie inside the mountPath of one of the volumes",
                field=".data.valFiles",
            ),
            rule(
                _on_a_writable_volume("self.checkpoint.path"),
                "checkpoint.path must lie inside the mountPath of a volume that is not read-only",
                field=".checkpoint.path",
            ),
            rule(
                f"!has(self.trace) || {_on_a_writable_volume('self.trace.path')}",
                "trace.path must lie inside the mountPath of a volume that is not read-only",
                field=".trace.path",
            ),
        )
    )

    @property
    def ranks(self) -> int:
        """Number of training processes: workers times GPUs."""
        return self.workers.replicas * self.workers.gpus_per_worker
