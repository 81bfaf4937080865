"""The mean over all ranks is the mean of one process, with weights and without, whatever a rank holds.

B batch, L local length.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_collectives import gather_objects
from cp_core import InvalidInputError, count_valid_tokens, mean_global_loss, shard_batch_for_cp, sum_loss_weights

LENGTH = 29
WINDOW = 3


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Labels and weights of a step; the first half of a row is a prompt, its last quarter pads."""
    generator = torch.Generator().manual_seed(step)
    losses = torch.rand(2, LENGTH, 1, dtype=torch.float64, generator=generator)
    labels = torch.randint(50, (2, LENGTH), generator=generator)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, -LENGTH // 4 :] = False
    labels[~mask] = -100
    labels[:, : LENGTH // 2 + 2 + step] = -100
    weights = torch.rand(2, LENGTH, dtype=torch.float64, generator=generator)
    # The "model" says its losses outright: they travel as embeddings of width 1.
    return {"inputs_embeds": losses, "labels": labels, "attention_mask": mask, "loss_weights": weights}


def window_losses(mesh: DeviceMesh | None, *, weighted: bool) -> dict[str, Any]:
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    window = [shard_batch_for_cp(batch_of(step), mesh) for step in range(WINDOW)]
    counts = [count_valid_tokens(batch["shift_labels"]) for batch in window]
    sums = [sum_loss_weights(batch["loss_weights"]) for batch in window]
    options: dict[str, Any] = {"window_valid_tokens": sum(gather_objects(sum(counts), mesh=mesh))}
    if weighted:
        options = {"window_weight_sum": math.fsum(gather_objects(math.fsum(sums), mesh=mesh))}
    logged, valid_tokens = [], []
    for batch, count, weight_sum in zip(window, counts, sums, strict=True):
        weights = batch["loss_weights"] if weighted else (batch["shift_labels"] != -100).double()
        loss = mean_global_loss(
            (batch["inputs_embeds"][..., 0] * factor * weights).sum(),
            count,
            dp_cp_mesh=mesh,
            grad_average_degree=1,
            local_weight_sum=weight_sum if weighted else None,
            **options,
        )
        loss.backward.backward()
        logged.append(loss.logged.item())
        valid_tokens.append(loss.valid_tokens)
    assert factor.grad is not None
    return {"logged": logged, "valid_tokens": valid_tokens, "counts": counts, "gradient": factor.grad.item()}


def parallel_losses(weighted: bool) -> dict[str, Any]:
    return window_losses(cp_mesh(), weighted=weighted)


@pytest.mark.parametrize("weighted", [False, True], ids=["tokens", "weights"])
@pytest.mark.parametrize("cp", [2, 4])
def test_the_mean_over_ranks_is_the_mean_of_one_process(worlds: Any, cp: int, weighted: bool) -> None:
    oracle = window_losses(None, weighted=weighted)
    found = worlds(cp).run(parallel_losses, weighted)
    for rank in found:
        assert rank["logged"] == pytest.approx(oracle["logged"], rel=1e-14)
        assert rank["valid_tokens"] == oracle["valid_tokens"]
        assert rank["logged"] == found[0]["logged"]
    assert sum(rank["gradient"] for rank in found) == pytest.approx(oracle["gradient"], rel=1e-14)
    # Each rank has another part of the tokens, and one has none at all.
    assert 0 in [sum(rank["counts"]) for rank in found]
    assert len({sum(rank["counts"]) for rank in found}) > 1


def test_the_oracles_weights_matter_and_add_up_to_the_weighted_mean() -> None:
    rows = [batch_of(step) for step in range(WINDOW)]
    shifted = [(row["inputs_embeds"][:, :-1, 0], row["labels"][:, 1:], row["loss_weights"][:, 1:]) for row in rows]
    losses, labels, weights = (torch.cat([part.flatten() for part in parts]) for parts in zip(*shifted, strict=True))
    kept = weights * (labels != -100)
    expected = (losses * kept).sum() / kept.sum()
    found = window_losses(None, weighted=True)
    assert sum(found["logged"]) == pytest.approx(expected.item(), rel=1e-14)
    assert found["gradient"] == pytest.approx(expected.item(), rel=1e-14)
    assert sum(window_losses(None, weighted=False)["logged"]) != pytest.approx(expected.item(), rel=1e-3)


def refusals() -> dict[str, str]:
    mesh, rank = cp_mesh(), dist.get_rank()
    cases: dict[str, dict[str, Any]] = {
        "weights on one rank": {"local_weight_sum": 0.5 if rank else None},
        "a weight sum that is none on one rank": {"local_weight_sum": float("nan") if rank else 0.5},
        "a window of one rank": {"window_valid_tokens": 10 + rank},
        "another degree": {"grad_average_degree": 1 + rank},
        "a window that holds less": {"window_valid_tokens": 7},
        "weights in a window that holds less": {"local_weight_sum": 0.5, "window_weight_sum": 0.9},
    }
    found = {}
    for name, options in cases.items():
        try:
            mean_global_loss(torch.tensor(1.0), 4, dp_cp_mesh=mesh, **{"grad_average_degree": 1, **options})
            found[name] = "accepted"
        except InvalidInputError as error:
            found[name] = str(error)
    return found


def test_what_one_rank_gets_wrong_stops_all(worlds: Any) -> None:
    same = "window_valid_tokens, window_weight_sum and grad_average_degree must be the same on all ranks, but rank 0 "
    advice = "; sum the window over all ranks, not over this rank's batches alone."
    expected = {
        "weights on one rank": "local_weight_sum must be given on all ranks or on none, but rank 0 of 2 has none; a "
        "rank whose tokens all weigh nothing gives 0.",
        "a weight sum that is none on one rank": "rank 1 of 2: local_weight_sum must be finite and at least 0, but got "
        "nan.",
        "a window of one rank": f"{same}has (10, None, 1) and rank 1 has (11, None, 1){advice}",
        "another degree": f"{same}has (None, None, 1) and rank 1 has (None, None, 2){advice}",
        "a window that holds less": "window_valid_tokens (7) is less than the 8 valid tokens of this call; count all "
        "batches of the accumulation window over all ranks.",
        "weights in a window that holds less": "window_weight_sum (0.9) must be finite and not less than the weights "
        "of this call (1.0); sum all batches of the accumulation window over all ranks.",
    }
    for found in worlds(2).run(refusals):
        assert found == expected
