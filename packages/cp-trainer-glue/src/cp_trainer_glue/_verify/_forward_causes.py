"""Why the first layer that disagrees does: each hypothesis is computed on one device and held against the numbers.

B batch, S real global length, P padded global length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cp_wrappers import find_attention_boundaries

from ._batches import GlobalBatch
from ._capture import LOGITS, LayerCapture
from ._case import Case
from ._cause import Cause
from ._check import Check
from ._compare import found_tokens, token_errors

# A mask [P, P] of a longer sequence would not be small any more.
_MAX_MASKED_LENGTH = 8192


class _Suspect(NamedTuple):
    """The first layer that disagrees, and where."""

    check: Check
    batch: GlobalBatch
    # [B, S, ...], as the declared run gave it.
    found: torch.Tensor
    expected: torch.Tensor


class _Hypothesis(NamedTuple):
    kind: str
    sentence: str
    # [B, 1, P, P], True where a query sees a key.
    visible: torch.Tensor


def forward_causes(case: Case) -> Iterator[Cause]:
    """Yield why outputs of layers disagree: at most one cause, that of the first layer."""
    suspect = _suspect(case)
    if suspect is None:
        return
    cause = _positions_as_given(case, suspect) or _other_mask(case, suspect) or _restarted(case, suspect)
    if cause is not None:
        yield cause


def where(case: Case, check: Check) -> str:
    """Say in words where the first token that disagrees stands."""
    if check.place is None:
        return ""
    place, batch = check.place, case.batch_at(check.place.dp_rank, check.place.micro_batch)
    text = f"token {place.position} of row {place.row}"
    if case.sizes.dp > 1 or case.sizes.micro_batches > 1:
        text += f" (data-parallel rank {place.dp_rank}, micro-batch {place.micro_batch})"
    owner = int(case.owner(batch)[place.position])
    if case.gathered.cp_size == 1:
        return text
    starts = place.position in case.starts(batch)
    ends = place.position in case.shard_ends(batch)
    edge = "the first token" if starts else "the last token of a shard" if ends else "held by"
    return f"{text}, {edge} of context-parallel rank {owner}" if starts or ends else f"{text}, {edge} cp rank {owner}"


def _suspect(case: Case) -> _Suspect | None:
    failed = [check for check in case.failed("layer", LOGITS) if check.place is not None]
    if not failed or failed[0].place is None:
        return None
    key = (failed[0].place.dp_rank, failed[0].place.micro_batch)
    name = failed[0].name
    return _Suspect(failed[0], case.batch_at(*key), case.gathered.outputs[key][name], case.expected.outputs[key][name])


def _misfit(case: Case, suspect: _Suspect, predicted: torch.Tensor | None) -> float | None:
    """Return how far a prediction is from the declared run's output, None if it does not fit."""
    if predicted is None or predicted.shape[1] < suspect.found.shape[1]:
        return None
    predicted = predicted[:, : suspect.found.shape[1]]
    rest = float(token_errors(suspect.found, predicted, suspect.batch.real).max())
    observed = float(token_errors(suspect.found, suspect.expected, suspect.batch.real).max())
    return rest if rest <= 100 * case.tolerances.output and rest <= 0.01 * observed else None


# --- positions ----------------------------------------------------------------------------------------------------


def _positions_as_given(case: Case, suspect: _Suspect) -> Cause | None:
    given = found_tokens(case.gathered, suspect.batch, "position_ids")
    if not case.failed("positions") or given is None:
        return None
    rest = _misfit(case, suspect, _predicted(case, suspect, positions=given))
    if rest is None:
        return None
    starts = case.starts(suspect.batch)
    at_starts = [int(given[0, start]) for start in starts]
    if case.gathered.cp_size > 1 and len(set(at_starts)) == 1:
        sentence = f"positions restart at {at_starts[0]} on each rank: they must be those of the global sequence."
    else:
        sentence = "the model is given other positions than those of the global sequence."
    pairs = ", ".join(f"{found} at {start}" for found, start in zip(at_starts, starts, strict=True))
    return Cause(
        kind="positions_restart",
        sentence=sentence,
        evidence=f"position_ids are {pairs}, where shards begin; with them one device gives the same {_name(suspect)}, "
        f"to {rest:.1e}.",
    )


def _restarted(case: Case, suspect: _Suspect) -> Cause | None:
    """Try positions that the model remakes by itself on each shard."""
    local = case.local_index(suspect.batch)[: suspect.found.shape[1]].expand(suspect.found.shape[:2])
    if torch.equal(local, suspect.batch.inputs["position_ids"].expand(local.shape)):
        return None
    rest = _misfit(case, suspect, _predicted(case, suspect, positions=local))
    if rest is None:
        return None
    return Cause(
        kind="positions_restart",
        sentence="positions restart at 0 on each rank, inside the model: it does not use the position_ids it is given.",
        evidence=f"with positions that restart, one device gives the same {_name(suspect)}, to {rest:.1e}.",
    )


# --- masks --------------------------------------------------------------------------------------------------------


def _other_mask(case: Case, suspect: _Suspect) -> Cause | None:
    attentions = find_attention_boundaries(case.reference.model)
    length = len(case.owner(suspect.batch))
    if suspect.check.name not in attentions or length > _MAX_MASKED_LENGTH:
        return None
    for hypothesis in _masks(case, suspect, attentions[suspect.check.name]):
        rest = _misfit(case, suspect, _predicted(case, suspect, visible=hypothesis.visible))
        if rest is not None:
            return Cause(
                kind=hypothesis.kind,
                sentence=f"{suspect.check.name} {hypothesis.sentence}.",
                evidence=f"its first wrong token is {where(case, suspect.check)}; computed like that on one device, it "
                f"gives the same output to {rest:.1e}.",
            )
    return None


