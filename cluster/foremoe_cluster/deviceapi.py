"""Messages of the kubelet's device plugin API, v1beta1, built at run time.

Field names and numbers follow k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto (1.37); fields
that the stand-in devices do not use are left out, which protobuf allows. Building the descriptors
here spares generated code and a protobuf compiler.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "v1beta1"
REGISTRATION = f"{PACKAGE}.Registration"
DEVICE_PLUGIN = f"{PACKAGE}.DevicePlugin"

_TEXT, _FLAG, _MESSAGE = 9, 8, 11
_ONE, _MANY = 1, 3

_MESSAGES: dict[str, list[tuple[str, int, int, int, str | None]]] = {
    # name: (field, number, type, label, message type)
    "Empty": [],
    "DevicePluginOptions": [
        ("pre_start_required", 1, _FLAG, _ONE, None),
        ("get_preferred_allocation_available", 2, _FLAG, _ONE, None),
    ],
    "RegisterRequest": [
        ("version", 1, _TEXT, _ONE, None),
        ("endpoint", 2, _TEXT, _ONE, None),
        ("resource_name", 3, _TEXT, _ONE, None),
        ("options", 4, _MESSAGE, _ONE, "DevicePluginOptions"),
    ],
    "Device": [("ID", 1, _TEXT, _ONE, None), ("health", 2, _TEXT, _ONE, None)],
    "ListAndWatchResponse": [("devices", 1, _MESSAGE, _MANY, "Device")],
    "ContainerAllocateRequest": [("devices_ids", 1, _TEXT, _MANY, None)],
    "AllocateRequest": [("container_requests", 1, _MESSAGE, _MANY, "ContainerAllocateRequest")],
    "ContainerAllocateResponse": [("envs", 1, _MESSAGE, _MANY, "ContainerAllocateResponse.EnvsEntry")],
    "AllocateResponse": [("container_responses", 1, _MESSAGE, _MANY, "ContainerAllocateResponse")],
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="foremoe_deviceplugin.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if of:
                added.type_name = f".{PACKAGE}.{of}"
        if name == "ContainerAllocateResponse":
            entry = message.nested_type.add(name="EnvsEntry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=_TEXT, label=_ONE)
            entry.field.add(name="value", number=2, type=_TEXT, label=_ONE)
    return file


_CLASSES = message_factory.GetMessages([_file()], pool=descriptor_pool.DescriptorPool())


def _class(name: str) -> Any:
    return _CLASSES[f"{PACKAGE}.{name}"]


Empty = _class("Empty")
DevicePluginOptions = _class("DevicePluginOptions")
RegisterRequest = _class("RegisterRequest")
ListAndWatchResponse = _class("ListAndWatchResponse")
AllocateRequest = _class("AllocateRequest")
AllocateResponse = _class("AllocateResponse")
