"""Everything that is wrong with a run is said before it starts: one sentence each, all together, no traceback; and the
correction that is shown works when it is pasted."""

import copy
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cp_trainer_glue.cli import main

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
ENTRY: dict[str, Any] = {
    "match": "*.self_attn",
    "when": "cp",
    "region_dispatch": False,
    "inner_target": "self",
    "inner_wrapper": "sdpa_hf",
}
GOOD: dict[str, Any] = {
    "output_dir": "runs/x",
    "model": {"config": MODEL},
    "data": {"source": "stdlib", "seq_length": 64},
    "training": {"train_iters": 4, "global_batch_size": 2},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 2},
    "plan_overrides": [ENTRY],
}
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 257}
MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 257}
USERS_MODULE = """
from cp_wrappers import inner_wrapper


@inner_wrapper
def good(target_module, mesh, tp_mesh, cp_mesh, ep_mesh, chunks: int = 2):
    return target_module.forward


@inner_wrapper
def needs_degree(target_module, mesh, tp_mesh, cp_mesh, ep_mesh, degree: int):
    return target_module.forward


def undecorated(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):
    return target_module.forward


def compute(target_module, mesh, tp_mesh, cp_mesh, ep_mesh, scale: float):
    return lambda hidden_states, **keywords: (hidden_states * scale, None)


not_callable = 3


@inner_wrapper(strategy=lambda: None)
def no_strategy(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):
    return target_module.forward
"""
BROKEN_MODULES = {
    "users_exit.py": "raise SystemExit(7)\n",
    "users_speechless.py": (
        "class Speechless(Exception):\n    def __str__(self):\n        raise ValueError\n\n\nraise Speechless\n"
    ),
    "users_attribute.py": "def __getattr__(name):\n    raise ValueError(name)\n",
    "users_async.py": (
        "from cp_wrappers import inner_wrapper\n\n"
        "@inner_wrapper\nasync def w(target_module, mesh, tp_mesh, cp_mesh, ep_mesh):\n    return None\n"
    ),
    "users_positional.py": (
        "from cp_wrappers import inner_wrapper\n\n"
        "@inner_wrapper\ndef w(target_module, /, mesh, tp_mesh, cp_mesh, ep_mesh):\n    return None\n"
    ),
    "users_syntax.py": "def broken(:\n",
    "users_import.py": "import no_such_library\n",
    "users_error.py": "limit = {}['missing']\n",
    "users_signature.py": (
        "from cp_wrappers import inner_wrapper\n\n@inner_wrapper\ndef short(target_module, cp_mesh):\n    return None\n"
    ),
}


@dataclass(frozen=True)
class Case:
    """A wrong input and what must be said."""

    # Place in the good config -> value; None takes the key away.
    changes: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    # Whether a correction is shown, which then has to work but for the faults it says are left.
    corrected: bool = True
    options: tuple[str, ...] = ()
    # The file's text, if it is not the changed good config.
    text: str | None = None


def entry(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}


def entries(*items: Any, **more: Any) -> dict[str, Any]:
    return {"plan_overrides": list(items), **more}


def method_key(place: str, value: Any = "x") -> Case:
    return Case({place: value}, (f"{place}: methods are declared per attention and not here; name a wrapper",))


def wrong_wrapper(wrapper: Any, sentence: str, **changes: Any) -> Case:
    return Case(entries(entry(inner_wrapper=wrapper, **changes)), (sentence,))


LAYERS = [f"model.layers.{index}.self_attn" for index in range(3)]
LISTED = ", ".join(LAYERS)

