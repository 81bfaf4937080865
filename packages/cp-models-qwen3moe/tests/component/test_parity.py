"""Qwen3-MoE under synchronous Colossal is Qwen3-MoE on one device: logits, loss, every gradient, three steps.

The oracle is one process and the unwrapped model in float64. Each planted fault must turn the same comparison red.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import cp_core._strategy
from cp_collectives import CollectiveTrace, check_no_pending, gather_objects
from cp_core import count_valid_tokens, mean_global_loss, shard_batch_for_cp, sum_gradients, unshard_sequence
from cp_wrappers import apply_context_parallel

NUM_LAYERS = 2
NUM_STEPS = 3
LEARNING_RATE = 0.1
VALUE_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-10
FLOOR_TOLERANCE = 1e-14

FAULTS = (
    "label shift on the shard",
    "positions from 0",
    "one layer left unwrapped",
    "causal aligned top-left",
    "gradient times cp_size",
    "causal mask dropped",
)


class Case(NamedTuple):
    batch_size: int
    length: int
    num_kv_heads: int


CASES = [Case(b, s, kv) for b in (1, 2) for s in (7, 29, 32) for kv in (2, 1)]


def case_id(case: Case) -> str:
    return f"B{case.batch_size}-S{case.length}-heads4/{case.num_kv_heads}"


@dataclass
class Step:
    """What one optimizer step leaves behind, in global terms."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor | None]


# --- the model and its oracle -------------------------------------------------------------------------------------


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(11)
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=case.num_kv_heads,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.1,
        attn_implementation="sdpa",
        experts_implementation="eager",  # grouped_mm refuses float64
    )
    return Qwen3MoeForCausalLM(config).to(torch.float64)


def make_batch(case: Case, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(96, (case.batch_size, case.length), generator=generator)
    labels = ids.clone()
    labels[:, : 3 + step] = -100  # a prompt: valid tokens differ between shards
    return {"input_ids": ids, "labels": labels}


def loss_sum(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def oracle_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    loss = loss_sum(logits, targets) / (targets != -100).sum()
    loss.backward()
    return Step(logits.detach(), loss.item(), gradients_of(model))


def parallel_step(model: torch.nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh, fault: str | None) -> Step:
    local = shard_batch_for_cp(batch, mesh)
    layout, shift_labels = local["cp_layout"], local.pop("shift_labels")
    if fault == "label shift on the shard":
        own = torch.nn.functional.pad(batch["labels"], (0, layout.padded_length - layout.global_length), value=-100)
        shift_labels = torch.nn.functional.pad(own[:, layout.global_index][:, 1:], (0, 1), value=-100)
    if fault == "positions from 0":
        local["position_ids"] = local["position_ids"] - local["position_ids"][:, :1]
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
    return Step(unshard_sequence(logits.detach(), 1, mesh, layout), loss.logged.item(), gradients_of(model))


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# --- faults -------------------------------------------------------------------------------------------------------


@contextmanager
def planted(fault: str | None, model: torch.nn.Module) -> Iterator[None]:
    """Break the wrapped model from inside, in the way a real mistake would."""
    if fault == "one layer left unwrapped":
        model.model.layers[1].self_attn._context_parallel.intercepted = False
        model.model.layers[1].self_attn.__dict__.pop("forward")
    broken = {"causal aligned top-left": top_left_attention, "causal mask dropped": unmasked_attention}.get(fault or "")
    if broken is None:
        yield
        return
    with mock.patch.object(cp_core._strategy, "local_attention", broken):
        yield


def top_left_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attention_meta.scale, enable_gqa=True
    )


def unmasked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=attention_meta.scale, enable_gqa=True)


# --- the comparison, run on each rank -----------------------------------------------------------------------------


