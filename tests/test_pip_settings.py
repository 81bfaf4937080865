"""What pip is told by its own settings reaches uv."""

from pathlib import Path

import pytest

from pip_settings import pip_config_list, uv_environment


def test_settings_of_files_and_of_the_environment_are_translated(tmp_path: Path) -> None:
    said = "\n".join(
        [
            f"global.find-links='{tmp_path}'",
            "global.constraint='c.txt d.txt'",
            "global.index-url='https://index.example/simple'",
            "install.no-index='true'",
            ":env:.cert='/etc/certificates.pem'",
        ]
    )
    assert uv_environment(said, {}) == {
        "UV_FIND_LINKS": str(tmp_path),
        "UV_CONSTRAINT": "c.txt d.txt",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_NO_INDEX": "true",
        "SSL_CERT_FILE": "/etc/certificates.pem",
    }


def test_several_locations_are_separated_as_each_tool_wants(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert uv_environment(f":env:.find-links='{one} {two}'", {})["UV_FIND_LINKS"] == f"{one},{two}"


def test_the_environment_wins_over_files_as_in_pip(tmp_path: Path) -> None:
    said = f"global.find-links='/nowhere'\n:env:.find-links='{tmp_path}'"
    assert uv_environment(said, {})["UV_FIND_LINKS"] == str(tmp_path)


def test_what_uv_is_told_directly_wins_and_locations_are_joined(tmp_path: Path) -> None:
    said = f":env:.find-links='{tmp_path}'\nglobal.index-url='https://pip.example'"
    found = uv_environment(said, {"UV_FIND_LINKS": "/mine", "UV_DEFAULT_INDEX": "https://uv.example"})
    assert found == {"UV_FIND_LINKS": f"/mine,{tmp_path}"}


def test_a_folder_that_is_not_there_is_left_out() -> None:
    assert uv_environment("global.extra-index-url='file:///no/such/index'", {}) == {}


def test_further_indexes_are_searched_as_pip_searches_them(tmp_path: Path) -> None:
    found = uv_environment(f"global.extra-index-url='https://a.example file://{tmp_path}'", {})
    assert found == {"UV_INDEX": f"https://a.example file://{tmp_path}", "UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_no_settings_translate_to_nothing() -> None:
    assert uv_environment("", {}) == {}


def test_pip_is_really_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    import importlib.util

    if importlib.util.find_spec("pip") is None:
        pytest.fail("this environment has no pip; the tools-test group installs it")
    assert f":env:.find-links='{tmp_path}'" in pip_config_list()
