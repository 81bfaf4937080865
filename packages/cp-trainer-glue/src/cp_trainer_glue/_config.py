"""The config of a training run: what a YAML file may say. The rest of the package reads nothing else."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_switch(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


# Strict, because `cp_size: true` would else be 1.
Count = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
Quantity = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
# Lenient as to text, because YAML 1.1 takes 1e-3 for text.
Number = Annotated[float, BeforeValidator(_no_switch)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """One mapping of the config; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model; exactly one of `config` and `pretrained`."""

    # Fields of a transformers config, `model_type` among them; random weights.
    config: dict[str, Any] | None = None
    # A local folder or a hub name.
    pretrained: str | None = None
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    # transformers' implementation of expert layers; None leaves it to transformers.
    experts_implementation: str | None = None


class TextSource(Section):
    """Where text comes from."""

    # Where the section stands, for messages.
    place: ClassVar[str]
    # The sources of the running interpreter's standard library.
    source: Literal["stdlib"] | None = None
    # Globs of text, .jsonl or .parquet files, relative to the current directory.
    files: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    # The field of .jsonl and .parquet rows that holds the text.
    text_field: str = "text"


class DataConfig(TextSource):
    """Which text to train on; exactly one of `source` and `files`."""

    place = "data"
    # "byte", or a local folder or hub name for transformers' AutoTokenizer.
    tokenizer: str = "byte"
    seq_length: Annotated[int, Field(ge=2, le=2**28, strict=True)]


class TrainingConfig(Section):
    """How long and how large; batch sizes in samples of `seq_length` tokens."""

    train_iters: Count
    global_batch_size: Count
    micro_batch_size: Count = 1
    max_grad_norm: Annotated[Number, Field(gt=0)] = 1.0
    seed: Quantity = 42
    # "full" recomputes each transformer block in backward, "attention" each attention only.
    activation_checkpoint: Literal["none", "full", "attention"] = "none"
    # The older form of recomputation, which torch keeps for models that need it; with "full" only.
    checkpoint_reentrant: Switch = False
    # "layers" compiles each transformer block by itself; attention stays outside.
    compile: Literal["none", "layers"] = "none"
    compile_backend: Text = "inductor"


class LossConfig(Section):
    """The loss of a token, and how much of it is worked out at once."""

    # Share of the target that is spread evenly over the vocabulary.
    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    # Weight of each token id as a target, 1 where it is not listed; the loss is the weighted mean.
    class_weights: dict[int, Annotated[Number, Field(ge=0)]] | None = None
    # Tokens whose logits exist at once; None works out those of all tokens of a rank together.
    chunk_tokens: Count | None = None


class EvaluationConfig(TextSource):
    """Held-out text, cut like `data`; exactly one of `source`, `files` and `held_out_samples`."""

    place = "evaluation"
    # The last blocks of `data`, which are then not trained on.
    held_out_samples: Count | None = None
    # Iterations between evaluations; there is one at the end in any case, and with 0 no other.
    every_iters: Quantity = 0
    # Evaluates no more than the first so many samples; None is all.
    max_samples: Count | None = None


class FsdpConfig(Section):
    """Sharded parameters, gradients and optimizer states (FSDP2): over data-parallel shards and context parallel."""

    # Dtype of the gathered parameters and of the computation; None is the model's.
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # Dtype in which gradients are summed over ranks, on every axis; None is `param_dtype`.
    reduce_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    # Frees gathered parameters between forward and backward.
    reshard_after_forward: Switch = True


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[Number, Field(ge=0)]
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0


class LrSchedulerConfig(Section):
    """The learning-rate schedule; after the warmup it runs to `train_iters`."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_iters: Quantity = 0


class CheckpointConfig(Section):
    """Checkpoints under `output_dir/checkpoints`."""

    # Iterations between checkpoints; 0 saves at the end only.
    save_iters: Quantity = 0
    # "auto" takes the newest checkpoint if there is one, "none" starts afresh, else a checkpoint's folder.
    resume: str = "auto"


class AcceleratorConfig(Section):
    """Sizes of the mesh axes."""

    dp_shard_size: Count = 1
    dp_replicate_size: Count = 1
    tp_size: Count = 1
    cp_size: Count = 1
    ep_size: Count = 1
    pp_size: Count = 1
    sequence_parallel: Switch = False
    loss_parallel: Switch = False

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def sequence_shards(self) -> int:
        """Shards of tokens into which tensor-parallel ranks cut a shard of context parallelism once more."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp_size * self.dp_size * self.cp_size * self.tp_size


class PlanOverride(Section):
    """The declared method of the attentions that a pattern reaches."""

    match: str
    when: Literal["cp"] | None = None
    inner_target: str | None = None
    inner_wrapper: str | dict[str, Any] | None = None
    local_compute_fn: str | dict[str, Any] | None = None
    region_dispatch: Switch | None = None
    # Where tensors lie by mesh axis, such as {cp: shard(1)}: what `sharding_mode: validate` checks over the defaults.
    input_placements: dict[str, str] | None = None
    output_placements: dict[str, str] | None = None


class TrainerConfig(Section):
    """A training run."""

    output_dir: Text
    sharding_mode: Literal["production", "validate"] = "production"
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig
    lr_scheduler: LrSchedulerConfig = LrSchedulerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    accelerator: AcceleratorConfig = AcceleratorConfig()
    # Left out, parameters are replicated, unless dp_shard_size asks for shards.
    fsdp: FsdpConfig | None = None
    plan_overrides: tuple[PlanOverride, ...] = ()
    # Left out, there is none.
    evaluation: EvaluationConfig | None = None

    @property
    def held_out_samples(self) -> int:
        """Blocks of `data` that are not trained on."""
        return (self.evaluation.held_out_samples or 0) if self.evaluation is not None else 0

    @property
    def fsdp_config(self) -> FsdpConfig | None:
        """How parameters are sharded over `dp_shard x cp`; None where they are replicated."""
        return implied_fsdp(self.fsdp, self.accelerator)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of one rank per optimizer step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.accelerator.dp_size)


def implied_fsdp(fsdp: FsdpConfig | None, accelerator: AcceleratorConfig) -> FsdpConfig | None:
    """Return the declared section, or the one that `dp_shard_size` above 1 implies; None where nothing is sharded."""
    if fsdp is None and accelerator.dp_shard_size > 1:
        return FsdpConfig()
    return fsdp
