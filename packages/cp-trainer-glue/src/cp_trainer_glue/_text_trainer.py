"""Training of causal language models of transformers on text."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_core import InvalidInputError, SequenceLayout, UnsupportedError

from ._data import BatchStream, TokenBlocks, load_blocks, load_tokens
from ._expert_balance import ExpertBalance
from ._loss import LossInHead, TokenLoss
from ._model import HyperAutoModel, require_vocabulary
from ._tokenizer import make_tokenizer
from ._trainer import BaseTrainer
from ._vocab_parallel_loss import gather_vocabulary, vocab_parallel_loss_sum


class TextTrainer(BaseTrainer):
    """Trains a causal language model of transformers on text."""

    def build_data(self) -> BatchStream:
        """Return blocks of the configured text."""
        config = self.config
        self.tokenizer = make_tokenizer(config.data.tokenizer)
        blocks = load_blocks(config.data, self.tokenizer, self._cache_dir, self.meshes.world_mesh)
        if config.held_out_samples:
            blocks, self._held_out = blocks.split(config.held_out_samples)
        return BatchStream(blocks, config.training, self.meshes)

    def build_evaluation(self) -> TokenBlocks | None:
        """Return blocks of the configured held-out text.

        Raises:
            InvalidInputError: If that is shorter than one block.
        """
        section, seq_length = self.config.evaluation, self.config.data.seq_length
        if section is None:
            return None
        if section.held_out_samples is not None:
            return self._held_out
        tokens = load_tokens(section, self.tokenizer, self._cache_dir, self.meshes.world_mesh)
        if len(tokens) < seq_length:
            raise InvalidInputError(
                f"evaluation: the held-out text has {len(tokens)} tokens, less than one block of data.seq_length "
                f"({seq_length}); give more text or a smaller data.seq_length."
            )
        return TokenBlocks(tokens, seq_length)

    def build_model(self) -> torch.nn.Module:
        """Return the configured model.

        Raises:
            InvalidInputError: If its vocabulary does not hold the tokenizer's ids.
        """
        model = HyperAutoModel.build(self.config.model)
        require_vocabulary(model, self.tokenizer, self.config.data.tokenizer)
        built: torch.nn.Module = model
        return built

    def prepare_loss(self) -> None:
        """Read the loss section, and take over the loss that a model makes of its own rank's tokens only."""
        model: Any = self.model
        self.expert_balance = ExpertBalance.take_over(model)
        self.token_loss = TokenLoss(self.config.loss, model.get_output_embeddings().weight.shape[0])
        self.loss_in_head = None if self.config.loss.chunk_tokens is None else LossInHead(model)

    def compute_loss_sum(
        self, inputs: dict[str, Any], shift_labels: torch.Tensor, *, loss_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the summed cross-entropy; the model is called without labels, which it would shift by itself."""
        balance = self.expert_balance if torch.is_grad_enabled() else None  # an evaluation has none to balance
        recording = nullcontext() if balance is None else balance.recording()
        with recording:
            if self.loss_in_head is not None:
                return self.loss_in_head.loss(inputs, self.token_loss, shift_labels, loss_weights)
            logits = self.model(**inputs).logits
        if self.config.accelerator.loss_parallel:
            return self._loss_of_sharded_logits(logits, shift_labels, loss_weights)
        return self.token_loss.of_logits(logits, shift_labels, loss_weights)

    def compute_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the model's logits; under `loss_parallel` each rank holds the whole vocabulary while they are read."""
        model: Any = self.model
        logits: torch.Tensor = model(**inputs).logits
        if not self.config.accelerator.loss_parallel:
            return logits
        vocab_size = model.get_output_embeddings().out_features
        return gather_vocabulary(logits, tp_mesh=self.meshes.tp_mesh, vocab_size=vocab_size)

    def loss_weight_sum(self, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None) -> float | None:
        """Return the sum of class weights and token weights of a shard, None where there are none."""
        return self.token_loss.weight_sum(shift_labels, loss_weights)

    def compute_auxiliary_loss(
        self, layout: SequenceLayout, *, batch_size: int, dp_cp_mesh: DeviceMesh | None
    ) -> torch.Tensor | None:
        """Return this rank's part of the load-balancing loss of experts, if the model's config asks for it."""
        if self.expert_balance is None:
            return None
        return self.expert_balance.loss_part(layout, batch_size=batch_size, dp_cp_mesh=dp_cp_mesh)

    @property
    def _cache_dir(self) -> Path:
        return Path(self.config.output_dir) / "data-cache"

    def _loss_of_sharded_logits(
        self, logits: torch.Tensor, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None
    ) -> torch.Tensor:
        if loss_weights is not None:
            raise UnsupportedError(
                "loss_parallel: a batch with loss_weights is not supported; set loss_parallel false."
            )
        model: Any = self.model
        vocab_size = model.get_output_embeddings().out_features
        return vocab_parallel_loss_sum(logits, shift_labels, tp_mesh=self.meshes.tp_mesh, vocab_size=vocab_size)
