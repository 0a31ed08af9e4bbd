"""The two services of our own: the volume provisioner and the device plugin."""

from typing import Any

from foremoe_cluster import deviceapi, deviceplugin, volumes
from foremoe_cluster.settings import STORAGE_CLASS


def claim(name: str, *, storage: str = STORAGE_CLASS, volume: str | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "storageClassName": storage,
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "2Gi"}},
    }
    if volume:
        spec["volumeName"] = volume
    return {"metadata": {"name": name, "namespace": "jobs", "uid": f"uid-{name}"}, "spec": spec}


def released(manifest: Any, phase: str = "Released") -> dict[str, Any]:
    return {**manifest, "status": {"phase": phase}}


def test_each_waiting_claim_gets_one_volume_of_its_own() -> None:
    claims = [claim("a"), claim("bound", volume="v"), claim("foreign", storage="other")]
    (volume,) = volumes.wanted_volumes(claims, [])
    assert volume["spec"]["claimRef"]["name"] == "a" and volume["spec"]["claimRef"]["uid"] == "uid-a"
    assert volume["spec"]["capacity"] == {"storage": "2Gi"}
    assert volumes.wanted_volumes(claims, [dict(volume)]) == [], "a second round changes nothing"


def test_only_our_released_volumes_go() -> None:
    ours = volumes.volume_for(claim("a"))
    foreign = {**ours, "metadata": {"name": "foreign"}}
    assert volumes.released_volumes([released(ours, "Bound"), released(foreign)]) == []
    assert volumes.released_volumes([released(ours)]) == ["pvc-uid-a"]


def test_device_ids_are_stable_and_distinct() -> None:
    ids = deviceplugin.device_ids("node1", 8) + deviceplugin.device_ids("node2", 8)
    assert len(set(ids)) == 16
    assert deviceplugin.device_ids("node1", 8) == ids[:8]


def test_messages_have_the_kubelets_wire_format() -> None:
    """Bytes by hand: field number and type (number << 3 | 2), length, text."""
    request = deviceapi.RegisterRequest(version="v1beta1", endpoint="e", resource_name="r", options={})
    assert request.SerializeToString() == b"\x0a\x07v1beta1\x12\x01e\x1a\x01r\x22\x00"
    devices = deviceapi.ListAndWatchResponse(devices=[{"ID": "g", "health": "Healthy"}])
    assert devices.SerializeToString() == b"\x0a\x0c\x0a\x01g\x12\x07Healthy"


def test_containers_are_told_their_devices() -> None:
    plugin = deviceplugin.DevicePlugin(["a", "b"])
    request = deviceapi.AllocateRequest(container_requests=[{"devices_ids": ["a", "b"]}, {"devices_ids": ["c"]}])
    answer = plugin.allocate(request, None)
    visible = [dict(container.envs)["NVIDIA_VISIBLE_DEVICES"] for container in answer.container_responses]
    assert visible == ["a,b", "c"]
