"""The life of a run: what is built, in which order, and one training step as the data sees it."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_collectives import CollectiveTrace, Platform, check_no_pending, gather_objects
from cp_core import GlobalLoss, InvalidInputError, count_valid_tokens, mean_global_loss, sequence_multiple

from ._applier import apply_plan
from ._checkpoint import Checkpoints
from ._compilation import compile_blocks
from ._config import TrainerConfig
from ._data import Batch, BatchStream, load_blocks, require_same_shard
from ._gradient_domain import GradientDomain
from ._loss import token_loss_sum
from ._mesh import MeshContext
from ._metrics import MetricsFile, StepMetrics
from ._model import HyperAutoModel, require_equal_parameters, require_vocabulary
from ._optimizer import make_optimizer, make_scheduler
from ._progress import Reporter
from ._recomputation import checkpoint_activations
from ._sharded_parameters import shard_parameters
from ._stop import StopRequest
from ._tokenizer import make_tokenizer
from ._vocab_parallel_loss import vocab_parallel_loss_sum

_logger = logging.getLogger("cp_trainer_glue")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step found; equal on all ranks."""

    # 0-d: mean loss over the valid tokens of the step.
    loss: torch.Tensor
    valid_tokens: int
    # 0-d: gradient norm before clipping.
    grad_norm: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches of one optimizer step, fetched before its first backward: all their tokens weigh each."""

    # This rank's shards, as `shard_batch` returns them, on the host.
    batches: tuple[dict[str, Any], ...]
    # Labels of each shard.
    counts: tuple[int, ...]
    # Labels of all shards of all ranks.
    valid_tokens: int


class BaseTrainer:
    """Trains a model by a config; a subclass says what model, what data and what loss.

    Construct it on every rank, with the default process group up. The order of the parts is fixed: model, tensor
    parallelism, declared context parallelism, activation checkpointing, compile, FSDP, optimizer.

    Args:
        config: The run.
        platform: The platform of `device`.
        device: This rank's device.

    Raises:
        ContextParallelError: With all faults together, on all ranks, before the first step.
    """

    def __init__(self, config: TrainerConfig, platform: Platform, device: torch.device) -> None:
        self.config, self.platform = config, platform
        self.meshes = MeshContext.build(config.accelerator, platform, device)
        platform.manual_seed(config.training.seed)
        self.stream = self.build_data()
        self.model = self.build_model().to(device)
        require_equal_parameters(self.model, self.meshes.world_mesh)
        self.applied, tp_grad_info = apply_plan(self.model, config, self.meshes)
        self.model.train()
        checkpoint_activations(self.model, config.training)
        compile_blocks(self.model, config.training)
        if config.fsdp_config is not None:
            shard_parameters(self.model, self.meshes.fsdp_mesh, config.fsdp_config)
        self.gradients = GradientDomain(self.model, self.meshes, tp_grad_info)
        self.optimizer = make_optimizer(config.optimizer, self.model)
        self.scheduler = make_scheduler(config.lr_scheduler, self.optimizer, config.training.train_iters)
        self.checkpoints = Checkpoints(
            config,
            self.meshes,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            stream=self.stream,
        )
        self._batches: Iterator[Batch] | None = None

    def build_data(self) -> BatchStream:
        """Return the stream of global micro-batches, each with `input_ids` and `labels` `[B, S]`."""
        raise NotImplementedError("a trainer says what its data are: override build_data.")

    def build_model(self) -> torch.nn.Module:
        """Return the model, with equal weights on all ranks."""
        raise NotImplementedError("a trainer says what its model is: override build_model.")

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of this rank's tokens, summed, 0-d.

        Args:
            inputs: The keyword arguments of the model: this rank's shard.
            shift_labels: `[B, L]`, shifted on the global sequence, -100 where nothing is to predict.
        """
        raise NotImplementedError("a trainer says what its loss is: override compute_loss_sum.")

    def train_step(self) -> StepResult:
        """Make one optimizer step over a window of micro-batches."""
        window = self.next_window()
        loss = self.accumulate(window)
        self.reduce_gradients()
        grad_norm = self.clip_gradients()
        self.update()
        return StepResult(loss=loss, valid_tokens=window.valid_tokens, grad_norm=grad_norm)

    def next_window(self) -> Window:
        """Fetch and shard the micro-batches of the next step."""
        batches = tuple(self._shard(next(self._stream_iterator())) for _ in range(self.config.accumulation_steps))
        counts = tuple(count_valid_tokens(batch["shift_labels"]) for batch in batches)
        valid_tokens = sum(gather_objects(sum(counts), mesh=self.meshes.dp_cp_mesh))
        return Window(batches=batches, counts=counts, valid_tokens=valid_tokens)

    def accumulate(self, window: Window) -> torch.Tensor:
        """Run forward and backward of each micro-batch; return the mean loss over the window's valid tokens, 0-d."""
        logged = torch.zeros((), device=self.meshes.device)
        last = len(window.batches) - 1
        for index, (batch, count) in enumerate(zip(window.batches, window.counts, strict=True)):
            self.gradients.will_reduce(index == last)
            logged = logged + self._backward(batch, count, window.valid_tokens).logged
        return logged

    def reduce_gradients(self) -> None:
        """Make each gradient that of the whole window, on all ranks."""
        self.gradients.reduce()

    def clip_gradients(self) -> torch.Tensor:
        """Scale gradients down to `max_grad_norm`; return the norm before, 0-d."""
        return self.gradients.clip(self.config.training.max_grad_norm)

    def update(self) -> None:
        """Step the optimizer and the schedule, and drop the gradients.

        Raises:
            InvalidInputError: If a trainable parameter is not the optimizer's.
        """
        self._require_optimized()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self) -> bool:
        """Train to `train_iters`, from the newest checkpoint if there is one.

        Returns:
            Whether the run is finished; False if it was asked to stop and saved what it had.
        """
        config, first = self.config, self.checkpoints.load()
        reporter = Reporter(train_iters=config.training.train_iters, shown=dist.get_rank() == 0)
        reporter.summary(self._summary(first))
        if first >= config.training.train_iters:
            reporter.say(f"train_iters ({config.training.train_iters}) is reached; nothing to do.")
            return True
        metrics = self._metrics_file(first)
        with reporter, StopRequest(self.meshes.world_mesh) as stop:
            for step in range(first + 1, config.training.train_iters + 1):
                measured = self._measured_step(step)
                if metrics is not None:
                    metrics.write(measured)
                reporter.step(measured)
                stopping = stop.agreed()
                if stopping or self._saves_after(step):
                    reporter.say(f"saved {self.checkpoints.save(step)}")
                if stopping:
                    reporter.say(f"stopped after step {step}; the same command goes on from here.")
                    return step == config.training.train_iters
        return True

    def _stream_iterator(self) -> Iterator[Batch]:
        if self._batches is None:
            self._batches = iter(self.stream)
        return self._batches

    def _shard(self, batch: Batch) -> dict[str, Any]:
        shard = self.applied.shard_batch(batch, multiple_of=self._padding_multiple())
        require_same_shard(shard, self.meshes.tp_mesh)
        return shard

    def _padding_multiple(self) -> int:
        """With the residual stream sharded along the sequence, tensor-parallel ranks cut each shard once more."""
        axes = self.config.accelerator
        multiple = sequence_multiple(axes.cp_size, self.applied.strategies)
        return multiple * axes.tp_size if axes.sequence_parallel else multiple

    def _backward(self, batch: dict[str, Any], count: int, window_valid_tokens: int) -> GlobalLoss:
        local = {
            name: value.to(self.meshes.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        shift_labels = local.pop("shift_labels")
        if not self.applied.report:  # nothing is wrapped: the model gets what it would get without any of this
            local.pop("cp_layout")
        loss = mean_global_loss(
            self.compute_loss_sum(local, shift_labels),
            count,
            dp_cp_mesh=self.meshes.dp_cp_mesh,
            grad_average_degree=1,  # every domain sums
            window_valid_tokens=window_valid_tokens,
        )
        loss.backward.backward()
        return loss

    def _measured_step(self, step: int) -> StepMetrics:
        lr = float(self.scheduler.get_last_lr()[0])
        self.platform.reset_peak_memory(self.meshes.device)
        started = time.perf_counter()
        with CollectiveTrace() as trace:
            result = self.train_step()
        loss = result.loss.item()  # waits for the device, so the clock is read after it
        seconds = time.perf_counter() - started
        check_no_pending(where=f"training step {step}")
        return StepMetrics(
            step=step,
            loss=loss,
            valid_tokens=result.valid_tokens,
            grad_norm=result.grad_norm.item(),
            lr=lr,
            tokens_per_second=self.config.training.global_batch_size * self.config.data.seq_length / seconds,
            peak_memory_bytes=self.platform.peak_memory_bytes(self.meshes.device),
            comm_bytes=sum(record.bytes_received for record in trace.records),
        )

    def _saves_after(self, step: int) -> bool:
        every = self.config.checkpoint.save_iters
        return step == self.config.training.train_iters or (every > 0 and step % every == 0)

    def _metrics_file(self, last_step: int) -> MetricsFile | None:
        if dist.get_rank() != 0:
            return None
        return MetricsFile(Path(self.config.output_dir) / "metrics.jsonl", last_step=last_step)

    def _require_optimized(self) -> None:
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        lacking = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in known]
        if lacking:
            raise InvalidInputError(
                f"{len(lacking)} trainable parameters are not the optimizer's, first {lacking[0]}; add parameters in "
                "build_model, before the optimizer is made, or freeze them."
            )

    def _summary(self, first: int) -> dict[str, str]:
        axes = self.config.accelerator
        methods: dict[str, list[str]] = {}
        for row in self.applied.report:
            methods.setdefault(row.wrapper, []).append(row.fqn)
        return {
            "ranks": f"{axes.world_size} (dp {axes.dp_size} x cp {axes.cp_size} x tp {axes.tp_size}) on {self.meshes.device.type}",
            "model": f"{type(self.model).__name__}, {sum(p.numel() for p in self.model.parameters()):,} parameters",
            "methods": "; ".join(f"{name}: {_short(fqns)}" for name, fqns in methods.items()) or "none (cp_size 1)",
            "batch": f"{self.config.training.global_batch_size} x {self.config.data.seq_length} tokens",
            "output": self.config.output_dir,
            "start": f"after step {first}" if first else "from the beginning",
        }


class TextTrainer(BaseTrainer):
    """Trains a causal language model of transformers on text."""

    def build_data(self) -> BatchStream:
        """Return blocks of the configured text."""
        config = self.config
        self.tokenizer = make_tokenizer(config.data.tokenizer)
        cache_dir = Path(config.output_dir) / "data-cache"
        blocks = load_blocks(config.data, self.tokenizer, cache_dir, self.meshes.world_mesh)
        return BatchStream(blocks, config.training, self.meshes)

    def build_model(self) -> torch.nn.Module:
        """Return the configured model.

        Raises:
            InvalidInputError: If its vocabulary does not hold the tokenizer's ids.
        """
        model = HyperAutoModel.build(self.config.model)
        require_vocabulary(model, self.tokenizer, self.config.data.tokenizer)
        built: torch.nn.Module = model
        return built

    def compute_loss_sum(self, inputs: dict[str, Any], shift_labels: torch.Tensor) -> torch.Tensor:
        """Return the summed cross-entropy; the model is called without labels, which it would shift by itself."""
        logits = self.model(**inputs).logits
        if self.config.accelerator.loss_parallel:
            return vocab_parallel_loss_sum(
                logits,
                shift_labels,
                tp_mesh=self.meshes.tp_mesh,
                vocab_size=self.model.get_output_embeddings().out_features,
            )
        return token_loss_sum(logits, shift_labels)


def _short(fqns: list[str]) -> str:
    return fqns[0] if len(fqns) == 1 else f"{fqns[0]} ... {fqns[-1]} ({len(fqns)})"
