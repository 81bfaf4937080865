"""A long run holds no more than a short one: process groups, pending handles, memory, Python's own objects."""

import gc
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_collectives import check_no_pending, current_platform
from cp_trainer_glue import TextTrainer, TrainerConfig

WARM_UP, STEPS = 100, 400
# Allocators round, and Python caches: far below what one leaked tensor or object per step would come to.
MAX_GROWTH_BYTES = 8 * 2**20
MAX_MORE_OBJECTS = 200

MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Batches:
    def __iter__(self) -> Any:
        ids = torch.arange(16).view(1, 16)
        while True:
            yield {"input_ids": ids, "labels": ids.clone()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def held(sections: dict[str, Any]) -> list[dict[str, int]]:
    """Return what is held after the warm-up and after all steps."""

    class Trainer(TextTrainer):
        def build_data(self) -> Any:
            stream, self.tokenizer = Batches(), None
            return stream

        def build_model(self) -> torch.nn.Module:
            from transformers import AutoModelForCausalLM, LlamaConfig

            fields = {name: value for name, value in MODEL.items() if name != "model_type"}
            model: torch.nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**fields, use_cache=False))
            return model

    config = {
        "output_dir": "runs/never_written",
        "model": {"config": MODEL},
        "data": {"source": "stdlib", "seq_length": 16},
        "training": {"train_iters": WARM_UP + STEPS, "global_batch_size": 1},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "accelerator": {"cp_size": 2},
        "plan_overrides": [
            {"match": "*.self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"}
        ],
        **sections,
    }
    platform = current_platform("cpu")
    trainer, found = Trainer(TrainerConfig.model_validate(config), platform, platform.device(0)), []
    for steps in (WARM_UP, STEPS):
        for _ in range(steps):
            trainer.train_step()
        check_no_pending(where="the long run")
        gc.collect()
        found.append(
            {
                "groups": len(dist.distributed_c10d._world.pg_map),
                "resident": resident_bytes(),
                "objects": len(gc.get_objects()),
            }
        )
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("sections", [{}, {"fsdp": {}}], ids=["replicated", "sharded"])
def test_five_hundred_steps_hold_no_more_than_one_hundred(worlds: Any, sections: dict[str, Any]) -> None:
    # Without the sanitizer of buffers, which maps pages of its own.
    for early, late in worlds(2).run(held, sections, sanitize=False):
        assert late["groups"] == early["groups"]
        assert late["resident"] - early["resident"] < MAX_GROWTH_BYTES
        assert late["objects"] - early["objects"] < MAX_MORE_OBJECTS
