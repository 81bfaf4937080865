"""Qwen3-MoE: where its attentions are. Found by cp-wrappers through the entry point `cp_wrappers.model_specs`."""

from importlib.metadata import version

from ._spec import register_model_spec

__version__ = version("cp-models-qwen3moe")

__all__ = ["register_model_spec"]
