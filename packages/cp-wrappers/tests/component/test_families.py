"""Model families of transformers under Colossal are what they are on one device, whatever the shape and the padding.

The oracle is one process and the unwrapped model in float64: logits of the real tokens, loss, each parameter's gradient
and the parameters after a step of SGD (design.md, section 6). Each planted fault must turn the same comparison red.
"""

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import cp_core._strategy
from cp_collectives import check_no_pending
from cp_core import count_valid_tokens, local_attention, mean_global_loss, sum_gradients, unshard_sequence
from cp_wrappers import apply_context_parallel

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.15,
    "pad_token_id": None,  # else its embedding gets no gradient, and pads of the test may be any token
}
# The families that must hold, and after them what comes with windows and sinks.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    # grouped_mm refuses float64
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 5},
    "qwen2, one layer with a window": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gpt_oss": {
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
REQUIRED = [*FAMILIES][:5]
PADDINGS = ("none", "right", "left")
HEADS = (4, 2, 1)
LEARNING_RATE = 0.05


class Case(NamedTuple):
    family: str
    batch_size: int = 2
    length: int = 29
    num_kv_heads: int = 2
    padding: str = "none"
    # Parameters whose name holds one of these get no gradient.
    frozen: tuple[str, ...] = ()
    seed: int = 0


class Step(NamedTuple):
    """One optimizer step in global terms."""

    logits: torch.Tensor  # of the real tokens, [B * S, V] without pads
    loss: float
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


# --- the models and their oracle ----------------------------------------------------------------------------------


@cache
def prototype(family: str, num_kv_heads: int) -> torch.nn.Module:
    """Return the model of a family, made once on each rank and copied for each case."""
    torch.manual_seed(11)
    name = family.partition(",")[0]
    options = {"attn_implementation": "sdpa", **FAMILIES[family]}
    config = CONFIG_MAPPING[name](**SIZES, num_key_value_heads=num_kv_heads, **options)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=options["attn_implementation"]
    )
    return model.to(torch.float64)


def make_model(case: Case) -> torch.nn.Module:
    model = copy.deepcopy(prototype(case.family, case.num_kv_heads))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    return model


