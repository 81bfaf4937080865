"""Everything that can be known to be wrong with a run before it starts, found at once, without ranks and weights."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cp_collectives import current_platform
from cp_core import ContextParallelError, InvalidInputError

from ._combinations import fitted_to_world, world_size_fault
from ._config import AcceleratorConfig, DataConfig, PlanOverride, TextSource, TrainerConfig
from ._files import matching_files
from ._model import HyperAutoModel, require_positions, require_vocabulary
from ._plan import as_yaml, entries_of
from ._planner import PlanCheck, ShardingPlanner
from ._resolver import PlanOverrideResolver
from ._structure import Structure, check_structure
from ._tokenizer import BYTE_TOKENIZER, make_tokenizer
from ._yaml_file import ConfigError, read_yaml, set_value


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where a run would take place."""

    # Ranks there are; None where the config decides.
    world_size: int | None = None
    # Who says so, for the message.
    origin: str = "--nproc is"
    # Where the attentions will run; None is what this machine has.
    device: torch.device | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What mends a file; it was looked at like a file."""

    # Keys of the file that must go.
    removed: tuple[str, ...]
    # YAML to paste over the same keys of the file; empty if removing is enough.
    pasted: str
    # Faults that it leaves, since nobody can know what is right.
    num_left: int = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The end of an error message."""
        outcome = f"{self.num_left} of these faults are left" if self.num_left else "the file works"
        without = f"without {', '.join(key if key.isidentifier() else repr(key) for key in self.removed)}"
        if not self.pasted:
            return (f"{without} {outcome}.",)
        and_without = f"{without}, and " if self.removed else ""
        return (f"{and_without}with this pasted over the same keys {outcome}:", self.pasted)


@dataclass(slots=True)
class Inspection:
    """What was found in a config."""

    name: str
    # The config; None if its form is wrong.
    config: TrainerConfig | None = None
    # The sections of the right form, whatever is wrong with the others.
    sections: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    # None where there is nothing to mend, or no knowing how.
    correction: Correction | None = None
    # The model on the meta device and its plan, where they were looked at.
    model: PreTrainedModel | None = None
    check: PlanCheck | None = None

    def raise_faults(self) -> None:
        """Raise everything that was found, one line each.

        Raises:
            ConfigError: If anything was found.
        """
        if self.faults:
            count = f"{self.name}: {len(self.faults)} fault{'s' if len(self.faults) > 1 else ''}"
            lines = [count, *(f"  - {_indented(fault)}" for fault in self.faults)]
            if self.correction is not None:
                lines += self.correction.lines
            raise ConfigError("\n".join(lines))


def planning_device(device_type: str | None) -> torch.device:
    """Return the device that attentions would run on; it need not be there.

    Args:
        device_type: `"cpu"`, `"cuda"`, `"npu"`, or None for what this machine has.

    Raises:
        InvalidInputError: If torch cannot name it here.
    """
    chosen = device_type or current_platform().device_type
    try:
        return torch.device(chosen)
    except RuntimeError as error:
        raise InvalidInputError(
            f"--device {chosen}: torch does not know this device type here; install the extension that brings it."
        ) from error


def inspect_config(
    path: str | Path, overrides: Sequence[str] = (), *, setting: Setting | None = None, with_model: bool = True
) -> Inspection:
    """Look at a config with the model that it describes, on the meta device: nothing is loaded, no rank is needed.

    Args:
        path: The file.
        overrides: `a.b=value` settings that replace what the file says.
        setting: Where the run would take place.
        with_model: Whether to look at the model too.

    Returns:
        What was found; nothing is raised for what a config says.
    """
    setting = setting or Setting()
    try:
        content = read_yaml(Path(path))
    except ConfigError as error:
        return Inspection(name=str(path), faults=(str(error).removeprefix(f"{path}: "),))
    overridden, faults = _overridden(content, overrides)
    inspection, structure = _inspected(overridden, str(path), setting, with_model=with_model)
    if inspection.faults:
        corrected, heading = _corrected(inspection, structure)
        removed = tuple(key for key in overridden if key not in corrected)
        changed = {key: value for key, value in corrected.items() if repr(overridden.get(key)) != repr(value)}
        # Looked at as the user will run it: the settings of the command line hold over what is pasted.
        pasted = {key: value for key, value in content.items() if key not in removed} | changed
        then, _ = _inspected(_overridden(pasted, overrides)[0], str(path), setting, with_model=with_model)
        if set(then.faults) < set(inspection.faults):
            text = heading + as_yaml(changed) if changed else ""
            inspection.correction = Correction(removed=removed, pasted=text, num_left=len(then.faults) + len(faults))
    inspection.faults = (*faults, *inspection.faults)
    return inspection


