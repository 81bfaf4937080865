"""What one attention has in flight between its launch and its wait."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import LifecycleError, PendingCollective


@dataclass(kw_only=True, slots=True)
class LaunchState:
    """Collectives of one invocation in flight; opaque to callers, waited for once."""

    layer: str | None
    mesh: DeviceMesh | None
    # What was launched, by the names of the tensors that travel together.
    pending: dict[tuple[str, ...], PendingCollective]

    def collect(self) -> dict[str, torch.Tensor]:
        """Wait for everything and return the results by name.

        Raises:
            LifecycleError: If collected before.
        """
        if not self.pending:
            raise LifecycleError(
                f"layer {self.layer!r}: nothing is in flight; this launch was waited for before, or never started."
            )
        pending, self.pending = self.pending, {}
        return {
            name: tensor for names, handle in pending.items() for name, tensor in zip(names, handle.wait(), strict=True)
        }
