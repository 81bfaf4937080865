"""From text to token ids."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from cp_core import InvalidInputError

BYTE_TOKENIZER = "byte"
Ids = npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; the model's vocabulary must hold them."""
        ...

    @property
    def end_of_document(self) -> int:
        """The id between two documents."""
        ...

    def encode(self, text: str) -> Ids:
        """Return the ids of one document."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 between documents."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)


class PretrainedTokenizer:
    """A tokenizer of transformers.

    Args:
        name: A local folder or a hub name.

    Raises:
        InvalidInputError: If it cannot be loaded, or has no end-of-sequence token.
    """

    def __init__(self, name: str) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"data.tokenizer: cannot load {name!r}: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise InvalidInputError(f"data.tokenizer: {name!r} has no end-of-sequence token to put between documents.")
        self.vocab_size = len(self._tokenizer)
        self.end_of_document: int = self._tokenizer.eos_token_id

    def encode(self, text: str) -> Ids:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names."""
    return ByteTokenizer() if name == BYTE_TOKENIZER else PretrainedTokenizer(name)
