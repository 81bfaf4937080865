"""What a layer is configured to do must be what its attention is asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_core import UnsupportedError
from cp_wrappers._attention_settings import require_settings_of, window_of


def layer(*, layer_types: list[str] | None = None, **attributes: Any) -> Any:
    config = SimpleNamespace(
        _attn_implementation="sdpa", layer_types=layer_types, sliding_window=attributes.pop("of", None)
    )
    return SimpleNamespace(config=config, layer_idx=0, is_causal=True, **attributes)


@pytest.mark.parametrize(
    ("module", "window"),
    [
        (layer(), None),
        (layer(of=4), 4),
        (layer(sliding_window=3), 3),
        (layer(sliding_window=3, layer_types=["full_attention"]), None),
        (layer(of=4, layer_types=["full_attention"]), None),
        (layer(of=4, layer_types=["sliding_attention"]), 4),
        (layer(of=4, sliding_window=None, layer_types=["sliding_attention"]), 4),
    ],
    ids=["none", "config", "module", "full, module", "full, config", "sliding, config", "sliding, module says none"],
)
def test_the_window_is_read_from_layer_type_module_and_config(module: Any, window: int | None) -> None:
    assert window_of(module) == window
    require_settings_of(module, "attn", window=window, sinks=None)


def test_a_window_that_only_the_config_knows_is_refused() -> None:
    sentence = (
        r"^attn: the layer's config says sliding_window=4, but its attention was asked for None; context parallelism"
    )
    with pytest.raises(UnsupportedError, match=sentence):
        require_settings_of(layer(of=4), "attn", window=None, sinks=None)
    with pytest.raises(UnsupportedError, match="says sliding_window=None, but its attention was asked for 4"):
        require_settings_of(layer(of=4, layer_types=["full_attention"]), "attn", window=4, sinks=None)


def test_sinks_that_only_one_side_knows_are_refused() -> None:
    sinks = torch.zeros(4)
    require_settings_of(layer(sinks=sinks), "attn", window=None, sinks=sinks)
    for module, handed in ((layer(sinks=sinks), None), (layer(), sinks)):
        with pytest.raises(
            UnsupportedError, match=r"^attn: the layer has sinks, but its attention was not handed them"
        ):
            require_settings_of(module, "attn", window=None, sinks=handed)
