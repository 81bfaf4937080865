"""Every code block of every README runs, and every command in them exists."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from cp_trainer_glue._structure import check_structure

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *ROOT.glob("docs/*.md"),
]
SESSIONS = re.findall(r"^@nox\.session\n(?:@each_package\n)?def (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    info: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        for token in MarkdownIt().parse(document.read_text()):
            if token.type == "fence" and token.info.split(" ")[0] == language:
                found.append(Block(document, token.info, token.map[0] + 1 if token.map else 0, token.content))
    return found


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.text)
    ranks = re.search(r"ranks=(\d+)", block.info)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_a_yaml_block_is_a_mapping(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_a_yaml_block_has_the_form_of_a_config(block: Block) -> None:
    needed = {"output_dir", "model", "data", "training", "optimizer"}
    missing = [f"{name}: is missing." for name in needed]
    assert [fault for fault in check_structure(yaml.safe_load(block.text)).faults if fault not in missing] == []


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.name)
def test_a_command_names_what_exists(block: Block) -> None:
    for command in re.split(r"\n|&&", block.text):
        words = shlex.split(command, comments=True)
        for session in (words[i + 1] for i, word in enumerate(words) if word == "-s"):
            assert session.partition("(")[0] in SESSIONS, f"nox has no session {session}"
        for word in words:
            if "/" in word and not word.startswith(("-", "/")):
                assert (ROOT / word).exists(), f"{word} does not exist"
        if words[:1] == ["uv"] and "--package" in words:
            assert (ROOT / "packages" / words[words.index("--package") + 1]).is_dir()


def test_the_readme_opens_with_the_two_commands() -> None:
    first = [block.text.strip() for block in blocks("bash") if block.document.name == "README.md"][:2]
    assert first == ['pip install "nox[uv]" && nox -s train', 'pip install "nox[uv]" && nox']


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert 'pip install --quiet "nox[uv]" && nox\n' in (ROOT / ".ci" / "run").read_text()


def test_no_file_names_a_host_of_an_index_or_a_path_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|/(opt|work|farm|root)/")
    for name in listed:
        path = ROOT / name
        if path.suffix in {".py", ".toml", ".yaml", ".md", ".cfg", ""} and name not in {
            "LICENSE",
            "tests/test_documents.py",
        }:
            assert not wrong.search(path.read_text()), name
