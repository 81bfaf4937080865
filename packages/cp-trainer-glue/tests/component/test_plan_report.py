"""What `plan` says of groups and costs is what ranks then form and count."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from cp_collectives import CollectiveTrace, current_platform
from cp_trainer_glue import HyperAutoModel, MeshContext, load_config
from cp_trainer_glue._applier import apply_plan
from cp_trainer_glue._inspection import inspect_config
from cp_trainer_glue._plan_report import PlanReport, RankCost, plan_report

CONFIG: dict[str, Any] = {
    "output_dir": "runs/x",
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 257,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    },
    "data": {"source": "stdlib", "seq_length": 29},
    "training": {"train_iters": 1, "global_batch_size": 4, "micro_batch_size": 2},
    "optimizer": {"lr": 0.1},
    "accelerator": {"cp_size": 2, "dp_replicate_size": 2},
    "plan_overrides": [{"match": "*.self_attn", "when": "cp", "region_dispatch": False, "inner_wrapper": "sdpa_hf"}],
}
CPU = torch.device("cpu")


def planned(path: str) -> PlanReport:
    return plan_report(inspect_config(path), CPU)


def groups_and_costs(path: str) -> dict[str, Any]:
    config, platform = load_config(path), current_platform("cpu")
    meshes = MeshContext.build(config.accelerator, platform, CPU)
    groups = {
        name: dist.get_process_group_ranks(meshes.device_mesh[name].get_group())
        for name in meshes.device_mesh.mesh_dim_names or ()
    }
    groups["dp_cp"] = dist.get_process_group_ranks(meshes.dp_cp_mesh.get_group())
    model = HyperAutoModel.build(config.model)
    applied = apply_plan(model, config, meshes).context_parallel
    batch = applied.shard_batch({"input_ids": torch.randint(257, (2, 29), generator=torch.Generator().manual_seed(0))})
    with CollectiveTrace() as trace:
        model(**batch).logits.sum().backward()
    records = [record for record in trace.records if record.layer is not None]
    by_phase = {phase: [r for r in records if r.phase == phase] for phase in ("forward", "backward")}
    return {
        "groups": groups,
        "cp_rank": meshes.cp_mesh.get_local_rank(),
        "length": batch["input_ids"].shape[1],
        "messages": [len(by_phase["forward"]), len(by_phase["backward"])],
        "bytes": [sum(r.bytes_received for r in by_phase[phase]) for phase in ("forward", "backward")],
    }


def messages(cost: RankCost) -> list[int]:
    return [cost.forward_messages, cost.backward_messages]


def test_a_plan_says_what_ranks_then_form_and_count(worlds: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    report = planned(str(path))
    assert report.groups is not None and report.sequence is not None and report.declared is not None
    for rank, found in enumerate(worlds(4).run(groups_and_costs, str(path))):
        for axis, ranks in found["groups"].items():
            assert ranks == next(group for group in report.groups[axis] if rank in group)
        assert found["length"] == report.sequence.local_length
        cost = report.declared.ranks[found["cp_rank"]]
        assert found["messages"] == messages(cost) == [3, 3]
        assert found["bytes"] == [cost.forward_bytes, cost.backward_bytes]
