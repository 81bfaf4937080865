"""A config says what it means, or every fault in it is said at once, in words a user can act on."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from cp_trainer_glue import ConfigError, TrainerConfig, load_config

GOOD: dict[str, Any] = {
    "output_dir": "runs/x",
    "model": {"config": {"model_type": "qwen3_moe"}},
    "data": {"source": "stdlib", "seq_length": 64},
    "training": {"train_iters": 4, "global_batch_size": 2},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 2},
    "plan_overrides": [
        {
            "match": "*.self_attn",
            "when": "cp",
            "region_dispatch": False,
            "inner_target": "self",
            "inner_wrapper": "sdpa_hf",
        }
    ],
}

EXAMPLE_OF_THE_DESIGN_DOCUMENT = """
accelerator:
  dp_shard_size: 1
  dp_replicate_size: 1
  tp_size: 1
  cp_size: 2
  ep_size: 1
  pp_size: 1
  sequence_parallel: false
  loss_parallel: false

plan_overrides:
  - match: "*.self_attn"
    when: cp
    region_dispatch: false
    inner_target: self
    inner_wrapper:
      _target_: hyper_parallel.distributed.context_parallel.wrappers.sdpa_hf_cp_wrapper
"""


def load(tmp_path: Path, content: Any, *overrides: str) -> TrainerConfig:
    path = tmp_path / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return load_config(path, overrides)


def changed(**changes: Any) -> dict[str, Any]:
    """Return the good config with `section__key=value` changes."""
    content = copy.deepcopy(GOOD)
    for place, value in changes.items():
        *parents, last = place.split("__")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return content


def test_defaults_are_those_of_the_document(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.accelerator.world_size == 2
    assert config.accumulation_steps == 2
    assert config.checkpoint.resume == "auto"


def test_the_yaml_of_the_design_document_is_accepted_as_printed(tmp_path: Path) -> None:
    config = load(tmp_path, {**GOOD, **yaml.safe_load(EXAMPLE_OF_THE_DESIGN_DOCUMENT)})
    assert config.plan_overrides[0].when == "cp"
    assert config.plan_overrides[0].region_dispatch is False


def test_settings_replace_what_the_file_says(tmp_path: Path) -> None:
    overrides = (
        "training.train_iters=7",
        "plan_overrides.0.inner_wrapper={_target_: a.b, degree: 2}",
        "optimizer.lr=1e-3",
    )
    config = load(tmp_path, GOOD, *overrides)
    assert config.training.train_iters == 7
    assert config.plan_overrides[0].inner_wrapper == {"_target_": "a.b", "degree": 2}
    assert config.optimizer.lr == 1e-3


WRONG = {
    "misspelt key": (
        changed(training__max_grad_nrm=1.0),
        "training.max_grad_nrm: unknown key; did you mean 'max_grad_norm'?",
    ),
    "misspelt section": (changed(modle={}), "modle: unknown key; did you mean 'model'?"),
    "unknown key in an entry": (
        changed(plan_overrides=[{"match": "*", "inner_wraper": "sdpa_hf"}]),
        "plan_overrides.0.inner_wraper: unknown key; did you mean 'inner_wrapper'?",
    ),
    "method in accelerator": (
        changed(accelerator__cp={"algorithm": "ring"}),
        "accelerator.cp: methods are declared per attention",
    ),
    "algorithm": (changed(accelerator__algorithm="x"), "accelerator.algorithm: methods are declared per attention"),
    "schedule": (changed(schedule="x"), "schedule: methods are declared per attention"),
    "load balance": (changed(accelerator__load_balance=True), "accelerator.load_balance: methods are declared"),
    "async fallback": (changed(accelerator__async_fallback=True), "accelerator.async_fallback: methods are declared"),
    "degree outside a target": (
        changed(accelerator__ulysses_degree=2),
        "accelerator.ulysses_degree: methods are declared",
    ),
    "missing": (changed(training={"global_batch_size": 2}), "training.train_iters: is missing."),
    "bool for a count": (
        changed(accelerator__cp_size=True),
        "accelerator.cp_size: must be an integer, but is True.",
    ),
    "zero": (changed(accelerator__cp_size=0), "accelerator.cp_size: must be greater than or equal to 1, but is 0."),
    "text for a switch": (
        changed(accelerator__loss_parallel="no"),
        "accelerator.loss_parallel: must be true or false, but is 'no'.",
    ),
    "unknown choice": (changed(optimizer__name="lion"), "optimizer.name: must be 'adamw' or 'sgd', but is 'lion'."),
    "unknown when": (changed(plan_overrides=[{"match": "*", "when": "tp"}]), "plan_overrides.0.when: must be 'cp'"),
    "two models": (
        changed(model__pretrained="here"),
        "model: needs exactly one of config and pretrained, but has config and pretrained.",
    ),
    "no data": (changed(data={"seq_length": 8}), "data: needs exactly one of source and files, but has none."),
    "pp": (changed(accelerator__pp_size=2), "accelerator.pp_size: 2 is not supported in this version; leave it at 1."),
    "ep": (changed(accelerator__ep_size=2), "accelerator.ep_size: 2 is not supported in this version; leave it at 1."),
    "reentrant": (
        changed(training__checkpoint_reentrant=True),
        "training.checkpoint_reentrant: activation_checkpoint is none, and reentrant",
    ),
    "sequence_parallel": (
        changed(accelerator__sequence_parallel=True),
        "accelerator.sequence_parallel: shards over tensor-parallel ranks, but tp_size is 1",
    ),
    "batch": (
        changed(training__micro_batch_size=4),
        "training.global_batch_size (2) must be a multiple of micro_batch_size (4) times the data-parallel ranks "
        "(1), for example 4.",
    ),
    "cache": (changed(model__config__use_cache=True), "model.config.use_cache: a key/value cache is for inference"),
    "chunks of a split head": (
        changed(loss={"chunk_tokens": 8}, accelerator__tp_size=2),
        "loss.chunk_tokens: with tp_size 2 the output layer is split",
    ),
    "a value for a section": (changed(model=3), "model: must be a mapping, but is 3."),
    "a mapping for a list": (changed(plan_overrides={"a": 1}), "plan_overrides: must be a list, but is {'a': 1}."),
    "infinity": (changed(optimizer__lr=float("inf")), "optimizer.lr: must be a finite number, but is inf."),
    "not a mapping": ("- a\n- b\n", "must be a mapping with keys such as model and data, but is list."),
    "not yaml": ("a: [", "is not YAML"),
    "twice": ("output_dir: a\noutput_dir: b\n", "line 1: output_dir is given twice; keep one."),
}


@pytest.mark.parametrize(("content", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_fault_is_said_in_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    assert sentence in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert "http" not in str(caught.value)


def test_all_faults_of_a_file_are_said_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, changed(accelerator__pp_size=2, accelerator__ep_size=4, data={"seq_length": 8}))
    first, *faults = str(caught.value).splitlines()
    assert first.endswith("run.yaml: 3 faults")
    assert [fault for fault in faults if fault.startswith("  - ")] == faults[:3]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: 1 fault\n  - cannot be read: No such file"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.train_iters", "must be a.b=value"),
        ("=3", "must be a.b=value"),
        ("training.train_iters.x=3", "training.train_iters is a value, not a mapping"),
        ("training.train_iters.x.y=3", "there is no mapping above 'x'"),
        ("plan_overrides.4.match=x", "'4' is no item of a list of 1"),
        ("training.train_iters=[", "the value is not YAML"),
        ("training.trian_iters=3", "training.trian_iters: unknown key; did you mean 'train_iters'?"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD, override)
    assert sentence in str(caught.value)


def test_every_example_is_a_good_config() -> None:
    examples = sorted((Path(__file__).parents[4] / "examples").glob("**/*.yaml"))
    for path in examples:
        load_config(path)
