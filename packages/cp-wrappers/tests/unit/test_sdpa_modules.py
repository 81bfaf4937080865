"""Which modules sdpa_hf and sdpa_qkv take, what they say of the others, and what is known before the first forward."""

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention as renamed

from cp_core import AllGatherStrategy, AttentionShape, ContextParallelError
from cp_wrappers import (
    MethodDeclaration,
    find_attention_boundaries,
    inner_wrapper,
    judge_methods,
    plan_boundaries,
    register_inner_wrapper,
)
from cp_wrappers._forward_code import calls_sdpa


def helper(q: torch.Tensor) -> torch.Tensor:
    return second_helper(q)


def second_helper(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Direct(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Inheriting(Direct):
    pass


class Renamed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return renamed(x, x, x)


class ThroughAMethod(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ThroughAStaticMethod(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x)

    @staticmethod
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class ThroughFunctions(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


class ThroughAnAttribute(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        self.other = F.scaled_dot_product_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x, x, x)


class InALambda(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda y: F.scaled_dot_product_attention(y, y, y))(x)


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class InItsModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Direct()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


CALLING = [
    Direct,
    Inheriting,
    Renamed,
    ThroughAMethod,
    ThroughAStaticMethod,
    ThroughFunctions,
    ThroughAnAttribute,
    InALambda,
    Decorated,
]


@pytest.mark.parametrize("kind", CALLING)
def test_a_forward_that_calls_attention_is_found(kind: type[torch.nn.Module]) -> None:
    model = torch.nn.Sequential(Plain(), kind())
    assert list(find_attention_boundaries(model)) == ["1"]
    assert [plan.fqn for plan in plan_boundaries(model, [declared("1")], cp_size=2)] == ["1"]


@pytest.mark.parametrize("module", [Plain(), InItsModule(), torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(8, 2)])
def test_a_forward_that_does_not_is_not(module: torch.nn.Module) -> None:
    assert not calls_sdpa(module)


def declared(match: str, **data: Any) -> MethodDeclaration:
    name = data.pop("_target_", "sdpa_hf")
    return MethodDeclaration(match=match, inner_target="self", inner_wrapper={"_target_": name, **data})


class Core(torch.nn.Module):
    """Has no parameters, as such modules do."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, extra: Any = None) -> Any:
        return F.scaled_dot_product_attention(query, key, value)


class Projecting(Core):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(2, 2, dtype=torch.float64)


class Defaulting(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: Any = None, value: Any = None) -> Any:
        return F.scaled_dot_product_attention(query, key, value)


class Collecting(torch.nn.Module):
    def forward(self, *qkv: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(*qkv)


QKV = {"_target_": "sdpa_qkv"}
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("module", "data", "sentence"),
    [
        (Plain(), {}, r"^attn \(Plain\) shows no attention call that sdpa_hf could take part in: .* a wrapper of its"),
        (torch.nn.MultiheadAttention(8, 2), {}, r"attn \(MultiheadAttention\) shows no attention call that sdpa_hf"),
        (Plain(), QKV, r"shows no attention call that sdpa_qkv could take part in"),
        (Direct(), QKV, r"attn \(Direct\): its forward takes x: torch\.Tensor, and sdpa_qkv serves forward\(q, k, v"),
        (Defaulting(), QKV, r"key: Any = None, .* and sdpa_qkv serves forward\(q, k, v"),
        (Collecting(), QKV, r"takes \*qkv: torch\.Tensor, and sdpa_qkv serves forward\(q, k, v"),
        (Core(), {**QKV, "layout": "SBND"}, r"attn: layout of sdpa_qkv must be BNSD or BSND, but is 'SBND'"),
        (Core(), {**QKV, "arguments": ["q", "k", "v"]}, r"must name three of these, its q, k and v, but is \['q', 'k'"),
        (Core(), {**QKV, "arguments": ["query", "key", "key"]}, r"must name three of these"),
        (Core(), {**QKV, "num_q_heads": 4}, r"are declared together, as integers, but are 4, None and None"),
        (Direct(), {"head_dim": "8"}, r"are declared together, as integers, but are None, None and '8'"),
        (Projecting(), {**QKV, **HEADS, "num_kv_heads": 3}, r"num_q_heads \(4\) must be .* num_kv_heads \(3\)"),
    ],
)
def test_a_module_or_data_that_cannot_be_served_is_refused_before_the_first_forward(
    module: torch.nn.Module, data: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ContextParallelError, match=sentence):
        plan_boundaries(torch.nn.ModuleDict({"attn": module}), [declared("attn", **data)], cp_size=2)


def test_a_target_may_hold_the_module_that_calls() -> None:
    model = torch.nn.ModuleDict({"attn": InItsModule()})
    assert [plan.fqn for plan in plan_boundaries(model, [declared("attn")], cp_size=2)] == ["attn"]


@pytest.mark.parametrize(
    ("module", "data", "shape"),
    [
        (Projecting(), QKV, None),
        (Core(), {**QKV, **HEADS}, None),
        (Projecting(), {**QKV, **HEADS}, (4, 2, 8, torch.float64)),
        (Projecting(), HEADS, (4, 2, 8, torch.float64)),
        (Defaulting(), {**QKV, "arguments": ["query", "key", "value"]}, None),
    ],
    ids=["not declared", "without parameters", "declared", "declared for sdpa_hf", "by name"],
)
def test_heads_are_known_where_they_are_declared(module: torch.nn.Module, data: dict[str, Any], shape: Any) -> None:
    (plan,) = plan_boundaries(torch.nn.ModuleDict({"attn": module}), [declared("attn", **data)], cp_size=2)
    found = plan.shape and (plan.shape.num_q_heads, plan.shape.num_kv_heads, plan.shape.head_dim, plan.shape.dtype)
    assert found == shape
    assert plan.strategy == AllGatherStrategy()


def test_both_serve_a_core_and_heads_that_are_not_known_are_none() -> None:
    verdicts = {verdict.wrapper: verdict for verdict in judge_methods({"core": Core()}, cp_size=2)["core"]}
    for name in ("sdpa_hf", "sdpa_qkv"):
        assert (verdicts[name].reason, verdicts[name].strategy) == (None, AllGatherStrategy())
        assert verdicts[name].shape is None


def test_a_wrapper_of_the_users_own_may_read_heads_and_is_given_its_data() -> None:
    seen = []

    def check(module: torch.nn.Module, fqn: str, *, degree: int) -> None:
        seen.append((fqn, degree))

    def shape(module: torch.nn.Module, fqn: str, *, device: Any, degree: int) -> AttentionShape:
        return AttentionShape(
            num_q_heads=degree,
            num_kv_heads=degree,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
            fqn=fqn,
        )

    @inner_wrapper(strategy=lambda degree: AllGatherStrategy(), check=check, shape=shape)
    def mine(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, degree: int) -> Any: ...

    register_inner_wrapper("reads_its_heads", mine)
    model = torch.nn.ModuleDict({"attn": Plain()})
    (plan,) = plan_boundaries(model, [declared("attn", _target_="reads_its_heads", degree=3)], cp_size=2)
    assert seen == [("attn", 3)]
    assert plan.shape is not None and plan.shape.num_q_heads == 3


def test_models_of_other_kinds_need_no_transformers() -> None:
    code = f"""
import sys
sys.modules["transformers"] = None
import torch, torch.nn.functional as F
from cp_wrappers import MethodDeclaration, plan_boundaries
namespace = {{"__name__": "toys"}}
exec(open({__file__!r}).read().split("CALLING")[0], namespace)
model = torch.nn.ModuleDict({{"attn": namespace["Direct"]()}})
print(len(plan_boundaries(model, [MethodDeclaration(match="attn", inner_wrapper="sdpa_hf")], cp_size=2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
