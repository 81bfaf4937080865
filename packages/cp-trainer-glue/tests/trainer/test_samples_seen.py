"""What a run counts and draws does not depend on how many ranks share a sequence.

Ten tagged samples: all tokens of sample n are n.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cp_collectives import current_platform
from cp_trainer_glue import TextTrainer, TrainerConfig, _trainer
from cp_trainer_glue._data import BatchStream, TokenBlocks

NUM_SAMPLES, SEQ_LENGTH, STEPS_PER_EPOCH = 10, 8, 5
FIELDS = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


class Axes(NamedTuple):
    """One layout of ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp


def config_of(folder: Path, axes: Axes) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "output_dir": str(folder),
            "model": {"config": {"model_type": "llama", **FIELDS}, "dtype": "float64"},
            "data": {"source": "stdlib", "seq_length": SEQ_LENGTH},
            "training": {"train_iters": 2 * STEPS_PER_EPOCH, "global_batch_size": 2},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "lr_scheduler": {"name": "cosine", "warmup_iters": 3},
            "accelerator": {"dp_replicate_size": axes.dp, "cp_size": axes.cp, "tp_size": axes.tp},
            "plan_overrides": [
                {
                    "match": "*.self_attn",
                    "when": "cp",
                    "region_dispatch": False,
                    "inner_target": "self",
                    "inner_wrapper": "sdpa_hf",
                }
            ],
        }
    )


class TaggedTrainer(TextTrainer):
    """Trains on the tagged samples, notes their tags, and scales each by a random number that it notes too."""

    def build_data(self) -> BatchStream:
        self.tags: list[int] = []
        self.draws: list[float] = []
        tokens = np.repeat(np.arange(NUM_SAMPLES, dtype=np.int32), SEQ_LENGTH)
        return BatchStream(TokenBlocks(tokens, SEQ_LENGTH), self.config.training, self.meshes)

    def build_model(self) -> torch.nn.Module:
        model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig(**FIELDS), dtype=torch.float64, attn_implementation="sdpa"
        )
        model.config.use_cache = False
        model.model.embed_tokens.register_forward_hook(self._scale_samples)
        built: torch.nn.Module = model
        return built

    def shard_batch(self, batch: Any) -> dict[str, Any]:
        self.tags += batch["input_ids"][:, 0].tolist()
        return super().shard_batch(batch)

    def _scale_samples(self, _module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(output.shape[0], dtype=output.dtype)
        self.draws += drawn.tolist()
        return output * (1 + drawn.view(-1, 1, 1))


def make_trainer(folder: Path, axes: Axes) -> TaggedTrainer:
    platform = current_platform("cpu")
    return TaggedTrainer(config_of(folder, axes), platform, platform.device(0))


class Seen(NamedTuple):
    """What one rank saw of a run."""

    dp_rank: int
    tags: list[int]
    draws: list[float]
    # Of rank 0's metrics.jsonl; its seconds are counted in readings of the clock, of which a step takes two.
    rows: list[dict[str, Any]]


def run(folder: Path, axes: Axes) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_trainer, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
        trainer = make_trainer(folder, axes)
        trainer.train()
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    # Plain, since a class of a test file cannot be sent back.
    return Seen(trainer.meshes.dp_rank, trainer.tags, trainer.draws, rows)._asdict()


def everyone(worlds: Any, folder: Path, axes: Axes) -> list[Seen]:
    found = worlds(axes.world_size).run(run, folder / "-".join(map(str, axes)), axes)
    return [Seen(**of_rank) for of_rank in found]


def test_each_sample_is_seen_once_per_epoch_and_by_all_ranks_that_share_it(worlds: Any, tmp_path: Path) -> None:
    ranks = everyone(worlds, tmp_path, Axes(dp=2, cp=2))
    of_dp_rank = {seen.dp_rank: seen.tags for seen in ranks}
    assert all(seen.tags == of_dp_rank[seen.dp_rank] for seen in ranks)
    for epoch in range(2):
        steps = slice(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert Counter(tag for tags in of_dp_rank.values() for tag in tags[steps]) == Counter(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("one", "shared"),
    [(Axes(), Axes(cp=2)), (Axes(), Axes(cp=4)), (Axes(dp=2), Axes(dp=2, cp=2)), (Axes(), Axes(cp=2, tp=2))],
    ids=["cp2", "cp4", "dp2-cp2", "cp2-tp2"],
)
def test_counters_do_not_depend_on_how_many_ranks_share_a_sequence(
    worlds: Any, tmp_path: Path, one: Axes, shared: Axes
) -> None:
    alone, together = (everyone(worlds, tmp_path, axes) for axes in (one, shared))
    tags = {seen.dp_rank: seen.tags for seen in alone}
    assert all(seen.tags == tags[seen.dp_rank] for seen in together)
    for name in ("step", "lr", "valid_tokens", "tokens_per_second"):
        assert [row[name] for row in together[0].rows] == [row[name] for row in alone[0].rows]
    assert [row["step"] for row in alone[0].rows] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert {row["valid_tokens"] for row in alone[0].rows} == {2 * (SEQ_LENGTH - 1)}
    assert {row["tokens_per_second"] for row in alone[0].rows} == {2 * SEQ_LENGTH}  # in one "second"
    for row, expected in zip(together[0].rows, alone[0].rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-10)  # with the same random numbers


# --- random decisions per sample --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [Axes(dp=2, cp=2), Axes(dp=2, tp=2), Axes(cp=2, tp=2)], ids=str)
def test_ranks_that_share_a_sample_decide_alike_and_others_do_not(worlds: Any, tmp_path: Path, axes: Axes) -> None:
    ranks = everyone(worlds, tmp_path, axes)
    draws = {seen.dp_rank: seen.draws for seen in ranks}
    assert all(seen.draws == draws[seen.dp_rank] for seen in ranks)
    assert len({drawn for of_rank in draws.values() for drawn in of_rank}) == sum(map(len, draws.values()))


def in_parts(folder: Path, axes: Axes, interrupted: bool) -> list[float]:
    trainer = make_trainer(folder, axes)
    losses = [float(trainer.train_step().loss) for _ in range(3)]
    if interrupted:
        trainer.checkpoints.save(3)
        trainer = make_trainer(folder, axes)
        torch.rand(7)
        assert trainer.checkpoints.load() == 3
    return losses + [float(trainer.train_step().loss) for _ in range(3)]


def test_random_decisions_go_on_after_a_resume_as_without_it(worlds: Any, tmp_path: Path) -> None:
    axes = Axes(dp=2, cp=2)
    expected = worlds(4).run(in_parts, tmp_path / "whole", axes, False)
    assert worlds(4).run(in_parts, tmp_path / "parts", axes, True) == expected
