"""veRL's device platform for machines without an accelerator.

veRL asks a platform object for everything about devices and reads statistics of a module shaped like `torch.cuda`.
Here streams do nothing, memory statistics are zero and the process-group backend is gloo. Ranks stay countable
because Ray's resource keeps the name GPU: the agent starts Ray nodes with as many logical ones as the job has ranks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from foremoe_operator.api.constants import CPU_PLATFORM

CPU = torch.device("cpu")


class NullStream:
    """Stands in for a stream and for an event: everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept whatever a CUDA stream or event is made with."""

    def __enter__(self) -> NullStream:
        """As a stream context."""
        return self

    def __exit__(self, *args: object) -> None:
        """As a stream context."""

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: object = None) -> NullStream:
        """The event itself."""
        return self

    def record(self, stream: object = None) -> None:
        """Nothing to record."""


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _constant(0)
    ),
    **dict.fromkeys(("current_stream", "stream", "default_stream"), NullStream),
    "mem_get_info": _constant((0, 0)),
    "is_available": _constant(True),
    "device_count": _constant(1),
    "current_device": _constant(CPU),
    "get_device_name": _constant("cpu"),
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
}


class DeviceModule(types.ModuleType):
    """Shaped like `torch.cuda`; calls it does not know do nothing and answer None."""

    Stream = NullStream
    Event = NullStream

    def __getattr__(self, name: str) -> Any:
        """A function for any public name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _ANSWERS.get(name, _constant(None))


@PlatformRegistry.register(platform=CPU_PLATFORM)
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """The processor as veRL's device."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = DeviceModule("foremoe_cpu_device")

    def is_available(self) -> bool:
        """Always."""
        return True

    def current_device(self) -> torch.device:
        """The processor."""
        return CPU

    def device_count(self) -> int:
        """One device per process."""
        return 1

    def set_device(self, device_index: object) -> None:
        """There is only one."""

    def synchronize(self, device_index: object = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: object) -> None:
        """There is no caching allocator."""

    def empty_cache(self) -> None:
        """There is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """No compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """The backend of collectives."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable Ray sets for a GPU resource."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """veRL counts only the resources GPU and NPU before it starts."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Keep Ray from hiding devices."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""
