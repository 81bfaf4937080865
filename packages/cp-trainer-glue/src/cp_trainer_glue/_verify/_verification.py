"""The proof: a declared run beside the same run on one device, step by step."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_collectives import Platform, agree, gather_objects
from cp_core import ContextParallelError, InvalidInputError

from .._config import TrainerConfig
from .._mesh import world_mesh
from .._trainer import BaseTrainer
from ._case import Case
from ._cause import Cause
from ._causes import likely_causes
from ._check import Check, tolerances_of
from ._compare import compare_step
from ._declared import DeclaredRun, DeclaredStep
from ._forward_causes import where
from ._gathered import GatheredStep, gather_step
from ._narrow import FP32_SUM
from ._options import LEARNING_RATE, VerifyOptions, verified_config
from ._reference import Reference
from ._report import VerifyReport

_PROBES = 8
_logger = logging.getLogger("cp_trainer_glue")


def verify_training(
    trainer_class: type[BaseTrainer],
    config: TrainerConfig,
    platform: Platform,
    device: torch.device,
    *,
    options: VerifyOptions | None = None,
) -> VerifyReport:
    """Train a few steps as declared and on one device, and compare everything.

    Every rank calls it, with the default process group up. It stops after the first step in which something disagrees:
    what comes later follows from it. Nothing is written to the config's `output_dir`.

    Args:
        trainer_class: The trainer that `run` would use; a subclass of the user's own is verified as it is.
        config: The run.
        platform: The platform of `device`.
        device: This rank's device.
        options: Steps, dtype, and what is shrunk.

    Returns:
        The report, the same on all ranks.

    Raises:
        ContextParallelError: As the run itself would.
    """
    options = options or VerifyOptions()
    world = world_mesh(device)
    with _shared_folder(world) as folder:
        verified = verified_config(config, options, output_dir=folder)
        run = DeclaredRun(trainer_class, verified.config, platform, device, options=options)
        verification = _Verification(run, trainer_class)
        steps = 0
        for number in range(1, options.steps + 1):
            steps = number
            _logger.info("verify: step %d of %d, as declared and on one device", number, options.steps)
            if not verification.step(number):
                break
        report = verification.report(changes=(*verified.changes, *run.changes), steps=steps)
    found: VerifyReport = gather_objects(report, mesh=world)[0]
    return found


class _Verification:
    """Compares on the first rank; the others send what it asks for."""

    def __init__(self, run: DeclaredRun, trainer_class: type[BaseTrainer]) -> None:
        self._run, self._is_first = run, dist.get_rank() == 0
        self._reference = (
            Reference(run.trainer, trainer_class, run.original, learning_rate=LEARNING_RATE) if self._is_first else None
        )
        self._checks: list[Check] = []
        self._causes: tuple[Cause, ...] = ()
        self._first_token, self._num_tokens, self._num_labels = "", 0, 0
        self._used_in_fp32: frozenset[str] = frozenset()

    def step(self, number: int) -> bool:
        """Make and compare one step; return on all ranks whether all agreed."""
        declared = self._run.step(number)
        axes = self._run.trainer.config.accelerator
        gathered = gather_step(declared, self._run.coordinates, self._run.world, loss_parallel=axes.loss_parallel)
        probes = declared.gradients.differing[:_PROBES]
        replicas = gather_objects({n: declared.gradients.values.get(n) for n in probes}, mesh=self._run.world)
        agreed, fault = True, None
        try:
            if self._reference is not None:
                agreed = self._compare(number, declared, gathered, self._reference, tuple(replicas))
        except ContextParallelError as error:
            fault = error
        agree(fault, mesh=self._run.world)
        return bool(gather_objects(agreed, mesh=self._run.world)[0])

    def _compare(
        self,
        number: int,
        declared: DeclaredStep,
        gathered: GatheredStep,
        reference: Reference,
        replicas: tuple[dict[str, torch.Tensor | None], ...],
    ) -> bool:
        fsdp = self._run.trainer.config.fsdp_config
        computed_in = () if fsdp is None else (fsdp.param_dtype, fsdp.reduce_dtype)
        expected = reference.step(gathered.batches)
        tolerances = tolerances_of(reference.model, computed_in=computed_in)
        checks = compare_step(number, declared, gathered, expected, tolerances)
        self._checks += checks
        self._num_tokens = sum(int(batch.real.sum()) for batch in gathered.batches)
        self._num_labels = expected.valid_tokens
        self._used_in_fp32 = expected.used_in_fp32
        if all(check.passed for check in checks):
            reference.continue_from(declared.parameters.values)
            return True
        case = Case(
            checks=tuple(checks),
            declared=declared,
            gathered=gathered,
            expected=expected,
            reference=reference,
            tolerances=tolerances,
            replicas=replicas,
        )
        reference.rewind()
        self._causes = likely_causes(case)
        placed = [check for check in checks if not check.passed and check.place is not None]
        self._first_token = where(case, placed[0]) if placed else ""
        return False

    def report(self, *, changes: tuple[str, ...], steps: int) -> VerifyReport | None:
        """Return what was found, None on all ranks but the first."""
        if self._reference is None:
            return None
        axes = self._run.trainer.config.accelerator
        parameters = list(self._reference.model.parameters())
        return VerifyReport(
            checks=tuple(self._checks),
            causes=self._causes,
            changes=(*changes, *_allowances(self._used_in_fp32)),
            first_token=self._first_token,
            model=type(self._reference.model).__name__,
            ranks=f"{axes.world_size} ranks (dp {axes.dp_size} x cp {axes.cp_size} x tp {axes.tp_size})",
            num_steps=steps,
            num_parameters=len(parameters),
            num_entries=sum(p.numel() for p in parameters),
            num_tokens=self._num_tokens,
            num_labels=self._num_labels,
        )


def _allowances(used_in_fp32: frozenset[str]) -> list[str]:
    if not used_in_fp32:
        return []
    return [
        f"allowed: {FP32_SUM:.0e} in the gradients of {len(used_in_fp32)} parameters, first {min(used_in_fp32)}: the "
        "model casts them to fp32, where sums over tokens are rounded"
    ]


@contextmanager
def _shared_folder(world: DeviceMesh) -> Iterator[str]:
    """Yield one new folder of all ranks, for what the data part caches; it goes with the first rank."""
    if dist.get_rank() != 0:
        names = gather_objects("", mesh=world)
        yield str(names[0])
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="cp-train-verify-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InvalidInputError(f"verify needs a temporary folder, but none can be made: {error}.") from error
    with folder as name:
        gather_objects(name, mesh=world)
        yield name
