"""What a run would be: groups of ranks, the method of each attention, and what each legal method costs each rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from cp_core import AttentionShape, ContextParallelError, ContextParallelStrategy, SequenceLayout, sequence_multiple
from cp_core.cost import AttentionCost, attention_cost
from cp_wrappers import find_attention_boundaries, judge_methods

from ._combinations import MAX_WORLD_SIZE
from ._config import AcceleratorConfig, DataConfig, TrainingConfig, implied_fsdp
from ._gradient_sums import gradient_sums
from ._inspection import Correction, Inspection
from ._parameter_bytes import parameter_bytes
from ._topology import axis_groups, axis_sizes

_UNKNOWN_HEADS = "whose heads are not known before the first forward; declare them as data of the wrapper"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePlan:
    """How a global sequence is cut; lengths in tokens."""

    global_length: int
    padded_length: int
    local_length: int
    # What the padded length is a multiple of, by the declared methods.
    padding_multiple: int
    micro_batch_size: int
    micro_batches_per_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRow:
    """One attention and the method it gets."""

    fqn: str
    kind: str
    # None where no usable method is declared.
    wrapper: str | None
    # inner_wrapper or local_compute_fn.
    channel: str | None
    # The entry that chose it, for example "plan_overrides.0".
    entry: str | None
    match: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCost:
    """What one rank of a context-parallel group spends on all attentions of one micro-batch, forward and backward."""

    cp_rank: int
    forward_messages: int
    backward_messages: int
    # Bytes received from other ranks.
    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int
    # Query-key products computed, and those that the mask lets through.
    scored_entries: int
    visible_entries: int
    # Bytes that attentions keep from forward to backward.
    saved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodRow:
    """One method on this model: the declared ones together, or a registered one on every attention."""

    name: str
    # Attentions it serves, and all there are.
    serves: int
    attentions: int
    # Why it does not serve the others, each reason once.
    refusals: tuple[str, ...] = ()
    # By rank of a context-parallel group; empty where it does not serve all, or communicates by itself.
    ranks: tuple[RankCost, ...] = ()
    # What the numbers leave out.
    note: str = ""

    @property
    def is_legal(self) -> bool:
        """Whether it serves every attention."""
        return self.serves == self.attentions > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """A run, explained; what is wrong with the config is in `faults`, and what could not be known then is None."""

    config: str
    device: str
    faults: tuple[str, ...]
    # What makes the file right; None where nothing is wrong, or nobody can know.
    correction: Correction | None
    world_size: int | None = None
    axes: Mapping[str, int] | None = None
    # Ranks of each group, by axis.
    groups: Mapping[str, list[list[int]]] | None = None
    model: str | None = None
    num_parameters: int | None = None
    # Bytes of the parameters on the rank that holds most, between steps.
    parameter_bytes: int | None = None
    # How parameters are held, and over which ranks their gradients are summed, in words.
    gradients: str | None = None
    sequence: SequencePlan | None = None
    attentions: tuple[AttentionRow, ...] = ()
    declared: MethodRow | None = None
    # Every registered method.
    methods: tuple[MethodRow, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain content; `legal` is added to each method."""
        content = asdict(self)
        for row, method in zip(content["methods"], self.methods, strict=True):
            row["legal"] = method.is_legal
        return content


def plan_report(inspection: Inspection, device: torch.device) -> PlanReport:
    """Explain what an inspected config would run.

    Args:
        inspection: What `inspect_config` found, for the same device.
        device: Where the attentions would run.
    """
    sections = inspection.sections
    accelerator: AcceleratorConfig | None = sections.get("accelerator")
    if accelerator is not None and accelerator.world_size > MAX_WORLD_SIZE:
        accelerator = None  # among the faults
    known: dict[str, Any] = {}
    if accelerator is not None:
        known |= {
            "world_size": accelerator.world_size,
            "axes": axis_sizes(accelerator),
            "groups": axis_groups(accelerator),
        }
    if inspection.model is not None and accelerator is not None:
        known |= _explained_model(inspection, accelerator, device)
    return PlanReport(
        config=inspection.name,
        device=device.type,
        faults=inspection.faults,
        correction=inspection.correction,
        **known,
    )


