"""Groups of ranks, worked out without ranks."""

from cp_trainer_glue._config import AcceleratorConfig
from cp_trainer_glue._topology import axis_groups


def test_tp_is_innermost_and_cp_next_to_it() -> None:
    groups = axis_groups(AcceleratorConfig(cp_size=2, tp_size=2))
    assert groups["tp"] == [[0, 1], [2, 3]]
    assert groups["cp"] == [[0, 2], [1, 3]]
    assert groups["dp_cp"] == [[0, 2], [1, 3]]


def test_data_parallel_ranks_are_strided() -> None:
    groups = axis_groups(AcceleratorConfig(dp_replicate_size=2, cp_size=3))
    assert groups["cp"] == [[0, 1, 2], [3, 4, 5]]
    assert groups["dp_replicate"] == [[0, 3], [1, 4], [2, 5]]
    assert groups["dp_cp"] == [[0, 1, 2, 3, 4, 5]]
    assert groups["pp"] == [[rank] for rank in range(6)]


def test_each_rank_is_once_on_each_axis() -> None:
    for groups in axis_groups(AcceleratorConfig(dp_replicate_size=3, dp_shard_size=2, cp_size=4, tp_size=2)).values():
        assert sorted(rank for group in groups for rank in group) == list(range(48))
