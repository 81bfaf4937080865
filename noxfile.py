"""Sessions of this repository; `nox` alone runs lint, types, layers, build, tests and consumer, as `.ci/run` does.

    nox -s train -- CONFIG.yaml     trains (default: examples/qwen3moe_tiny/sync_colossal.yaml)
    nox -s plan -- CONFIG.yaml      explains what a config would run, and what is wrong with it
    nox -s verify -- CONFIG.yaml    proves a config's numbers beside those of one device
    nox -s tests -- -k NAME         the whole suite in one environment
    nox -s "component(cp-core)"     one package's tests with nothing installed that it does not ask for
    nox -s "consumer(cp-core)"      one package's wheel alone: import, unit tests, what must be absent is absent
    nox -s "npu_component(cp-core)" the component tests on NPU hardware; fails where there is none
    nox -s parity_full              every combination of the parity matrices

Each session has an environment of its own, made anew, so that it holds exactly what the project's files ask for;
downloads and disk are shared through uv's cache. What pip is told by its own settings holds for uv too.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from pip_settings import pip_config_list, uv_environment

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "layers", "build", "tests", "consumer"]

ROOT = Path(__file__).parent
EXAMPLE = "examples/qwen3moe_tiny/sync_colossal.yaml"
# Each package with all that may stand below it, itself last; what must be absent from its environment follows.
STACKS = {
    "cp-collectives": ["cp-collectives"],
    "cp-core": ["cp-collectives", "cp-core"],
    "cp-wrappers": ["cp-collectives", "cp-core", "cp-wrappers"],
    "cp-models-qwen3moe": ["cp-collectives", "cp-core", "cp-wrappers", "cp-models-qwen3moe"],
    "cp-trainer-glue": ["cp-collectives", "cp-core", "cp-wrappers", "cp-trainer-glue"],
}
ABSENT = {
    "cp-collectives": ["transformers", "pydantic", "yaml", "numpy"],
    "cp-core": ["transformers", "pydantic", "yaml", "numpy"],
    "cp-wrappers": ["transformers", "pydantic", "yaml"],
    "cp-models-qwen3moe": ["datasets", "cp_trainer_glue"],
    "cp-trainer-glue": [],
}
NPU_WORLD_SIZE = 4

each_package = nox.parametrize("package", [nox.param(name, id=name) for name in STACKS])


def prepare(session: nox.Session) -> None:
    """Hand pip's settings to uv, and give each rank one thread."""
    session.env.update(uv_environment(pip_config_list(), os.environ))
    session.env.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    session.env["UV_PYTHON_DOWNLOADS"] = "never"
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # spawned ranks import torch many times; compiled once it is quicker


def editable(*packages: str, extras: str = "") -> list[str]:
    """Return the arguments that install packages of this workspace from their sources."""
    return [argument for name in packages for argument in ("-e", f"packages/{name}{extras}")]


def group(owner: str, name: str) -> list[str]:
    """Return the arguments that install a dependency group of a pyproject.toml."""
    return ["--group", f"{owner}:{name}"]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    prepare(session)
    session.install(*group("pyproject.toml", "lint"))
    session.run("ruff", "check", ".", *session.posargs)
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages with mypy --strict."""
    prepare(session)
    session.install(*editable(*STACKS), *group("pyproject.toml", "types"), "pytest")
    sources = [f"packages/{name}/src/{name.replace('-', '_')}" for name in STACKS]
    session.run("mypy", *sources, *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check import directions, declared against imported packages, ranges between ours, and where devices are named."""
    prepare(session)
    session.install(*group("pyproject.toml", "layers"))
    sources = os.pathsep.join(f"packages/{name}/src" for name in STACKS)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": sources})
    for name in STACKS:
        with session.chdir(f"packages/{name}"):
            module = name.replace("-", "_")
            ours = ",".join(f"{other}={other.replace('-', '_')}" for other in STACKS)
            names = f"PyYAML=yaml,torch-npu=torch_npu,{ours}"
            # pytest serves the test plugin alone; extras, and what a library needs in turn, are not imported.
            ignores = "DEP001=pytest,DEP002=torch-npu|transformers,DEP004=pytest"
            options = ["--known-first-party", module, "--package-module-name-map", names, "--per-rule-ignores", ignores]
            session.run("deptry", f"src/{module}", "--no-ansi", *options)
    session.run("python", "tools/check_ranges.py")
    session.run("python", "tools/check_devices.py")


