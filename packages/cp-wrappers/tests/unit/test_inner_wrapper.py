"""`@inner_wrapper` checks a wrapper when it is defined, and `resolve_inner_wrapper` checks what a user declares."""

from typing import Any

import pytest

from cp_core import AllGatherStrategy, InvalidInputError
from cp_wrappers import inner_wrapper, inner_wrapper_names, resolve_inner_wrapper


@inner_wrapper
def plain(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any, degree: int, chunks: int = 2) -> Any:
    return None


def undecorated(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any, ep_mesh: Any) -> Any:
    return None


def test_a_missing_context_parameter_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"missing: tp_mesh, ep_mesh; with a default: none"):

        @inner_wrapper
        def wrapper(target_module: Any, mesh: Any, cp_mesh: Any) -> None: ...


def test_a_context_parameter_with_a_default_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"with a default: cp_mesh"):

        @inner_wrapper
        def wrapper(target_module: Any, mesh: Any, tp_mesh: Any, cp_mesh: Any = None, ep_mesh: Any = None) -> None: ...


@pytest.mark.parametrize("collect", ["*args", "**kwargs"])
def test_collecting_parameters_is_refused(collect: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def wrapper(target_module, mesh, tp_mesh, cp_mesh, ep_mesh, {collect}): ...", namespace)
    with pytest.raises(InvalidInputError, match="name each data parameter"):
        inner_wrapper(namespace["wrapper"])


def test_a_name_resolves_to_its_strategy() -> None:
    assert resolve_inner_wrapper("sdpa_hf").strategy() == AllGatherStrategy()


@pytest.mark.parametrize(
    "target",
    [
        "sdpa_hf",
        "cp_wrappers.wrappers.sdpa_hf_cp_wrapper",
        "hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_cp_wrapper",
    ],
    ids=["name", "path", "path-of-the-design-document"],
)
def test_a_target_may_be_a_name_or_a_path(target: str) -> None:
    assert resolve_inner_wrapper({"_target_": target}).function is resolve_inner_wrapper("sdpa_hf").function


def test_a_decorated_function_resolves_with_its_data() -> None:
    with pytest.raises(InvalidInputError, match=r"takes chunks, degree; unknown: none; missing: degree"):
        resolve_inner_wrapper(plain)


def test_an_unknown_name_lists_the_choices_and_the_nearest() -> None:
    with pytest.raises(
        InvalidInputError, match=r"no inner_wrapper is called 'sdpa_h'; registered are .*sdpa_hf.*Did you"
    ):
        resolve_inner_wrapper("sdpa_h")


def test_a_name_whose_package_is_missing_names_the_package() -> None:
    if any(name.startswith("qwen3_moe_") for name in inner_wrapper_names()):
        pytest.fail("this test is of the version in which cp-models-qwen3moe brings no wrappers")
    with pytest.raises(InvalidInputError, match="comes with cp-models-qwen3moe"):
        resolve_inner_wrapper("qwen3_moe_async_colossal")


@pytest.mark.parametrize(
    ("declaration", "sentence"),
    [
        (
            {"_target_": "sdpa_hf", "ulysses_degree": 2},
            "takes backward_kv, head_dim, num_kv_heads, num_q_heads; unknown: uly",
        ),
        ({"_target_": "sdpa_hf", "cp_mesh": 2}, "cp_mesh is filled in at apply"),
        ({"target": "sdpa_hf"}, "needs _target_"),
        ({"_target_": "no.such.module.wrapper"}, "there is no module 'no.such.module'"),
        ({"_target_": "cp_wrappers.wrappers.nothing"}, "has no 'nothing'"),
        ({"_target_": "cp_wrappers.wrappers.__doc__"}, "is a str, not a callable"),
        (undecorated, "decorate the function with @inner_wrapper"),
        (3, "must be a name, a mapping"),
    ],
    ids=["unknown-data", "reserved", "no-target", "no-module", "no-attribute", "not-callable", "undecorated", "number"],
)
def test_a_wrong_declaration_is_refused(declaration: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        resolve_inner_wrapper(declaration)
