"""The life of a run: what is built, in which order, and one training step as the data sees it."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import CollectiveTrace, Platform, all_reduce_sum, check_no_pending
from cp_core import (
    InvalidInputError,
    SequenceLayout,
    mean_global_loss,
    sequence_multiple,
    sum_loss_weights,
)

from ._applier import apply_plan
from ._checkpoint import Checkpoints
from ._compilation import compile_blocks
from ._config import TrainerConfig
from ._data import Batch, BatchStream, ShardOnDevice, require_same_shard, shard_on_device
from ._evaluation import EvalResult, Prediction, evaluate, evaluates_after, predict
from ._gradient_domain import GradientDomain
from ._mesh import MeshContext
from ._metrics import EvaluationMetrics, MetricsFile, StepMetrics
from ._model import require_equal_parameters
from ._optimizer import make_optimizer, make_scheduler
from ._progress import Reporter
from ._recomputation import checkpoint_activations
from ._samples import Samples
from ._sharded_parameters import shard_parameters
from ._stop import StopRequest
from ._summary import run_summary
from ._window import Window

_logger = logging.getLogger("cp_trainer_glue")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step found; equal on all ranks."""

    # 0-d: mean loss over the valid tokens of the step.
    loss: torch.Tensor
    valid_tokens: int
    # 0-d: gradient norm before clipping.
    grad_norm: torch.Tensor


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
        self.prepare_loss()
        require_equal_parameters(self.model, self.meshes.world_mesh)
        self.evaluation_samples = self.build_evaluation()
        self.applied, tp_grad_info, self.validation = apply_plan(self.model, config, self.meshes)
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
        # Weights needed one seed everywhere; from here on, ranks with other samples make other random decisions, and
        # ranks that share samples the same.
        platform.manual_seed(config.training.seed + self.meshes.dp_rank)

    def build_data(self) -> BatchStream:
        """Return the stream of global micro-batches, each with `input_ids` and `labels` `[B, S]`."""
        raise NotImplementedError("a trainer says what its data are: override build_data.")

    def build_model(self) -> torch.nn.Module:
        """Return the model, with equal weights on all ranks."""
        raise NotImplementedError("a trainer says what its model is: override build_model.")

    def build_evaluation(self) -> Samples | None:
        """Return the samples to evaluate, the same on all ranks, none of them trained on; None where there are none."""
        return None

    def prepare_loss(self) -> None:
        """Do what the loss needs of the whole model, just after it was built."""

    def compute_loss_sum(
        self, inputs: dict[str, Any], shift_labels: torch.Tensor, *, loss_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of this rank's tokens, summed, 0-d.

        Args:
            inputs: The keyword arguments of the model: this rank's shard.
            shift_labels: `[B, L]`, shifted on the global sequence, -100 where nothing is to predict.
            loss_weights: `[B, L]`, what each token's loss is multiplied with; given where the batch has them.
        """
        raise NotImplementedError("a trainer says what its loss is: override compute_loss_sum.")

    def compute_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return what `predict` reads: `[B, L, V]` of this rank's shard, with the whole vocabulary.

        Args:
            inputs: As in `compute_loss_sum`.
        """
        raise NotImplementedError("a trainer says what its logits are: override compute_logits.")

    def loss_weight_sum(self, shift_labels: torch.Tensor, loss_weights: torch.Tensor | None) -> float | None:
        """Return what the summed loss of a shard is to be divided by; None is its number of labels.

        Args:
            shift_labels, loss_weights: As in `compute_loss_sum`, on the host.
        """
        return None if loss_weights is None else sum_loss_weights(loss_weights)

    def compute_auxiliary_loss(
        self, layout: SequenceLayout, *, batch_size: int, dp_cp_mesh: DeviceMesh | None
    ) -> torch.Tensor | None:
        """Return this rank's part of a loss that is no sum over tokens, 0-d; the parts of all ranks add up to it.

        A step's is the mean over its micro-batches, beside the mean over tokens. Called after `compute_loss_sum`.

        Args:
            layout: The layout of the shard.
            batch_size: Its rows.
            dp_cp_mesh: 1-D mesh of the ranks that hold different tokens.
        """
        return None

    def train_step(self) -> StepResult:
        """Make one optimizer step over a window of micro-batches."""
        window = self.next_window()
        loss = self.accumulate(window)
        self.reduce_gradients()
        grad_norm = self.clip_gradients()
        self.update()
        return StepResult(loss=loss, valid_tokens=window.valid_tokens, grad_norm=grad_norm)

    def next_window(self) -> Window:
        """Fetch and shard the micro-batches of the next step: fewer than others if the data ends here.

        Raises:
            InvalidInputError: On all ranks, if the data has ended, or ends earlier on some ranks.
        """
        fetched = itertools.islice(self._stream_iterator(), self.config.accumulation_steps)
        batches = [self.shard_batch(batch) for batch in fetched]
        weights = [self.loss_weight_sum(batch["shift_labels"], batch.get("loss_weights")) for batch in batches]
        return Window.counted(batches, weights, dp_cp_mesh=self.meshes.dp_cp_mesh)

    def accumulate(self, window: Window) -> torch.Tensor:
        """Run forward and backward of each micro-batch; return the mean loss over the window, 0-d."""
        logged = torch.zeros((), device=self.meshes.device)
        last = len(window.batches) - 1
        for index in range(len(window.batches)):
            self.gradients.will_reduce(index == last)
            logged = logged + self._backward(window, index)
        return logged

    def reduce_gradients(self) -> None:
        """Make each gradient that of the whole window, on all ranks."""
        self.gradients.reduce()
        if self.validation is not None:
            self.validation.check_parameters(self._trained(), gradients=True)

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
        if self.validation is not None:
            self.validation.check_parameters(self.model.named_parameters(), gradients=False)

    def evaluate(self, samples: Samples | None = None) -> EvalResult:
        """Return the mean loss over the tokens of all samples, each counted once; training goes on as without it.

        All ranks call it. `compute_loss_sum` runs in eval mode, without gradients, and on every rank equally often. The
        auxiliary loss of experts is no part of it.

        Args:
            samples: The same on all ranks; None takes those of `build_evaluation`, `evaluation.max_samples` of them.

        Raises:
            InvalidInputError: On all ranks, if there is no sample or no label, or samples differ between ranks.
        """
        return evaluate(self, samples)

    def predict(self, batches: Iterable[Batch], *, logits: bool = False) -> list[Prediction]:
        """Return what the model predicts after each token of each sample; training goes on as without it.

        All ranks call it. Each forward takes `micro_batch_size` samples on each data-parallel rank, and what was asked
        for is sent to rank 0 after it.

        Args:
            batches: Global batches, the same on all ranks, on the host; each entry a tensor with a row for each sample.
            logits: Whether to return logits too. They are gathered sample by sample: a context-parallel rank holds
                `[S, V]` of one at a time, but the first one those of its forward, and rank 0 all.

        Returns:
            On rank 0 one prediction for each sample, in the order given; on all other ranks an empty list.

        Raises:
            InvalidInputError: On all ranks, if batches differ between ranks or cannot be cut into samples.
        """
        return predict(self, batches, logits=logits)

    def train(self) -> bool:
        """Train to `train_iters`, from the newest checkpoint if there is one.

        Returns:
            Whether the run is finished; False if it was asked to stop and saved what it had.
        """
        config, first = self.config, self.checkpoints.load()
        reporter = Reporter(train_iters=config.training.train_iters, shown=dist.get_rank() == 0)
        methods = [(row.wrapper, row.fqn) for row in self.applied.report]
        device_type, partial = self.meshes.device.type, self.gradients.partial_names
        reporter.summary(
            run_summary(config, self.model, methods, partial=partial, device_type=device_type, first=first)
        )
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
                if evaluates_after(step, config):
                    self._report_evaluation(step, reporter, metrics)
                stopping = stop.agreed()
                if stopping or self._saves_after(step):
                    reporter.say(f"saved {self.checkpoints.save(step)}")
                if stopping:
                    reporter.say(f"stopped after step {step}; the same command goes on from here.")
                    return step == config.training.train_iters
        return True

    def shard_batch(self, batch: Batch) -> dict[str, Any]:
        """Return this rank's shard of a global batch, on the host."""
        shard = self.applied.shard_batch(batch, multiple_of=self._padding_multiple())
        require_same_shard(shard, self.meshes.tp_mesh)
        return shard

    def on_device(self, shard: dict[str, Any]) -> ShardOnDevice:
        """Return what a forward takes, on the device."""
        # Where nothing is wrapped the model gets what it would get without any of this.
        return shard_on_device(shard, self.meshes.device, takes_layout=bool(self.applied.report))

    def _stream_iterator(self) -> Iterator[Batch]:
        if self._batches is None:
            self._batches = iter(self.stream)
        return self._batches

    def _padding_multiple(self) -> int:
        """With the residual stream sharded along the sequence, tensor-parallel ranks cut each shard once more."""
        axes = self.config.accelerator
        return sequence_multiple(axes.cp_size, self.applied.strategies) * axes.sequence_shards

    def _backward(self, window: Window, index: int) -> torch.Tensor:
        batch = window.batches[index]
        inputs, shift_labels, weights = self.on_device(batch)
        if shift_labels is None:
            raise AssertionError("the window was counted by labels, but this batch has none.")
        layout, weighted = batch["cp_layout"], window.weight_sum is not None
        loss = mean_global_loss(
            self.compute_loss_sum(inputs, shift_labels, **weights),
            window.counts[index],
            dp_cp_mesh=self.meshes.dp_cp_mesh,
            grad_average_degree=1,  # every domain sums
            window_valid_tokens=None if weighted else window.valid_tokens,
            local_weight_sum=window.weights[index],
            window_weight_sum=window.weight_sum,
        )
        auxiliary = self._auxiliary_share(layout, batch_size=shift_labels.shape[0], num_batches=len(window.batches))
        if auxiliary is None:
            loss.backward.backward()
            return loss.logged
        (loss.backward + auxiliary).backward()
        logged = auxiliary.detach().clone()
        all_reduce_sum([logged], mesh=self.meshes.dp_cp_mesh)
        return loss.logged + logged

    def _auxiliary_share(self, layout: SequenceLayout, *, batch_size: int, num_batches: int) -> torch.Tensor | None:
        part = self.compute_auxiliary_loss(layout, batch_size=batch_size, dp_cp_mesh=self.meshes.dp_cp_mesh)
        return None if part is None else part / num_batches

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

    def _report_evaluation(self, step: int, reporter: Reporter, metrics: MetricsFile | None) -> None:
        found = self.evaluate()
        row = EvaluationMetrics(
            step=step, eval_loss=found.loss, eval_tokens=found.valid_tokens, eval_samples=found.samples
        )
        if metrics is not None:
            metrics.write(row)
        reporter.evaluation(row)

    def _saves_after(self, step: int) -> bool:
        every = self.config.checkpoint.save_iters
        return step == self.config.training.train_iters or (every > 0 and step % every == 0)

    def _metrics_file(self, last_step: int) -> MetricsFile | None:
        if dist.get_rank() != 0:
            return None
        return MetricsFile(Path(self.config.output_dir) / "metrics.jsonl", last_step=last_step)

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, param) for name, param in self.model.named_parameters() if param.requires_grad)

    def _require_optimized(self) -> None:
        known = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        lacking = [name for name, param in self._trained() if id(param) not in known]
        if lacking:
            raise InvalidInputError(
                f"{len(lacking)} trainable parameters are not the optimizer's, first {lacking[0]}; add parameters in "
                "build_model, before the optimizer is made, or freeze them."
            )
