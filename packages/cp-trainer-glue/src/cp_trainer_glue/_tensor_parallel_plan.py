"""What tensor parallelism would do to a model: transformers' own plan, made concrete and judged; needs no ranks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cp_core import ContextParallelError
from cp_wrappers import Fault, attention_shape, find_attention_boundaries, split_heads

from ._sequence_parallel_plan import SequenceParallelPlan, plan_sequence_parallel

# A copy on each rank whose gradient is a part. transformers' own hook would sum it after each micro-batch, and the
# sums of earlier ones again; here the sum is taken once per step.
PARTIAL_STYLE = "replicated_with_grad_allreduce"
# Styles of linear layers, of a block of experts, of its parameters, and of the token embedding.
_LINEAR_STYLES = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")
_EXPERTS_STYLE = "moe_tp_experts"
PROVEN_STYLES = (*_LINEAR_STYLES, "embedding_rowwise", _EXPERTS_STYLE, "packed_colwise", PARTIAL_STYLE)
# Their activations are a rank's own.
_REGION_STYLES = ("colwise", "rowwise", "packed_colwise")
_NO_TP = "leave tp_size at 1 for it"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelPlan:
    """How a model is split over tensor-parallel ranks; nothing has been applied."""

    tp_size: int
    # Style of transformers by the name of a parameter or module; a module's parameters stand before it.
    styles: Mapping[str, str] = field(default_factory=dict)
    # Ranks over which the heads of an attention are split, by its name; absent where every rank has all of them.
    head_degrees: Mapping[str, int] = field(default_factory=dict)
    # Parameters that every rank has whole, and of whose gradient each rank finds a part.
    partial: tuple[str, ...] = ()
    sequence_parallel: SequenceParallelPlan | None = None
    # The output layer whose logits stay sharded over the vocabulary; None where they are gathered.
    sharded_output: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelCheck:
    """What tensor parallelism comes to on a model."""

    # None without tensor parallelism, and where there are faults.
    plan: TensorParallelPlan | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def head_degrees(self) -> Mapping[str, int]:
        """Ranks over which the heads of each attention are split, as far as it is known."""
        return {} if self.plan is None else self.plan.head_degrees


def check_tensor_parallel(
    model: torch.nn.Module, *, tp_size: int, sequence_parallel: bool = False, loss_parallel: bool = False
) -> TensorParallelCheck:
    """Work out what tensor parallelism does to each module, or every reason why it cannot.

    Args:
        model: The whole model, not yet split; it may be on the meta device.
        tp_size: Ranks over which it is split.
        sequence_parallel: Whether activations between the split modules are sharded along the sequence.
        loss_parallel: Whether logits stay sharded over the vocabulary.
    """
    if tp_size == 1:
        return TensorParallelCheck()
    name, rules = type(model).__name__, getattr(model, "tp_plan", None) or {}
    styles = _concrete(model, rules)
    if not styles:
        message = f"tp_size {tp_size}: transformers has no tensor-parallel plan for {name}; {_NO_TP}."
        return TensorParallelCheck(faults=(Fault(message=message, unsupported=True),))
    faults = [Fault(message=f"tp_size {tp_size}: {m}", unsupported=True) for m in _style_faults(model, styles)]
    faults += [Fault(message=message) for message in _size_faults(model, styles, tp_size)]
    sequence, sequence_faults = plan_sequence_parallel(model, styles) if sequence_parallel else (None, ())
    faults += sequence_faults
    sharded_output = _output_layer(model) if loss_parallel else None
    if loss_parallel and styles.get(sharded_output or "") != "colwise_gather_output":
        message = f"loss_parallel: the plan of {name} does not split its output layer; leave loss_parallel false."
        faults.append(Fault(message=message, unsupported=True))
    if faults:
        return TensorParallelCheck(faults=tuple(faults))
    partial = [parameter for parameter, _ in model.named_parameters() if styles.get(parameter) == PARTIAL_STYLE]
    plan = TensorParallelPlan(
        tp_size=tp_size,
        styles={name: style for name, style in styles.items() if style != PARTIAL_STYLE},
        head_degrees=dict.fromkeys(_split_attentions(model, styles), tp_size),
        partial=(*partial, *(sequence.partial if sequence is not None else ())),
        sequence_parallel=sequence,
        sharded_output=sharded_output,
    )
    return TensorParallelCheck(plan=plan)


class Split(NamedTuple):
    """How a style splits a parameter."""

    dim: int
    # Parts that lie one behind the other in it, each of which is split.
    num_parts: int


def split_of(parameter: torch.Tensor, style: str) -> Split | None:
    """Return how a style splits a parameter; None where each rank has the whole."""
    rows = max(parameter.ndim - 2, 0)
    if style in ("colwise", "colwise_gather_output", "packed_colwise"):
        return Split(rows, 2 if style == "packed_colwise" else 1)
    if style == "embedding_rowwise":
        return Split(0, 1)
    if style in ("rowwise", "rowwise_split_input") and parameter.ndim > 1:
        return Split(parameter.ndim - 1, 1)
    return None


def _concrete(model: torch.nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module and parameter; `*` in a rule stands for a layer's number."""
    styles: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style = rules.get(_generic(name))
        for parameter in module._parameters:
            full = f"{name}.{parameter}" if name else parameter
            own = rules.get(_generic(full), style)
            if own is not None and module._parameters[parameter] is not None:
                styles[full] = own
        if style is not None:
            styles[name] = style
    return styles


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# --- what is refused ----------------------------------------------------------------------------------------------


