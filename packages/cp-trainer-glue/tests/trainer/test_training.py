"""A run by config is the run of one process: parity of whole trainings, exact resume, and one message on a fault.

The oracle is a plain loop without any context-parallel code, on the same batches in the same order, in float64.
"""

import itertools
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from cp_collectives import current_platform
from cp_collectives.testing import RankFailed
from cp_trainer_glue import TextTrainer, load_config
from cp_trainer_glue._data import BatchStream, load_blocks
from cp_trainer_glue._tokenizer import ByteTokenizer

NUM_STEPS = 3
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}


def write_config(folder: Path, **changes: Any) -> str:
    """Write a config for text of our own, with `section__key=value` changes; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text(" ".join(f"{number} squared is {number * number}." for number in range(300)))
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"config": MODEL, "dtype": "float64"},
        "data": {"files": [str(text)], "seq_length": 30},
        "training": {"train_iters": NUM_STEPS, "global_batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "accelerator": {"cp_size": 1},
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
    for place, value in changes.items():
        *parents, last = place.split("__")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def make_trainer(path: str) -> TextTrainer:
    platform = current_platform("cpu")
    return TextTrainer(load_config(path), platform, platform.device(0))


def train(path: str) -> dict[str, torch.Tensor]:
    """Train by a config and return the parameters."""
    trainer = make_trainer(path)
    trainer.train()
    return {name: whole(parameter) for name, parameter in trainer.model.named_parameters()}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def lines(path: str) -> list[dict[str, Any]]:
    metrics = Path(load_config(path).output_dir) / "metrics.jsonl"
    return [json.loads(text) for text in metrics.read_text().splitlines()]


# --- one process, without any context-parallel code ----------------------------------------------------------------


def plain_training(path: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Return parameters, losses and gradient norms of a loop that a person would write for one device."""
    config = load_config(path)
    everything: Any = SimpleNamespace(dp_rank=0, dp_size=1)
    blocks = load_blocks(config.data, ByteTokenizer(), Path(config.output_dir) / "data-cache", None)
    batches = iter(BatchStream(blocks, config.training, everything))
    torch.manual_seed(config.training.seed)
    hf_config = Qwen3MoeConfig(**{key: value for key, value in MODEL.items() if key != "model_type"})
    model = AutoModelForCausalLM.from_config(
        hf_config, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)
    losses, norms = [], []
    steps = config.training.global_batch_size // config.training.micro_batch_size
    for _ in range(NUM_STEPS):
        window = [next(batches) for _ in range(steps)]
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        loss = torch.zeros(())
        for batch in window:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
            part.backward()
            loss = loss + part.detach()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


def compare_with_plain_loop(path: str) -> dict[str, Any]:
    found = train(path)
    expected, losses, norms = plain_training(path)
    return {
        "bits": all(torch.equal(found[name], expected[name]) for name in expected),
        "distance": max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected),
        "losses": losses,
        "norms": norms,
    }


def test_cp_size_1_gives_the_bits_of_a_loop_without_context_parallelism(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (found,) = worlds(1).run(compare_with_plain_loop, path)
    assert found["bits"]
    assert [line["loss"] for line in lines(path)] == found["losses"]
    assert [line["grad_norm"] for line in lines(path)] == found["norms"]
    assert all(line["comm_bytes"] == 0 for line in lines(path))


LAYOUTS = {
    "cp2": {"accelerator__cp_size": 2},
    "cp4": {"accelerator__cp_size": 4},
    "cp2, one window of four": {"accelerator__cp_size": 2, "training__micro_batch_size": 1},
    "cp2, clipped": {"accelerator__cp_size": 2, "training__max_grad_norm": 0.1},
    "cp2, recomputed": {"accelerator__cp_size": 2, "training__activation_checkpoint": "full"},
}


@pytest.mark.parity
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_training_over_ranks_is_the_training_of_one_process(
    worlds: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = write_config(tmp_path, **changes)
    for found in worlds(changes["accelerator__cp_size"]).run(compare_with_plain_loop, path):
        assert found["distance"] <= 1e-10
    for line, loss, norm in zip(lines(path), found["losses"], found["norms"], strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-12)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-10)
        assert line["comm_bytes"] > 0


def gathered_parameters(path: str) -> tuple[bytes, list[float]]:
    parameters = train(path)
    return b"".join(p.numpy().tobytes() for p in parameters.values()), [line["loss"] for line in lines(path)]


@pytest.mark.parity
def test_data_and_context_parallel_ranks_end_with_equal_parameters_and_the_loss_of_data_parallelism(
    worlds: Any, tmp_path: Path
) -> None:
    both = write_config(tmp_path / "both", accelerator__dp_replicate_size=2, accelerator__cp_size=2)
    data = write_config(tmp_path / "data", accelerator__dp_replicate_size=2)
    results = worlds(4).run(gathered_parameters, both)
    assert len({bits for bits, _ in results}) == 1
    expected = worlds(2).run(gathered_parameters, data)[0][1]
    assert results[0][1] == pytest.approx(expected, rel=1e-12)


# --- resume -------------------------------------------------------------------------------------------------------


RESUMED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer__name": "sgd"},
    "adamw": {"optimizer__name": "adamw"},
    "fsdp, recomputed": {"optimizer__name": "adamw", "fsdp": {}, "training__activation_checkpoint": "full"},
    "fsdp, compiled": {"fsdp": {}, "training__compile": "layers", "training__compile_backend": "aot_eager"},
    # Gate and up projections of experts are packed in one parameter, of which a rank has two strips.
    "tensor parallel": {"optimizer__name": "adamw", "accelerator": {"tp_size": 2}},
    "tensor parallel, fsdp": {"optimizer__name": "adamw", "fsdp": {}, "accelerator": {"cp_size": 2, "tp_size": 2}},
}


