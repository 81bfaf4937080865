"""The pytest plugin: shared worlds of ranks, and the switch between the selected and the full parity matrix.

Use it with `-p cp_collectives.testing.pytest_plugin`, or name it in `pytest_plugins` of the top-level conftest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cp_collectives.testing._world import World

if TYPE_CHECKING:
    from collections.abc import Iterator


class Worlds:
    """Makes worlds on demand and keeps them: equal arguments give the same world, whose ranks stay alive."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._worlds: dict[tuple[object, ...], World] = {}

    def __call__(self, size: int, **options: Any) -> World:
        """Return the world of this size and options (those of `World`); its ranks start at its first `run`."""
        options.setdefault("time_limit", self._time_limit)
        key = (size, *sorted(options.items()))
        if key not in self._worlds:
            self._worlds[key] = World(size, **options)
        return self._worlds[key]

    def close(self) -> None:
        """End the ranks of all worlds."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--parity-full` and `--rank-time-limit`."""
    group = parser.getgroup("ranks", "tests on several ranks")
    group.addoption(
        "--parity-full", action="store_true", help="also run the tests marked full: every combination, not a selection"
    )
    group.addoption(
        "--rank-time-limit", type=float, default=60.0, metavar="SECONDS", help="default time limit of a World.run (60)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line("markers", "parity: compares a parallel run with one process")
    config.addinivalue_line("markers", "full: part of the full matrix only; deselected unless --parity-full is given")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `full` unless `--parity-full` is given."""
    if config.getoption("--parity-full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """Worlds of ranks that live as long as the session: `worlds(2).run(fn)`."""
    shared = Worlds(request.config.getoption("--rank-time-limit"))
    yield shared
    shared.close()
