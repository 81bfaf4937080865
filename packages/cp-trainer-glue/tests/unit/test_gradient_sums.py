"""A run says how its parameters are held and over which ranks their gradients are summed."""

import pytest

from cp_trainer_glue._config import AcceleratorConfig, FsdpConfig
from cp_trainer_glue._gradient_sums import gradient_sums

ONE = AcceleratorConfig()
DP_CP = AcceleratorConfig(dp_replicate_size=2, cp_size=2)
SHARDS = AcceleratorConfig(dp_shard_size=2, cp_size=2)
TP = AcceleratorConfig(cp_size=2, tp_size=4)


@pytest.mark.parametrize(
    ("accelerator", "fsdp", "partial", "words"),
    [
        (ONE, None, (), "one data rank"),
        (DP_CP, None, (), "parameters replicated, gradients summed over dp x cp (4 ranks)"),
        (
            SHARDS,
            FsdpConfig(param_dtype="bfloat16", reduce_dtype="float32"),
            (),
            "parameters sharded over dp_shard x cp (4 ranks, FSDP2), gradients summed there in float32",
        ),
        (
            DP_CP,
            FsdpConfig(),
            (),
            "parameters sharded over dp_shard x cp (2 ranks, FSDP2), gradients summed there and over dp_replicate (2 "
            "replicas)",
        ),
        (
            TP,
            None,
            ("q_norm", "k_norm"),
            "parameters replicated, gradients summed over dp x cp (2 ranks); q_norm and 1 more also over tp (4 ranks)",
        ),
    ],
    ids=["one", "replicated", "fsdp", "hsdp", "tp"],
)
def test_each_domain_has_its_words(
    accelerator: AcceleratorConfig, fsdp: FsdpConfig | None, partial: tuple[str, ...], words: str
) -> None:
    assert gradient_sums(accelerator, fsdp, partial=partial) == words
