"""What an agent is told: its role and place by environment, the job by the boot file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from foremoe.errors import LaunchError
from foremoe_operator.api import constants as c
from foremoe_operator.api.boot import BootConfig


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Everything an agent knows when it starts."""

    role: c.Role
    worker_index: int | None
    boot: BootConfig
    address: str
    """IP address under which the other agents reach this one."""
    node_name: str
    termination_file: Path
    environment: Mapping[str, str]
    """What children inherit."""

    @property
    def name(self) -> str:
        """For logs: `head` or `worker 3`."""
        return str(self.role) if self.worker_index is None else f"{self.role} {self.worker_index}"

    @property
    def local(self) -> bool:
        """Whether this is one of several agents on one machine, each with a loopback address of its own."""
        return self.address.startswith("127.")

    @property
    def bind_host(self) -> str:
        """Where the HTTP server listens: the kubelet's probes come from outside the pod."""
        return self.address if self.local else "0.0.0.0"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AgentContext:
        """Read environment and boot file. Raises LaunchError naming what is missing or wrong."""
        role = _role(environment)
        boot = read_boot(Path(environment.get(c.ENV_BOOT_FILE) or Path(c.BOOT_DIRECTORY) / c.BOOT_FILE))
        index = _number(environment, c.ENV_WORKER_INDEX) if role is c.Role.WORKER else None
        if index is not None and not 0 <= index < boot.spec.workers.replicas:
            raise LaunchError(f"{c.ENV_WORKER_INDEX}={index} is not in [0, {boot.spec.workers.replicas})")
        return cls(
            role=role,
            worker_index=index,
            boot=boot,
            address=environment.get(c.ENV_POD_IP) or "127.0.0.1",
            node_name=environment.get(c.ENV_NODE_NAME, ""),
            termination_file=Path(environment.get(c.ENV_TERMINATION_FILE) or c.TERMINATION_FILE),
            environment=dict(environment),
        )


def read_boot(path: Path) -> BootConfig:
    """Read a boot file. Raises LaunchError naming the file and the first field that does not fit."""
    try:
        return BootConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise LaunchError(f"cannot read the boot file {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise LaunchError(
            f"boot file {path}: {where}: {first['msg']}; do operator and image have the same release?"
        ) from error


def _role(environment: Mapping[str, str]) -> c.Role:
    value = environment.get(c.ENV_ROLE, "")
    try:
        return c.Role(value)
    except ValueError:
        roles = ", ".join(c.Role)
        raise LaunchError(f"{c.ENV_ROLE} must be one of {roles}, got {value!r}") from None


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdigit():
        raise LaunchError(f"{name} must be a number, got {value!r}")
    return int(value)
