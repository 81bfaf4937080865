"""Parts of a model that are right on a whole sequence and wrong on a shard of it, whatever its attentions do."""

import inspect
import re
from collections.abc import Iterator, Mapping

import torch

from ._attention_settings import asks_config_for_attention
from ._boundaries import unserved_token_mixers
from ._names import ModuleNames, is_inside

# Heads that pick one token of the sequence, or pool over it.
_POOLING_HEADS = re.compile(r"For(SequenceClassification|MultipleChoice)$|DoubleHeadsModel$")
_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds")


def whole_sequence_parts(
    names: ModuleNames, attentions: Mapping[str, torch.nn.Module], served: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each part with what is wrong with it on a shard.

    Args:
        names: The model's modules.
        attentions: Its attentions.
        served: The modules that a method takes care of, attentions included.
    """
    for fqn in unserved_token_mixers(names, served):
        yield (
            fqn,
            "mixes tokens along the sequence and no context-parallel method serves it: on each rank it would start "
            "from nothing",
        )
    for fqn, module in names.modules.items():
        if _POOLING_HEADS.search(type(module).__name__):
            yield fqn, "pools over the sequence: each rank would read the tokens of its own shard"
    for fqn in dict.fromkeys(_without_positions(names, attentions)):
        yield fqn, "takes no position_ids: on each rank its positions would start at 0"


def _without_positions(names: ModuleNames, attentions: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Yield the models of transformers that hold attentions and make their positions from what they are given alone."""
    for attention, module in attentions.items():
        if not asks_config_for_attention(module):
            continue
        above = [name for name in names.modules if name != attention and is_inside(attention, name)]
        for name in sorted(above, key=len, reverse=True):
            arguments = inspect.signature(type(names.modules[name]).forward).parameters
            if any(argument in arguments for argument in _TOKEN_ARGUMENTS):
                if "position_ids" not in arguments:
                    yield name
                break