def _explained_model(inspection: Inspection, accelerator: AcceleratorConfig, device: torch.device) -> dict[str, Any]:
    model, check, cp_size = inspection.model, inspection.check, accelerator.cp_size
    if model is None or check is None:
        raise AssertionError("a model that was built was not checked.")
    strategies = list(dict.fromkeys(plan.strategy for plan in check.boundaries if plan.strategy is not None))
    parameters = list(model.parameters())
    fsdp = implied_fsdp(inspection.sections.get("fsdp"), accelerator)
    num_shards = 1 if fsdp is None else accelerator.dp_shard_size * accelerator.cp_size
    known: dict[str, Any] = {
        "model": type(model).__name__,
        "num_parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": parameter_bytes(model, check.tensor_parallel, num_shards=num_shards),
        "gradients": gradient_sums(
            accelerator, fsdp, partial=() if check.tensor_parallel is None else check.tensor_parallel.partial
        ),
        "attentions": tuple(_attention_rows(inspection)),
    }
    sequence = _sequence_plan(inspection.sections, accelerator, strategies)
    if sequence is not None:
        costs = _Costs(sequence, accelerator)
        declared = {plan.fqn: (plan.strategy, plan.shape) for plan in check.boundaries}
        num_attentions = len(known["attentions"])
        known |= {
            "sequence": sequence,
            "declared": _declared_row(declared, num_attentions, costs) if cp_size > 1 else None,
            "methods": tuple(_method_rows(inspection, cp_size, device, costs)) if cp_size > 1 else (),
        }
    return known


