"""What the sections of a config must not say together, and what this version does not do.

Each check reads the sections it needs; one that is wrong by itself is not there, and its checks are left out.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ._config import AcceleratorConfig, DataConfig, EvaluationConfig, LossConfig, ModelConfig, TrainingConfig

# Changes a config's content so that the fault is gone.
Repair = Callable[[dict[str, Any]], None]
Finding = tuple[str, Repair | None]

# So that a slip of a zero is not worked out for minutes; eight times what has been tried.
MAX_WORLD_SIZE = 131072


def combination_faults(sections: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield each fault with its repair, None where nobody can know what is right."""
    model: ModelConfig | None = sections.get("model")
    data: DataConfig | None = sections.get("data")
    training: TrainingConfig | None = sections.get("training")
    accelerator: AcceleratorConfig | None = sections.get("accelerator")
    evaluation: EvaluationConfig | None = sections.get("evaluation")
    if model is not None:
        yield from _model_faults(model)
    if data is not None:
        yield from _exactly_one("data", source=data.source, files=data.files)
    if evaluation is not None:
        given = {name: getattr(evaluation, name) for name in ("source", "files", "held_out_samples")}
        yield from _exactly_one("evaluation", **given)
    if accelerator is not None:
        yield from _accelerator_faults(accelerator)
    if training is not None:
        yield from _recomputation_faults(training)
    if training is not None and accelerator is not None:
        yield from _batch_faults(training, accelerator)
        if training.compile != "none" and accelerator.tp_size > 1:
            yield (
                f"training.compile: {training.compile} is not supported with tp_size {accelerator.tp_size}: torch 2.13 "
                "recurses without end over DTensors when a second sequence length comes; set compile to none.",
                _setting("training.compile", "none"),
            )
    loss: LossConfig | None = sections.get("loss")
    if loss is not None and accelerator is not None:
        yield from _loss_faults(loss, accelerator)
    if training is not None and sections.get("sharding_mode") == "validate" and training.compile != "none":
        yield (
            "training.compile: sharding_mode validate looks at tensors between blocks, which a compiler takes apart; "
            "set compile to none.",
            _setting("training.compile", "none"),
        )


def fitted_to_world(accelerator: AcceleratorConfig, world_size: int) -> Repair | None:
    """Return the change that makes the sizes multiply to a number of ranks, None where replicas cannot do it."""
    others = accelerator.world_size // accelerator.dp_replicate_size
    fits = world_size % others == 0
    return _setting("accelerator.dp_replicate_size", world_size // others) if fits else None


def world_size_fault(accelerator: AcceleratorConfig, world_size: int, *, origin: str) -> str | None:
    """Return the fault of sizes that do not multiply to the number of ranks.

    Args:
        accelerator: The sizes.
        world_size: Ranks there are, or will be.
        origin: Who says so, for the sentence.
    """
    if accelerator.world_size == world_size:
        return None
    names = ("pp_size", "dp_replicate_size", "dp_shard_size", "cp_size", "tp_size")
    product = " x ".join(f"{name} {getattr(accelerator, name)}" for name in names)
    others = accelerator.world_size // accelerator.dp_replicate_size
    fitting = (
        f"without dp_replicate_size they multiply to {others}, which does not divide {world_size}."
        if world_size % others
        else f"dp_replicate_size {world_size // others} would fit."
    )
    return (
        f"accelerator: the sizes multiply to {accelerator.world_size} ranks ({product}), but {origin} {world_size}; "
        f"{fitting}"
    )


def _model_faults(model: ModelConfig) -> Iterator[Finding]:
    yield from _exactly_one("model", config=model.config, pretrained=model.pretrained)
    if (model.config or {}).get("use_cache") is True:
        yield (
            "model.config.use_cache: a key/value cache is for inference; leave it out.",
            _setting("model.config.use_cache", False),
        )
    yield from _output_faults(model)
    if model.dtype == "float64" and model.experts_implementation == "grouped_mm":
        message = "model.experts_implementation: grouped_mm does not take float64; use eager."
        yield message, _setting("model.experts_implementation", "eager")


def _output_faults(model: ModelConfig) -> Iterator[Finding]:
    """What a model is asked to give beside or instead of logits."""
    fields = model.config or {}
    if fields.get("return_dict") is False:
        message = "model.config.return_dict: the trainer reads the model's output by name; leave it out."
        yield message, _setting("model.config.return_dict", True)
    if fields.get("output_attentions"):
        message = "model.config.output_attentions: attention weights exist on no rank as a whole; leave it out."
        yield message, _setting("model.config.output_attentions", False)


def _exactly_one(section: str, **values: object) -> Iterator[Finding]:
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        yield f"{section}: needs exactly one of {' and '.join(values)}, but has {' and '.join(given) or 'none'}.", None


def _accelerator_faults(accelerator: AcceleratorConfig) -> Iterator[Finding]:
    if accelerator.world_size > MAX_WORLD_SIZE:
        yield f"accelerator: the sizes multiply to {accelerator.world_size} ranks, more than {MAX_WORLD_SIZE}.", None
    for name in ("pp_size", "ep_size"):
        size = getattr(accelerator, name)
        if size != 1:
            message = f"accelerator.{name}: {size} is not supported in this version; leave it at 1."
            yield message, _setting(f"accelerator.{name}", 1)
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(accelerator, name) and accelerator.tp_size == 1:
            message = f"accelerator.{name}: shards over tensor-parallel ranks, but tp_size is 1; leave it false."
            yield message, _setting(f"accelerator.{name}", False)


def _recomputation_faults(training: TrainingConfig) -> Iterator[Finding]:
    if training.checkpoint_reentrant and training.activation_checkpoint != "full":
        yield (
            f"training.checkpoint_reentrant: activation_checkpoint is {training.activation_checkpoint}, and reentrant "
            "recomputation is of whole blocks only; use activation_checkpoint: full, or leave it false.",
            _setting("training.checkpoint_reentrant", False),
        )


def _batch_faults(training: TrainingConfig, accelerator: AcceleratorConfig) -> Iterator[Finding]:
    at_once = training.micro_batch_size * accelerator.dp_size
    if training.global_batch_size % at_once:
        next_multiple = -(-training.global_batch_size // at_once) * at_once
        yield (
            f"training.global_batch_size ({training.global_batch_size}) must be a multiple of micro_batch_size "
            f"({training.micro_batch_size}) times the data-parallel ranks ({accelerator.dp_size}), for example "
            f"{next_multiple}.",
            _setting("training.global_batch_size", next_multiple),
        )


def _loss_faults(loss: LossConfig, accelerator: AcceleratorConfig) -> Iterator[Finding]:
    if loss.chunk_tokens is not None and accelerator.tp_size > 1:
        yield (
            f"loss.chunk_tokens: with tp_size {accelerator.tp_size} the output layer is split over ranks; leave it "
            "out, and use accelerator.loss_parallel.",
            _setting("loss.chunk_tokens", None),
        )
    for name in ("label_smoothing", "class_weights"):
        if accelerator.loss_parallel and getattr(loss, name):
            yield (
                f"loss.{name}: is not supported where logits stay sharded over the vocabulary; set "
                "accelerator.loss_parallel to false.",
                _setting("accelerator.loss_parallel", False),
            )


def _setting(place: str, value: object) -> Repair:
    *parents, last = place.split(".")

    def repair(content: dict[str, Any]) -> None:
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value

    return repair
