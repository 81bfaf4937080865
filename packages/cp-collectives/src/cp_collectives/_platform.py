"""The one table of devices: which backend serves which device, and how its memory is read.

Nothing outside this file names a backend or a device module.
"""

import importlib
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """A device type with the process-group backend that serves it."""

    device_type: str
    # The backend that moves device tensors.
    backend: str
    # What `init_process_group` is given: the CPU backend always takes part, for the control plane.
    process_group_backend: str
    # The module that registers the device type with torch, where torch does not know it by itself.
    extension: str | None = None

    def load(self) -> None:
        """Import the extension that registers this device type, if there is one."""
        if self.extension is not None:
            importlib.import_module(self.extension)

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank; all ranks share the one CPU."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, local_rank)

    def set_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process; nothing to do on CPU."""
        if self.device_type != "cpu":
            torch.accelerator.set_device_index(device)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators, the device's included."""
        torch.manual_seed(seed)

    def rng_states(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the states of torch's generators, on the host: `host`, and `device` where that has one of its own."""
        states = {"host": torch.get_rng_state()}
        if self.device_type != "cpu":
            states["device"] = self._device_module().get_rng_state(device)
        return states

    def set_rng_states(self, states: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Put the generators back to what `rng_states` returned."""
        torch.set_rng_state(states["host"])
        if self.device_type != "cpu":
            self._device_module().set_rng_state(states["device"], device)

    def reset_peak_memory(self, device: torch.device) -> None:
        """Start a new peak-memory measurement; a CPU process cannot forget its peak."""
        if self.device_type != "cpu":
            self._device_module().reset_peak_memory_stats(device)

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return the peak memory in bytes: the device allocator's, on CPU the process's resident set."""
        if self.device_type != "cpu":
            return int(self._device_module().max_memory_allocated(device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

    def _device_module(self) -> Any:
        return torch.get_device_module(self.device_type)


_PLATFORMS = {
    "cpu": Platform(device_type="cpu", backend="gloo", process_group_backend="gloo"),
    "cuda": Platform(device_type="cuda", backend="nccl", process_group_backend="cpu:gloo,cuda:nccl"),
    "npu": Platform(
        device_type="npu", backend="hccl", process_group_backend="cpu:gloo,npu:hccl", extension="torch_npu"
    ),
}


def current_platform(device: torch.device | str | None = None) -> Platform:
    """Return the platform of a device, or of this machine.

    Args:
        device: A device or its type (`"cpu"`, `"cuda"`, `"npu"`). None takes the accelerator that is really there,
            else the CPU.

    Raises:
        UnsupportedError: If the device type is not in the table.
    """
    device_type = _available_device_type() if device is None else _device_type_of(device)
    platform = _PLATFORMS.get(device_type)
    if platform is None:
        raise UnsupportedError(
            f"the platform table has no device type {device_type!r}; supported are {', '.join(sorted(_PLATFORMS))}."
        )
    return platform


def _device_type_of(device: torch.device | str) -> str:
    # torch.device refuses a name whose extension is not loaded yet, and this is what tells which one to load.
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def _available_device_type() -> str:
    # Without check_available torch names an accelerator that was only built in (facts: torch_npu with no device).
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