@nox.session
def build(session: nox.Session) -> None:
    """Build all wheels into dist/."""
    prepare(session)
    build_wheels(session)


def build_wheels(session: nox.Session) -> None:
    """Build the wheels of all packages into dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    command = ["uv", "build", "--all-packages", "--wheel", "--out-dir", "dist"]
    session.run_install(*command, silent=True, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole suite, all packages in one environment."""
    prepare(session)
    session.install(
        *editable(*STACKS), *group("pyproject.toml", "tools-test"), *group("pyproject.toml", "packages-test")
    )
    session.run("pytest", *session.posargs)


@nox.session
@each_package
def component(session: nox.Session, package: str) -> None:
    """Run one package's own tests with only that package and what it asks for installed."""
    prepare(session)
    # The component tests of cp-wrappers are those of its extra.
    extras = "[hf]" if package == "cp-wrappers" else ""
    below = editable(*STACKS[package][:-1])
    session.install(*below, *editable(package, extras=extras), *group(f"packages/{package}/pyproject.toml", "test"))
    session.run("pytest", f"packages/{package}/tests", *session.posargs)


@nox.session
@each_package
def consumer(session: nox.Session, package: str) -> None:
    """Install one package's wheel alone, import it, run its unit tests, and see that nothing else came with it."""
    prepare(session)
    if not list((ROOT / "dist").glob("*.whl")):
        build_wheels(session)
    wheels = [str(next((ROOT / "dist").glob(f"{name.replace('-', '_')}-*.whl"))) for name in STACKS[package]]
    temporary = Path(session.create_tmp()).resolve()
    with session.chdir(temporary):  # outside the workspace: nothing but the wheels can serve the packages
        shutil.copytree(ROOT / "packages" / package / "tests" / "unit", temporary / "unit", dirs_exist_ok=True)
        shutil.copy(ROOT / "tools" / "consumer_check.py", temporary)
        constraint = temporary / "constraint.txt"
        constraint.write_text("torch==2.13.*\n")  # the root's constraint, which a wheel does not carry
        session.install("--constraint", str(constraint), *wheels, "pytest")
        session.run("python", "consumer_check.py", *STACKS[package], "--absent", *ABSENT[package])
        plugin = ["-p", "cp_collectives.testing.pytest_plugin", "--import-mode=importlib", "--strict-markers"]
        session.run("pytest", *plugin, "-c", os.devnull, "--rootdir", ".", "unit", *session.posargs)


@nox.session
@each_package
def npu_component(session: nox.Session, package: str) -> None:
    """Run one package's component tests on NPU hardware; fails, and never skips, where there is none."""
    probe = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "npu_probe.py"), str(NPU_WORLD_SIZE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        lines = (probe.stdout or probe.stderr).strip().splitlines() or [f"the probe died with {probe.returncode}"]
        session.error(f"npu_component({package}) needs an NPU: {lines[-1]}")
    session.error(f"npu_component({package}): the NPU is ready, but this version has no tests for it yet.")


@nox.session
def parity_full(session: nox.Session) -> None:
    """Run every combination of the parity matrices, not the selection of `tests`."""
    prepare(session)
    session.install(
        *editable(*STACKS), *group("pyproject.toml", "tools-test"), *group("pyproject.toml", "packages-test")
    )
    session.run("pytest", "-m", "parity", "--parity-full", *session.posargs)


@nox.session
def train(session: nox.Session) -> None:
    """Train from a config: `nox -s train -- CONFIG.yaml [options of cp-train run]`."""
    prepare(session)
    session.install(*editable(*STACKS), silent=True)
    # Ctrl-C reaches the run too, which finishes its step and saves; nox would end it after a fraction of a second.
    patience = {"interrupt_timeout": 600.0, "terminate_timeout": 600.0}
    session.run("cp-train", "run", *(session.posargs or [EXAMPLE]), **patience)


@nox.session
def plan(session: nox.Session) -> None:
    """Explain what a config would run: `nox -s plan -- CONFIG.yaml [options of cp-train plan]`."""
    prepare(session)
    session.install(*editable(*STACKS), silent=True)
    session.run("cp-train", "plan", *(session.posargs or [EXAMPLE]))


@nox.session
def verify(session: nox.Session) -> None:
    """Prove a config's numbers beside one device: `nox -s verify -- CONFIG.yaml [options of cp-train verify]`."""
    prepare(session)
    session.install(*editable(*STACKS), silent=True)
    session.run("cp-train", "verify", *(session.posargs or [EXAMPLE]))
