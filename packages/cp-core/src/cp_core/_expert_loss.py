"""The load-balancing loss of experts over all ranks: no sum over tokens, and yet each rank's part is one.

With E experts, k of them chosen per token, and T tokens of all ranks and layers, the loss is

    E * sum_i f_i * P_i,    f_i = times expert i was chosen / T,    P_i = sum_t p_ti / T

(Switch Transformer, Fedus et al. 2021, equations 4 to 6, as Mixtral and its successors in transformers compute it).
Choices have no gradient. So once the ranks have summed them, a rank's part is linear in the probabilities of its own
tokens, and the parts of all ranks add up to the loss of one process.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import InvalidInputError, all_reduce_sum

from ._layout import SequenceLayout


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    *,
    top_k: int,
    dp_cp_mesh: DeviceMesh | None,
    real_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's part of the load-balancing loss; the parts of all ranks add up to it.

    Scale it by the model's coefficient and add it to what backward is called on, where gradients are summed over the
    ranks; where they are averaged over G ranks, times G.

    Args:
        router_logits: One `[T, E]` per layer, T this rank's tokens.
        top_k: Experts per token.
        dp_cp_mesh: 1-D mesh of all ranks that hold different tokens, not tensor parallel.
        real_tokens: `[T]` bool, False for pads, which do not count; None if all are real.

    Returns:
        0-d, in fp32 or wider; 0 where no rank has a real token.

    Raises:
        InvalidInputError: If there is no layer, or layers differ in shape.
    """
    _check(router_logits, top_k, real_tokens)
    first = router_logits[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    num_experts = first.shape[-1]
    chosen = torch.zeros(num_experts + 1, dtype=torch.int64, device=first.device)  # the last counts tokens
    probability_sums = torch.zeros(num_experts, dtype=wide, device=first.device)
    real = first.new_ones(first.shape[0], dtype=torch.int64) if real_tokens is None else real_tokens.to(first.device)
    for logits in router_logits:
        probabilities = logits.to(wide).softmax(dim=-1)
        experts = probabilities.detach().topk(top_k, dim=-1).indices
        chosen[:-1].scatter_add_(0, experts.flatten(), real.long().repeat_interleave(top_k))
        probability_sums = probability_sums + probabilities.mul(real.to(wide).unsqueeze(-1)).sum(dim=0)
    chosen[-1] = real.sum() * len(router_logits)
    all_reduce_sum([chosen], mesh=dp_cp_mesh)
    num_tokens = chosen[-1].clamp(min=1).to(wide)
    return num_experts * (chosen[:-1] / num_tokens * probability_sums / num_tokens).sum()


def real_local_tokens(layout: SequenceLayout, *, batch_size: int) -> torch.Tensor:
    """Return which of this rank's tokens are no pads.

    Args:
        layout: The layout of the shard.
        batch_size: B.

    Returns:
        `[B, L]` bool on CPU.
    """
    within = layout.global_index < layout.global_length
    if layout.key_padding is None:
        return within.expand(batch_size, -1)
    return layout.key_padding.cpu()[:, layout.global_index] & within


def _check(router_logits: Sequence[torch.Tensor], top_k: int, real_tokens: torch.Tensor | None) -> None:
    shapes = {tuple(logits.shape) for logits in router_logits}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 2 or not 1 <= top_k <= shape[1]:
        raise InvalidInputError(
            "load_balancing_loss needs router logits [T, E] of one shape for each layer and top_k of at most E, but "
            f"got {sorted(shapes)} and {top_k}."
        )
    if real_tokens is not None and tuple(real_tokens.shape) != shape[:1]:
        raise InvalidInputError(
            f"load_balancing_loss: real_tokens must be [T] = [{shape[0]}], but is {list(real_tokens.shape)}."
        )
