"""kubectl and helm against one cluster, as the demo and a user would call them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foremoe_cluster import programs
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.shell import run


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The two programs and the cluster they talk to."""

    kubectl_path: Path
    helm_path: Path
    kubeconfig: Path

    @classmethod
    def embedded(cls, kubeconfig: Path) -> "Tools":
        """The pinned programs that were built or fetched for the embedded cluster."""
        folder = programs.binaries()
        return cls(kubectl_path=folder / "kubectl", helm_path=folder / "helm", kubeconfig=kubeconfig)

    @classmethod
    def installed(cls, kubeconfig: Path) -> "Tools":
        """The programs on PATH, for a cluster of the user's own. Raises ClusterError where one is missing."""
        if not kubeconfig.is_file():
            raise ClusterError(f"KUBECONFIG={kubeconfig}: no such file")
        paths = {name: shutil.which(name) for name in ("kubectl", "helm")}
        for name, path in paths.items():
            if path is None:
                raise ClusterError(f"{name} is not on PATH; it is needed to use a cluster of your own")
        return cls(kubectl_path=Path(str(paths["kubectl"])), helm_path=Path(str(paths["helm"])), kubeconfig=kubeconfig)

    @property
    def environment(self) -> Mapping[str, str]:
        """What both programs are started with."""
        return {"KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        """Standard output of a kubectl command that has to succeed."""
        return run(self.kubectl_path, *words, stdin=stdin, env=self.environment, timeout=timeout)

    def helm(self, *words: str, timeout: float = 300.0) -> str:
        """Standard output of a helm command that has to succeed."""
        return run(self.helm_path, *words, env=self.environment, timeout=timeout)

    def get(self, *words: str) -> dict[str, Any] | None:
        """One object, None where it does not exist."""
        text = self.kubectl("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None
