"""Device plugin that advertises stand-in `nvidia.com/gpu` devices, one per node.

Runs inside the node's namespaces, beside its kubelet, which finds it by the socket in
/var/lib/kubelet/device-plugins. It speaks the kubelet's device plugin API v1beta1; the few messages
of it that matter are described in `deviceapi`. The containers get what a real plugin would give them in
the environment (NVIDIA_VISIBLE_DEVICES) and no device nodes.
"""

import argparse
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from foremoe_cluster.deviceapi import (
    DEVICE_PLUGIN,
    REGISTRATION,
    AllocateRequest,
    AllocateResponse,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
)

SOCKETS = Path("/var/lib/kubelet/device-plugins")
KUBELET = SOCKETS / "kubelet.sock"
OWN = SOCKETS / "foremoe-gpu.sock"
RESOURCE = "nvidia.com/gpu"


def device_ids(node: str, count: int) -> list[str]:
    """Ids in the form of NVIDIA's, the same at every start."""
    return [f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}/{index}')}" for index in range(count)]


class DevicePlugin:
    """The service the kubelet calls."""

    def __init__(self, devices: list[str]) -> None:
        """All devices are healthy, always."""
        self._devices = devices

    def options(self, _request: Any, _context: Any) -> Any:
        """Neither pre-start calls nor preferred allocation."""
        return DevicePluginOptions()

    def list_and_watch(self, _request: Any, context: Any) -> Iterator[Any]:
        """Send the devices once and keep the stream open."""
        yield ListAndWatchResponse(devices=[{"ID": device, "health": "Healthy"} for device in self._devices])
        while context.is_active():
            time.sleep(5.0)

    def allocate(self, request: Any, _context: Any) -> Any:
        """The environment of each container."""
        answer = AllocateResponse()
        for container in request.container_requests:
            visible = ",".join(container.devices_ids)
            answer.container_responses.add().envs["NVIDIA_VISIBLE_DEVICES"] = visible
        return answer

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods by name, for the server."""

        def method(kind: Any, call: Any, request: Any) -> Any:
            return kind(call, request.FromString, lambda message: message.SerializeToString())

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            DEVICE_PLUGIN,
            {
                "GetDevicePluginOptions": method(unary, self.options, Empty),
                "ListAndWatch": method(stream, self.list_and_watch, Empty),
                "Allocate": method(unary, self.allocate, AllocateRequest),
            },
        )


def serve(devices: list[str]) -> grpc.Server:
    """Listen on our socket."""
    OWN.unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((DevicePlugin(devices).handler(),))
    server.add_insecure_port(f"unix://{OWN}")
    server.start()
    return server


def register() -> None:
    """Tell the kubelet about us."""
    request = RegisterRequest(version="v1beta1", endpoint=OWN.name, resource_name=RESOURCE, options={})
    with grpc.insecure_channel(f"unix://{KUBELET}") as channel:
        call = channel.unary_unary(
            f"/{REGISTRATION}/Register", lambda message: message.SerializeToString(), Empty.FromString
        )
        call(request, timeout=5.0)


def main() -> None:
    """Serve until killed. A restarted kubelet has a new socket and empties the folder: then register again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--node", required=True)
    parser.add_argument("--devices", type=int, required=True)
    arguments = parser.parse_args()
    devices = device_ids(arguments.node, arguments.devices)
    server: grpc.Server | None = None
    registered: int | None = None
    while True:
        current = KUBELET.stat().st_ino if KUBELET.exists() else None
        if current is not None and current != registered:
            if server is not None:
                server.stop(grace=None)
            server = serve(devices)
            try:
                register()
            except grpc.RpcError as error:
                print(f"the kubelet does not answer yet: {error}", flush=True)
            else:
                registered = current
                print(f"registered {len(devices)} x {RESOURCE}", flush=True)
        time.sleep(0.5 if registered is None else 2.0)


if __name__ == "__main__":
    main()