@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(
    worlds: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = {"accelerator__cp_size": 2, "lr_scheduler__name": "cosine", **changes}
    whole = write_config(tmp_path / "whole", training__train_iters=6, **options)
    parts = write_config(tmp_path / "parts", training__train_iters=6, **options)
    world = worlds(load_config(parts).accelerator.world_size)
    expected = world.run(gathered_parameters, whole)
    world.run(stop_after_step_four, parts)
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 4]
    assert world.run(gathered_parameters, parts) == expected
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 4, 5, 6]


def stop_after_step_four(path: str) -> None:
    """Train, and let rank 1 alone be interrupted in step 4: Ctrl-C need not reach all ranks at once."""
    trainer = make_trainer(path)
    made, counted = trainer.train_step, itertools.count(1)

    def interrupted_step() -> Any:
        if next(counted) == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return made()

    trainer.train_step = interrupted_step  # type: ignore[method-assign]
    assert trainer.train() is False


def test_another_layout_is_refused_by_name(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, accelerator__cp_size=2)
    worlds(2).run(gathered_parameters, path)
    other = write_config(tmp_path, accelerator__dp_replicate_size=2, accelerator__cp_size=1)
    with pytest.raises(RankFailed, match=r"another layout: \{'dp_replicate_size': 1, 'cp_size': 2\}"):
        worlds(2).run(gathered_parameters, other)


def test_sharded_parameters_are_another_layout(worlds: Any, tmp_path: Path) -> None:
    worlds(2).run(gathered_parameters, write_config(tmp_path, accelerator__cp_size=2))
    sharded = write_config(tmp_path, accelerator__cp_size=2, fsdp={})
    with pytest.raises(RankFailed, match="was saved with another fsdp: None, but the config says"):
        worlds(2).run(gathered_parameters, sharded)