def _masks(case: Case, suspect: _Suspect, module: torch.nn.Module) -> Iterator[_Hypothesis]:
    """Yield what the queries of an attention may have seen instead."""
    owner, local = case.owner(suspect.batch), case.local_index(suspect.batch)
    index = torch.arange(len(owner))
    query, key = index[:, None], index[None, :]
    causal, own = key <= query, owner[:, None] == owner[None, :]
    real = torch.nn.functional.pad(suspect.batch.real, (0, len(owner) - suspect.batch.real.shape[1]))[:, None, None, :]
    windows = {window for window in _windows(module) if window < len(owner)}
    kinds: list[tuple[str, str, torch.Tensor]] = []
    for window in (None, *windows):
        near = causal if window is None else causal & (query - key < window)
        kinds += [
            (
                "attention_local",
                "attends within each rank's own shard only: it was left unwrapped, or its keys and values are not "
                "gathered",
                near & own,
            ),
            (
                "mask_top_left",
                "aligns its causal mask top-left: the queries of every rank see the keys of the first positions, as if "
                "each shard began at 0",
                (key <= local[:, None]) & (near | ~causal if window is not None else torch.ones_like(causal)),
            ),
        ]
    kinds += [("window_dropped", f"ignores its window of {min(windows)} tokens", causal)] if windows else []
    kinds += [
        ("mask_dropped", "attends without its causal mask: every query sees all keys", torch.ones_like(causal)),
        ("attention_local", "attends within each rank's own shard only, and without a causal mask there", own),
    ]
    for kind, sentence, visible in kinds:
        yield _Hypothesis(kind, sentence, visible & real)
    yield _Hypothesis(
        "mask_dropped",
        "attends without its causal mask: every query sees all keys, pads too",
        torch.ones_like(real & causal),
    )


def _windows(module: torch.nn.Module) -> Iterator[int]:
    for owner in (module, getattr(module, "config", None)):
        window = getattr(owner, "sliding_window", None)
        if isinstance(window, int):
            yield window


# --- one device under a hypothesis --------------------------------------------------------------------------------


def _predicted(
    case: Case, suspect: _Suspect, *, positions: torch.Tensor | None = None, visible: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return the suspect's output on one device under a hypothesis, None where it cannot be tried."""
    inputs, labels = _padded(suspect.batch, len(case.owner(suspect.batch)))
    model, length = case.reference.model, labels.shape[1]
    if positions is not None:
        after = positions[:, -1:] + torch.arange(1, length - positions.shape[1] + 1)
        inputs["position_ids"] = torch.cat([positions, after], dim=1)
        if hasattr(model, "config"):  # else transformers takes what restarts for packed documents
            inputs.setdefault("attention_mask", torch.ones(labels.shape, dtype=torch.long))
    module = model if suspect.check.name == LOGITS else model.get_submodule(suspect.check.name)
    with torch.no_grad(), LayerCapture(model) as capture, _seeing(module, visible):
        try:
            case.reference.loss_of(suspect.batch, inputs=inputs, shift_labels=labels)
        except (RuntimeError, TypeError, ValueError):  # a model need not take what a hypothesis gives it
            return None
    return capture.outputs.get(suspect.check.name)


def _padded(batch: GlobalBatch, length: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch as long as its shards are together; pads stand at the end, where causal attention hides them."""
    own = batch.shift_labels.shape[1]
    inputs = dict(batch.inputs)
    for name in ("input_ids", "attention_mask"):
        if isinstance(inputs.get(name), torch.Tensor):
            inputs[name] = torch.nn.functional.pad(inputs[name], (0, length - own))
    if isinstance(inputs.get("inputs_embeds"), torch.Tensor):
        inputs["inputs_embeds"] = torch.nn.functional.pad(inputs["inputs_embeds"], (0, 0, 0, length - own))
    positions = inputs["position_ids"]
    inputs["position_ids"] = torch.cat([positions, positions[:, -1:] + torch.arange(1, length - own + 1)], dim=1)
    return inputs, torch.nn.functional.pad(batch.shift_labels, (0, length - own), value=-100)


@contextmanager
def _seeing(module: torch.nn.Module, visible: torch.Tensor | None) -> Iterator[None]:
    """Give an attention another mask while this is open: as its keyword argument, or where it calls torch's."""
    if visible is None:
        yield
        return
    parameter = next(module.parameters())
    shown = visible.to(parameter.device)
    mask = torch.zeros(shown.shape, dtype=parameter.dtype, device=parameter.device)
    mask = mask.masked_fill(~shown, torch.finfo(parameter.dtype).min)
    mode = _Masked(shown)

    def before(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": mask}
        mode.__enter__()
        return args, kwargs

    def after(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        if "attention_mask" not in kwargs:
            mode.__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Masked(TorchFunctionMode):
    """Replaces mask and causality of calls of `F.scaled_dot_product_attention`."""

    def __init__(self, visible: torch.Tensor) -> None:
        super().__init__()
        self._visible = visible

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            args = args[:3]
            options |= {"attn_mask": self._visible, "is_causal": False}
        return func(*args, **options)


def _name(suspect: _Suspect) -> str:
    return "logits" if suspect.check.name == LOGITS else f"output of {suspect.check.name}"
