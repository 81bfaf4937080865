"""A module keeps the name its user knows, whatever was wrapped around it."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cp_wrappers import MethodDeclaration, find_attention_boundaries, inner_wrapper, plan_boundaries
from cp_wrappers._names import ModuleNames


class ToyAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def toy() -> torch.nn.Module:
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"self_attn": ToyAttention()}) for _ in range(2))
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})


class BaseTuner(torch.nn.Module):
    """Named as PEFT's: it holds the user's model under `model`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model


class LoraModel(BaseTuner):
    """A kind of tuner."""


class PeftModel(torch.nn.Module):
    """Named as PEFT's: it holds the tuner under `base_model`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(model, backend="eager")


def compiled_layers(model: torch.nn.Module) -> torch.nn.Module:
    layers = model["model"]["layers"]
    for index, layer in enumerate(layers):
        layers[index] = torch.compile(layer, backend="eager")
    return model


def checkpointed_attention(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model["model"]["layers"]:
        layer["self_attn"] = checkpoint_wrapper(layer["self_attn"])
    return model


def everything(model: torch.nn.Module) -> torch.nn.Module:
    return compiled(PeftModel(compiled_layers(checkpointed_attention(model))))


WRAPPED = {
    "as it is": (lambda model: model, "model.layers.0.self_attn"),
    "compiled": (compiled, "_orig_mod.model.layers.0.self_attn"),
    "compiled layers": (compiled_layers, "model.layers.0._orig_mod.self_attn"),
    "PEFT": (PeftModel, "base_model.model.model.layers.0.self_attn"),
    "DataParallel": (torch.nn.DataParallel, "module.model.layers.0.self_attn"),
    "checkpointed": (checkpointed_attention, "model.layers.0.self_attn._checkpoint_wrapped_module"),
    "all at once": (
        everything,
        "_orig_mod.base_model.model.model.layers.0._orig_mod.self_attn._checkpoint_wrapped_module",
    ),
}
NAMES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@inner_wrapper
def own(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):  # type: ignore[no-untyped-def]
    return target_module.forward


@pytest.mark.parametrize(("wrap", "full_name"), WRAPPED.values(), ids=WRAPPED.keys())
def test_names_are_those_of_the_unwrapped_model(wrap, full_name: str) -> None:  # type: ignore[no-untyped-def]
    plain, model = toy(), wrap(toy())
    assert list(find_attention_boundaries(model)) == NAMES
    assert list(ModuleNames.of(model).modules) == list(ModuleNames.of(plain).modules)
    full_names = {name for name, module in model.named_modules() if isinstance(module, ToyAttention)}
    assert full_name in full_names


@pytest.mark.parametrize(("wrap", "full_name"), WRAPPED.values(), ids=WRAPPED.keys())
def test_a_pattern_matches_the_users_name_and_the_full_one(wrap, full_name: str) -> None:  # type: ignore[no-untyped-def]
    for first in ("model.layers.0.self_attn", full_name):
        declarations = [
            MethodDeclaration(match=first, inner_target="self", inner_wrapper=own),
            MethodDeclaration(match="model.layers.1", inner_target="self_attn", inner_wrapper=own),
        ]
        model = wrap(toy())
        plans = plan_boundaries(model, declarations, cp_size=2)
        assert [plan.fqn for plan in plans] == NAMES
        assert all(isinstance(plan.module, ToyAttention) for plan in plans)


def test_a_module_that_two_names_share_is_listed_once_and_matches_by_both() -> None:
    shared = ToyAttention()
    model = torch.nn.ModuleDict({"first": torch.nn.ModuleDict({"attn": shared}), "second": shared})
    assert list(find_attention_boundaries(model)) == ["first.attn"]
    for match, target in (("second", None), ("second", "self"), ("first", "attn")):
        declaration = MethodDeclaration(match=match, inner_target=target, inner_wrapper=own)
        assert [plan.fqn for plan in plan_boundaries(model, [declaration], cp_size=2)] == ["first.attn"]


class ModulesToSaveWrapper(torch.nn.Module):
    """Named as PEFT's: it keeps the original beside the copies that it trains."""

    def __init__(self, original: torch.nn.Module, *adapters: str) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = torch.nn.ModuleDict({name: ToyAttention() for name in adapters})


def test_what_peft_trains_in_full_stands_for_the_original() -> None:
    model = torch.nn.ModuleDict({"attn": ModulesToSaveWrapper(ToyAttention(), "default")})
    assert list(find_attention_boundaries(model)) == ["attn"]
    assert find_attention_boundaries(model)["attn"] is model["attn"].modules_to_save["default"]
    several = torch.nn.ModuleDict({"attn": ModulesToSaveWrapper(ToyAttention(), "one", "two")})
    assert list(find_attention_boundaries(several)) == ["attn.modules_to_save.one", "attn.modules_to_save.two"]
