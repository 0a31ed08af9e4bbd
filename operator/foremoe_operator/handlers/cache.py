"""The controller's view of kopf's indices. kopf fills them before any handler runs, so they are never half-empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foremoe_operator.core.model import Pod
from foremoe_operator.kube.convert import Key, StoredJob


class IndexCache:
    """Reads jobs, pods and other children from indices; empty until `connect` was called."""

    def __init__(self) -> None:
        self._jobs: Mapping[Key, Iterable[StoredJob]] = {}
        self._pods: Mapping[Key, Iterable[Pod]] = {}
        self._children: Mapping[Key, Iterable[tuple[str, str, str]]] = {}

    def connect(self, *, jobs: Any, pods: Any, children: Any) -> None:
        """Take over kopf's indices."""
        self._jobs, self._pods, self._children = jobs, pods, children

    def job(self, key: Key) -> StoredJob | None:
        """The job of that namespace and name."""
        return next(iter(self._jobs.get(key, ())), None)

    def pods(self, key: Key) -> Iterable[Pod]:
        """All pods that carry the job's label."""
        return tuple(self._pods.get(key, ()))

    def children(self, key: Key) -> Iterable[tuple[str, str, str]]:
        """Kind, name and owner UID of its services and config maps."""
        return tuple(self._children.get(key, ()))
