"""`verify` says of right set-ups that they are right, and of each planted fault where it shows and what it is.

Trainers read random tokens with labels at uneven places; faults are planted as a user would make them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cp_core._strategy
from cp_collectives import current_platform
from cp_core import clip_grad_norm, count_valid_tokens, local_attention, sum_gradients
from cp_trainer_glue import TextTrainer, TrainerConfig, VerifyOptions, VerifyReport, verify_training

VOCAB_SIZE = 96
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WRAPPED = {
    "match": "*.self_attn",
    "when": "cp",
    "region_dispatch": False,
    "inner_target": "self",
    "inner_wrapper": "sdpa_hf",
}


def make_config(family: str = "llama", **changes: Any) -> TrainerConfig:
    """Return a config for two context-parallel ranks, with `section__key=value` changes."""
    content: dict[str, Any] = {
        "output_dir": "runs/never_written",
        "model": {"config": {"model_type": family, **SIZES}},
        "data": {"source": "stdlib", "seq_length": 30},
        "training": {"train_iters": 10, "global_batch_size": 2, "micro_batch_size": 2, "max_grad_norm": 0.5},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        "lr_scheduler": {"name": "cosine", "warmup_iters": 5},
        "accelerator": {"cp_size": 2},
        "plan_overrides": [WRAPPED],
    }
    for place, value in changes.items():
        *parents, last = place.split("__")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return TrainerConfig.model_validate(content)


class Samples:
    """Micro-batches of random tokens in which every sample has labels at other places, and another number of them."""

    def __init__(self, config: TrainerConfig, dp_rank: int, padding: str) -> None:
        self._config, self._dp_rank, self._padding = config, dp_rank, padding

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size, length = self._config.training.micro_batch_size, self._config.data.seq_length
        for number in itertools.count():
            generator = torch.Generator().manual_seed(1000 * number + self._dp_rank)
            ids = torch.randint(VOCAB_SIZE, (size, length), generator=generator)
            chance = torch.rand((size, 1), generator=generator)
            labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > chance, -100)
            labels[:, length // 2] = ids[:, length // 2]  # a target at the end of the first half
            yield {"input_ids": ids, "labels": labels} | self._padded(ids, labels)

    def _padded(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._padding == "none":
            return {}
        index = torch.arange(ids.shape[1]).expand(ids.shape)
        real = index < ids.shape[1] - 5 if self._padding == "right" else index >= 5
        return {"attention_mask": real.long(), "labels": labels.masked_fill(~real, -100)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class SampleTrainer(TextTrainer):
    """A right trainer."""

    padding = "none"

    def build_data(self) -> Any:
        super_tokenizer(self)
        return Samples(self.config, self.meshes.dp_rank, self.padding)


class RightPadded(SampleTrainer):
    padding = "right"


class LeftPadded(SampleTrainer):
    padding = "left"


def super_tokenizer(trainer: TextTrainer) -> None:
    """Give a trainer a tokenizer that asks for no vocabulary: the tokens are random."""

    class Nothing:
        vocab_size = 1

    trainer.tokenizer = Nothing()  # type: ignore[assignment]


def verified(trainer_class: type[TextTrainer], config: TrainerConfig, **options: Any) -> VerifyReport:
    platform = current_platform("cpu")
    return verify_training(trainer_class, config, platform, platform.device(0), options=VerifyOptions(**options))


# --- right set-ups ------------------------------------------------------------------------------------------------

MOE = {"model__config": {"model_type": "qwen3_moe", **SIZES, **EXPERTS}}
RIGHT: dict[str, tuple[int, str, type[TextTrainer], dict[str, Any]]] = {
    "llama": (2, "llama", SampleTrainer, {}),
    "qwen3_moe": (2, "qwen3_moe", SampleTrainer, MOE),
    "qwen3, S not divisible": (2, "qwen3", SampleTrainer, {"data__seq_length": 29}),
    "mistral, window": (
        2,
        "mistral",
        SampleTrainer,
        {"model__config": {"model_type": "mistral", **SIZES, "sliding_window": 5}},
    ),
    "tied embeddings": (
        2,
        "llama",
        SampleTrainer,
        {"model__config": {"model_type": "llama", **SIZES, "tie_word_embeddings": True}},
    ),
    "window of three, one sample each": (
        2,
        "llama",
        SampleTrainer,
        {"training__global_batch_size": 3, "training__micro_batch_size": 1},
    ),
    "recomputed blocks": (2, "llama", SampleTrainer, {"training__activation_checkpoint": "full"}),
    "recomputed attention": (2, "qwen3", SampleTrainer, {"training__activation_checkpoint": "attention"}),
    "compiled": (2, "llama", SampleTrainer, {"training__compile": "layers", "training__compile_backend": "eager"}),
    "regathered": (
        2,
        "qwen3",
        SampleTrainer,
        {"plan_overrides": [{**WRAPPED, "inner_wrapper": {"_target_": "sdpa_hf", "backward_kv": "regathered"}}]},
    ),
    "pads after": (2, "llama", RightPadded, {}),
    "pads before": (2, "llama", LeftPadded, {}),
    "fsdp": (2, "llama", SampleTrainer, {"fsdp": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}),
    "data parallel only": (2, "llama", SampleTrainer, {"accelerator": {"dp_replicate_size": 2}, **{}}),
    "tensor parallel only": (2, "qwen3", SampleTrainer, {"accelerator": {"tp_size": 2}}),
    "cp 4": (4, "qwen3", SampleTrainer, {"accelerator__cp_size": 4}),
    "dp 2 x cp 2, window of three": (
        4,
        "llama",
        SampleTrainer,
        {"accelerator__dp_replicate_size": 2, "training__global_batch_size": 6, "training__micro_batch_size": 1},
    ),
    "dp 2 x cp 2, fsdp": (
        4,
        "qwen3_moe",
        SampleTrainer,
        {**MOE, "accelerator__dp_shard_size": 2, "training__micro_batch_size": 1},
    ),
    "cp 2 x tp 2": (4, "qwen3", SampleTrainer, {"accelerator__tp_size": 2}),
    "cp 2 x tp 2, sequence and loss parallel": (
        4,
        "llama",
        SampleTrainer,
        {
            "accelerator__tp_size": 2,
            "accelerator__sequence_parallel": True,
            "accelerator__loss_parallel": True,
            "training__micro_batch_size": 1,
        },
    ),
}


def verify_right(name: str) -> dict[str, Any]:
    _, family, trainer_class, changes = RIGHT[name]
    return verified(trainer_class, make_config(family, **changes)).as_json()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_set_up_is_found_right(worlds: Any, name: str) -> None:
    for report in worlds(RIGHT[name][0]).run(verify_right, name):
        assert [check for check in report["checks"] if not check["passed"]] == []
        assert report["passed"]
        assert report["causes"] == []
        assert {check["step"] for check in report["checks"]} == {1, 2}
        kinds = {check["kind"] for check in report["checks"]}
        assert {"layer", "logits", "labels", "loss", "gradient", "clipped_gradient", "parameter", "replicas"} <= kinds
