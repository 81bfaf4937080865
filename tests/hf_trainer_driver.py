"""Trains a tiny model with transformers' Trainer, plain or with context parallelism, and saves what came of it.

python tests/hf_trainer_driver.py REPLICAS OUT, or the same under torchrun, in a folder that may be written to.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_trainer.py"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "clipped": {"max_grad_norm": 0.05},
    "one micro-batch over": {"gradient_accumulation_steps": 2, "num_train_epochs": 2},
}
NUM_SAMPLES, SEQ_LENGTH, LABELS = 10, 30, (1, 7, 29)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(NUM_SAMPLES):
        ids = torch.randint(64, (SEQ_LENGTH,), generator=generator)
        labels = torch.full_like(ids, -100)
        places = torch.randperm(SEQ_LENGTH - 1, generator=generator)[: LABELS[index % 3]] + 1
        labels[places] = ids[places]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class PlainTrainer(Trainer):
    """One process; the loss in the model's own precision, which transformers' is not."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits, labels = model(input_ids=inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch
        return (loss, {}) if return_outputs else loss


class Gradients(TrainerCallback):
    """Keeps the gradients that each optimizer step gets."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append({name: param.grad.clone() for name, param in model.named_parameters()})


def run(case: str, replicas: int, cp_size: int | None) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes, initializer_range=0.2, use_cache=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    settings = {"num_train_epochs": 1, "max_grad_norm": 1.0, "lr_scheduler_type": "linear", **CASES[case]}
    args = TrainingArguments(
        "run",
        per_device_train_batch_size=1 if cp_size else replicas,
        per_device_eval_batch_size=2 if cp_size else 2 * replicas,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        prediction_loss_only=True,
        ddp_find_unused_parameters=False,
        **settings,
    )
    gradients = Gradients()
    # accelerate fills the last batch of replicas up with samples that it evaluates twice, with or without us.
    num_evaluated = 5 if replicas == 1 else 8
    options = {"model": model, "args": args, "train_dataset": samples(), "eval_dataset": samples()[:num_evaluated]}
    trainer = make_trainer(cp_size, callbacks=[gradients], **options)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return {
        "logs": [line for line in trainer.state.log_history if "grad_norm" in line],
        "gradients": gradients.steps,
        "parameters": {name: param.detach() for name, param in model.named_parameters()},
        "eval_loss": evaluated,
        "steps": trainer.state.global_step,
    }


def make_trainer(cp_size: int | None, **options: Any) -> Trainer:
    if cp_size is None:
        return PlainTrainer(**options)
    spec = importlib.util.spec_from_file_location("hf_trainer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trainer: Trainer = module.ContextParallelTrainer(cp_size=cp_size, **options)
    return trainer


def main(replicas: int, out: str) -> None:
    """Run all cases: as one process with the batches of all replicas, or as one of the ranks."""
    cp_size = int(os.environ.get("WORLD_SIZE", "0")) // replicas or None
    found = {case: run(case, replicas, cp_size) for case in CASES}
    rank = dist.get_rank() if cp_size else 0
    torch.save(found, f"{out}.{rank}")
    if cp_size:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
