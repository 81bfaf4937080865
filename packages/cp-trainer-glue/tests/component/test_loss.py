"""Losses beyond the plain one are those of one process: weights, smoothing, chunks, experts, windows without labels.

The oracle is one unwrapped process on the whole batch of the step, in float64.
"""

import copy
import dataclasses
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from cp_collectives import current_platform
from cp_collectives.testing import RankFailed
from cp_core import _expert_loss
from cp_trainer_glue import TextTrainer, TrainerConfig
from cp_trainer_glue._config import LossConfig
from cp_trainer_glue._loss import TokenLoss

V, S = 48, 14
SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 4,
        "router_aux_loss_coef": 0.5,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5},
}
CLASS_WEIGHTS = {3: 0.0, 5: 4.0, 7: 2.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A loss on a layout."""

    family: str = "llama"
    loss: dict[str, Any] = field(default_factory=dict)
    dp: int = 1
    cp: int = 2
    # Labels of each row of a step.
    counts: tuple[int, ...] = (9, 4)
    micro_batch_size: int = 1
    sections: dict[str, Any] = field(default_factory=dict)
    # Fields of the model's config.
    fields: dict[str, Any] = field(default_factory=dict)
    tp: int = 1
    switches: dict[str, bool] = field(default_factory=dict)
    with_loss_weights: bool = False
    experts: bool = False
    # Micro-batches that there are; None for as many as are asked for.
    ends_after: int | None = None

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp


def step_batch(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (len(case.counts), S), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(case.counts):
        places = torch.randperm(S - 1, generator=generator)[:count] + 1
        labels[row, places] = ids[row, places]
    batch = {"input_ids": ids, "labels": labels}
    if case.with_loss_weights:
        batch["loss_weights"] = torch.rand(ids.shape, dtype=torch.float64, generator=generator)
    return batch


def build_model(case: Case) -> Any:
    torch.manual_seed(0)
    fields = {**SIZES, **MIXTURES.get(case.family, {}), **case.fields}
    config = AutoConfig.for_model(case.family, **fields, use_cache=False, output_router_logits=case.experts)
    experts = {"experts_implementation": "eager"} if case.family in MIXTURES else {}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa", **experts)


class Rows:
    def __init__(self, case: Case, dp_rank: int) -> None:
        self._case, self._dp_rank = case, dp_rank

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        case, batch, index = self._case, step_batch(self._case), 0
        while case.ends_after is None or index < case.ends_after:
            start = (index * case.dp + self._dp_rank) * case.micro_batch_size % len(case.counts)
            yield {name: tensor[start : start + case.micro_batch_size] for name, tensor in batch.items()}
            index += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_trainer(case: Case) -> TextTrainer:
    class Trainer(TextTrainer):
        def build_data(self) -> Any:
            return Rows(case, self.meshes.dp_rank)

        def build_model(self) -> torch.nn.Module:
            model: torch.nn.Module = build_model(case)
            return model

    config = {
        "output_dir": "runs/never_written",
        "model": {"config": {"model_type": case.family}, "dtype": "float64"},
        "data": {"source": "stdlib", "seq_length": S},
        "training": {
            "train_iters": 1,
            "global_batch_size": len(case.counts),
            "micro_batch_size": case.micro_batch_size,
            **case.sections.get("training", {}),
        },
        "loss": case.loss,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "accelerator": {"dp_replicate_size": case.dp, "cp_size": case.cp, "tp_size": case.tp, **case.switches},
        "plan_overrides": [
            {"match": "*.self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"}
        ],
        **{name: value for name, value in case.sections.items() if name != "training"},
    }
    platform = current_platform("cpu")
    return Trainer(TrainerConfig.model_validate(config), platform, platform.device(0))


# --- one process ----------------------------------------------------------------------------------------------------


def oracle(case: Case) -> tuple[float, dict[str, torch.Tensor | None]]:
    model, batch = build_model(case), step_batch(case)
    output = model(input_ids=batch["input_ids"])
    loss = token_loss(case, output.logits[:, :-1], batch)
    if case.experts:
        loss = loss + model.router_aux_loss_coef * expert_loss(case, output.router_logits)
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def token_loss(case: Case, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"][:, 1:]
    weight = None
    if case.loss.get("class_weights"):
        weight = torch.ones(V, dtype=torch.float64)
        for token, value in CLASS_WEIGHTS.items():
            weight[token] = value
    smoothing = case.loss.get("label_smoothing", 0.0)
    if not case.with_loss_weights:
        count = int((labels != -100).sum())
        mean = cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight, label_smoothing=smoothing)
        return mean if count else logits.sum() * 0
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight, reduction="none")
    weights = (batch["loss_weights"][:, 1:] * (labels != -100)).flatten()
    of_class = 1 if weight is None else weight[labels.clamp(min=0).flatten()]
    return (losses * weights).sum() / (weights * of_class).sum()


def expert_loss(case: Case, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Switch's loss of each micro-step's global micro-batch, in float64; transformers' own adds up in fp32."""
    rows = case.dp * case.micro_batch_size
    parts = []
    for start in range(0, len(case.counts), rows):
        tokens = torch.cat([layer.view(len(case.counts), S, -1)[start : start + rows] for layer in router_logits])
        probabilities = tokens.flatten(0, 1).softmax(-1)
        chosen = torch.nn.functional.one_hot(probabilities.topk(2, -1).indices, 4).sum(1).double()
        parts.append(4 * (chosen.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(parts).mean()


# --- ranks ----------------------------------------------------------------------------------------------------------


def distance_from_one_process(case: Case) -> tuple[float, float]:
    """Return the relative error of the logged loss, and the largest gradient error in units of what is allowed."""
    trainer = make_trainer(case)
    loss = trainer.accumulate(trainer.next_window()).item()
    trainer.reduce_gradients()
    found = {name: whole(param.grad) for name, param in trainer.model.named_parameters()}
    expected_loss, expected = oracle(case)
    assert found.keys() == expected.keys()
    assert all((found[name] is None) == (expected[name] is None) for name in expected)
    norms = {name: float(value.norm()) for name, value in expected.items() if value is not None}
    floor = 1e-14 * max(norms.values()) + 1e-300
    errors = [float((found[n] - expected[n]).norm()) / (1e-10 * norm + floor) for n, norm in norms.items()]
    return abs(loss - expected_loss) / max(abs(expected_loss), 1e-30), max(errors)


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


CASES = {
    "class weights": Case(loss={"class_weights": CLASS_WEIGHTS}),
    "smoothing": Case(loss={"label_smoothing": 0.2}),
    "class weights and smoothing": Case(loss={"class_weights": CLASS_WEIGHTS, "label_smoothing": 0.2}),
    "weights of tokens": Case(with_loss_weights=True),
    "chunks": Case(loss={"chunk_tokens": 3}),
    "chunks of one": Case(loss={"chunk_tokens": 1}),
    "chunks, class weights": Case(loss={"chunk_tokens": 4, "class_weights": CLASS_WEIGHTS}),
    "chunks, weights of tokens": Case(loss={"chunk_tokens": 4}, with_loss_weights=True),
    "chunks, sharded": Case(loss={"chunk_tokens": 3}, sections={"fsdp": {}}),
    "chunks, sharded, recomputed": Case(
        loss={"chunk_tokens": 3}, sections={"fsdp": {}, "training": {"activation_checkpoint": "full"}}
    ),
    "chunks, tied": Case(loss={"chunk_tokens": 3}, fields={"tie_word_embeddings": True}),
    "chunks, tied, sharded": Case(
        loss={"chunk_tokens": 3}, fields={"tie_word_embeddings": True}, sections={"fsdp": {}}
    ),
    "chunks, smoothing": Case(loss={"chunk_tokens": 3, "label_smoothing": 0.2}),
    "class weights and weights of tokens": Case(loss={"class_weights": CLASS_WEIGHTS}, with_loss_weights=True),
    "class weights over data-parallel ranks": Case(dp=2, loss={"class_weights": CLASS_WEIGHTS}, counts=(1, 7, 13, 2)),
    "1, 7 and 13 labels": Case(counts=(1, 7, 13)),
    "a micro-batch without labels": Case(counts=(0, 5)),
    "a rank without labels": Case(dp=2, counts=(0, 5)),
    "no label at all": Case(counts=(0, 0)),
    "no label at all, sharded": Case(counts=(0, 0), sections={"fsdp": {}}),
    "four ranks": Case(cp=4, counts=(1, 3)),
    "experts of mixtral": Case(family="mixtral", experts=True),
    "experts of qwen3_moe": Case(family="qwen3_moe", experts=True, micro_batch_size=2),
    "experts of olmoe": Case(family="olmoe", experts=True),
    "experts over data-parallel ranks": Case(family="qwen3_moe", experts=True, dp=2, counts=(1, 7, 13, 2)),
    "experts on pads": Case(family="mixtral", experts=True, cp=4),  # 14 tokens are filled up to 16
    "experts, recomputed": Case(
        family="qwen3_moe", experts=True, sections={"training": {"activation_checkpoint": "full"}}
    ),
    "experts, sharded": Case(family="qwen3_moe", experts=True, sections={"fsdp": {}}),
    "experts over tensor-parallel ranks": Case(family="qwen3_moe", experts=True, tp=2),
    "experts under sequence_parallel": Case(
        family="qwen3_moe", experts=True, tp=2, switches={"sequence_parallel": True, "loss_parallel": True}
    ),
    "experts and chunks": Case(family="qwen3_moe", experts=True, loss={"chunk_tokens": 4}),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_are_those_of_one_process(worlds: Any, case: Case) -> None:
    for loss, gradients in worlds(case.world_size).run(distance_from_one_process, case):
        assert loss < 1e-12
        assert gradients < 1


def bf16_loss_of_chunks(chunk_tokens: int | None) -> tuple[float, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, labels = torch.randn(2, 32, 16, generator=generator).bfloat16(), torch.randint(V, (2, 32))
    head = torch.nn.Linear(16, V, bias=False).bfloat16()
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, 16, generator=generator))
    loss = TokenLoss(LossConfig(chunk_tokens=chunk_tokens), V)
    labels = torch.randint(V, (2, 32), generator=generator)
    value = loss.of_hidden(hidden, head, labels, None) if chunk_tokens else loss.of_logits(head(hidden), labels, None)
    value.backward()
    return value.item(), head.weight.grad


def test_chunks_of_16_bit_lose_nothing() -> None:
    whole_loss, whole_gradient = bf16_loss_of_chunks(None)
    loss, gradient = bf16_loss_of_chunks(2)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert float((gradient - whole_gradient).float().norm()) < 2**-8 * float(whole_gradient.float().norm())


# --- the end of the data --------------------------------------------------------------------------------------------


def last_windows(case: Case) -> list[tuple[int, int]]:
    trainer, found = make_trainer(case), []
    for _ in range(2):
        window = trainer.next_window()
        found.append((len(window.batches), window.valid_tokens))
        trainer.accumulate(window)
    trainer.next_window()
    return found


def test_the_last_window_may_be_short_and_then_the_data_has_ended(worlds: Any) -> None:
    case = Case(counts=(9, 4), ends_after=3)
    with pytest.raises(RankFailed, match="the data has ended before train_iters"):
        worlds(2).run(last_windows, case)


def short_window_is_its_own_mean() -> tuple[float, float]:
    case = Case(counts=(9, 4), ends_after=1)
    trainer = make_trainer(case)
    loss = trainer.accumulate(trainer.next_window()).item()
    batch = {name: tensor[:1] for name, tensor in step_batch(case).items()}
    logits = build_model(case)(input_ids=batch["input_ids"]).logits[:, :-1]
    return loss, token_loss(case, logits, batch).item()


def test_a_short_window_is_weighed_by_its_own_tokens(worlds: Any) -> None:
    for found, expected in worlds(2).run(short_window_is_its_own_mean):
        assert found == pytest.approx(expected, rel=1e-12)


def uneven_ends() -> None:
    case = Case(dp=2, cp=1, counts=(1, 2, 3, 4), ends_after=2 if dist.get_rank() == 0 else 1)
    make_trainer(case).next_window()


def test_data_parallel_ranks_must_end_together(worlds: Any) -> None:
    with pytest.raises(RankFailed, match=r"must end together, but they have \[1, 2\] micro-batches left"):
        worlds(2).run(uneven_ends)


# --- what is refused ------------------------------------------------------------------------------------------------


def chunks_of_a_model_that_changes_its_logits() -> None:
    case = Case(family="granite", loss={"chunk_tokens": 4}, fields={"logits_scaling": 2.0})
    trainer = make_trainer(case)
    trainer.accumulate(trainer.next_window())


def test_a_model_that_changes_its_logits_is_refused(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="GraniteForCausalLM changes its logits after the output layer"):
        worlds(2).run(chunks_of_a_model_that_changes_its_logits)


def class_weight_out_of_range() -> None:
    make_trainer(Case(loss={"class_weights": {V: 2.0}}))


def test_a_class_weight_of_no_token_is_refused(worlds: Any) -> None:
    with pytest.raises(RankFailed, match=r"loss\.class_weights: 48 is no id of a vocabulary of 48"):
        worlds(2).run(class_weight_out_of_range)


# --- memory, and waiting for the device -----------------------------------------------------------------------------


def largest_allocation(case: Case) -> int:
    """Return the bytes of the largest piece of memory that one step asks for."""
    trainer = make_trainer(case)
    window = trainer.next_window()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.accumulate(window)
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def test_logits_exist_for_as_many_tokens_as_asked_for(worlds: Any) -> None:
    counts, item = (9, 4, 2, 3, 1, 1, 1, 1), 8
    vocab_size = 4096
    plain = Case(counts=counts, micro_batch_size=len(counts), fields={"vocab_size": vocab_size})
    assert min(worlds(2).run(largest_allocation, plain)) >= len(counts) * S // 2 * vocab_size * item
    # What is left is the head's gradient [V, H].
    chunked = dataclasses.replace(plain, loss={"chunk_tokens": 3})
    assert max(worlds(2).run(largest_allocation, chunked)) == vocab_size * SIZES["hidden_size"] * item


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading a value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            callers = [frame.name for frame in traceback.extract_stack()]
            # The control plane's tensors are the host's own; transformers reads positions in each forward by itself.
            if not {"all_gather_object", "find_packed_sequence_indices"}.intersection(callers):
                self.names.append(f"{func} from {callers[-6:]}")
        return func(*args, **(kwargs or {}))


def host_waits(case: Case) -> list[str]:
    trainer = make_trainer(case)
    window = trainer.next_window()
    with HostWaits() as waits:
        trainer.accumulate(window)
        trainer.reduce_gradients()
        trainer.clip_gradients()
    return waits.names


@pytest.mark.parametrize(
    "case",
    [Case(), Case(loss={"class_weights": CLASS_WEIGHTS}), Case(with_loss_weights=True), Case(sections={"fsdp": {}})],
    ids=["plain", "class weights", "weights of tokens", "fsdp"],
)
def test_the_host_never_waits_for_the_device_between_window_and_update(worlds: Any, case: Case) -> None:
    assert worlds(2).run(host_waits, case) == [[], []]


# --- faults on purpose ----------------------------------------------------------------------------------------------


def local_expert_loss(case: Case) -> tuple[float, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_expert_loss, "all_reduce_sum", lambda *_, **__: None)
        return distance_from_one_process(case)


def test_an_expert_loss_of_local_tokens_is_seen(worlds: Any) -> None:
    case = Case(family="qwen3_moe", experts=True)
    for _, gradients in worlds(2).run(local_expert_loss, case):
        assert gradients > 1e6


def padded_expert_loss(case: Case) -> tuple[float, float]:
    from cp_trainer_glue import _expert_balance

    with pytest.MonkeyPatch.context() as patch:
        everything = lambda layout, *, batch_size: torch.ones(batch_size, layout.local_length, dtype=torch.bool)  # noqa: E731
        patch.setattr(_expert_balance, "real_local_tokens", everything)
        return distance_from_one_process(case)


def test_pads_that_count_for_experts_are_seen(worlds: Any) -> None:
    case = Case(family="mixtral", experts=True, cp=4)
    for _, gradients in worlds(4).run(padded_expert_loss, case):
        assert gradients > 1e6


def class_weights_over_the_count(case: Case) -> tuple[float, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextTrainer, "loss_weight_sum", lambda *_: None)
        return distance_from_one_process(copy.copy(case))


def test_class_weights_divided_by_a_count_are_seen(worlds: Any) -> None:
    for loss, _ in worlds(2).run(class_weights_over_the_count, CASES["class weights"]):
        assert loss > 1e-3
