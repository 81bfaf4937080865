"""Context-parallel algorithms, free of any model or trainer.

Modules, lowest first: `kernels`, `_launch_state`, `_layout`, `_query_runs`, `_meta`, `_digest`, `_documents`,
`_padding`, `_positions`, `_labels`, `_batch_fields`, `_batch`, `_local_attention`, `_strategy`, `_all_gather`, `_loss`,
`_expert_loss`, `_gradients`, `_grad_norm`, `cost`.
Errors and `flex_cp_allgather` come from `cp_collectives`.
"""

from importlib.metadata import version

from cp_collectives import (
    ContextParallelError,
    InvalidInputError,
    LifecycleError,
    PeerError,
    UnsupportedError,
    flex_cp_allgather,
)

from . import cost
from ._all_gather import AllGatherStrategy
from ._batch import sequence_multiple, shard_batch_for_cp, unshard_sequence
from ._digest import tensor_digest
from ._expert_loss import load_balancing_loss, real_local_tokens
from ._grad_norm import clip_grad_norm
from ._gradients import sum_gradients
from ._launch_state import LaunchState
from ._layout import Chunk, SequenceLayout
from ._local_attention import local_attention
from ._loss import GlobalLoss, count_valid_tokens, mean_global_loss, sum_loss_weights
from ._meta import AttentionMeta, AttentionShape, HandoffMeta
from ._strategy import ContextParallelStrategy

__version__ = version("cp-core")

__all__ = [
    "AllGatherStrategy",
    "AttentionMeta",
    "AttentionShape",
    "Chunk",
    "ContextParallelError",
    "ContextParallelStrategy",
    "GlobalLoss",
    "HandoffMeta",
    "InvalidInputError",
    "LaunchState",
    "LifecycleError",
    "PeerError",
    "SequenceLayout",
    "UnsupportedError",
    "clip_grad_norm",
    "cost",
    "count_valid_tokens",
    "flex_cp_allgather",
    "load_balancing_loss",
    "local_attention",
    "mean_global_loss",
    "real_local_tokens",
    "sequence_multiple",
    "shard_batch_for_cp",
    "sum_gradients",
    "sum_loss_weights",
    "tensor_digest",
    "unshard_sequence",
]
