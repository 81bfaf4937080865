"""One JSON line per step and per evaluation, on the first rank."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a step is reported by; values are global unless said otherwise."""

    step: int
    # Mean over the valid tokens of all ranks.
    loss: float
    valid_tokens: int
    # Before clipping.
    grad_norm: float
    # That the step was made with.
    lr: float
    # Tokens of the global batch, pads of the batch included, over the seconds of the step.
    tokens_per_second: float
    # Of this rank.
    peak_memory_bytes: int
    # Received by this rank from others in this step.
    comm_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """What an evaluation is reported by."""

    # After which it was made.
    step: int
    # Mean over the valid tokens of all samples.
    eval_loss: float
    eval_tokens: int
    eval_samples: int


class MetricsFile:
    """`metrics.jsonl`, with one line for each step, one for each evaluation after its step's, and none twice.

    Args:
        path: The file.
        last_step: The step a run resumes after; later lines, of steps that were lost, are dropped.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= last_step] if last_step else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in kept))
        self._path = path

    def write(self, metrics: StepMetrics | EvaluationMetrics) -> None:
        """Append one step or evaluation."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