CASES: dict[str, Case] = {
    # methods in the wrong place
    "accelerator.cp": method_key("accelerator.cp", {"algorithm": "ring"}),
    "algorithm": method_key("accelerator.algorithm"),
    "top-level algorithm": method_key("algorithm"),
    "schedule": method_key("accelerator.schedule"),
    "load_balance": method_key("accelerator.load_balance", True),
    "async_fallback": method_key("accelerator.async_fallback", True),
    "ulysses_degree in accelerator": method_key("accelerator.ulysses_degree", 2),
    "ulysses_degree beside the wrapper": Case(
        entries(entry(ulysses_degree=2)),
        ("plan_overrides.0.ulysses_degree: methods are declared", "put the wrapper's data beside its _target_"),
    ),
    "schedule in an entry": Case(entries(entry(schedule="1f1b")), ("plan_overrides.0.schedule: methods are declared",)),
    # parallelism that is not there
    "pp": Case(
        {"accelerator.pp_size": 2}, ("accelerator.pp_size: 2 is not supported in this version; leave it at 1.",)
    ),
    "ep": Case(
        {"accelerator.ep_size": 2}, ("accelerator.ep_size: 2 is not supported in this version; leave it at 1.",)
    ),
    "tp": Case(
        {"accelerator.tp_size": 2}, ("num_q_heads (2) and num_kv_heads (1) must be divisible by tp_size (2)",), False
    ),
    "reentrant recomputation of nothing": Case(
        {"training.checkpoint_reentrant": True}, ("checkpoint_reentrant: activation_checkpoint is none",)
    ),
    "unknown reduce_dtype": Case(
        {"fsdp": {"reduce_dtype": "float8"}}, ("fsdp.reduce_dtype: must be 'float64', ",), corrected=False
    ),
    "sequence_parallel": Case(
        {"accelerator.sequence_parallel": True},
        ("sequence_parallel: shards over tensor-parallel ranks, but tp_size is 1",),
    ),
    "loss_parallel": Case(
        {"accelerator.loss_parallel": True}, ("loss_parallel: shards over tensor-parallel ranks, but tp_size is 1",)
    ),
    "validate and compile": Case(
        {"sharding_mode": "validate", "training.compile": "layers"}, ("training.compile: sharding_mode validate looks",)
    ),
    "unknown placement": Case(
        entries(entry(output_placements={"cp": "sharded"})),
        ("output_placements: a placement is `replicate` or",),
    ),
    # sizes
    "cp_size 0": Case({"accelerator.cp_size": 0}, ("cp_size: must be greater than or equal to 1, but is 0.",), False),
    "cp_size text": Case({"accelerator.cp_size": "2"}, ("cp_size: must be an integer, but is '2'.",), False),
    "cp_size true": Case({"accelerator.cp_size": True}, ("cp_size: must be an integer, but is True.",), False),
    "cp_size 1.5": Case({"accelerator.cp_size": 1.5}, ("cp_size: must be an integer, but is 1.5.",), False),
    "negative size": Case({"accelerator.dp_replicate_size": -1}, ("greater than or equal to 1, but is -1.",), False),
    "batch": Case(
        {"training.micro_batch_size": 4},
        ("training.global_batch_size (2) must be a multiple of micro_batch_size (4) times the data-parallel",),
    ),
    "world size that fits with replicas": Case(
        {"training.global_batch_size": 4},
        (
            "accelerator: the sizes multiply to 2 ranks (pp_size 1 x dp_replicate_size 1 x",
            "--nproc is 8; dp_replicate_size 4",
        ),
        options=("--nproc", "8"),
    ),
    "world size that cannot fit": Case(
        says=("but --nproc is 3; without dp_replicate_size they multiply to 2, which does not divide 3.",),
        corrected=False,
        options=("--nproc", "3"),
    ),
    # the shape of the file
    "misspelt section": Case({"modle": {}}, ("modle: unknown key; did you mean 'model'?",)),
    "misspelt key": Case({"training.max_grad_nrm": 1.0}, ("max_grad_nrm: unknown key; did you mean 'max_grad_norm'?",)),
    "unknown key": Case({"training.xyzzy": 1.0}, ("training.xyzzy: unknown key; known keys are train_iters",)),
    "missing section": Case({"optimizer": None}, ("optimizer: is missing.",), False),
    "missing key": Case({"training.train_iters": None}, ("training.train_iters: is missing.",), False),
    "a value for a section": Case({"training": 3}, ("training: must be a mapping, but is 3.",), False),
    "a list for a file": Case(text="- a\n- b\n", says=("must be a mapping with keys such as model",), corrected=False),
    "an empty file": Case(
        text="", says=("must be a mapping with keys such as model and data, but is empty",), corrected=False
    ),
    "no YAML": Case(text="a: [", says=("is not YAML",), corrected=False),
    "a key twice": Case(
        text="output_dir: a\noutput_dir: b\n", says=("line 1: output_dir is given twice",), corrected=False
    ),
    "a number for a key": Case(text="1: a\n", says=("keys must be text, but 1 is not.",), corrected=False),
    "an anchor to itself": Case(
        text="a: &a [*a]\n", says=("is not YAML: found unconstructable recursive node",), corrected=False
    ),
    "two models": Case(
        {"model.pretrained": "here"}, ("model: needs exactly one of config and pretrained, but has",), False
    ),
    "no data": Case({"data.source": None}, ("data: needs exactly one of source and files, but has none.",), False),
    "no held-out text": Case(
        {"evaluation": {"every_iters": 2}},
        ("evaluation: needs exactly one of source and files and held_out_samples, but has none.",),
        False,
    ),
    "two held-out texts": Case(
        {"evaluation": {"source": "stdlib", "held_out_samples": 2}},
        ("evaluation: needs exactly one of source and files and held_out_samples, but has source and held_out_",),
        False,
    ),
    "held-out text that is not there": Case(
        {"evaluation": {"files": ["nothing/*.txt"]}},
        ("evaluation.files: 'nothing/*.txt' matches no file (relative to ",),
        False,
    ),
    "unknown key of an evaluation": Case(
        {"evaluation": {"source": "stdlib", "every_iter": 2}},
        ("evaluation.every_iter: unknown key; did you mean 'every_iters'?",),
    ),
    "infinite rate": Case(
        {"optimizer.lr": float("inf")}, ("optimizer.lr: must be a finite number, but is inf.",), False
    ),
    "unknown optimizer": Case({"optimizer.name": "lion"}, ("optimizer.name: must be 'adamw' or 'sgd', but is",), False),
    "setting without a value": Case(
        says=("--set 'training.train_iters': must be a.b=value.",),
        corrected=False,
        options=("--set", "training.train_iters"),
    ),
    "setting nowhere": Case(
        says=("there is no mapping above 'x'",), corrected=False, options=("--set", "data.seq_length.x.y=1")
    ),
    # the model and the data
    "cache": Case({"model.config.use_cache": True}, ("use_cache: a key/value cache is for inference; leave it out.",)),
    "loss of experts of another kind": Case(
        {"model.config": {"model_type": "jetmoe", "output_router_logits": True}},
        ("output_router_logits: the expert loss of JetMoeForCausalLM is not the load balancing of Mixtral's kind",),
        corrected=False,
    ),
    "chunks of a split head": Case(
        {"loss": {"chunk_tokens": 8}, "accelerator.tp_size": 2}, ("loss.chunk_tokens: with tp_size 2 the output",)
    ),
    "loss of shards with smoothing": Case(
        {"loss": {"label_smoothing": 0.1}, "accelerator.tp_size": 2, "accelerator.loss_parallel": True},
        ("loss.label_smoothing: is not supported where logits stay sharded",),
    ),
    "no model type": Case(
        {"model.config.model_type": None}, ("model.config.model_type: is missing; name a family",), False
    ),
    "unknown model type": Case(
        {"model.config.model_type": "qwen3_mo"}, ("knows no model type 'qwen3_mo'. Did you mean 'qwen3_moe'?",), False
    ),
    "unknown model field": Case(
        {"model.config.num_hiden_layers": 2}, ("qwen3_moe has no such field. Did you mean 'num_hidden_layers'?",), False
    ),
    "a model that cannot be built": Case({"model.config.hidden_size": -1}, ("cannot be built from its config",), False),
    "heads that do not divide": Case(
        {"model.config.num_attention_heads": 3, "model.config.num_key_value_heads": 2},
        (
            "model.layers.0.self_attn: num_q_heads (3) must be a positive multiple of num_kv_heads (2)",
            f"for {LAYERS[1]}, {LAYERS[2]}.",
        ),
        False,
    ),
    "no such folder": Case(
        {"model.config": None, "model.pretrained": "./no/such/folder"},
        ("model.pretrained: cannot load './no/such",),
        False,
    ),
    "small vocabulary": Case({"model.config.vocab_size": 100}, ("vocab_size (100) must hold the 257 ids of",), False),
    "no such text": Case(
        {"data.source": None, "data.files": ["absent/*.txt"]}, ("data.files: 'absent/*.txt' matches no file",), False
    ),
    "capped scores": Case(
        {
            "model.config": {**LLAMA, "model_type": "gemma2", "num_hidden_layers": 2, "attn_logit_softcapping": 4.0},
            "model.attn_implementation": "eager",
        },
        (
            "model.layers.0.self_attn: attn_logit_softcapping=4.0 is not supported",
            "The same holds for model.layers.1.self_attn.",
        ),
        False,
    ),
    "attention dropout": Case(
        {"model.config.attention_dropout": 0.5},
        ("model.layers.0.self_attn: attention_dropout=0.5 is not supported",),
        False,
    ),
    "a rotary embedding of the longest position": Case(
        {"model.config": {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
        ("rope_type=dynamic, which depends on the longest position, is not supported",),
        False,
    ),
    "an attention implementation that the model lacks": Case(
        {"model.config": MAMBA}, ("MambaForCausalLM does not support an attention implementation",), False
    ),
    "linear attention": Case(
        {"model.config": MAMBA, "model.attn_implementation": "eager"}, ("mixes tokens along the sequence",), False
    ),
    "too few positions": Case(
        {"model.config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}},
        ("transformer.wpe of the model has 32 positions, but data.seq_length is 64;",),
        False,
    ),
    "dropout under another name": Case(
        {
            "model.config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2},
            **entries(entry(match="*.attn")),
        },
        ("transformer.h.0.attn: attention_dropout=0.1 is not supported",),
        False,
    ),
    "tuples for outputs": Case(
        {"model.config.return_dict": False}, ("reads the model's output by name; leave it out.",)
    ),
    "attention weights": Case(
        {"model.config.output_attentions": True}, ("attention weights exist on no rank as a whole",)
    ),
    "experts in float64": Case(
        {"model.dtype": "float64", "model.experts_implementation": "grouped_mm"}, ("grouped_mm does not take float64",)
    ),
    "what shows without a model": Case(
        {
            "model.config.foo": 1,
            "model.config.num_hiden_layers": 1,
            **entries(entry(inner_wrapper="sdp", region_dispatch=None)),
        },
        (
            "model.config.foo: qwen3_moe has no such field.",
            "model.config.num_hiden_layers: qwen3_moe has no such field. Did you mean",
            "needs region_dispatch: false, but lacks it",
            "no inner_wrapper is called 'sdp'",
        ),
        False,
    ),
    # values beyond measure
    "cp_size of 31 digits": Case({"accelerator.cp_size": 10**30}, ("cp_size: must be less than or equal to",), False),
    "a billion ranks": Case({"accelerator.cp_size": 10**9}, ("ranks, more than 131072.",), False),
    "a sequence without end": Case({"data.seq_length": 2**40}, ("seq_length: must be less than or equal to",), False),
    "a seed of 70 bits": Case({"training.seed": 2**70}, ("seed: must be less than or equal to",), False),
    "true for a rate": Case({"optimizer.lr": True}, ("optimizer.lr: must be a number, but is True.",), False),
    "no output_dir": Case({"output_dir": ""}, ("output_dir: must be text that is not empty, but is ''.",), False),
    "no files": Case(
        {"data.source": None, "data.files": []}, ("files: must be a list that is not empty, but is",), False
    ),
    "half a character": Case(text='"\\ud800": 1\n', says=("holds text that is not Unicode",), corrected=False),
    "a tag that does not fit": Case(text="x: !!bool abc\n", says=("is not YAML: KeyError 'abc'",), corrected=False),
    "a setting with such a tag": Case(
        says=("the value is not YAML: ",), corrected=False, options=("--set", "accelerator.cp_size=!!int ''")
    ),
    "a setting nested too deep": Case(
        says=("the value is not YAML: ",), corrected=False, options=("--set", "training.seed=" + "[" * 3000)
    ),
    "a fault of the command line": Case(
        says=("accelerator.pp_size: 2 is not supported",), corrected=False, options=("--set", "accelerator.pp_size=2")
    ),
    "sizes that fit until they are mended": Case(
        {"accelerator.pp_size": 2, "training.global_batch_size": 4},
        ("config.yaml: 1 fault", "accelerator.pp_size: 2 is not supported"),
        options=("--nproc", "4"),
    ),
    "a number for a key of a section": Case(
        {"accelerator": {1: 2, "cp_size": 2}}, ("accelerator: must be a mapping with text for keys",), False
    ),
    # entries of plan_overrides
    "region_dispatch 0": Case(
        entries(entry(region_dispatch=0)), ("region_dispatch: must be true or false, but is 0.",)
    ),
    "a projection for an attention": Case(
        entries(entry(match="*.q_proj", inner_wrapper="users_own.good")),
        ("reaches model.layers.0.self_attn.q_proj, a part of the attention model.layers.0.self_attn, which a method",),
    ),
    "a projection beside its attention": Case(
        entries(entry(match="*.q_proj", inner_wrapper="users_own.good"), ENTRY),
        ("reaches model.layers.0.self_attn.q_proj, a part of the attention",),
    ),
    "data beside the wrapper": Case(
        entries(entry(chunks=2, inner_wrapper="users_own.good")),
        ("plan_overrides.0.chunks: unknown key;", "put it beside the wrapper's _target_."),
    ),
    "nothing declared": Case(
        entries(), (f"3 of 3 attentions have no context-parallel method: {LISTED}; declare one for each.",)
    ),
    "one layer undeclared": Case(
        entries(entry(match="model.layers.[01].self_attn")),
        (f"1 of 3 attentions have no context-parallel method: {LAYERS[2]};",),
    ),
    "a dead glob": Case(
        entries(entry(match="*.self_atn")),
        (f"plan_overrides.0 ('*.self_atn') matches no module; the model's attentions are {LISTED}.",),
    ),
    "a dead glob beside a good one": Case(
        entries(ENTRY, entry(match="*.cross_attn")), ("plan_overrides.1 ('*.cross_attn') matches no module",)
    ),
    "a glob without an attention": Case(
        entries(entry(match="*.mlp", inner_target=None)),
        ("plan_overrides.0 ('*.mlp') matches", "but none of these is an attention"),
    ),
    "two methods": Case(
        entries(ENTRY, entry(match="model.layers.0.*", inner_target=None)),
        (f"{LAYERS[0]} is declared 2 times, by plan_overrides.0 ('*.self_attn'), plan_overrides.1 ('model.",),
    ),
    "one entry twice": Case(
        entries(ENTRY, ENTRY), (f"{LAYERS[0]} is declared 2 times", f"The same holds for {LAYERS[1]}, {LAYERS[2]}.")
    ),
    "both channels": Case(
        entries(entry(local_compute_fn="users_own.compute")),
        ("plan_overrides.0 ('*.self_attn') declares both inner_wrapper and local_compute_fn; keep one of them.",),
    ),
    "no method": Case(
        entries(entry(inner_wrapper=None)), ("plan_overrides.0 ('*.self_attn') names no method; add inner_wrapper",)
    ),
    "no region_dispatch": Case(
        entries(entry(region_dispatch=None)),
        ("plan_overrides.0 ('*.self_attn') needs region_dispatch: false, but lacks it",),
    ),
    "region_dispatch true": Case(entries(entry(region_dispatch=True)), ("needs region_dispatch: false, but has true",)),
    "region_dispatch text": Case(
        entries(entry(region_dispatch="no")), ("plan_overrides.0.region_dispatch: must be true or false, but is 'no'.",)
    ),
    "unknown when": Case(entries(entry(when="tp")), ("plan_overrides.0.when: must be 'cp', but is 'tp'.",)),
    "an unknown inner_target": Case(
        entries(entry(inner_target="core")), ("matches", "but none of these has an inner_target 'core'")
    ),
    "an empty inner_target": Case(
        entries(entry(inner_target="")),
        ("plan_overrides.0 ('*.self_attn'): inner_target must be 'self' or a name inside",),
    ),
    "a target left out that is not unique": Case(
        entries(entry(match="model", inner_target=None)), ("leaves out inner_target, but model holds 3 attentions",)
    ),
    "a target with several attentions": Case(
        entries(entry(match="model")),
        ("reaches model, which holds 3 attentions", "each attention has a method of its own"),
    ),
    "no match": Case(entries({"inner_wrapper": "sdpa_hf"}), ("plan_overrides.0.match: is missing.",)),
    "a number for a match": Case(entries(entry(match=3)), ("plan_overrides.0.match: must be text, but is 3.",)),
    "text for an entry": Case(entries("sdpa_hf"), ("plan_overrides.0: must be a mapping, but is 'sdpa_hf'.",)),
    "a mapping for the entries": Case({"plan_overrides": ENTRY}, ("plan_overrides: must be a list, but is {",)),
    "a misspelt key in an entry": Case(
        entries({**entry(inner_wrapper=None), "inner_wraper": "sdpa_hf"}),
        ("plan_overrides.0.inner_wraper: unknown key; did you mean 'inner_wrapper'?",),
    ),
    # wrappers
    "an unknown wrapper": wrong_wrapper("sdpa_h", "no inner_wrapper is called 'sdpa_h'; registered are"),
    "a number for a wrapper": wrong_wrapper(3, "plan_overrides.0.inner_wrapper: must be text or a mapping, but is 3."),
    "a wrapper that is not installed": wrong_wrapper("qwen3_moe_async_ring", "comes with cp-models-qwen3moe"),
    "a path to nowhere": wrong_wrapper(
        {"_target_": "no.such.wrapper"}, "there is no module 'no.such'; install its package"
    ),
    "a path to nothing": wrong_wrapper({"_target_": "users_own.nothing"}, "module 'users_own' has no 'nothing'."),
    "a path to a number": wrong_wrapper({"_target_": "users_own.not_callable"}, "is a int, not a callable."),
    "a path of the design document that is not there": wrong_wrapper(
        {"_target_": "hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_ring_cp_wrapper"},
        "names a wrapper that no installed package has; of these paths there are hyper_parallel.distributed",
    ),
    "no _target_": wrong_wrapper({"target": "sdpa_hf"}, "a mapping under inner_wrapper needs _target_"),
    "unknown data": wrong_wrapper({"_target_": "sdpa_hf", "degree": 2}, "num_q_heads; unknown: degree"),
    "misspelt data": wrong_wrapper(
        {"_target_": "users_own.good", "chunk": 2},
        "takes chunks; unknown: chunk; missing: none. Did you mean 'chunks'?",
    ),
    "missing data": wrong_wrapper("users_own.needs_degree", "takes degree; unknown: none; missing: degree."),
    "a reserved name": wrong_wrapper({"_target_": "sdpa_hf", "cp_mesh": 2}, "cp_mesh is filled in at apply and cannot"),
    "no decorator": wrong_wrapper(
        "users_own.undecorated", "is not a wrapper: decorate the function with @inner_wrapper"
    ),
    "a module with a syntax error": wrong_wrapper("users_syntax.w", "importing 'users_syntax' failed: SyntaxError"),
    "a module that lacks a library": wrong_wrapper(
        "users_import.w", "importing 'users_import' failed: ModuleNotFoundError: No module named 'no_such_library'"
    ),
    "a module that fails": wrong_wrapper("users_error.w", "importing 'users_error' failed: KeyError: 'missing' ("),
    "a wrapper without its parameters": wrong_wrapper(
        "users_signature.short",
        "short must take target_module, mesh, tp_mesh, cp_mesh, ep_mesh without defaults; missing: mesh",
    ),
    "a module that exits": wrong_wrapper("users_exit.w", "importing 'users_exit' failed: SystemExit: 7 ("),
    "a module that fails without words": wrong_wrapper(
        "users_speechless.w", "importing 'users_speechless' failed: Speechless ("
    ),
    "a module that computes its attributes": wrong_wrapper(
        "users_attribute.w", "'users_attribute.w': looking it up failed: ValueError: w ("
    ),
    "an async wrapper": wrong_wrapper("users_async.w", "w must be a plain function, not an async one or a generator."),
    "positional parameters": wrong_wrapper(
        "users_positional.w", "w must take target_module by name, not by position only."
    ),
    "a wrapper of the main module": wrong_wrapper("__main__.nothing_here", "module '__main__' has no 'nothing_here'."),
    "a strategy that is none": wrong_wrapper(
        "users_own.no_strategy", "must make a ContextParallelStrategy, but made a NoneType."
    ),
    "a class as a compute function": Case(
        entries(entry(inner_wrapper=None, local_compute_fn="builtins.dict")),
        ("dict has no parameters that can be read",),
    ),
    "a wrapper as a compute function": Case(
        entries(entry(inner_wrapper=None, local_compute_fn="users_own.good")),
        ("declare it as inner_wrapper: users_own.good.",),
    ),
    "a compute function without its data": Case(
        entries(entry(inner_wrapper=None, local_compute_fn="users_own.compute")),
        ("takes scale; unknown: none; missing: scale",),
    ),
    "one fault that can be mended and one that cannot": Case(
        {"accelerator.pp_size": 2, "model.config.attention_dropout": 0.5},
        (
            "accelerator.pp_size: 2 is not supported",
            "attention_dropout=0.5",
            "pasted over the same keys 1 of these faults",
        ),
    ),
    "faults that cannot be mended": Case(
        {"training.train_iters": None, "model.config.attention_dropout": 0.5}, ("config.yaml: 2 faults",), False
    ),
    "everything at once": Case(
        {
            "accelerator.algorithm": "ring",
            "accelerator.pp_size": 2,
            "training.max_grad_nrm": 1.0,
            **entries(entry(match="*.0.self_attn", region_dispatch=None), entry(match="*.1.*"), entry(match="dead")),
        },
        (
            "config.yaml: 6 faults",
            "accelerator.algorithm: methods are declared",
            "accelerator.pp_size: 2 is not supported",
            "training.max_grad_nrm: unknown key",
            "plan_overrides.0 ('*.0.self_attn') needs region_dispatch: false, but lacks it",
            "plan_overrides.2 ('dead') matches no module",
            f"1 of 3 attentions have no context-parallel method: {LAYERS[2]};",
        ),
    ),
}


CORRECTION = re.compile(
    r"^(?:without (?P<removed>[\w, ]+?)(?:, and)? )?"
    r"(?:with this pasted over the same keys )?"
    r"(?:the file works|(?P<left>\d+) of these faults are left)(?:\.|:\n)(?P<pasted>.*)",
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with modules of their own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"users_own.py": USERS_MODULE, **BROKEN_MODULES}.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in ("users_own", *(Path(name).stem for name in BROKEN_MODULES)):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Nothing may hang."""

    def stop(*_: object) -> None:
        raise TimeoutError("the command took more than 30 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def content_of(case: Case) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    for place, value in case.changes.items():
        *parents, last = place.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        if value is None:
            section.pop(last)
        else:
            section[last] = value
    return content


def plan(folder: Path, content: dict[str, Any] | str, options: tuple[str, ...]) -> int:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), "--device", "cpu", *options])
    return int(ended.value.code or 0)


def test_the_good_config_is_good(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, GOOD, ()) == 0
    assert capsys.readouterr().err == ""


def test_there_are_at_least_sixty() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_bad_input_is_said_and_its_correction_works(
    folder: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    content = content_of(case)
    assert plan(folder, content if case.text is None else case.text, case.options) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    for sentence in case.says:
        assert sentence in err
    for ours in ("Traceback", "pydantic", "http"):
        assert ours not in err
    shown = CORRECTION.search(err)
    assert (shown is not None) == ("\nwith" in err) == case.corrected, err
    if shown is not None:
        kept = {key: value for key, value in content.items() if key not in (shown["removed"] or "").split(", ")}
        pasted = {**kept, **(yaml.safe_load(shown["pasted"] or "") or {})}
        status = plan(folder, pasted, case.options)
        still = capsys.readouterr().err
        assert (status, still.count("\n  - ")) == ((2, int(shown["left"])) if shown["left"] else (0, 0)), still


def test_the_correction_of_a_projection_keeps_the_method_of_the_attention(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(folder, content_of(CASES["a projection beside its attention"]), ())
    shown = CORRECTION.search(capsys.readouterr().err)
    assert shown is not None
    assert yaml.safe_load(shown["pasted"])["plan_overrides"] == [ENTRY]


def test_the_data_that_stood_beside_a_wrapper_goes_to_its_target(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(folder, content_of(CASES["data beside the wrapper"]), ())
    shown = CORRECTION.search(capsys.readouterr().err)
    assert shown is not None
    (corrected,) = yaml.safe_load(shown["pasted"])["plan_overrides"]
    assert corrected["inner_wrapper"] == {"_target_": "users_own.good", "chunks": 2}


@pytest.mark.parametrize("number", ["0", "-2", "two"])
def test_a_number_of_ranks_that_is_none_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    assert plan(folder, GOOD, (f"--nproc={number}",)) == 2
    assert f"argument --nproc: must be a number of at least 1, but is '{number}'" in capsys.readouterr().err


@pytest.mark.parametrize("target", [".", "no/such/plan.json", "a\0b"])
def test_a_plan_that_cannot_be_written_is_said_beside_the_faults(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert plan(folder, content_of(Case({"accelerator.pp_size": 2})), ("--json", target)) == 2
    err = capsys.readouterr().err
    assert "accelerator.pp_size: 2 is not supported" in err
    assert "error: --json: cannot write" in err


def test_a_correction_keeps_what_stood_under_a_misspelt_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(folder, content_of(Case({"training.max_grad_nrm": 0.25, "training.xyzzy": 1})), ())
    shown = CORRECTION.search(capsys.readouterr().err)
    assert shown is not None
    assert yaml.safe_load(shown["pasted"])["training"] == {
        "global_batch_size": 2,
        "train_iters": 4,
        "max_grad_norm": 0.25,
    }
