"""The little of the Kubernetes API the cluster itself needs, over httpx.

Server-side apply of a few manifests and some reads: starting kubectl for each would cost more time
than the work.
"""

import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Self

import httpx

from foremoe_cluster.errors import ClusterError
from foremoe_cluster.settings import API_SERVER, PKI

Manifest = Mapping[str, Any]

RESOURCES = {
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Deployment": "deployments",
    "EndpointSlice": "endpointslices",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Service": "services",
    "StorageClass": "storageclasses",
}


class Api:
    """A connection that proves itself with the key pair of one identity (see `pki`)."""

    def __init__(self, identity: str = "admin", *, timeout: float = 10.0) -> None:
        """Load the identity's certificate; nothing is sent yet."""
        try:
            context = ssl.create_default_context(cafile=str(PKI / "ca.crt"))
            context.load_cert_chain(PKI / f"{identity}.crt", PKI / f"{identity}.key")
        except OSError:
            raise ClusterError("no cluster is up on this machine: start it with `make cluster-up`") from None
        self._client = httpx.Client(base_url=API_SERVER, verify=context, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._client.close()

    def ready(self) -> bool:
        """Whether the API server says so itself."""
        try:
            return self._client.get("/readyz").text == "ok"
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> dict[str, Any] | None:
        """The object or list at `path`, None where there is none."""
        answer = self._request("GET", path)
        return None if answer.status_code == 404 else _checked(answer)

    def items(self, path: str) -> list[dict[str, Any]]:
        """All objects of a collection."""
        found = self.get(path)
        return list(found["items"]) if found else []

    def delete(self, path: str) -> None:
        """Delete; no error where nothing is there."""
        answer = self._request("DELETE", path)
        if answer.status_code != 404:
            _checked(answer)

    def apply(self, manifests: Iterable[Manifest]) -> None:
        """Server-side apply, in order."""
        for manifest in manifests:
            answer = self._request(
                "PATCH",
                path_of(manifest),
                params={"fieldManager": "foremoe-cluster", "force": "true"},
                headers={"Content-Type": "application/apply-patch+yaml"},
                json=manifest,
            )
            _checked(answer)

    def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ClusterError(f"the API server does not answer ({error}); see `make cluster-status`") from error


def path_of(manifest: Manifest) -> str:
    """Where the object lives in the API."""
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"{root}{namespace}/{RESOURCES[manifest['kind']]}/{metadata['name']}"


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise ClusterError(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text}")
    return dict(answer.json())