def test_another_model_is_refused_by_name(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    worlds(1).run(gathered_parameters, path)
    other = write_config(tmp_path, model__config={**MODEL, "num_hidden_layers": 1})
    with pytest.raises(RankFailed, match=r"was saved with another model"):
        worlds(1).run(gathered_parameters, other)


def test_another_learning_rate_is_refused_since_a_loaded_optimizer_brings_its_own(worlds: Any, tmp_path: Path) -> None:
    worlds(1).run(gathered_parameters, write_config(tmp_path))
    other = write_config(tmp_path, optimizer__lr=0.2)
    with pytest.raises(RankFailed, match=r"another optimizer: \{'lr': 0\.1\}, but the config says \{'lr': 0\.2\}"):
        worlds(1).run(gathered_parameters, other)


def test_a_longer_run_goes_on_after_a_finished_one(worlds: Any, tmp_path: Path) -> None:
    worlds(1).run(gathered_parameters, write_config(tmp_path))
    longer = write_config(tmp_path, training__train_iters=5)
    worlds(1).run(gathered_parameters, longer)
    assert [line["step"] for line in lines(longer)] == [1, 2, 3, 4, 5]


def test_an_incomplete_checkpoint_is_named(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    worlds(1).run(gathered_parameters, path)
    (tmp_path / "run/checkpoints/step-00000003/run.json").unlink()
    with pytest.raises(RankFailed, match="names step-00000003, which is no complete checkpoint"):
        worlds(1).run(gathered_parameters, path)


def test_a_damaged_checkpoint_is_named(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    worlds(1).run(gathered_parameters, path)
    for shard in (tmp_path / "run/checkpoints/step-00000003").glob("*.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(RankFailed, match="step-00000003 cannot be read; it is damaged"):
        worlds(1).run(gathered_parameters, path)


def test_a_checkpoint_that_cannot_be_written_is_named(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, accelerator__cp_size=2)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/.unfinished-step-00000003").write_text("no folder")
    with pytest.raises(RankFailed, match=r"step-00000003 cannot be written: rank 0: \w*Error: "):
        worlds(2).run(gathered_parameters, path)


# --- parameters that nobody would train -----------------------------------------------------------------------------


def train_with_a_late_parameter(path: str) -> str:
    trainer = make_trainer(path)
    trainer.model.adapter = torch.nn.Parameter(torch.zeros(2))
    try:
        trainer.train_step()
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_trainable_parameter_that_is_not_the_optimizers_is_refused(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, accelerator__cp_size=2)
    for message in worlds(2).run(train_with_a_late_parameter, path):
        assert message == (
            "1 trainable parameters are not the optimizer's, first adapter; add parameters in build_model, before the "
            "optimizer is made, or freeze them."
        )


# --- faults -------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({"plan_overrides": []}, "2 of 2 attentions have no context-parallel method"),
    "vocabulary": ({"model__config": {**MODEL, "vocab_size": 100}}, r"vocab_size \(100\) must hold the 257 ids"),
    "misspelt field": ({"model__config": {**MODEL, "hiden_size": 8}}, r"no such field\. Did you mean 'hidden_size'"),
    "wrong value": (
        {"model__config": {**MODEL, "num_hidden_layers": "two"}},
        r"model\.config: qwen3_moe refuses it: [\s\S]*'num_hidden_layers'",
    ),
    "unknown model": ({"model__config": {"model_type": "qwen33"}}, "transformers knows no model type 'qwen33'"),
    "no such weights": (
        {"model": {"pretrained": "/no/such/folder", "dtype": "float64"}},
        r"model\.pretrained: cannot load '/no/such/folder'",
    ),
    "no file": ({"data__files": ["/no/such/*.txt"]}, r"'/no/such/\*\.txt' matches no file"),
    "world size": ({"accelerator__cp_size": 3}, "multiply to 3 ranks, but 2 were started"),
    "short text": ({"data__seq_length": 100000}, "the data holds 0 blocks of seq_length"),
    "no checkpoint": ({"checkpoint__resume": "/nowhere"}, r"checkpoint\.resume: '/nowhere' is neither"),
}


@pytest.mark.parametrize(("changes", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_stops_the_run_before_its_first_step(
    worlds: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = write_config(tmp_path, **{"accelerator__cp_size": 2, **changes})
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(gathered_parameters, path)


def train_with_another_text_on_rank_1(path: str) -> str:
    config = load_config(path)
    if dist.get_rank() == 1:
        text = Path(config.output_dir).parent / "other.txt"
        text.write_text("other text " * 300)
        config = config.model_copy(update={"data": config.data.model_copy(update={"files": (str(text),)})})
    platform = current_platform("cpu")
    try:
        TextTrainer(config, platform, platform.device(0))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_read_other_text_are_found(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, accelerator__cp_size=2)
    for message in worlds(2).run(train_with_another_text_on_rank_1, path):
        assert message == "ranks 1 read other text than rank 0; every rank must see the same files."


def train_with_other_weights_on_rank_1(path: str) -> str:
    class Unequal(TextTrainer):
        def build_model(self) -> torch.nn.Module:
            model = super().build_model()
            if dist.get_rank() == 1:
                with torch.no_grad():
                    next(model.parameters()).add_(1)
            return model

    platform = current_platform("cpu")
    try:
        Unequal(load_config(path), platform, platform.device(0))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_other_weights_are_found(worlds: Any, tmp_path: Path) -> None:
    path = write_config(tmp_path, accelerator__cp_size=2)
    for message in worlds(2).run(train_with_other_weights_on_rank_1, path):
        assert message.startswith(
            "1 parameters of rank 1 differ from rank 0's before the first step, first model.embed"
        )
