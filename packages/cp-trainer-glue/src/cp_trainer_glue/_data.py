"""Token blocks in an order that depends on the seed alone, and a stream of them that can be resumed exactly.

Documents are joined, with the end token between them, and cut into blocks of `seq_length` tokens. Ranks that share a
sequence read the same blocks; data-parallel ranks read different ones.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from cp_collectives import gather_objects, mesh_size
from cp_core import InvalidInputError, tensor_digest

from ._config import DataConfig, TextSource, TrainingConfig
from ._mesh import MeshContext
from ._text import documents
from ._tokenizer import Ids, Tokenizer

Batch = dict[str, torch.Tensor]


class TokenBlocks(Dataset[Batch]):
    """Blocks of one token stream; the labels are the tokens, shifted later on the global sequence.

    Args:
        tokens: The stream.
        seq_length: Tokens of a block; what is left at the end is dropped.
    """

    def __init__(self, tokens: Ids, seq_length: int) -> None:
        self._seq_length = seq_length
        self._blocks = tokens[: len(tokens) // seq_length * seq_length].reshape(-1, seq_length)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> Batch:
        block = torch.from_numpy(self._blocks[index].astype(np.int64))
        return {"input_ids": block, "labels": block.clone()}

    def split(self, num_last: int) -> tuple["TokenBlocks", "TokenBlocks"]:
        """Return all blocks but the last `num_last`, and these.

        Raises:
            InvalidInputError: If none would be left for the first part.
        """
        if num_last >= len(self):
            raise InvalidInputError(
                f"evaluation.held_out_samples ({num_last}) must leave blocks to train on, but the data holds "
                f"{len(self)}; give more text, or hold fewer out."
            )
        tokens, kept = self._blocks.reshape(-1), (len(self) - num_last) * self._seq_length
        return TokenBlocks(tokens[:kept], self._seq_length), TokenBlocks(tokens[kept:], self._seq_length)


class ShardOnDevice(NamedTuple):
    """This rank's shard of a batch, as a forward takes it."""

    # The keyword arguments of the model.
    inputs: dict[str, Any]
    # [B, L], or None.
    shift_labels: torch.Tensor | None
    # `loss_weights` [B, L], where the batch has them.
    weights: dict[str, torch.Tensor]


class BatchStream:
    """An endless stream of micro-batches, epoch after epoch, whose position can be saved and taken up again.

    Args:
        blocks: All blocks, the same on every rank.
        training: Micro-batch size and seed.
        meshes: Which part of the data this rank reads.

    Raises:
        InvalidInputError: If the data does not fill one micro-batch on each data-parallel rank.
    """

    def __init__(self, blocks: TokenBlocks, training: TrainingConfig, meshes: MeshContext) -> None:
        needed = training.micro_batch_size * meshes.dp_size
        if len(blocks) < needed:
            raise InvalidInputError(
                f"the data holds {len(blocks)} blocks of seq_length, but one micro-batch on each of {meshes.dp_size} "
                f"data-parallel ranks needs {needed}; give more text or a smaller data.seq_length."
            )
        self._sampler = StatefulDistributedSampler(
            blocks, num_replicas=meshes.dp_size, rank=meshes.dp_rank, shuffle=True, seed=training.seed, drop_last=True
        )
        self._loader = StatefulDataLoader(
            blocks,
            batch_size=training.micro_batch_size,
            sampler=self._sampler,
            drop_last=True,
            # Of its own: each start of an iterator draws from it, and a resumed run starts one more.
            generator=torch.Generator(),
        )
        self._epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._sampler.set_epoch(self._epoch)
            yield from self._loader
            self._epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and where in it."""
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; call before iterating."""
        self._epoch = state["epoch"]
        self._sampler.set_epoch(self._epoch)
        self._loader.load_state_dict(state["loader"])


def require_same_shard(shard: dict[str, Any], mesh: DeviceMesh | None) -> None:
    """Check that tensor-parallel ranks hold the same shard; context-parallel ranks agreed when it was cut.

    Args:
        shard: What `shard_batch` returned, on the host.
        mesh: 1-D mesh of tensor-parallel ranks.

    Raises:
        InvalidInputError: On all ranks, naming the first rank and the fields that differ.
    """
    if mesh_size(mesh) == 1:
        return
    digests = {name: tensor_digest(value) for name, value in shard.items() if isinstance(value, torch.Tensor)}
    first, *others = gather_objects(digests, mesh=mesh)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            raise InvalidInputError(
                f"tensor-parallel ranks must read the same batch, but rank {rank} differs from rank 0 in "
                f"{', '.join(differing)}; let build_data depend on meshes.dp_rank alone."
            )


def load_blocks(config: DataConfig, tokenizer: Tokenizer, cache_dir: Path, mesh: DeviceMesh | None) -> TokenBlocks:
    """Read the data and cut it into blocks.

    Args:
        config: The `data` section.
        tokenizer: Its tokenizer.
        cache_dir: Where `datasets` keeps what it has read.
        mesh: 1-D mesh of all ranks.

    Raises:
        InvalidInputError: If ranks read different text.
    """
    return TokenBlocks(load_tokens(config, tokenizer, cache_dir, mesh), config.seq_length)


def load_tokens(config: TextSource, tokenizer: Tokenizer, cache_dir: Path, mesh: DeviceMesh | None) -> Ids:
    """Read and tokenize text, and check that all ranks read the same.

    Args:
        config: The section that says where text comes from.
        tokenizer: The tokenizer of `data`.
        cache_dir: Where `datasets` keeps what it has read.
        mesh: 1-D mesh of all ranks.

    Raises:
        InvalidInputError: If ranks read different text.
    """
    end = np.array([tokenizer.end_of_document], dtype=np.int32)
    pieces = [piece for text in documents(config, cache_dir) for piece in (tokenizer.encode(text), end)]
    tokens = np.concatenate(pieces) if pieces else end[:0]
    digests = gather_objects(hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(), mesh=mesh)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise InvalidInputError(
            f"ranks {', '.join(map(str, differing))} read other text than rank 0; every rank must see the same files."
        )
    return tokens


def shard_on_device(shard: dict[str, Any], device: torch.device, *, takes_layout: bool) -> ShardOnDevice:
    """Bring a shard to a device.

    Args:
        shard: What `shard_batch` returned.
        device: Where the model is.
        takes_layout: Whether the model is called with `cp_layout`.
    """
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in shard.items()}
    shift_labels = moved.pop("shift_labels", None)
    weights = {"loss_weights": moved.pop("loss_weights")} if "loss_weights" in moved else {}
    if not takes_layout:
        moved.pop("cp_layout")
    return ShardOnDevice(moved, shift_labels, weights)