def make_batch(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + case.seed)
    shape = (case.batch_size, case.length)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    if case.padding == "none":
        labels = ids.clone()
        labels[:, : case.length // 5] = -100  # a prompt: valid tokens differ between shards
        return {"input_ids": ids, "labels": labels}
    pads = torch.randint(case.length, (case.batch_size, 1), generator=generator)
    index = torch.arange(case.length)
    real = (index < case.length - pads) if case.padding == "right" else (index >= pads)
    return {"input_ids": ids, "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}


def targets_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return shifted.masked_fill(~real_tokens(batch), -100)  # a pad predicts nothing


def real_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


def oracle_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    logits = model(**inputs, use_cache=False).logits
    targets = targets_of(batch)
    loss = loss_sum(logits, targets) / max(1, int((targets != -100).sum()))
    loss.backward()
    return finished(model, logits, loss, batch)


def finished(model: torch.nn.Module, logits: torch.Tensor, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> Step:
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Step(logits.detach()[real_tokens(batch)], loss.item(), gradients, parameters)


def parallel_step(case: Case, batch: dict[str, torch.Tensor], mesh: DeviceMesh, fault: str | None) -> Step:
    model = make_model(case)
    applied = apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    with planted(fault, model, mesh):
        local = applied.shard_batch(batch)
        layout, shift_labels = local["cp_layout"], local.pop("shift_labels")
        if fault == "positions from 0":
            local["position_ids"] = local["position_ids"] - local["position_ids"][:, :1]
        if fault == "label shift on the shard":
            own = torch.nn.functional.pad(batch["labels"], (0, layout.padded_length - case.length), value=-100)
            shift_labels = torch.nn.functional.pad(own[:, layout.global_index][:, 1:], (0, 1), value=-100)
        if fault == "padding mask dropped":
            local["cp_layout"] = dataclasses.replace(layout, key_padding=None)
        logits = model(**local).logits
        loss = mean_global_loss(
            loss_sum(logits, shift_labels),
            count_valid_tokens(shift_labels),
            dp_cp_mesh=mesh,
            grad_average_degree=mesh.size() if fault == "gradient times cp_size" else 1,
        )
        loss.backward.backward()
    sum_gradients(model.parameters(), mesh)
    check_no_pending(where="a step of the test")
    return finished(model, unshard_sequence(logits.detach(), 1, mesh, layout), loss.logged, batch)


# --- faults -------------------------------------------------------------------------------------------------------

FAULTS = (
    "label shift on the shard",
    "positions from 0",
    "one layer left unwrapped",
    "causal aligned top-left",
    "gradient times cp_size",
    "causal mask dropped",
    "padding mask dropped",
)


@contextmanager
def planted(fault: str | None, model: torch.nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Break the wrapped model from inside, in the way a real mistake would."""
    if fault == "one layer left unwrapped":
        model.model.layers[1].self_attn._context_parallel.cp_mesh = None
        model.model.layers[1].self_attn._context_parallel.strategy = _LocalOnly()
    broken = {"causal aligned top-left": top_left_attention, "causal mask dropped": unmasked_attention}.get(fault or "")
    if broken is None:
        yield
        return
    with mock.patch.object(cp_core._strategy, "local_attention", broken):
        yield


class _LocalOnly:
    """What a layer does that was left out: attention over its own shard."""

    def attention(self, q: Any, k: Any, v: Any, *, cp_mesh: Any, attention_meta: Any, layer: Any) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention_meta.scale, enable_gqa=True)


def top_left_attention(q: Any, k: Any, v: Any, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention_meta.scale, enable_gqa=True)


def unmasked_attention(q: Any, k: Any, v: Any, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    meta = dataclasses.replace(attention_meta, causal=False, window=None)
    return local_attention(q, k, v, attention_meta=meta, recall=recall)


# --- the comparison, run on each rank -----------------------------------------------------------------------------


def violations(case: Case, fault: str | None = None) -> list[str]:
    """Train both models one step and return every promise that does not hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    batch = make_batch(case)
    oracle = make_model(case)
    expected, found = oracle_step(oracle, batch), parallel_step(case, batch, mesh, fault)
    broken = []
    if (found.logits - expected.logits).norm() > 1e-12 * expected.logits.norm():
        broken.append("logits")
    if abs(found.loss - expected.loss) > 1e-12 * abs(expected.loss):
        broken.append("loss")
    largest = max((g.norm().item() for g in expected.gradients.values() if g is not None), default=0.0)
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                broken.append(f"gradient of {name} is None on one side only")
        elif (other - gradient).norm() > 1e-10 * gradient.norm() + 1e-14 * largest:
            broken.append(f"gradient of {name}")
    for name, parameter in expected.parameters.items():
        if (found.parameters[name] - parameter).norm() > 1e-10 * parameter.norm() + 1e-14 * largest:
            broken.append(f"parameter {name}")
    return [f"{case}: {promise}" for promise in broken]


def violations_of(cases: list[Case]) -> list[str]:
    return [broken for case in cases for broken in violations(case)]


def lengths(cp_size: int) -> list[int]:
    return sorted({2 * cp_size - 1, 2 * cp_size, 2 * cp_size + 1, *range(29, 34)})


# --- the claims ---------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.full
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("num_kv_heads", HEADS, ids="heads4/{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_and_padding(worlds: Any, family: str, num_kv_heads: int, cp_size: int) -> None:
    shapes = itertools.product((1, 2), lengths(cp_size), PADDINGS)
    cases = [Case(family, b, s, num_kv_heads, padding, seed=seed) for seed, (b, s, padding) in enumerate(shapes)]
    assert worlds(cp_size).run(violations_of, cases, time_limit=300) == [[]] * cp_size


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_of_shapes_and_paddings(worlds: Any, family: str, cp_size: int) -> None:
    """Each pair of batch size, heads and padding, with all lengths in turn."""
    turns = itertools.cycle(lengths(cp_size))
    chosen = [(1, 4, "none"), (2, 2, "none"), (2, 1, "right"), (1, 2, "right"), (2, 4, "left"), (1, 1, "left")]
    cases = [Case(family, b, next(turns), kv, padding, seed=cp_size) for b, kv, padding in chosen * 2]
    assert worlds(cp_size).run(violations_of, cases) == [[]] * cp_size


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", REQUIRED)
def test_the_comparison_finds_the_planted_fault(worlds: Any, family: str, fault: str, cp_size: int) -> None:
    case = Case(family, padding="left" if fault == "padding mask dropped" else "none")
    for broken in worlds(cp_size).run(violations, case, fault):
        assert any("gradient" in violation for violation in broken)


def random_cases(family: str, num_cases: int) -> list[str]:
    """Draw the same cases on every rank and return every promise that one of them breaks."""
    broken: list[str] = []

    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        batch_size=st.integers(1, 3),
        length=st.integers(1, 40),
        num_kv_heads=st.sampled_from(HEADS),
        padding=st.sampled_from(PADDINGS),
        frozen=st.sets(
            st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "mlp", "embed", "lm_head", "norm"]), max_size=6
        ),
        seed=st.integers(0, 10_000),
    )
    def one(**fields: Any) -> None:
        broken.extend(violations(Case(family, **{**fields, "frozen": tuple(sorted(fields["frozen"]))})))

    one()
    return broken


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 3], ids="C{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_shapes_paddings_and_frozen_parameters(worlds: Any, family: str, cp_size: int) -> None:
    assert worlds(cp_size).run(random_cases, family, 15) == [[]] * cp_size


@pytest.mark.parity
@pytest.mark.full
@pytest.mark.parametrize("cp_size", [2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_shapes_paddings_and_frozen_parameters(worlds: Any, family: str, cp_size: int) -> None:
    assert worlds(cp_size).run(random_cases, family, 100, time_limit=600) == [[]] * cp_size
