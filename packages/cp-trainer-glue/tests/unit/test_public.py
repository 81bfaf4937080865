"""The package offers what it says."""

import types

import cp_trainer_glue


def test_public_names_are_what_all_says() -> None:
    public = {
        name
        for name, value in vars(cp_trainer_glue).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "version"
    }
    assert public == set(cp_trainer_glue.__all__)
