"""The handle of a collective that was launched and is waited for once."""

from collections.abc import Callable

import torch

from ._errors import LifecycleError


class PendingCollective:
    """A differentiable collective in flight; made by the `launch_*` functions.

    In backward the inverse collective is launched where the forward waited, and waited for where the forward launched:
    what stands between launch and wait in forward hides the message in both directions.
    """

    def __init__(self, finish: Callable[[], tuple[torch.Tensor, ...]], *, name: str) -> None:
        self._finish: Callable[[], tuple[torch.Tensor, ...]] | None = finish
        self._name = name

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return the results, one per input tensor; on device backends the current stream waits, the host does not.

        Raises:
            LifecycleError: If called a second time; names layer and invocation.
        """
        if self._finish is None:
            raise LifecycleError(f"{self._name} was waited for twice; keep the result of the first wait().")
        finish, self._finish = self._finish, None
        return finish()
