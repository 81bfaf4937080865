"""Checkpoints: complete or absent, and resumed to the bit under the same layout.

output_dir/checkpoints/step-00000010/   torch.distributed.checkpoint, with `run.json`: step, layout, model, data
output_dir/checkpoints/latest           the name of the newest complete one
"""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import current_platform, gather_objects
from cp_core import InvalidInputError

from ._checkpoint_parts import from_parts, in_parts
from ._config import TrainerConfig
from ._data import BatchStream
from ._mesh import MeshContext

_RUN_FILE = "run.json"


class Checkpoints:
    """Saves and loads the state of one run.

    Args:
        config: The run's config.
        meshes: Where this rank stands.
        model, optimizer, scheduler, stream: What is saved and loaded, in place.
    """

    def __init__(
        self,
        config: TrainerConfig,
        meshes: MeshContext,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        stream: BatchStream,
    ) -> None:
        self._config, self._meshes = config, meshes
        self._model, self._optimizer, self._scheduler, self._stream = model, optimizer, scheduler, stream
        self._platform = current_platform(meshes.device)
        self._root = Path(config.output_dir) / "checkpoints"

    def save(self, step: int) -> Path:
        """Save after a step; all ranks call it.

        Returns:
            The folder, complete.
        """
        final = self._root / f"step-{step:08d}"
        unfinished = self._root / f".unfinished-{final.name}"
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            self._root.mkdir(parents=True, exist_ok=True)
        _meet(self._meshes.world_mesh)
        try:
            dcp.save(in_parts(self._state()), checkpoint_id=unfinished)
        except CheckpointException as error:
            raise InvalidInputError(f"the checkpoint {final} cannot be written: {_first_failure(error)}") from error
        if dist.get_rank() == 0:
            (unfinished / _RUN_FILE).write_text(json.dumps({"step": step, **_identity(self._config)}, indent=1))
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            _write_atomically(self._root / "latest", final.name)
        _meet(self._meshes.world_mesh)
        return final

    def load(self) -> int:
        """Load what `checkpoint.resume` asks for; all ranks call it.

        Returns:
            The step of the checkpoint, 0 for a fresh start.

        Raises:
            InvalidInputError: If there is no such checkpoint, or it is of another layout, model or data.
        """
        folder = self._folder_to_resume()
        if folder is None:
            return 0
        run = json.loads((folder / _RUN_FILE).read_text())
        _require_same_run(run, _identity(self._config), folder)
        state = self._state()
        parts = in_parts(state)
        try:
            dcp.load(parts, checkpoint_id=folder)
        except CheckpointException as error:
            raise InvalidInputError(
                f"the checkpoint {folder} cannot be read; it is damaged: {_first_failure(error)}"
            ) from error
        self._take(from_parts(state, parts))
        return int(run["step"])

    def _folder_to_resume(self) -> Path | None:
        resume = self._config.checkpoint.resume
        if resume == "none":
            return None
        latest = self._root / "latest"
        if resume != "auto":
            if not (Path(resume) / _RUN_FILE).exists():
                raise InvalidInputError(
                    f"checkpoint.resume: {resume!r} is neither auto nor none nor a checkpoint's folder."
                )
            return Path(resume)
        if not latest.exists():
            return None
        folder = self._root / latest.read_text().strip()
        if not (folder / _RUN_FILE).exists():
            raise InvalidInputError(
                f"{latest} names {folder.name}, which is no complete checkpoint; set checkpoint.resume to one of the "
                "folders beside it, or to none."
            )
        return folder

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": pickle.dumps(self._scheduler.state_dict()),
            # What differs between ranks goes under a name of its own; as one value, since its structure changes as the
            # epoch goes on and torch.distributed.checkpoint matches structures key by key.
            **{f"random.{dist.get_rank()}.{place}": state for place, state in self._rng_states().items()},
            f"stream.{dist.get_rank()}": pickle.dumps(self._stream.state_dict()),
        }

    def _take(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._scheduler.load_state_dict(pickle.loads(state["scheduler"]))
        self._stream.load_state_dict(pickle.loads(state[f"stream.{dist.get_rank()}"]))
        states = {place: state[f"random.{dist.get_rank()}.{place}"] for place in self._rng_states()}
        self._platform.set_rng_states(states, self._meshes.device)

    def _rng_states(self) -> dict[str, torch.Tensor]:
        return self._platform.rng_states(self._meshes.device)


def _identity(config: TrainerConfig) -> dict[str, Any]:
    """Return what must be equal for a checkpoint to go on to the bit."""
    training = config.training
    return {
        "layout": config.accelerator.model_dump(),
        "fsdp": None if config.fsdp_config is None else config.fsdp_config.model_dump(),
        "model": config.model.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "held_out_samples": config.held_out_samples,
        "batch": {
            "global_batch_size": training.global_batch_size,
            "micro_batch_size": training.micro_batch_size,
            "seed": training.seed,
        },
        # A loaded optimizer brings its own settings, so others in the config would be dropped in silence.
        "optimizer": config.optimizer.model_dump(mode="json"),
        "lr_scheduler": config.lr_scheduler.model_dump(mode="json"),
    }


def _require_same_run(saved: dict[str, Any], current: dict[str, Any], folder: Path) -> None:
    for part, wanted in current.items():
        found = saved.get(part)
        if found == wanted:
            continue
        if isinstance(wanted, dict) and isinstance(found, dict):
            names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
            found, wanted = ({name: values.get(name) for name in names} for values in (found, wanted))
        raise InvalidInputError(
            f"the checkpoint {folder} was saved with another {part}: {found}, but the config says {wanted}; resume it "
            "with its own, or set checkpoint.resume to none (and another output_dir)."
        )


def _first_failure(error: CheckpointException) -> str:
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(failure).__name__}: {failure}"


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _meet(mesh: DeviceMesh) -> None:
    """Return when all ranks are here."""
    gather_objects(None, mesh=mesh)
