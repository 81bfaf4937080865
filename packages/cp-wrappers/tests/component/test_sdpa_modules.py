"""Hand-written models under sdpa_hf and sdpa_qkv are those models on one device: logits and every gradient.

The oracle is one process and the unwrapped model in float64. Each planted fault must turn the same comparison red.
"""

import copy
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import cp_core._strategy
from cp_collectives import CollectiveTrace, check_no_pending
from cp_collectives.testing import RankFailed
from cp_core import LifecycleError, shard_batch_for_cp, unshard_sequence
from cp_wrappers import MethodDeclaration, apply_context_parallel

WIDTH, NUM_HEADS, HEAD_DIM, NUM_TOKENS, NUM_LAYERS = 32, 4, 8, 64, 2


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a model attends, and what wraps it."""

    wrapper: str = "sdpa_hf"
    layout: str = "BNSD"
    # enable_gqa hands compact keys to the call, "repeat" expands them before.
    grouping: str = "enable_gqa"
    num_kv_heads: int = 2
    causal: bool = True
    scale: float | None = None

    @property
    def declarations(self) -> dict[str, Any]:
        if self.wrapper == "sdpa_hf":
            return {"*.attn": "sdpa_hf"}
        return {"*.attn.core": {"_target_": "sdpa_qkv", "layout": self.layout}}

    @property
    def name(self) -> str:
        parts = [self.wrapper, self.layout, self.grouping, f"kv{self.num_kv_heads}"]
        parts += [] if self.causal else ["bidirectional"]
        return "-".join(parts if self.scale is None else [*parts, "scaled"])


KINDS = [
    Kind(),
    Kind(grouping="repeat"),
    Kind(num_kv_heads=1, scale=0.9),
    Kind(causal=False),
    Kind(wrapper="sdpa_qkv"),
    Kind(wrapper="sdpa_qkv", grouping="repeat", scale=0.9),
    Kind(wrapper="sdpa_qkv", layout="BSND"),
    Kind(wrapper="sdpa_qkv", layout="BSND", grouping="repeat"),
    Kind(wrapper="sdpa_qkv", layout="BSND", causal=False),
    Kind(wrapper="sdpa_qkv", causal=False, num_kv_heads=1, grouping="repeat"),
]
BOTH = [Kind(), Kind(wrapper="sdpa_qkv", layout="BSND", grouping="repeat")]
FAULTS = ("one layer left unwrapped", "causal aligned top-left", "causality dropped", "scale dropped")


# --- the model ----------------------------------------------------------------------------------------------------


def attended(kind: Kind, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend over tensors in the layout of a kind; returns [B, S, N * D]."""
    if kind.layout == "BSND":
        queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))
    if kind.grouping == "repeat":
        keys, values = (t.repeat_interleave(NUM_HEADS // kind.num_kv_heads, dim=1) for t in (keys, values))
    output = F.scaled_dot_product_attention(
        queries, keys, values, None, 0.0, kind.causal, scale=kind.scale, enable_gqa=kind.grouping == "enable_gqa"
    )
    return output.transpose(1, 2).flatten(2)


class Core(torch.nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return attended(self.kind, queries, keys, values)


class CausalSelfAttention(torch.nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.q = torch.nn.Linear(WIDTH, NUM_HEADS * HEAD_DIM, bias=False)
        self.k = torch.nn.Linear(WIDTH, kind.num_kv_heads * HEAD_DIM, bias=False)
        self.v = torch.nn.Linear(WIDTH, kind.num_kv_heads * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(NUM_HEADS * HEAD_DIM, WIDTH, bias=False)
        self.core = Core(kind) if kind.wrapper == "sdpa_qkv" else None

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, rotary), rotated(k, rotary)
        if self.kind.layout == "BNSD":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(attended(self.kind, q, k, v) if self.core is None else self.core(q, k, values=v))


class Block(torch.nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = torch.nn.LayerNorm(WIDTH), CausalSelfAttention(kind), Mlp()

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.attn(self.norm(x), rotary))


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Transformer(torch.nn.Module):
    def __init__(self, kind: Kind, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = torch.nn.Embedding(NUM_TOKENS, WIDTH)
        self.layers = torch.nn.ModuleList(Block(kind) for _ in range(NUM_LAYERS))
        self.head = torch.nn.Linear(WIDTH, NUM_TOKENS, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x, rotary = self.embed(input_ids), rotary_of(position_ids)
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x, rotary)
            else:
                x = checkpoint(layer, x, rotary, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def rotary_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Return [B, L, D / 2] rotations as complex numbers."""
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = position_ids[..., None].double() * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(3, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary.unsqueeze(2)).flatten(3).to(x.dtype)


def make_model(kind: Kind, seed: int = 7, checkpointing: str = "none") -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(kind, checkpointing).double()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


# --- the comparison, run on each rank -----------------------------------------------------------------------------


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(NUM_TOKENS, (2, length), generator=torch.Generator().manual_seed(3))


def plain_logits(model: torch.nn.Module, length: int = 13) -> torch.Tensor:
    return model(tokens(length), torch.arange(length).expand(2, length))


def local_logits(model: torch.nn.Module, applied: Any, mesh: DeviceMesh, length: int = 13) -> tuple[torch.Tensor, Any]:
    local = shard_batch_for_cp({"input_ids": tokens(length)}, mesh, strategy=applied.strategies)
    applied.set_layout(local["cp_layout"])
    return model(local["input_ids"], local["position_ids"]), local["cp_layout"]


def logits_of(model: torch.nn.Module, applied: Any, mesh: DeviceMesh, length: int = 13) -> torch.Tensor:
    logits, layout = local_logits(model, applied, mesh, length)
    return unshard_sequence(logits.detach(), 1, mesh, layout)


def weighted_sum(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A loss that is a sum over tokens, in which no token counts as another does."""
    weights = torch.sin(torch.arange(NUM_TOKENS, dtype=torch.float64) + positions[:, None])
    return (logits.double().log_softmax(-1) * weights).sum()


def trained(model: torch.nn.Module, applied: Any, mesh: DeviceMesh, length: int) -> torch.Tensor:
    """Leave global gradients on the parameters and return global logits."""
    logits, layout = local_logits(model, applied, mesh, length)
    real = layout.global_index < length
    weighted_sum(logits[:, real], layout.global_index[real]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
    check_no_pending(where="a step of the test")
    return unshard_sequence(logits.detach(), 1, mesh, layout)


def compare(
    kind: Kind, length: int, *, fault: str | None = None, checkpointing: str = "none", compiled: str = "none"
) -> list[str]:
    """Return every promise that does not hold."""
    mesh, oracle, model = cp_mesh(), make_model(kind), make_model(kind, checkpointing=checkpointing)
    expected = plain_logits(oracle, length)
    weighted_sum(expected, torch.arange(length)).backward()
    applied = apply_context_parallel(model, mesh, kind.declarations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile says where its graph breaks
        compile_parts(model, compiled)
        with planted(fault, model):
            logits = trained(model, applied, mesh, length)
    return violations(oracle, model, expected.detach(), logits)


def compare_padded(kind: Kind, length: int, pads: tuple[tuple[int, int], ...], dropped: bool = False) -> list[str]:
    """Compare a padded batch with its rows one by one, without their pads."""
    mesh, oracle, model = cp_mesh(), make_model(kind), make_model(kind)
    index, ids = torch.arange(length), tokens(length)
    real = torch.stack([(index >= left) & (index < length - right) for left, right in pads])
    rows = [(oracle(ids[row, kept][None], index[kept][None])[0], index[kept]) for row, kept in enumerate(real)]
    sum(weighted_sum(logits[None], positions) for logits, positions in rows).backward()
    applied = apply_context_parallel(model, mesh, kind.declarations)
    local = applied.shard_batch({"input_ids": ids, "attention_mask": real})
    layout = local["cp_layout"]
    applied.set_layout(replace(layout, key_padding=None) if dropped else layout)
    logits = model(local["input_ids"], local["position_ids"])
    for row, kept in enumerate(layout.key_padding[:, layout.global_index]):
        weighted_sum(logits[row, kept][None], layout.global_index[kept]).backward(retain_graph=True)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group())
    check_no_pending(where="a step of the test")
    expected = torch.cat([logits.detach() for logits, _ in rows])
    broken = violations(oracle, model, expected, unshard_sequence(logits.detach(), 1, mesh, layout)[real])
    applied.remove()
    return [*broken, *(name for name, module in model.named_modules() if "forward" in module.__dict__)]


def compile_parts(model: torch.nn.Module, compiled: str) -> None:
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    for index, layer in enumerate(model.layers):
        if compiled == "layers":
            model.layers[index] = torch.compile(layer, backend="eager")
        elif compiled == "attentions in place":
            layer.attn.compile(backend="eager")


def violations(
    oracle: torch.nn.Module, model: torch.nn.Module, expected: torch.Tensor, logits: torch.Tensor
) -> list[str]:
    close = logits.shape == expected.shape and (logits - expected).norm() <= 1e-12 * expected.norm()
    gradients = [p.grad for p in oracle.parameters() if p.grad is not None]
    largest = max(gradient.norm() for gradient in gradients)
    broken = [] if close else ["logits"]
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        if parameter.grad is None or (parameter.grad - gradient).norm() > 1e-10 * gradient.norm() + 1e-14 * largest:
            broken.append(f"gradient of {name}")
    return broken


# --- faults -------------------------------------------------------------------------------------------------------


@contextmanager
def planted(fault: str | None, model: torch.nn.Module) -> Iterator[None]:
    """Break the wrapped model from inside, in the way a real mistake would."""
    if fault is None:
        yield
    elif fault == "one layer left unwrapped":
        for module in model.layers[1].modules():
            module.__dict__.pop("forward", None)
        yield
    else:
        with mock.patch.object(cp_core._strategy, "local_attention", BROKEN[fault]):
            yield


def top_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    scale = attention_meta.scale
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=attention_meta.scale, enable_gqa=True)


def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_meta: Any, recall: Any) -> torch.Tensor:
    return cp_core.local_attention(q, k, v, attention_meta=replace(attention_meta, scale=None))


BROKEN = {"causal aligned top-left": top_left, "causality dropped": unmasked, "scale dropped": unscaled}


# --- the claims ---------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_hand_written_model_equals_one_device(worlds: Any, cp_size: int, kind: Kind) -> None:
    for length in (13, 16):  # at 16 on four ranks there are as many tokens on a rank as heads
        assert worlds(cp_size).run(compare, kind, length) == [[]] * cp_size


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [2, 4], ids="C{}".format)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.wrapper)
def test_the_comparison_finds_the_planted_fault(worlds: Any, cp_size: int, kind: Kind, fault: str) -> None:
    for broken in worlds(cp_size).run(compare, replace(kind, scale=0.9), 16, fault=fault):
        assert any("gradient" in violation for violation in broken)


@pytest.mark.parity
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [*BOTH, Kind(wrapper="sdpa_qkv", causal=False)], ids=lambda kind: kind.name)
def test_activation_checkpointing_changes_nothing(worlds: Any, kind: Kind, checkpointing: str) -> None:
    assert worlds(2).run(compare, kind, 13, checkpointing=checkpointing) == [[], []]


@pytest.mark.parity
@pytest.mark.parametrize("compiled", ["layers", "attentions in place"])
@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.wrapper)
def test_compiling_changes_nothing(worlds: Any, kind: Kind, compiled: str) -> None:
    assert worlds(2).run(compare, kind, 13, compiled=compiled, time_limit=120) == [[], []]


def compiled_whole() -> str:
    mesh, model = cp_mesh(), make_model(Kind())
    applied = apply_context_parallel(model, mesh, Kind().declarations)
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        logits_of(model, applied, mesh)
    return str(caught.value)


def test_one_graph_for_all_is_refused_in_our_words(worlds: Any) -> None:
    for said in worlds(2).run(compiled_whole, time_limit=120):
        assert "layers.0.attn is a context-parallel attention; compile without fullgraph=True" in said


def lower_precision(kind: Kind) -> dict[str, bool]:
    mesh, model = cp_mesh(), make_model(kind).float()
    oracle = copy.deepcopy(model)
    exact = plain_logits(copy.deepcopy(model).double())
    applied = apply_context_parallel(model, mesh, kind.declarations)
    dtypes = []
    with torch.autocast("cpu", torch.bfloat16):
        plain = plain_logits(oracle)
        model.layers[0].attn.out.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        local, layout = local_logits(model, applied, mesh)
    logits = unshard_sequence(local.detach(), 1, mesh, layout)
    errors = [float((found - exact).norm() / exact.norm()) for found in (logits, plain)]
    return {
        "attends in 16 bits": dtypes == [torch.bfloat16],
        "as exact as one device": errors[0] <= 1.2 * errors[1],
    }


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.wrapper)
def test_autocast_casts_what_reaches_the_attention(worlds: Any, kind: Kind) -> None:
    for found in worlds(2).run(lower_precision, kind):
        assert all(found.values()), found


