"""The few API calls of the operator, as plain REST over the official client's connection and credentials.

The client's generated models are not used: loading them costs more memory than the rest of the operator, and manifests
are JSON already. Calls block, so they run in threads of a pool of their own; the event loop only awaits them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration

from foremoe_operator.api.constants import FIELD_MANAGER, GROUP, LABEL_JOB, PLURAL_JOB, VERSION
from foremoe_operator.core.model import Manifest

_TIMEOUT_SECONDS: Final = 30.0
_THREADS: Final = 32
_COLLECTIONS: Final[Mapping[str, str]] = {"Pod": "pods", "Service": "services", "ConfigMap": "configmaps"}


class KubeError(Exception):
    """The API server, or the way to it, said no. `code` is 0 if there was no answer."""

    def __init__(self, message: str, *, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to the API server."""

    method: str
    path: str
    query: Mapping[str, str] | None = None
    body: object = None
    content_type: str = "application/json"


class KubeClient:
    """Calls to the API server. Every method raises KubeError."""

    def __init__(self, configuration: Configuration) -> None:
        configuration.connection_pool_maxsize = _THREADS
        configuration.retries = False
        self._client = ApiClient(configuration)
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="kube")

    @classmethod
    def from_environment(cls) -> Self:
        """Credentials of the pod if it runs in one, else of the kubeconfig ($KUBECONFIG or ~/.kube/config)."""
        try:
            config.load_incluster_config()
        except config.ConfigException:
            try:
                config.load_kube_config()
            except config.ConfigException as error:
                raise KubeError(f"no credentials: not in a pod, and no usable kubeconfig ({error})") from error
        return cls(Configuration.get_default_copy())

    async def request(self, call: Call) -> Manifest:
        """Carry out one call and return the object it answers with."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.request_blocking, call)

    def request_blocking(self, call: Call) -> Manifest:
        """The same, for code outside the event loop."""
        headers = {"Accept": "application/json", "Content-Type": call.content_type, "User-Agent": FIELD_MANAGER}
        path = call.path + (f"?{urlencode(call.query)}" if call.query else "")
        self._client.update_params_for_auth(headers, None, ["BearerToken"], path, call.method, call.body)
        try:
            response = self._client.rest_client.pool_manager.request(
                call.method,
                self._client.configuration.host + path,
                body=None if call.body is None else json.dumps(call.body),
                headers=headers,
                timeout=_TIMEOUT_SECONDS,
            )
        except urllib3.exceptions.HTTPError as error:
            raise KubeError(f"{call.method} {call.path}: {error}") from error
        try:
            answer = json.loads(response.data or b"{}")
        except ValueError:
            answer = {"message": response.data[:200].decode(errors="replace")}
        if response.status >= 300:
            raise KubeError(
                str(answer.get("message") or f"{call.method} {call.path}: HTTP {response.status}"),
                code=response.status,
                reason=str(answer.get("reason", "")),
            )
        return dict(answer)

    async def create(self, manifest: Manifest) -> Manifest:
        """POST an object; code 409 if one of that name exists."""
        path, query = _collection_of(manifest), {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return await self.request(Call(method="POST", path=path, query=query, body=manifest))

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply of an object, taking over fields that others have set."""
        path = f"{_collection_of(manifest)}/{quote(_name_of(manifest))}"
        query = {"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        return await self.request(
            Call(method="PATCH", path=path, query=query, body=manifest, content_type="application/apply-patch+yaml")
        )

    async def read(self, manifest: Manifest) -> Manifest:
        """GET the object of the same kind and name."""
        return await self.request(Call(method="GET", path=f"{_collection_of(manifest)}/{quote(_name_of(manifest))}"))

    async def pods_of(self, namespace: str, job: str) -> list[Manifest]:
        """LIST all pods that carry the job's label, straight from etcd."""
        path, query = f"/api/v1/namespaces/{quote(namespace)}/pods", {"labelSelector": f"{LABEL_JOB}={job}"}
        items = (await self.request(Call(method="GET", path=path, query=query))).get("items")
        return list(items) if isinstance(items, list) else []

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        """DELETE a pod if it is the one with that UID; one that is gone or replaced is no error."""
        path = f"/api/v1/namespaces/{quote(namespace)}/pods/{quote(name)}"
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self.request(Call(method="DELETE", path=path, body=body))
        except KubeError as error:
            if error.code not in (404, 409):
                raise

    async def write_status(self, job: Manifest) -> Manifest:
        """PUT a job's status; code 409 if the job has changed since its resourceVersion."""
        metadata = job["metadata"]
        assert isinstance(metadata, dict)
        path = (
            f"/apis/{GROUP}/{VERSION}/namespaces/{quote(str(metadata['namespace']))}"
            f"/{PLURAL_JOB}/{quote(str(metadata['name']))}/status"
        )
        return await self.request(Call(method="PUT", path=path, query={"fieldManager": FIELD_MANAGER}, body=job))


def _name_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["name"])


def _collection_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return f"/api/v1/namespaces/{quote(str(metadata['namespace']))}/{_COLLECTIONS[str(manifest['kind'])]}"
