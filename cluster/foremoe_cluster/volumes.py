"""Provisioner of ReadWriteMany volumes: one folder of the host per claim.

All nodes are the same machine, so a hostPath volume is seen by all of them, which is what a job needs
for its model, data and checkpoints. Level-triggered: every second it compares claims and volumes,
so it may be killed and started at any time. A claim's folder goes when the claim is deleted.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foremoe_cluster.api import Api, Manifest
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.manifests import PROVISIONER
from foremoe_cluster.settings import SHARED_VOLUMES, STORAGE_CLASS

Objects = Sequence[dict[str, Any]]


def wanted_volumes(claims: Objects, volumes: Objects) -> list[Manifest]:
    """The volumes to create: for every claim of our class that waits without one."""
    existing = {volume["metadata"]["name"] for volume in volumes}
    return [
        volume_for(claim)
        for claim in claims
        if claim["spec"].get("storageClassName") == STORAGE_CLASS
        and not claim["spec"].get("volumeName")
        and not claim["metadata"].get("deletionTimestamp")
        and _name(claim) not in existing
    ]


def released_volumes(volumes: Objects) -> list[str]:
    """Names of our volumes whose claim is gone."""
    return [
        volume["metadata"]["name"]
        for volume in volumes
        if volume["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
        and volume["status"].get("phase") == "Released"
        and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    ]


def volume_for(claim: dict[str, Any]) -> Manifest:
    """A volume that only this claim can bind."""
    metadata, spec = claim["metadata"], claim["spec"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": _name(claim), "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "hostPath": {"path": str(SHARED_VOLUMES / _name(claim)), "type": "Directory"},
        },
    }


def synchronise(api: Api) -> None:
    """One round: create what is wanted, remove what was released."""
    volumes = api.items("/api/v1/persistentvolumes")
    for manifest in wanted_volumes(api.items("/api/v1/persistentvolumeclaims"), volumes):
        folder = Path(manifest["spec"]["hostPath"]["path"])
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # pods run as any user
        api.apply([manifest])
        print(f"created {folder}", flush=True)
    for name in released_volumes(volumes):
        # The folder first: what is cut short in between is found again by its volume, and done again.
        shutil.rmtree(SHARED_VOLUMES / name, ignore_errors=True)
        api.delete(f"/api/v1/persistentvolumes/{name}")
        print(f"removed {name}", flush=True)


def main() -> None:
    """Run until killed."""
    with Api("volumes") as api:
        while True:
            try:
                synchronise(api)
            except ClusterError as error:
                print(error, file=sys.stderr, flush=True)
            time.sleep(1.0)


def _name(claim: dict[str, Any]) -> str:
    return f"pvc-{claim['metadata']['uid']}"


if __name__ == "__main__":
    main()