def bytes_travelled(kind: Kind) -> list[tuple[str | None, str, int]]:
    mesh, model = cp_mesh(), make_model(kind)
    applied = apply_context_parallel(model, mesh, kind.declarations)
    with CollectiveTrace() as trace:
        local_logits(model, applied, mesh, 16)[0].sum().backward()
    return [(record.layer, record.phase, record.bytes_received) for record in trace.records]


@pytest.mark.parametrize(
    ("kind", "num_heads"),
    [(Kind(), 2), (Kind(grouping="repeat"), 4), (Kind(wrapper="sdpa_qkv", grouping="repeat"), 2)],
    ids=["compact at the call", "expanded before the call", "compact at the boundary"],
)
def test_one_message_each_way_of_the_heads_that_are_given(worlds: Any, kind: Kind, num_heads: int) -> None:
    expected = 2 * 2 * num_heads * HEAD_DIM * 8 * torch.float64.itemsize  # K and V, batch of 2, 8 tokens a rank
    names = [f"layers.{index}.attn{'.core' if kind.wrapper == 'sdpa_qkv' else ''}" for index in range(NUM_LAYERS)]
    for records in worlds(2).run(bytes_travelled, kind):
        assert records == [
            *[(name, "forward", expected) for name in names],
            *[(name, "backward", expected) for name in reversed(names)],
        ]


