"""transformers' own Trainer with context parallelism from cp-core and cp-wrappers, on this file's own text.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from cp_core import count_valid_tokens, mean_global_loss
from cp_wrappers import apply_context_parallel

# --- what context parallelism adds to a script with Trainer ---------------------------------------------------------


class ContextParallelTrainer(Trainer):
    """A Trainer whose ranks share each sequence in groups of `cp_size`."""

    loss_is_scaled_for_ga = True  # compute_loss divides by the tokens of the whole accumulation window

    def __init__(self, *, cp_size: int, **options: Any) -> None:
        super().__init__(**options)
        sizes = (self.args.world_size // cp_size, cp_size)
        mesh = dist.init_device_mesh(self.args.device.type, sizes, mesh_dim_names=("dp_replicate", "cp"))
        self.accelerator.state.device_mesh = mesh  # from it accelerate reads which ranks get the same samples
        self.everyone, self.cp_size = mesh._flatten("dp_cp"), cp_size
        self.context_parallel = apply_context_parallel(self.model, mesh["cp"], {"*.self_attn": "sdpa_hf"})

    def get_cp_size(self) -> int:
        return self.cp_size  # samples, steps and tokens are counted per group

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        batch = self.context_parallel.shard_batch(inputs)
        labels = batch.pop("shift_labels")
        outputs = model(**batch)
        loss = mean_global_loss(
            cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"),
            count_valid_tokens(labels),
            dp_cp_mesh=self.everyone,
            grad_average_degree=self.everyone.size(),  # DistributedDataParallel averages over all ranks
            window_valid_tokens=None if num_items_in_batch is None else int(num_items_in_batch),
        )
        # In training Trainer logs the mean over ranks of what it is given.
        value = loss.backward if model.training else loss.logged
        return (value, outputs) if return_outputs else value

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        def once_per_sample(losses: torch.Tensor) -> torch.Tensor:  # which are equal on all ranks
            state = self.accelerator.gradient_state
            per_sample = losses.repeat(self.everyone.size() // self.cp_size)
            return per_sample[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else per_sample

        self.gather_function = once_per_sample
        return super().evaluation_loop(*args, **options)


# --- the script -----------------------------------------------------------------------------------------------------


def train(output_dir: str, **options: Any) -> ContextParallelTrainer:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    samples = [{"input_ids": ids, "labels": ids} for ids in text.split(128)[:-1]]
    torch.manual_seed(0)  # the same model on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    args = TrainingArguments(
        output_dir,
        use_cpu=not torch.accelerator.is_available(),
        ddp_find_unused_parameters=False,
        prediction_loss_only=True,
        **options,
    )
    trainer = ContextParallelTrainer(
        model=model, args=args, train_dataset=samples, eval_dataset=samples[:5], cp_size=args.world_size
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    settings = {"num_train_epochs": 8, "learning_rate": 3e-3, "logging_steps": 10, "report_to": "none"}
    trainer = train(sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer", **settings)
    evaluated = trainer.evaluate()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, evaluated {evaluated['eval_loss']:.3f}")
    dist.destroy_process_group()
