"""OCI image archives, written without any tool: enough to hand an image to containerd.

An archive may leave out layers that its reader has already (or gets otherwise, see `imagestore`);
the manifest names them all the same.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Layer:
    """One layer: its digest (of the uncompressed tar), its size in bytes, and the tar unless left out."""

    digest: str
    size: int
    content: bytes | None = None


def layer_of(files: Mapping[str, Path]) -> Layer:
    """A layer with these executable files (path in the image -> file), the same bytes every time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(name)
            content = path.read_bytes()
            member.size, member.mode = len(content), 0o755
            tar.addfile(member, io.BytesIO(content))
    content = buffer.getvalue()
    return Layer(digest_of(content), len(content), content)


def digest_of(content: bytes) -> str:
    """For example sha256:e3b0c4..."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The name of every prefix of a stack of layers (OCI image spec, "Layer ChainID")."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(digest_of(f"{chain[-1]} {diff_id}".encode()) if chain else diff_id)
    return chain


def image_config(layers: Sequence[Layer], command: Sequence[str]) -> bytes:
    """The configuration of an image that only has a command."""
    return _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(command)},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )


def write_archive(path: Path, *, reference: str, config: bytes, layers: Sequence[Layer]) -> None:
    """Write an image archive that `ctr images import` reads."""
    described = [{"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size} for layer in layers]
    manifest = _json(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": _describe(CONFIG_TYPE, config), "layers": described}
    )
    entry = _describe(MANIFEST_TYPE, manifest) | {"annotations": {"io.containerd.image.name": reference}}
    blobs = [config, manifest, *(layer.content for layer in layers if layer.content is not None)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in blobs:
            _add(tar, f"blobs/{digest_of(blob).replace(':', '/')}", blob)


def _describe(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