def _style_faults(model: torch.nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    name = type(model).__name__
    unproven = {style: place for place, style in reversed(list(styles.items())) if style not in PROVEN_STYLES}
    for style, place in unproven.items():
        yield f"the plan of {name} uses {style!r} ({place}), which this version does not apply; {_NO_TP}."
    modules = dict(model.named_modules())
    for place, style in styles.items():
        module = modules.get(place)
        if module is not None and style in _LINEAR_STYLES and type(module) is not torch.nn.Linear:
            yield f"{place} would be split as a linear layer, but is a {type(module).__name__}; {_NO_TP}."
    for parameter in _unplanned(model, styles):
        yield (
            f"the plan of {name} does not say what becomes of {parameter}, which stands among split layers, so its "
            f"gradient may be a part of the whole; {_NO_TP}."
        )
    yield from _dropout_faults(model)


def _unplanned(model: torch.nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Yield the first parameter of each kind that may see one rank's activations, though no rule says so."""
    regions = tuple(f"{region}." for region in _regions(model, styles))
    seen: set[str] = set()
    for name, _ in model.named_parameters():
        if (
            name.startswith(regions)
            and styles.get(name, _EXPERTS_STYLE) == _EXPERTS_STYLE
            and _generic(name) not in seen
        ):
            seen.add(_generic(name))
            yield name


def _regions(model: torch.nn.Module, styles: Mapping[str, str]) -> set[str]:
    """Return the modules in which a rank's activations are its own: parents of split layers, and experts."""
    modules, output = dict(model.named_modules()), _output_layer(model)
    split = [place for place, style in styles.items() if style in _REGION_STYLES and place != output]
    layers = {place.rpartition(".")[0] for place in split if place in modules}
    owners = {place.rpartition(".")[0] for place in split if place not in modules}
    return {*layers, *(owner for owner in owners if owner not in styles or styles[owner] == _EXPERTS_STYLE)} - {""}


def _dropout_faults(model: torch.nn.Module) -> Iterator[str]:
    config: Any = getattr(model, "config", None)
    fields = {} if config is None else config.to_dict()
    for name, value in fields.items():
        if "drop" in name and type(value) in (int, float) and value > 0:
            yield (
                f"model.config.{name} is {value}, and dropout would strike the same places of every rank's heads and "
                "features; set it to 0."
            )


def _size_faults(model: torch.nn.Module, styles: Mapping[str, str], tp_size: int) -> Iterator[str]:
    seen: set[str] = set()
    for name, message in (*_head_faults(model, styles, tp_size), *_width_faults(model, styles, tp_size)):
        if _generic(name) not in seen:
            seen.add(_generic(name))
            yield message


def _head_faults(model: torch.nn.Module, styles: Mapping[str, str], tp_size: int) -> Iterator[tuple[str, str]]:
    attentions, modules = find_attention_boundaries(model), dict(model.named_modules())
    for fqn in _split_attentions(model, styles):
        try:
            shape = split_heads(attention_shape(attentions[fqn], fqn), tp_size)
        except ContextParallelError as error:
            yield fqn, str(error)
            continue
        widths = {heads * tp_size * shape.head_dim for heads in (shape.num_q_heads, shape.num_kv_heads)}
        for place, style in styles.items():
            layer = modules.get(place)
            if style != "colwise" or not place.startswith(f"{fqn}.") or layer is None:
                continue
            if layer.out_features not in widths:
                yield (
                    place,
                    f"{place} has {layer.out_features} output features, which are neither its attention's query heads "
                    f"nor its key/value heads ({sorted(widths)}), so heads cannot be told apart; {_NO_TP}.",
                )


def _width_faults(model: torch.nn.Module, styles: Mapping[str, str], tp_size: int) -> Iterator[tuple[str, str]]:
    attentions = tuple(f"{fqn}." for fqn in _split_attentions(model, styles))
    whole = tuple(f"{place}." for place in _vocabulary_layers(model))  # a vocabulary may be split unevenly
    for name, parameter in model.named_parameters():
        split = split_of(parameter, styles.get(name, ""))
        if split is None or name.startswith((*whole, *attentions)):
            continue
        width = parameter.shape[split.dim] // split.num_parts
        if width % tp_size:
            yield (
                name,
                f"{name} {list(parameter.shape)}: tensor parallelism splits its {width} features, which must be "
                f"divisible by tp_size ({tp_size}).",
            )


def _split_attentions(model: torch.nn.Module, styles: Mapping[str, str]) -> list[str]:
    """Return the attentions of which a rank has some heads; where projections are gathered it has all."""
    split = [place for place, style in styles.items() if style == "colwise"]
    return [fqn for fqn in find_attention_boundaries(model) if any(place.startswith(f"{fqn}.") for place in split)]


def _output_layer(model: torch.nn.Module) -> str | None:
    return _name_of(model, "get_output_embeddings")


def _vocabulary_layers(model: torch.nn.Module) -> list[str]:
    names = (_name_of(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    return [name for name in names if name is not None]


def _name_of(model: torch.nn.Module, getter: str) -> str | None:
    layer = getattr(model, getter)() if hasattr(model, getter) else None
    return next((name for name, module in model.named_modules() if module is layer), None)
