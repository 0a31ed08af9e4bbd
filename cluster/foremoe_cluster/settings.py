"""Every fixed name, path and address of the cluster, and the few things that can be set.

Names are the same in every checkout: that is how a later run, from wherever, finds and removes what
an earlier one left. Environment variables override the settings (FOREMOE_CLUSTER_NODES and so on).
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

STATE: Final = Path("/var/lib/foremoe-cluster")
"""Everything the cluster writes, except the programs (see `programs`)."""

PROCESS_MARK: Final = "FOREMOE_CLUSTER_ROLE"
"""Environment variable by which our processes are recognised; its value is the process's role."""

BRIDGE: Final = "fm0"
LINK_PREFIX: Final = "fm-"
FIREWALL_TABLE: Final = "foremoe_cluster"
CGROUP: Final = "foremoe-cluster"

HOST_ADDRESS: Final = "10.99.0.254"
HOST_NETWORK: Final = "10.99.0.0/24"
API_SERVER: Final = f"https://{HOST_ADDRESS}:6443"
POD_NETWORK: Final = "10.244.0.0/16"
SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE_ADDRESS: Final = "10.96.0.1"
DNS_ADDRESS: Final = "10.96.0.10"
CLUSTER_DOMAIN: Final = "cluster.local"
PAUSE_IMAGE: Final = "localhost/foremoe-pause:1"
STORAGE_CLASS: Final = "foremoe-shared"

MOUNT_POINTS: Final = tuple(
    Path(path)
    for path in (
        "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers",
        "/run/containerd", "/run/netns", "/run/mount",
    )
)  # fmt: skip
"""Paths the node programs insist on. Each node mounts its own there; on the host they stay empty."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user may choose."""

    nodes: int = 2
    """Number of nodes, 1 to 9."""
    gpus: int = 8
    """Stand-in `nvidia.com/gpu` devices per node; 8 is what an HGX machine has."""

    def __post_init__(self) -> None:
        """Refuse what the address plan has no room for."""
        if not 1 <= self.nodes <= 9:
            raise ValueError(f"nodes: {self.nodes} is not between 1 and 9")
        if not 0 <= self.gpus <= 64:
            raise ValueError(f"gpus: {self.gpus} is not between 0 and 64")

    @classmethod
    def from_environment(cls, *, nodes: int | None = None, gpus: int | None = None) -> "Settings":
        """The given values, else those of the environment, else the defaults."""
        return cls(
            nodes=nodes if nodes is not None else _integer("FOREMOE_CLUSTER_NODES", cls.nodes),
            gpus=gpus if gpus is not None else _integer("FOREMOE_CLUSTER_GPUS", cls.gpus),
        )

    def all_nodes(self) -> list["Node"]:
        """The nodes, node1 first."""
        return [Node(number=number) for number in range(1, self.nodes + 1)]

    def to_dict(self) -> dict[str, int]:
        """For the record a running cluster keeps of its settings."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node: its names, addresses and folders."""

    number: int

    @property
    def name(self) -> str:
        """The name of the node, its role and its folder."""
        return f"node{self.number}"

    @property
    def address(self) -> str:
        """Its address on the bridge."""
        return f"10.99.0.{self.number}"

    @property
    def pod_subnet(self) -> str:
        """Where the addresses of its pods come from."""
        return f"10.244.{self.number}.0/24"

    @property
    def link(self) -> str:
        """The host's end of its cable."""
        return f"{LINK_PREFIX}{self.name}"

    @property
    def cgroup(self) -> str:
        """Parent of all its pods' cgroups."""
        return f"/{CGROUP}/{self.name}"

    @property
    def folder(self) -> Path:
        """What lives as long as the node runs."""
        return STATE / "nodes" / self.name

    @property
    def images(self) -> Path:
        """containerd's root: outlives the node, so that images are there next time."""
        return STATE / "images" / self.name

    @property
    def socket(self) -> Path:
        """containerd's socket."""
        return self.folder / "run" / "containerd.sock"


KUBECONFIG: Final = STATE / "kubeconfig"
PKI: Final = STATE / "pki"
LOGS: Final = STATE / "logs"
RUN: Final = STATE / "run"
SHARED_VOLUMES: Final = STATE / "volumes"
BUILD: Final = STATE / "build"
KEPT: Final = (STATE / "images", BUILD)
"""What `down` leaves, to be quick next time; `down --purge` removes it too."""


def _integer(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text}: a whole number is needed") from None
