"""What a person sees of a run, on the first rank: a summary, and a bar or lines."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ._metrics import EvaluationMetrics, StepMetrics

_LINES_EVERY = 10


class Reporter:
    """Shows a run on a console; silent on all ranks but the first.

    Args:
        train_iters: Steps of the whole run.
        shown: Whether this rank shows anything.
    """

    def __init__(self, *, train_iters: int, shown: bool) -> None:
        self._console = Console(quiet=not shown, highlight=False)
        self._train_iters = train_iters
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, soft_wrap=True)

    def summary(self, rows: dict[str, str]) -> None:
        """Print what is about to run."""
        table = Table(show_header=False, box=None)
        for name, value in rows.items():
            table.add_row(f"[bold]{name}", value)
        self._console.print(table)

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished step: on the bar, or as a line every few steps where there is no terminal."""
        text = (
            f"loss {metrics.loss:.4f}  grad {metrics.grad_norm:.2f}  lr {metrics.lr:.1e}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._progress.add_task(text, total=self._train_iters)
            self._progress.update(self._task, completed=metrics.step, description=text)
        elif metrics.step == 1 or metrics.step % _LINES_EVERY == 0 or metrics.step == self._train_iters:
            self.say(f"step {metrics.step}/{self._train_iters}  {text}")

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Print what an evaluation found, above the bar."""
        self.say(
            f"eval {metrics.step}/{self._train_iters}  loss {metrics.eval_loss:.4f}  over {metrics.eval_tokens:,} "
            f"tokens of {metrics.eval_samples:,} samples"
        )
