"""Colossal on ranks is attention on one: outputs and every gradient, whatever the pads, window, sinks and heads.

B batch, N query heads, K key/value heads, S sequence, P padded sequence, D head dim, C ranks.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from cp_collectives import CollectiveTrace, all_reduce_sum, check_no_pending
from cp_collectives.testing import mean_gradient_over_ranks
from cp_core import (
    AllGatherStrategy,
    AttentionMeta,
    AttentionShape,
    InvalidInputError,
    SequenceLayout,
    local_attention,
    shard_batch_for_cp,
    sum_gradients,
    unshard_sequence,
)
from cp_core.cost import attention_cost

HEAD_DIM = 8
PADS: dict[str, list[tuple[int, int]] | None] = {
    "no pads": None,
    "right": [(0, 3), (0, 7)],
    "left": [(2, 0), (9, 0)],
    "both, and a row of pads": [(1, 2), (1000, 0)],
}


class Case(NamedTuple):
    length: int = 13
    pads: str = "no pads"
    num_kv_heads: int = 2
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    backward_kv: Any = "saved"


CASES = {
    "plain": Case(),
    "one token": Case(length=1),
    "fewer tokens than ranks": Case(length=3),
    "as many heads": Case(num_kv_heads=4),
    "one key head": Case(num_kv_heads=1),
    "right pads": Case(pads="right"),
    "left pads": Case(pads="left"),
    "pads at both sides": Case(pads="both, and a row of pads"),
    "non-causal": Case(causal=False),
    "non-causal, left pads": Case(causal=False, pads="left"),
    "window": Case(window=4),
    "window, left pads": Case(window=4, pads="left"),
    "sinks, window": Case(window=4, sinks=True),
    "sinks, pads": Case(sinks=True, pads="both, and a row of pads"),
}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def real_tokens(case: Case) -> torch.Tensor:
    pads, index = PADS[case.pads] or [(0, 0), (0, 0)], torch.arange(case.length)
    return torch.stack([(index >= left) & (index < case.length - right) for left, right in pads])


def make_layout(case: Case, mesh: DeviceMesh) -> SequenceLayout:
    return SequenceLayout.contiguous(
        global_length=case.length,
        multiple_of=mesh.size(),
        cp_size=mesh.size(),
        cp_rank=mesh.get_local_rank(),
        real_keys=None if case.pads == "no pads" else real_tokens(case),
    )


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, case: Case) -> torch.Tensor:
    index, real = torch.arange(case.length), real_tokens(case)
    seen = (real[:, :, None] & real[:, None, :])[:, None]
    if case.causal:
        seen = seen & (index <= index[:, None])
    if case.window is not None:
        seen = seen & (index > index[:, None] - case.window)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * HEAD_DIM**-0.5
    shape = scores.shape[:3]
    sink = scores.new_full((*shape, 1), -1e300) if sinks is None else sinks[:, None, None].expand(*shape, 1)
    weights = torch.cat([scores.masked_fill(~seen, float("-inf")), sink], -1).softmax(-1)[..., :-1]
    return (weights * seen.any(-1, keepdim=True)) @ v.repeat_interleave(groups, 1)


def shard_of(tensor: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, layout.padded_length - layout.global_length), value=7.0)
    return padded[:, :, layout.global_index].detach().requires_grad_()


def violations(case: Case) -> list[str]:
    """Compare attention on ranks with attention on one; return what differs."""
    mesh = cp_mesh()
    layout = make_layout(case, mesh)
    heads = {"q": 4, "k": case.num_kv_heads, "v": case.num_kv_heads}
    whole = {n: normal(2, h, case.length, HEAD_DIM, seed=i).requires_grad_() for i, (n, h) in enumerate(heads.items())}
    grad = normal(2, 4, case.length, HEAD_DIM, seed=9)
    sinks = normal(4, seed=5).requires_grad_() if case.sinks else None
    expected = oracle(*whole.values(), sinks, case)
    expected.backward(grad)
    local = {name: shard_of(tensor, layout) for name, tensor in whole.items()}
    local_sinks = None if sinks is None else sinks.detach().requires_grad_()
    meta = AttentionMeta(layout=layout, causal=case.causal, window=case.window, sinks=local_sinks)
    output = AllGatherStrategy(backward_kv=case.backward_kv).attention(
        *local.values(), cp_mesh=mesh, attention_meta=meta, layer="attention"
    )
    output.backward(shard_of(grad, layout).detach())
    check_no_pending(where="the test")
    found = {"output": unshard_sequence(output.detach(), 2, mesh, layout)}
    wanted = {"output": expected.detach(), **{name: tensor.grad for name, tensor in whole.items()}}
    for name, tensor in local.items():
        assert tensor.grad is not None
        found[name] = unshard_sequence(tensor.grad, 2, mesh, layout)
    if local_sinks is not None and sinks is not None and local_sinks.grad is not None:
        all_reduce_sum([local_sinks.grad], mesh=mesh)
        found["sinks"], wanted["sinks"] = local_sinks.grad, sinks.grad
    return [n for n, right in wanted.items() if right is None or (found[n] - right).norm() > 1e-12 * right.norm()]


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("backward_kv", ["saved", "regathered"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_on_ranks_is_attention_on_one(worlds: Any, cp_size: int, case: Case, backward_kv: str) -> None:
    assert worlds(cp_size).run(violations, case._replace(backward_kv=backward_kv)) == [[]] * cp_size


def counted(backward_kv: Any, case: Case) -> tuple[list[Any], list[Any]]:
    """Return messages as traced and as the cost model has them."""
    mesh = cp_mesh()
    layout, strategy = make_layout(case, mesh), AllGatherStrategy(backward_kv=backward_kv)
    q, k, v = (
        normal(2, n, layout.local_length, HEAD_DIM, seed=n, dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2)
    )
    with CollectiveTrace() as trace:
        output = strategy.attention(q, k, v, cp_mesh=mesh, attention_meta=AttentionMeta(layout=layout), layer="a")
        forward = len(trace.records)
        output.sum().backward()
    shape = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=q.dtype, device=q.device, fqn="a")
    cost = attention_cost(strategy, shape=shape, layout=layout, batch_size=2, cp_size=mesh.size())
    traced = [
        [record.bytes_received for record in trace.records[:forward]],
        [record.bytes_received for record in trace.records[forward:]],
    ]
    operations = [(record.op, record.phase) for record in trace.records]
    expected = [(cost.forward_messages, cost.forward_bytes), (cost.backward_messages, cost.backward_bytes)]
    return [[(len(part), sum(part)) for part in traced], operations], expected


@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("backward_kv", ["saved", "regathered"])
def test_messages_and_bytes_are_those_of_the_cost_model(worlds: Any, cp_size: int, backward_kv: str) -> None:
    for (found, operations), expected in worlds(cp_size).run(counted, backward_kv, Case()):
        assert found == expected
        again = [("all_gather", "recompute")] if backward_kv == "regathered" else []
        assert operations == [("all_gather", "forward"), *again, ("all_to_all", "backward")]


def kept_bytes(backward_kv: Any) -> tuple[int, int]:
    """Return the bytes that autograd and the strategy keep for backward, counted and by the cost model."""
    mesh = cp_mesh()
    layout, strategy = make_layout(Case(length=16), mesh), AllGatherStrategy(backward_kv=backward_kv)
    q, k, v = (normal(2, n, layout.local_length, HEAD_DIM, seed=n).requires_grad_() for n in (4, 2, 2))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        strategy.attention(q, k, v, cp_mesh=mesh, attention_meta=AttentionMeta(layout=layout), layer="a")
    for local in (k, v) if backward_kv == "regathered" else ():  # held by the recall, not by autograd
        keep(local)
    shape = AttentionShape(num_q_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=q.dtype, device=q.device, fqn="a")
    cost = attention_cost(strategy, shape=shape, layout=layout, batch_size=2, cp_size=mesh.size())
    return sum(kept.values()), cost.saved_bytes


@pytest.mark.parametrize("backward_kv", ["saved", "regathered"])
def test_what_is_kept_for_backward_is_what_the_cost_model_says(worlds: Any, backward_kv: str) -> None:
    for found, expected in worlds(4).run(kept_bytes, backward_kv):
        assert found == expected


def attention_jacobian_is_right(case: Case) -> bool:
    mesh = cp_mesh()
    layout = make_layout(case, mesh)
    strategy = AllGatherStrategy(backward_kv=case.backward_kv)

    def attend(*whole: torch.Tensor) -> torch.Tensor:
        local = (mean_gradient_over_ranks(tensor)[:, :, layout.global_index] for tensor in whole)
        meta = AttentionMeta(layout=layout, causal=case.causal, window=case.window)
        output = strategy.attention(*local, cp_mesh=mesh, attention_meta=meta)
        return unshard_sequence(output, 2, mesh, layout)

    inputs = [normal(2, heads, case.length, 2, seed=heads).requires_grad_() for heads in (2, 1, 1)]
    return torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("case", [Case(length=4), Case(length=4, pads="left", backward_kv="regathered")], ids=str)
def test_the_jacobian_of_attention_and_of_unsharding_is_the_numerical_one(worlds: Any, case: Case) -> None:
    assert worlds(2).run(attention_jacobian_is_right, case) == [True] * 2


def gradient_errors(dtype: torch.dtype, batch_size: int, length: int, heads: tuple[int, int]) -> list[list[float]]:
    """Return errors of dQ, dK, dV against float64: of the whole sequence on one rank, and on all ranks."""
    mesh = cp_mesh()
    num_heads = (heads[0], heads[1], heads[1])
    inputs = [normal(batch_size, n, length, 32, seed=seed, dtype=dtype) for seed, n in enumerate(num_heads)]
    grad = normal(batch_size, heads[0], length, 32, seed=9, dtype=dtype)
    exact_inputs = [tensor.double().requires_grad_() for tensor in inputs]
    exact = scaled_dot_product_attention(*exact_inputs, is_causal=True, enable_gqa=True)
    exact.backward(grad.double())
    layout = shard_batch_for_cp({"input_ids": torch.zeros(batch_size, length, dtype=torch.int64)}, mesh)["cp_layout"]
    alone = SequenceLayout.contiguous(global_length=length, multiple_of=1, cp_size=1, cp_rank=0)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    local_attention(*leaves, attention_meta=AttentionMeta(layout=alone)).backward(grad)
    local = [shard_of(tensor, layout) for tensor in inputs]
    output = AllGatherStrategy().attention(*local, cp_mesh=mesh, attention_meta=AttentionMeta(layout=layout))
    output.backward(grad[:, :, layout.global_index])
    errors = []
    for right, one, mine in zip(exact_inputs, leaves, local, strict=True):
        assert right.grad is not None and one.grad is not None and mine.grad is not None
        ours = unshard_sequence(mine.grad, 2, mesh, layout)
        errors.append([float((found.double() - right.grad).norm() / right.grad.norm()) for found in (one.grad, ours)])
    return errors


@pytest.mark.parity
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_16_bit_gradients_does_not_grow_on_four_ranks(
    worlds: Any, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    for alone, on_ranks in worlds(4).run(gradient_errors, dtype, 2, 1024, heads)[0]:
        assert on_ranks <= 1.2 * alone


def layouts_that_are_refused() -> list[str]:
    mesh = cp_mesh()
    rank, size = mesh.get_local_rank(), mesh.size()
    zigzag = torch.cat(
        [torch.arange(2 * rank, 2 * rank + 2), torch.arange(2 * (2 * size - 1 - rank), 2 * (2 * size - rank))]
    )
    length = 4 * size
    layouts = [
        (SequenceLayout(global_index=zigzag, global_length=length, padded_length=length), mesh),
        (
            SequenceLayout.contiguous(global_length=length, multiple_of=size, cp_size=size, cp_rank=size - 1 - rank),
            mesh,
        ),
        (
            SequenceLayout.contiguous(global_length=2 * length, multiple_of=size * 2, cp_size=2 * size, cp_rank=rank),
            mesh,
        ),
        (SequenceLayout.contiguous(global_length=length, multiple_of=size, cp_size=size, cp_rank=rank), None),
    ]
    sentences = []
    for layout, given in layouts:
        q, k, v = (normal(1, 2, 4, HEAD_DIM, seed=seed) for seed in range(3))
        with pytest.raises(InvalidInputError, match=r"shard the batch with the cp_mesh that the attention") as refusal:
            AllGatherStrategy().attention(
                q, k, v, cp_mesh=given, attention_meta=AttentionMeta(layout=layout, causal=False), layer="a"
            )
        sentences.append(str(refusal.value))
    return sentences


def test_a_layout_of_another_rank_or_mesh_or_order_is_refused(worlds: Any) -> None:
    first, second = worlds(2).run(layouts_that_are_refused)
    assert first[0].startswith(
        "a: the layout holds positions 0..1, 6..7 of 8, but rank 0 of 2 of this mesh has 0..3 of 8;"
    )
    assert second[1].startswith("a: the layout holds positions 0..3 of 8, but rank 1 of 2 of this mesh has 4..7 of 8;")
    assert first[2].startswith("a: the layout holds positions 0..3 of 16, but rank 0 of 2 of this mesh has 0..3 of 8;")
    assert second[3].startswith("a: the layout holds positions 4..7 of 8, but rank 0 of 1 of this mesh has 0..3 of 4;")


def changed_in_place(backward_kv: Any) -> str:
    mesh = cp_mesh()
    layout = make_layout(Case(length=8), mesh)
    leaves = [normal(2, n, layout.local_length, HEAD_DIM, seed=n).requires_grad_() for n in (4, 2, 2)]
    q, k, v = (leaf * 1 for leaf in leaves)
    output = AllGatherStrategy(backward_kv=backward_kv).attention(
        q, k, v, cp_mesh=mesh, attention_meta=AttentionMeta(layout=layout)
    )
    k.mul_(2)
    try:
        output.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "taken"


def test_keys_that_are_gathered_again_must_not_change_before(worlds: Any) -> None:
    assert worlds(2).run(changed_in_place, "saved") == ["taken"] * 2  # the gathered ones are kept
    for sentence in worlds(2).run(changed_in_place, "regathered"):
        assert "modified by an inplace operation" in sentence


def batch_that_one_rank_cannot_read() -> str:
    labels = torch.zeros(1, 8, dtype=torch.uint64 if dist.get_rank() == 1 else torch.int64)
    try:
        shard_batch_for_cp({"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": labels}, cp_mesh())
    except InvalidInputError as error:
        return str(error)
    return "taken"


def test_a_batch_that_one_rank_cannot_read_stops_all(worlds: Any) -> None:
    for sentence in worlds(2).run(batch_that_one_rank_cannot_read, time_limit=30):
        assert "rank 1" in sentence and "the batch cannot be read: " in sentence


def doubled_gradient() -> list[float]:
    mesh = cp_mesh()
    first, second = (torch.nn.Parameter(torch.zeros(3_000_000, dtype=torch.float64)) for _ in range(2))
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    sum_gradients([first, second, *(torch.nn.Parameter(torch.zeros(8_000_000)) for _ in range(2)), first], mesh)
    return [float(parameter.grad[0]) for parameter in (first, second) if parameter.grad is not None]


def test_a_tied_parameter_is_summed_once(worlds: Any) -> None:
    assert worlds(2).run(doubled_gradient) == [[2.0, 2.0]] * 2