# --- models that keep to themselves -------------------------------------------------------------------------------


def side_by_side(kind: Kind) -> dict[str, bool]:
    mesh, models = cp_mesh(), [make_model(kind, seed) for seed in (1, 2, 3)]
    expected = [plain_logits(model).detach() for model in models]
    first, second = (apply_context_parallel(model, mesh, kind.declarations) for model in models[:2])
    pairs = list(zip(models[:2], (first, second), strict=True))
    found = {
        "both right": all(close(logits_of(m, a, mesh), e) for (m, a), e in zip(pairs, expected[:2], strict=True)),
        "the third is plain": torch.equal(plain_logits(models[2]), expected[2]),
    }
    copied = copy.deepcopy(models[0])
    found["a copy is wrapped"] = close(logits_of(copied, first, mesh), expected[0])
    with torch.no_grad():
        copied.layers[0].attn.out.weight.zero_()
    found["a copy runs its own modules"] = not close(logits_of(copied, first, mesh), expected[0])
    found["the copied is as before"] = close(logits_of(models[0], first, mesh), expected[0])
    first.remove()
    found["removed"] = torch.equal(plain_logits(models[0]), expected[0])
    found["the other stays wrapped"] = close(logits_of(models[1], second, mesh), expected[1])
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm())


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.wrapper)
def test_models_and_copies_do_not_disturb_each_other(worlds: Any, kind: Kind) -> None:
    for found in worlds(2).run(side_by_side, kind):
        assert all(found.values()), found


