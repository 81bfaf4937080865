"""The ranges between our own packages admit the versions on disk; uv compares them nowhere in a workspace."""

import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def faults(root: Path) -> list[str]:
    """Return one sentence for each range that refuses the package beside it, and for each version that is not literal.

    Args:
        root: The checkout.
    """
    projects = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        projects[canonicalize_name(project["name"])] = project
    found = [f"{name}: version is not literal." for name, project in projects.items() if "version" not in project]
    for name, project in projects.items():
        for requirement in _requirements(project):
            other = projects.get(canonicalize_name(requirement.name))
            if other is None:
                continue
            if not requirement.specifier:
                found.append(f"{name} asks for {requirement.name} without a range; write >=X.Y,<X.Z.")
            elif "version" in other and other["version"] not in requirement.specifier:
                found.append(f"{name} asks for {requirement}, but {requirement.name} is {other['version']}.")
    return found


def _requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return [Requirement(line) for line in [*project.get("dependencies", []), *extras]]


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path(__file__).parents[1])) or 0)
