"""The loss of a causal language model as a sum over tokens, each with its weight.

B batch, L tokens of this rank, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from cp_core import InvalidInputError, UnsupportedError, sum_loss_weights

from ._config import LossConfig


class TokenLoss:
    """Cross-entropy by the `loss` section of a config.

    Args:
        config: The section.
        vocab_size: V.

    Raises:
        InvalidInputError: If a weight is given to an id that is not in the vocabulary.
    """

    def __init__(self, config: LossConfig, vocab_size: int) -> None:
        self._config = config
        self._class_weights = None if config.class_weights is None else torch.ones(vocab_size, dtype=torch.float64)
        for token, weight in (config.class_weights or {}).items():
            if not 0 <= token < vocab_size:
                raise InvalidInputError(
                    f"loss.class_weights: {token} is no id of a vocabulary of {vocab_size}; list ids from 0 to "
                    f"{vocab_size - 1}."
                )
            if self._class_weights is not None:
                self._class_weights[token] = weight

    def weight_sum(self, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None) -> float | None:
        """Return the sum of the weights of this rank's tokens; None where each that has a label weighs 1.

        Args:
            shift_labels: `[B, L]` on the host, -100 where nothing is to predict.
            loss_weights: `[B, L]` on the host, or None.
        """
        if self._class_weights is None:
            return None if loss_weights is None else sum_loss_weights(loss_weights)
        weights = self._class_weights[shift_labels.clamp(min=0)].where(shift_labels != -100, 0)
        return sum_loss_weights(weights if loss_weights is None else weights * loss_weights)

    def of_logits(
        self, logits: torch.Tensor, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the summed loss of logits `[B, L, V]`, 0-d, in fp32 or wider; 0 if no token has a label."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = cross_entropy(
            wide.flatten(0, 1),
            shift_labels.flatten(),
            weight=self._weights_like(wide),
            reduction="sum" if loss_weights is None else "none",
            label_smoothing=self._config.label_smoothing,
        )
        return losses if loss_weights is None else (losses * loss_weights.flatten()).sum()

    def of_hidden(
        self, hidden: torch.Tensor, head: Any, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what `of_logits` does for the output of a linear head, without `[B, L, V]` at any time.

        The logits of a chunk are worked out once more in backward.

        Args:
            hidden: `[B, L, H]`.
            head: The linear layer to V.
            shift_labels, loss_weights: `[B, L]`.
        """
        weight = head.weight
        if weight.dtype.itemsize == 2:
            weight = weight.float()  # so that its gradients are added up over the chunks in fp32
        length = self._config.chunk_tokens or hidden.shape[1]
        parts = [
            checkpoint(
                self._of_chunk, rows, weight, head.bias, labels, weights, use_reentrant=False, preserve_rng_state=False
            )
            for rows, labels, weights in _chunks(hidden, shift_labels, loss_weights, length=length)
        ]
        return torch.stack(parts).sum()

    def _of_chunk(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.of_logits(linear(hidden, weight.to(hidden.dtype), bias), labels, loss_weights)

    def _weights_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None if self._class_weights is None else self._class_weights.to(tensor.device, tensor.dtype)


def _chunks(
    hidden: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor | None, *, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield at most `length` tokens at a time, as one row: `[1, length, H]`, `[1, length]`, `[1, length]`."""
    rows, targets = hidden.flatten(0, 1).unsqueeze(0), labels.reshape(1, -1)
    weights = None if loss_weights is None else loss_weights.reshape(1, -1)
    for start in range(0, rows.shape[1], length):
        part = slice(start, start + length)
        yield rows[:, part], targets[:, part], None if weights is None else weights[:, part]


class LossInHead:
    """Works the loss out where a model calls its output layer, so that the logits of all tokens never exist.

    Inside the model's own forward, since that is where FSDP has the layer's weights.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._name = model, type(model).__name__
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            raise UnsupportedError(
                f"loss.chunk_tokens: the output layer of {self._name} is {type(head).__name__} and not a plain linear "
                "layer; leave chunk_tokens out."
            )

    def loss(
        self,
        inputs: dict[str, Any],
        token_loss: TokenLoss,
        shift_labels: torch.Tensor,
        loss_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call the model and return the summed loss of its tokens, 0-d.

        Raises:
            UnsupportedError: If the model changes what its output layer gives, or calls it otherwise than once.
        """
        head = self._model.get_output_embeddings()
        losses: list[torch.Tensor] = []

        def loss_of(hidden: torch.Tensor) -> torch.Tensor:
            losses.append(token_loss.of_hidden(hidden, head, shift_labels, loss_weights))
            return losses[-1]

        with _forward_of(head, loss_of):
            output = self._model(**inputs).logits
        loss = losses[0] if len(losses) == 1 else None
        if loss is None or loss is not output:
            raise UnsupportedError(
                f"loss.chunk_tokens: {self._name} changes its logits after the output layer (a cap or a scale), which "
                "chunks would leave out; leave chunk_tokens out."
            )
        return loss


@contextmanager
def _forward_of(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Give one module another forward for one call of its model."""
    earlier = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if earlier is not None:
            module.__dict__["forward"] = earlier


def token_log_probs(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token's label.

    Args:
        logits: `[B, L, V]`.
        shift_labels: `[B, L]`, -100 where nothing is to predict.

    Returns:
        `[B, L]`, in fp32 or wider; 0 where there is no label.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -cross_entropy(wide.flatten(0, 1), shift_labels.flatten(), reduction="none").view_as(shift_labels)