def _overridden(content: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the content with settings of the command line, and what is wrong with these."""
    overridden, faults = copy.deepcopy(dict(content)), []
    for override in overrides:
        try:
            set_value(overridden, override)
        except ConfigError as error:
            faults.append(str(error))
    return overridden, faults


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read and check a YAML config, without looking at its model.

    Args:
        path: The file. Relative paths in it are relative to the current directory.
        overrides: `a.b=value` settings that replace what the file says; values are YAML, list items go by number.

    Returns:
        The config, with every combination checked that can be without a model.

    Raises:
        ConfigError: With all faults together, one per line.
    """
    inspection = inspect_config(path, overrides, with_model=False)
    inspection.raise_faults()
    if inspection.config is None:
        raise AssertionError(f"{path} has neither a config nor a fault.")
    return inspection.config


def _inspected(
    content: dict[str, Any], name: str, setting: Setting, *, with_model: bool
) -> tuple[Inspection, Structure]:
    structure = check_structure(content)
    _check_world_size(structure, setting)
    inspection = Inspection(name=name, config=structure.config, sections=structure.sections)
    faults = list(structure.faults)
    if with_model and "model" in structure.sections and "accelerator" in structure.sections:
        faults += _check_model(inspection, setting)
    if with_model and "data" in structure.sections:
        faults += _check_data(inspection)
    inspection.faults = tuple(dict.fromkeys(faults))
    return inspection, structure


def _check_world_size(structure: Structure, setting: Setting) -> None:
    written: AcceleratorConfig | None = structure.written.get("accelerator")
    repaired: AcceleratorConfig | None = structure.sections.get("accelerator")
    if written is None or setting.world_size is None:
        return
    fault = world_size_fault(written, setting.world_size, origin=setting.origin)
    if fault is not None:
        structure.faults.append(fault)
    if repaired is not None and (repair := fitted_to_world(repaired, setting.world_size)) is not None:
        repair(structure.repaired)


def _check_model(inspection: Inspection, setting: Setting) -> list[str]:
    sections = inspection.sections
    accelerator: AcceleratorConfig = sections["accelerator"]
    overrides: Sequence[PlanOverride] = sections.get("plan_overrides", ())
    faults = []
    if (sections["model"].config is None) != (sections["model"].pretrained is None):  # else it is said already
        try:
            inspection.model = HyperAutoModel.skeleton(sections["model"])
        except ContextParallelError as error:
            faults.append(str(error))
    device = setting.device or planning_device(None)
    holding = PlanOverrideResolver(overrides).holding(cp_size=accelerator.cp_size)
    has_tp = accelerator.tp_size > 1  # else the switches are a fault of the config
    check = ShardingPlanner(holding).check(
        inspection.model,
        cp_size=accelerator.cp_size,
        device=device,
        tp_size=accelerator.tp_size,
        sequence_parallel=accelerator.sequence_parallel and has_tp,
        loss_parallel=accelerator.loss_parallel and has_tp,
    )
    inspection.check = check
    return [*faults, *(fault.message for fault in check.faults)]


def _check_data(inspection: Inspection) -> list[str]:
    data: DataConfig = inspection.sections["data"]
    model, faults = inspection.model, []
    texts: list[TextSource] = [data]
    if (evaluation := inspection.sections.get("evaluation")) is not None:
        texts.append(evaluation)
    checks: list[Callable[[], object]] = [
        partial(matching_files, [pattern], place=text.place) for text in texts for pattern in text.files or ()
    ]
    if model is not None:
        checks.append(lambda: require_positions(model, data.seq_length))
    if model is not None and data.tokenizer == BYTE_TOKENIZER:
        checks.append(lambda: require_vocabulary(model, make_tokenizer(data.tokenizer), data.tokenizer))
    for check in checks:
        try:
            check()
        except ContextParallelError as error:
            faults.append(str(error))
    return faults


def _corrected(inspection: Inspection, structure: Structure) -> tuple[dict[str, Any], str]:
    """Return the content without the faults that can be mended, and a comment to put above it."""
    corrected, check = copy.deepcopy(structure.repaired), inspection.check
    if check is None or check.suggestion is None:
        return corrected, ""
    declared: Sequence[PlanOverride] = inspection.sections["plan_overrides"]
    always = [entry.inner_wrapper or entry.local_compute_fn for entry in declared if entry.when is None]
    entries = entries_of(check.suggestion, always=always)
    if entries is None:
        return corrected, ""
    corrected["plan_overrides"] = entries
    filled_in = ", ".join(check.suggestion.filled_in)
    return corrected, f"# {filled_in} stands where no usable method was declared\n" if filled_in else ""


def _indented(fault: str) -> str:
    return fault.replace("\n", "\n    ")