def layout_of_another_batch(kind: Kind) -> bool:
    mesh, model = cp_mesh(), make_model(kind)
    applied = apply_context_parallel(model, mesh, kind.declarations)
    logits, _ = local_logits(model, applied, mesh, 13)
    other = shard_batch_for_cp({"input_ids": tokens(9)}, mesh)["cp_layout"]
    with pytest.raises(RuntimeError, match=r"layers\.0\.attn.*: a different layout was set while"):
        applied.set_layout(other)
    logits.sum().backward()
    applied.set_layout(other)
    return True


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.wrapper)
def test_a_layout_is_not_changed_before_the_backward(worlds: Any, kind: Kind) -> None:
    assert worlds(2).run(layout_of_another_batch, kind) == [True, True]


def in_another_thread() -> dict[str, bool]:
    """A plain attention runs in a thread while this one is inside a wrapped forward."""
    mesh, model = cp_mesh(), make_model(Kind())
    expected = plain_logits(model).detach()
    applied = apply_context_parallel(model, mesh, Kind().declarations)
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    plain, found = F.scaled_dot_product_attention(q, q, q), []

    def attend_elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(q, q, q)))
        thread.start()
        thread.join()

    model.layers[0].attn.q.register_forward_pre_hook(attend_elsewhere)
    right = close(logits_of(model, applied, mesh), expected)
    return {"right": right, "the thread": len(found) == 1 and torch.equal(found[0], plain)}


