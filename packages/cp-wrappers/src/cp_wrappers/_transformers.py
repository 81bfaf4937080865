"""The seam of transformers: one attention implementation, `context_parallel`, that asks the calling module what to do.

The only file that imports transformers; others import it where a transformers model is at hand.

The implementation's name stands in the model's config and holds for all its modules, so a module without a declared
method meets it too and raises. The mask function returns None: causality and padding are in the sequence layout.
"""

import copy
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cp_core import AttentionMeta, InvalidInputError, SequenceLayout, UnsupportedError

from ._attention_settings import refuse_leading_pads, require_settings_of
from ._boundary import LAYOUT_KEYWORD, AttentionBoundary, boundary_of
from ._mask_functions import is_plainly_causal

IMPLEMENTATION = "context_parallel"

# What models hand down to their attention function that does not change the attention.
_INERT_KEYWORDS = frozenset(
    {
        LAYOUT_KEYWORD,
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)


@dataclass(kw_only=True, slots=True)
class Adoption:
    """Modules whose attention goes through this seam: each has a copy of its config, which other models do not see."""

    # Each module with the config it had before.
    _configs: list[tuple[torch.nn.Module, Any]] = field(default_factory=list)

    def add(self, module: torch.nn.Module, copied: Any) -> None:
        """Give a module a copy of its config that names this seam and makes no cache."""
        self._configs.append((module, module.config))
        copied._attn_implementation_internal = IMPLEMENTATION
        if getattr(copied, "use_cache", False):
            copied.use_cache = False
        module.config = copied

    @property
    def had_cache(self) -> bool:
        """Whether a cache was on before."""
        return any(getattr(config, "use_cache", False) for _, config in self._configs)

    def earlier_implementations(self) -> dict[int, str]:
        """Return the earlier implementation by the id of each module."""
        return {id(module): config._attn_implementation for module, config in self._configs}

    def restore(self) -> None:
        """Give each module its own config back."""
        for module, config in self._configs:
            module.config = config
        self._configs = []


def adopt(model: torch.nn.Module) -> Adoption:
    """Send all attention of transformers inside `model` through the seam, and turn caches off."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    adoption = Adoption()
    memo: dict[int, Any] = {}  # what modules share stays shared, and a part of a composite config its part
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            adoption.add(module, copy.deepcopy(config, memo))
    return adoption


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function of transformers: `[B, N, L, D]` queries and compact keys in, `[B, L, N, D]` out."""
    boundary = boundary_of(module)
    if boundary is None:
        raise InvalidInputError(
            f"a {type(module).__name__} (layer_idx {getattr(module, 'layer_idx', None)}) attends without a declared "
            "context-parallel method; declare one for it in plan_overrides or apply_context_parallel."
        )
    if not boundary.intercepted:
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, **keywords}
        options |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return _earlier_attention(module, boundary, (query, key, value), options)
    _refuse_keywords(boundary.name, attention_mask, keywords)
    require_settings_of(module, boundary.name, window=sliding_window, sinks=s_aux)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

    def make_meta(layout: SequenceLayout) -> AttentionMeta:
        refuse_leading_pads(module.config, boundary.name, layout)
        return AttentionMeta(
            layout=layout,
            causal=causal,
            scale=scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            dropout_p=dropout,
        )

    output = boundary.attend(query, key, value, make_meta=make_meta)
    return output.transpose(1, 2).contiguous(), None


def _refuse_keywords(name: str, attention_mask: torch.Tensor | None, keywords: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise InvalidInputError(
            f"{name} was given an attention_mask {tuple(attention_mask.shape)} of its own; masks belong into the "
            "global batch of shard_batch_for_cp."
        )
    unknown = sorted(key for key, value in keywords.items() if value is not None and key not in _INERT_KEYWORDS)
    unknown += [key for key in ("output_attentions", "output_router_logits") if keywords.get(key)]
    if unknown:
        raise UnsupportedError(
            f"{name}: attention was asked for {', '.join(unknown)}, which context parallelism "
            "does not honour in this version; nothing is dropped in silence, so leave it out of the model's call."
        )


def _earlier_attention(
    module: torch.nn.Module,
    boundary: AttentionBoundary,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the implementation that the model had before, for a module whose wrapper communicates by itself."""
    name = boundary.earlier_implementation or "eager"
    modeling = sys.modules[type(module).__module__]
    # transformers keeps eager attention in each modeling file, not in the registry.
    function = modeling.eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    given = {key: value for key, value in options.items() if value is not None}
    mask = _causal_mask(module, tensors, boundary.name) if name == "eager" else None
    result: tuple[torch.Tensor, torch.Tensor | None] = function(module, *tensors, mask, **given)
    return result


def _causal_mask(
    module: torch.nn.Module, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], name: str
) -> torch.Tensor | None:
    """Return the additive mask `[1, 1, L, L]` without which eager attention of transformers would not be causal."""
    query, key, _ = tensors
    if not getattr(module, "is_causal", True):
        return None
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries != num_keys:
        raise UnsupportedError(
            f"{name}: eager attention was called with {num_queries} queries and {num_keys} keys under a wrapper of "
            "your own, and where the queries stand among the keys is not known; use attn_implementation sdpa."
        )
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
    mask = torch.zeros(1, 1, num_queries, num_keys, dtype=query.dtype, device=query.device)
    return mask.masked_fill(~visible, torch.finfo(query.dtype).min)


def _no_mask(
    *_args: Any, mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None, **_kwargs: Any
) -> None:
    """Mask function of transformers: the layout says all, so whatever asks for another mask is refused."""
    if mask_function is not causal_mask_function and torch.compiler.is_compiling():
        raise UnsupportedError(
            "under torch.compile of the whole model transformers asks for a mask of packed documents whatever "
            "position_ids say, which context parallelism cannot tell from real ones; compile the layers one by one, "
            "for example [layer.compile() for layer in model.model.layers]."
        )
    if not is_plainly_causal(mask_function):
        raise UnsupportedError(
            "the model asks for a mask that is not plainly causal (chunks, a prefix, full attention, or packed "
            "documents, which transformers reads from position_ids that do not count up by one); context parallelism "
            "does not honour it in this version."
        )
    if attention_mask is not None:
        raise InvalidInputError(
            f"the model was given an attention_mask {tuple(attention_mask.shape)} directly, or made one itself; give "
            "the global mask to shard_batch_for_cp, which puts it into the layout."
        )
