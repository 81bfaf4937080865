"""`verify` of YAML files of different shapes, as `cp-train verify` does it, finds nothing wrong in any."""

from pathlib import Path
from typing import Any

import pytest

from cp_collectives import current_platform
from cp_trainer_glue import TextTrainer, VerifyOptions, load_config, verify_training

FILES = sorted((Path(__file__).parent / "verified").glob("*.yaml"))
DECLARED_SHAPES = 12


def verify_file(path: str) -> dict[str, Any]:
    platform = current_platform("cpu")
    config, device = load_config(path), platform.device(0)
    return verify_training(TextTrainer, config, platform, device, options=VerifyOptions(steps=2)).as_json()


@pytest.mark.parametrize(
    "path",
    # Compiling takes longer than all the rest of a file.
    [pytest.param(path, marks=[pytest.mark.full] * (path.stem == "compiled_layers")) for path in FILES],
    ids=[path.stem for path in FILES],
)
def test_a_right_file_is_verified(worlds: Any, path: Path) -> None:
    reports = worlds(load_config(path).accelerator.world_size).run(verify_file, str(path))
    for report in reports:
        assert [check for check in report["checks"] if not check["passed"]] == []
        assert report["passed"]
        assert {check["step"] for check in report["checks"]} == {1, 2}
        kinds = {check["kind"] for check in report["checks"]}
        assert {"layer", "labels", "loss", "gradient", "clipped_gradient", "parameter", "replicas"} <= kinds
        assert ("logits" in kinds) == (path.stem != "loss_in_chunks")


def verify_in_its_own_dtypes(path: str) -> dict[str, Any]:
    platform = current_platform("cpu")
    options = VerifyOptions(steps=1, dtype="config")
    return verify_training(TextTrainer, load_config(path), platform, platform.device(0), options=options).as_json()


def test_mixed_precision_trains_as_one_device_within_its_rounding(worlds: Any) -> None:
    """The file computes in bfloat16 and sums in float32; each rank's layout passes FSDP as it is."""
    path = Path(__file__).parent / "verified" / "fsdp.yaml"
    for report in worlds(4).run(verify_in_its_own_dtypes, str(path)):
        assert [check for check in report["checks"] if not check["passed"]] == []
        assert {check["limit"] for check in report["checks"] if check["kind"] == "gradient"} == {2e-1}


def test_there_are_as_many_shapes_as_said() -> None:
    assert len(FILES) >= DECLARED_SHAPES