def _sequence_plan(
    sections: Mapping[str, Any], accelerator: AcceleratorConfig, strategies: Sequence[ContextParallelStrategy]
) -> SequencePlan | None:
    data: DataConfig | None = sections.get("data")
    training: TrainingConfig | None = sections.get("training")
    if data is None or training is None:
        return None
    multiple = sequence_multiple(accelerator.cp_size, strategies) * accelerator.sequence_shards
    padded_length = -(-data.seq_length // multiple) * multiple
    return SequencePlan(
        global_length=data.seq_length,
        padded_length=padded_length,
        local_length=padded_length // accelerator.cp_size,
        padding_multiple=multiple,
        micro_batch_size=training.micro_batch_size,
        micro_batches_per_step=training.global_batch_size // (training.micro_batch_size * accelerator.dp_size),
    )


def _attention_rows(inspection: Inspection) -> Iterator[AttentionRow]:
    model, check = inspection.model, inspection.check
    if model is None or check is None:
        return
    planned = {id(module): plan for plan in check.boundaries for module in (plan.module, *plan.attentions)}
    boundaries = {plan.fqn: plan.module for plan in check.boundaries if not plan.attentions}
    for fqn, module in {**_attentions_of(model), **boundaries}.items():
        plan = planned.get(id(module))
        yield AttentionRow(
            fqn=fqn if plan is None else plan.fqn,
            kind=type(module if plan is None else plan.module).__name__,
            wrapper=None if plan is None else plan.wrapper.name,
            channel=None if plan is None else plan.wrapper.channel,
            entry=None if plan is None else plan.declaration.source,
            match=None if plan is None else plan.match,
        )


def _attentions_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    try:
        return find_attention_boundaries(model)
    except ContextParallelError:
        return {}  # a spec without a module is among the faults


class _Costs:
    """Costs of sets of attentions, by rank; equal shapes are worked out once."""

    def __init__(self, sequence: SequencePlan, accelerator: AcceleratorConfig) -> None:
        self._sequence, self._cp_size = sequence, accelerator.cp_size
        self._sequence_shards = accelerator.sequence_shards

    def of(self, attentions: Sequence[tuple[ContextParallelStrategy, AttentionShape]]) -> tuple[RankCost, ...]:
        """Return what each rank spends on these attentions together."""
        alike: dict[object, list[tuple[ContextParallelStrategy, AttentionShape]]] = {}
        for strategy, shape in attentions:
            alike.setdefault((strategy, *_numbers(shape)), []).append((strategy, shape))
        strategies = [strategy for strategy, _ in attentions]
        multiple = sequence_multiple(self._cp_size, strategies) * self._sequence_shards
        ranks = []
        for rank in range(self._cp_size):
            layout = self._layout(multiple, rank)
            costs = [(self._cost(*members[0], layout), len(members)) for members in alike.values()]
            totals = {f.name: sum(getattr(cost, f.name) * n for cost, n in costs) for f in fields(AttentionCost)}
            ranks.append(RankCost(cp_rank=rank, **totals))
        return tuple(ranks)

    def _cost(self, strategy: ContextParallelStrategy, shape: AttentionShape, layout: SequenceLayout) -> AttentionCost:
        return attention_cost(
            strategy,
            shape=shape,
            layout=layout,
            batch_size=self._sequence.micro_batch_size,
            cp_size=self._cp_size,
        )

    def _layout(self, multiple: int, cp_rank: int) -> SequenceLayout:
        return SequenceLayout.contiguous(
            global_length=self._sequence.global_length,
            multiple_of=multiple,
            cp_size=self._cp_size,
            cp_rank=cp_rank,
        )


def _numbers(shape: AttentionShape) -> tuple[object, ...]:
    return shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.device, shape.window


def _declared_row(
    declared: Mapping[str, tuple[ContextParallelStrategy | None, AttentionShape | None]],
    num_attentions: int,
    costs: _Costs,
) -> MethodRow:
    by_strategy = [(strategy, shape) for strategy, shape in declared.values() if strategy is not None]
    known = [(strategy, shape) for strategy, shape in by_strategy if shape is not None]
    others, unknown = len(declared) - len(by_strategy), len(by_strategy) - len(known)
    notes = []
    if others:
        notes.append(f"without {others} attentions whose method communicates by itself")
    if unknown:
        notes.append(f"without {unknown} attentions {_UNKNOWN_HEADS}")
    return MethodRow(
        name="as declared",
        serves=len(declared),
        attentions=num_attentions,
        ranks=costs.of(known) if known else (),
        note="; ".join(notes),
    )


def _method_rows(inspection: Inspection, cp_size: int, device: torch.device, costs: _Costs) -> Iterator[MethodRow]:
    attentions = {} if inspection.model is None else _attentions_of(inspection.model)
    tensor_parallel = None if inspection.check is None else inspection.check.tensor_parallel
    degrees = None if tensor_parallel is None else tensor_parallel.head_degrees
    verdicts = judge_methods(attentions, cp_size=cp_size, device=device, tp_degrees=degrees)
    for index, name in enumerate(verdict.wrapper for verdict in next(iter(verdicts.values()), ())):
        by_attention = {fqn: rows[index] for fqn, rows in verdicts.items()}
        refusals: dict[str, str] = {}
        for fqn, verdict in by_attention.items():
            if verdict.reason is not None:
                refusals.setdefault(verdict.reason.replace(fqn, "\0"), verdict.reason)
        by_strategy = [(v.strategy, v.shape) for v in by_attention.values() if v.strategy is not None]
        served = [(strategy, shape) for strategy, shape in by_strategy if shape is not None]
        unknown = len(by_strategy) - len(served)
        legal = all(verdict.reason is None for verdict in by_attention.values())
        yield MethodRow(
            name=name,
            serves=sum(verdict.reason is None for verdict in by_attention.values()),
            attentions=len(attentions),
            refusals=tuple(refusals.values()),
            ranks=costs.of(served) if legal and len(served) == len(attentions) else (),
            note=_note_of_method(legal=legal, by_strategy=len(by_strategy), unknown=unknown),
        )


def _note_of_method(*, legal: bool, by_strategy: int, unknown: int) -> str:
    if legal and not by_strategy:
        return "communicates by itself"
    return f"no costs: {unknown} attentions {_UNKNOWN_HEADS}" if legal and unknown else ""
