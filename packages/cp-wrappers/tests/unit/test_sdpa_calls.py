"""Calls of scaled_dot_product_attention are read as torch reads them, in one thread, for as long as the mode is on."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from cp_core import InvalidInputError, SequenceLayout
from cp_wrappers._sdpa_calls import SdpaCall, SdpaCalls, require_supported

Q, K, V = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(4, 4, dtype=torch.bool)


def call_of(function: Any, *args: Any, **kwargs: Any) -> SdpaCall:
    calls = []
    with SdpaCalls(lambda call: calls.append(call) or call.query):
        assert function(*args, **kwargs) is calls[0].query
    return calls[0]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((Q, K, V), {}, SdpaCall(Q, K, V)),
        ((), {"value": V, "query": Q, "key": K}, SdpaCall(Q, K, V)),
        ((Q, K), {"value": V, "is_causal": True}, SdpaCall(Q, K, V, is_causal=True)),
        ((Q, K, V, MASK, 0.5, False), {}, SdpaCall(Q, K, V, attn_mask=MASK, dropout_p=0.5)),
        ((Q, K, V, None, 0.0, True), {"scale": 0.3}, SdpaCall(Q, K, V, is_causal=True, scale=0.3)),
        ((Q, K, V, None), {"dropout_p": 0.1, "enable_gqa": True}, SdpaCall(Q, K, V, dropout_p=0.1, enable_gqa=True)),
    ],
    ids=["positional", "by name", "mixed", "mask and dropout", "scale", "grouped"],
)
def test_arguments_are_read_in_any_mix(args: tuple[Any, ...], kwargs: dict[str, Any], expected: SdpaCall) -> None:
    found = call_of(F.scaled_dot_product_attention, *args, **kwargs)
    assert all(one is other for one, other in zip(found[:4], expected[:4], strict=True))
    assert found[4:] == expected[4:]
    F.scaled_dot_product_attention(*args, **kwargs)  # torch takes it, too


@pytest.mark.parametrize(
    "function",
    [
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    ],
)
def test_the_functions_other_names_are_seen(function: Any) -> None:
    assert call_of(function, Q, K, V).query is Q


def test_an_argument_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="causal"):
        call_of(F.scaled_dot_product_attention, Q, K, V, causal=True)


def test_a_call_makes_its_meta() -> None:
    layout = SequenceLayout.contiguous(global_length=4, multiple_of=2, cp_size=2, cp_rank=0)
    meta = SdpaCall(Q, K, V, is_causal=True, scale=0.3, dropout_p=0.2).meta(layout)
    assert (meta.layout, meta.causal, meta.scale, meta.dropout_p) == (layout, True, 0.3, 0.2)
    assert SdpaCall(Q, K, V).meta(layout).causal is False


def test_whoever_takes_a_call_calls_torchs_function() -> None:
    taken = []

    def take(call: SdpaCall) -> torch.Tensor:
        taken.append(call)
        return F.scaled_dot_product_attention(call.query, call.key, call.value)

    with SdpaCalls(take):
        output = F.scaled_dot_product_attention(Q, K, V)
    assert len(taken) == 1
    assert torch.equal(output, F.scaled_dot_product_attention(Q, K, V))


def test_a_call_after_an_exception_and_in_another_thread_is_torchs() -> None:
    def refuse(call: SdpaCall) -> torch.Tensor:
        raise KeyError("refused")

    elsewhere: list[torch.Tensor] = []
    with pytest.raises(KeyError), SdpaCalls(refuse):
        thread = threading.Thread(target=lambda: elsewhere.append(F.scaled_dot_product_attention(Q, K, V)))
        thread.start()
        thread.join()
        F.scaled_dot_product_attention(Q, K, V)
    assert torch.equal(elsewhere[0], F.scaled_dot_product_attention(Q, K, V))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autocast_casts_as_for_torchs_function(dtype: torch.dtype) -> None:
    tensors = [tensor.to(dtype) for tensor in (Q, K, V)]
    with torch.autocast("cpu", torch.bfloat16):
        found = call_of(F.scaled_dot_product_attention, *tensors)
        assert found.query.dtype == found.value.dtype == F.scaled_dot_product_attention(*tensors).dtype


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1), (2, 4), (4, 3)])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_heads_are_refused_where_torch_refuses_them(num_q_heads: int, num_kv_heads: int, enable_gqa: bool) -> None:
    q, k = torch.randn(1, num_q_heads, 4, 8), torch.randn(1, num_kv_heads, 4, 8)
    try:
        F.scaled_dot_product_attention(q, k, k, enable_gqa=enable_gqa)
    except RuntimeError:
        with pytest.raises(InvalidInputError, match=f"here: {num_q_heads} query heads cannot share {num_kv_heads} key"):
            require_supported(SdpaCall(q, k, k, enable_gqa=enable_gqa), "here")
    else:
        require_supported(SdpaCall(q, k, k, enable_gqa=enable_gqa), "here")