def test_other_threads_keep_torchs_function(worlds: Any) -> None:
    for found in worlds(2).run(in_another_thread):
        assert all(found.values()), found


# --- modules of other forms ---------------------------------------------------------------------------------------


class Toy(torch.nn.Module):
    """One attention under `attn`, handed a global [B, S, N, D] and `cp_layout` as a keyword."""

    def __init__(self, attn: torch.nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return self.attn(x, **keywords)


class SelfAttending(torch.nn.Module):
    """Takes [B, S, N, D]; subclasses say how it attends."""

    def forward(self, x: torch.Tensor, *, key: torch.Tensor | None = None) -> torch.Tensor:
        return self.attend(*(x.transpose(1, 2) for _ in range(3))).transpose(1, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TakesLayout(SelfAttending):
    def forward(self, x: torch.Tensor, cp_layout: Any) -> torch.Tensor:
        self.seen = cp_layout
        return super().forward(x)


def attend_causally(q: torch.Tensor, **others: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, is_causal=True, **others)


class ThroughAFunction(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_causally(q, value=v, key=k)


class ThroughAten(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)


class Inner(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True)


class ThroughAModule(SelfAttending):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.inner(q, k, v)


@torch.compile(backend="eager")
def compiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ThroughACompiledFunction(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return compiled_attention(q, k, v)


def toy_output(attn: torch.nn.Module, declared: Any = "sdpa_hf", **keywords: Any) -> bool:
    mesh = cp_mesh()
    torch.manual_seed(5)
    x = torch.randn(2, 8, 4, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)
    model = Toy(attn)
    apply_context_parallel(model, mesh, [MethodDeclaration(match="attn", inner_target="self", inner_wrapper=declared)])
    layout = shard_batch_for_cp({"input_ids": tokens(8)}, mesh)["cp_layout"]
    output = model(x[:, layout.global_index], cp_layout=layout, **keywords)
    return close(unshard_sequence(output, 1, mesh, layout), expected)


FORMS = [SelfAttending, TakesLayout, ThroughAFunction, ThroughAten, ThroughAModule, ThroughACompiledFunction]


@pytest.mark.parametrize("kind", FORMS)
def test_an_attention_call_is_seen_however_it_is_reached(worlds: Any, kind: type[torch.nn.Module]) -> None:
    assert worlds(2).run(toy_output, kind()) == [True, True]


class Qkv(torch.nn.Module):
    """Hands itself three tensors under names that its core has in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.core = MaskFirst()

    def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return self.core(None, value=x, query=x, key=x, **keywords)


class MaskFirst(torch.nn.Module):
    def forward(self, mask: None, key: Any, value: Any, query: Any) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=True).transpose(1, 2)


def qkv_by_name(arguments: list[str]) -> bool:
    mesh, model = cp_mesh(), Toy(Qkv())
    torch.manual_seed(5)
    x = torch.randn(2, 8, 4, 8, dtype=torch.float64)
    expected = model(x)
    declared = {"_target_": "sdpa_qkv", "layout": "BSND", "arguments": arguments}
    apply_context_parallel(model, mesh, {"attn.core": declared})
    layout = shard_batch_for_cp({"input_ids": tokens(8)}, mesh)["cp_layout"]
    return close(unshard_sequence(model(x[:, layout.global_index], cp_layout=layout), 1, mesh, layout), expected)


def test_arguments_may_be_named(worlds: Any) -> None:
    assert worlds(2).run(qkv_by_name, ["query", "key", "value"]) == [True, True]


# --- what a forward must look like --------------------------------------------------------------------------------


class NoCall(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v) if q.shape[0] == 17 else (q @ k.mT).softmax(-1) @ v


class TwoCalls(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k, v) - super().attend(q, k, v)


class Masking(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril())


class Dropping(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class ThreeDimensional(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q[:, 0], k[:, 0], v[:, 0]).unsqueeze(1)


class Crossing(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k[:, :, :2], v[:, :, :2])


class Undeclared(SelfAttending):
    """Shares keys without enable_gqa."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k[:, :2], v[:, :2])


class OtherDtypes(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k.float(), v)


class NarrowValues(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q, k, v[..., :4])


class Rounding(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().attend(q.long(), k.long(), v.long())


class CheckpointingInside(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().attend, q, k, v, use_reentrant=True)


def toy_fault(attn: torch.nn.Module, declared: Any = "sdpa_hf", tokens_per_rank: int = 4, **keywords: Any) -> None:
    mesh, model = cp_mesh(), Toy(attn)
    apply_context_parallel(model, mesh, {"attn": declared})
    layout = shard_batch_for_cp({"input_ids": tokens(tokens_per_rank * mesh.size())}, mesh)["cp_layout"]
    x = torch.randn(2, layout.local_length, 4, 8, dtype=torch.float64, requires_grad=True)
    model(x, cp_layout=layout, **keywords).sum().backward()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (NoCall, r"but it did 0 times\. What is seen are calls of torch\.nn\.functional\.scaled_dot_product_attention"),
        (TwoCalls, r"attn: one forward must reach the context-parallel attention once, but it did 2 times"),
        (Masking, r"attn: scaled_dot_product_attention was given an attn_mask \(4, 4\)"),
        (Dropping, r"attn: AllGatherStrategy does not support dropout_p \(attention dropout\)"),
        (ThreeDimensional, r"attn: scaled_dot_product_attention takes .* \[B, N, L, D\].* got \(2, 4, 8\) torch"),
        (Crossing, r"attn: q, k and v must be \[B, N, L, D\] with L = 4 .* \(2, 4, 2, 8\)"),
        (Undeclared, r"attn: 4 query heads cannot share 2 key/value heads with enable_gqa=False"),
        (OtherDtypes, r"needs query, key and value of one dtype, but got .* torch\.float32"),
        (NarrowValues, r"key and value have one shape, .* \(2, 4, 4, 4\)"),
        (Rounding, r"attn: attention needs a floating-point dtype, but got torch\.int64"),
        (
            CheckpointingInside,
            r"attn: scaled_dot_product_attention was called without gradients .*checkpoint",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_forward_is_refused_by_name(worlds: Any, kind: type[torch.nn.Module], sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(toy_fault, kind())


class ModestCheckpointing(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().attend, q, k, v, use_reentrant=False)


def test_a_part_that_is_recomputed_outside_the_forward_is_an_error_and_no_other_number(worlds: Any) -> None:
    with pytest.raises(RankFailed, match="CheckpointError"):
        worlds(2).run(toy_fault, ModestCheckpointing())


class Bidirectional(SelfAttending):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_one_token_a_rank_without_causality_is_refused(worlds: Any) -> None:
    worlds(2).run(toy_fault, Bidirectional(), tokens_per_rank=2)
    with pytest.raises(RankFailed, match=r"attn: .* is_causal=False for the one token of this rank"):
        worlds(2).run(toy_fault, Bidirectional(), tokens_per_rank=1)


HEADS = {"num_q_heads": 4, "num_kv_heads": 4, "head_dim": 8}


def test_declared_heads_are_those_of_the_call(worlds: Any) -> None:
    worlds(2).run(toy_fault, SelfAttending(), {"_target_": "sdpa_hf", **HEADS})
    sentence = (
        r"attn: declared are num_q_heads=4, num_kv_heads=2, head_dim=8, but its forward has num_q_heads=4, "
        r"num_kv_heads=4, head_dim=8"
    )
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(toy_fault, SelfAttending(), {"_target_": "sdpa_hf", **HEADS, "num_kv_heads": 2})


# --- modules that are handed queries, keys and values -------------------------------------------------------------


class QkvAttention(torch.nn.Module):
    """Attends over [B, N, S, D]."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CausalWhereSquare(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q.mul_(1.0)  # a second run of this line must not touch the first one's tensors
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])


class InPlace(QkvAttention):
    """Not causal, draws random numbers, and changes what it is given."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q.mul_(2.0)
        return F.scaled_dot_product_attention(q, F.dropout(k, 0.5), v)


class Cutting(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        return F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], is_causal=True)


class QkvNoCall(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(q, k, v) if q.shape[0] == 17 else q


class QkvTwoCalls(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().forward(q, k, v) - super().forward(q, k, v)


class QkvMasking(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype))


class QkvDropping(QkvAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)


def qkv_outputs(
    core: torch.nn.Module, layout_name: str = "BNSD", shape: tuple[int, ...] = (2, 4, 8, 8), *, times: int = 1
) -> list[torch.Tensor]:
    """Return what a core makes of the same tokens and random numbers, each time with the next random number."""
    mesh, model = cp_mesh(), torch.nn.ModuleDict({"core": core})
    applied = apply_context_parallel(model, mesh, {"core": {"_target_": "sdpa_qkv", "layout": layout_name}})
    layout = shard_batch_for_cp({"input_ids": tokens(8)}, mesh)["cp_layout"]
    applied.set_layout(layout)
    torch.manual_seed(1)
    q, k, v = torch.randn(3, *shape, dtype=torch.float64)[..., layout.global_index, :].requires_grad_()
    found = []
    for _ in range(times):
        torch.manual_seed(2)
        found.append(torch.cat([core(q * 1, k * 1, v * 1).detach().flatten(), torch.rand(1, dtype=torch.float64)]))
    return found


@pytest.mark.parametrize(
    ("kind", "layout_name", "sentence"),
    [
        (CausalWhereSquare, "BNSD", r"core: its forward asks for is_causal=True where there are as many keys as quer"),
        (Cutting, "BNSD", r"core: its forward was handed queries of 4 tokens and keys of 8, but called .* 4 and 4;"),
        (QkvNoCall, "BNSD", r"core: one forward must reach .* but it did 0 times\. What is seen are calls of torch"),
        (QkvTwoCalls, "BNSD", r"core: one forward must reach .* but it did 2 times"),
        (QkvMasking, "BNSD", r"core: scaled_dot_product_attention was given an attn_mask \(4, 8\)"),
        (QkvDropping, "BNSD", r"core: AllGatherStrategy does not support dropout_p \(attention dropout\)"),
        (QkvAttention, "BSND", r"core: its forward was handed queries of 4 tokens and keys of 8, .* with 4 and 4;"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_core_is_refused_by_name(
    worlds: Any, kind: type[torch.nn.Module], layout_name: str, sentence: str
) -> None:
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(qkv_outputs, kind(), layout_name)


def test_a_wrong_layout_is_refused_before_anything_is_sent(worlds: Any) -> None:
    sentence = (
        r"core: q, k, v of its forward must be BSND tensors of four dimensions with S = 4 tokens of this rank, but are "
        r"\(2, 2, 4, 8\), \(2, 2, 4, 8\), \(2, 2, 4, 8\); declare layout"
    )
    with pytest.raises(RankFailed, match=sentence):
        worlds(2).run(qkv_outputs, QkvAttention(), "BSND", (2, 2, 8, 8))


def test_a_core_that_is_not_causal_is_looked_at_once_and_without_a_trace(worlds: Any) -> None:
    for first, second in worlds(2).run(qkv_outputs, InPlace(), times=2):
        assert torch.equal(first, second)


@pytest.mark.parity
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4], ids="C{}".format)
@pytest.mark.parametrize("pads", [((3, 0), (8, 0)), ((0, 5), (0, 1)), ((2, 4), (0, 0))], ids=["left", "right", "both"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_pads_are_hidden_also_where_nothing_else_is_wrapped(
    worlds: Any, kind: Kind, pads: tuple[tuple[int, int], ...], cp_size: int
) -> None:
    assert worlds(cp_size).run(compare_padded, kind, 13, pads) == [[]] * cp_size


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
def test_the_comparison_finds_pads_that_are_attended(worlds: Any, kind: Kind) -> None:
    for broken in worlds(2).run(compare_padded, kind, 13, ((3, 0), (8, 0)), True):
        assert any("gradient" in violation for violation in broken)


def two_batches_before_their_backward(checkpointing: str, same: bool) -> str:
    mesh, model = cp_mesh(), make_model(Kind(), checkpointing=checkpointing)
    applied = apply_context_parallel(model, mesh, Kind().declarations)
    losses = []
    for left in (2, 2 if same else 5):
        local = applied.shard_batch({"input_ids": tokens(12), "attention_mask": torch.arange(12).expand(2, 12) >= left})
        try:
            applied.set_layout(local["cp_layout"])
        except LifecycleError as error:
            return str(error)
        losses.append(model(local["input_ids"], local["position_ids"]).sum())
    sum(losses).backward()
    for left in (3, 4):  # and nothing is left over for the next steps
        local = applied.shard_batch({"input_ids": tokens(12), "attention_mask": torch.arange(12).expand(2, 12) >= left})
        applied.set_layout(local["cp_layout"])
        model(local["input_ids"], local["position_ids"]).sum().backward()
    return "taken"


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_another_layout_before_the_backward_is_refused_whatever_the_checkpointing(
    worlds: Any, checkpointing: str
) -> None:
    assert worlds(2).run(two_batches_before_their_backward, checkpointing, True) == ["taken"] * 2
    for sentence in worlds(2).run(two_batches_before_their_backward, checkpointing, False):
        assert "layers.0.attn: a different layout was set while an earlier forward" in sentence


def copy_follows_the_layout() -> bool:
    mesh, model = cp_mesh(), make_model(Kind())
    applied = apply_context_parallel(model, mesh, Kind().declarations)
    logits_of(model, applied, mesh, 13)
    copied = copy.deepcopy(model)
    return all(
        close(logits_of(one, applied, mesh, 14), plain_logits(make_model(Kind()), 14)) for one in (model, copied)
    )


def test_a_copy_gets_the_layout_that_is_set_later(worlds: Any) -> None:
    assert worlds(2).run(copy_follows_the_layout) == [True] * 2