def compare(case: Case, fault: str | None) -> list[str]:
    """Train both models a few steps side by side and return every promise that does not hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    oracle = make_model(case)
    model = copy.deepcopy(oracle)
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    broken: list[str] = []
    with planted(fault, model):
        for step in range(NUM_STEPS):
            batch = make_batch(case, step)
            expected, found = oracle_step(oracle, batch), parallel_step(model, batch, mesh, fault)
            broken += step_violations(expected, found, where=f"step {step}")
            for one in (oracle, model):
                torch.optim.SGD(one.parameters(), lr=LEARNING_RATE).step()
                one.zero_grad()
    broken += parameter_violations(oracle, model)
    broken += rank_violations(model, mesh)
    return broken


def step_violations(expected: Step, found: Step, where: str) -> list[str]:
    broken = []
    if found.logits.shape != expected.logits.shape or distance(found.logits, expected.logits) > VALUE_TOLERANCE:
        broken.append(f"{where}: logits")
    if abs(found.loss - expected.loss) > VALUE_TOLERANCE * abs(expected.loss):
        broken.append(f"{where}: loss")
    largest = max(g.norm().item() for g in expected.gradients.values() if g is not None)
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        if gradient is None or other is None:
            if gradient is not other:
                broken.append(f"{where}: gradient of {name} is None on one side only")
        elif (other - gradient).norm() > GRADIENT_TOLERANCE * gradient.norm() + FLOOR_TOLERANCE * largest:
            broken.append(f"{where}: gradient of {name}")
    return broken


def parameter_violations(oracle: torch.nn.Module, model: torch.nn.Module) -> list[str]:
    pairs = zip(oracle.named_parameters(), model.parameters(), strict=True)
    return [f"parameter {n} after training" for (n, p), q in pairs if distance(q, p) > GRADIENT_TOLERANCE]


def rank_violations(model: torch.nn.Module, mesh: DeviceMesh) -> list[str]:
    own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    equal = all(torch.equal(own, other) for other in gather_objects(own, mesh=mesh))
    return [] if equal else ["parameters differ between ranks"]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --- the claims ---------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_training_equals_one_device(worlds: Any, cp_size: int, case: Case) -> None:
    assert worlds(cp_size).run(compare, case, None) == [[]] * cp_size


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("fault", FAULTS)
def test_comparison_finds_the_planted_fault(worlds: Any, cp_size: int, fault: str) -> None:
    for broken in worlds(cp_size).run(compare, Case(batch_size=2, length=29, num_kv_heads=2), fault):
        assert any("gradient" in violation for violation in broken)


def counted_messages(case: Case) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make_model(case)
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    local = shard_batch_for_cp(make_batch(case, 0), mesh)
    shift_labels = local.pop("shift_labels")
    with CollectiveTrace() as trace:
        loss_sum(model(**local).logits, shift_labels).backward()
    return {
        "messages": [(record.layer, record.op, record.phase, record.bytes_received) for record in trace.records],
        "local_length": local["cp_layout"].local_length,
    }


@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("case", [Case(2, 29, 2), Case(1, 32, 1)], ids=case_id)
def test_one_message_forward_and_one_backward_of_exactly_the_compact_keys(
    worlds: Any, cp_size: int, case: Case
) -> None:
    for counted in worlds(cp_size).run(counted_messages, case):
        elements = 2 * case.batch_size * case.num_kv_heads * 16 * counted["local_length"]
        expected = elements * (cp_size - 1) * torch.float64.itemsize
        layers = [f"model.layers.{index}.self_attn" for index in range(NUM_LAYERS)]
        assert counted["messages"] == [
            *[(layer, "all_gather", "forward", expected) for layer in layers],
            *[(layer, "all_to_all", "backward", expected) for layer in reversed(layers)],
        ]


def densely_masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any
) -> torch.Tensor:
    keys = torch.arange(k.shape[2])
    visible = attention_meta.layout.global_index[:, None] >= keys
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, visible, scale=attention_meta.scale, enable_gqa=True
    )


def largest_allocation(length: int, attention: Any) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    case = Case(batch_size=1, length=length, num_kv_heads=1)
    model = make_model(case).float()
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    local = shard_batch_for_cp(make_batch(case, 0), mesh)
    shift_labels = local.pop("shift_labels")
    with (
        mock.patch.object(cp_core._strategy, "local_attention", attention or cp_core.local_attention),
        torch.profiler.profile(profile_memory=True) as profile,
    ):
        loss_sum(model(**local).logits, shift_labels).backward()
    events = profile.profiler.kineto_results.events()
    allocations = [event.nbytes() for event in events if event.name() == "[memory]"]
    return {"largest": max(allocations), "mask": local["cp_layout"].local_length * length}


def test_nothing_as_large_as_a_mask_is_allocated(worlds: Any) -> None:
    for found in worlds(2).run(largest_allocation, 4096, None):
        assert 0 < found["largest"] < found["mask"]  # a bool mask [L, S] takes one byte an entry


def test_a_mask_would_have_been_seen(worlds: Any) -> None:
    for found in worlds(2).run(largest_allocation, 4096, densely_masked_attention):
        assert found["largest"] >= found["mask"]


def trained_with_checkpointing(case: Case, use_reentrant: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    oracle = make_model(case)
    model = copy.deepcopy(oracle)
    apply_context_parallel(model, mesh, {"*.self_attn": "sdpa_hf"})
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.train()
    batch = make_batch(case, 0)
    return step_violations(oracle_step(oracle, batch), parallel_step(model, batch, mesh, None), where="step 0")


@pytest.mark.parity
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_changes_nothing(worlds: Any, use_reentrant: bool) -> None:
    assert worlds(2).run(trained_with_checkpointing, Case(2, 29, 2), use_reentrant) == [[]] * 2
