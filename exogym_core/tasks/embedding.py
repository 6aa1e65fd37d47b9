"""Vectors of tokens, with a word for those who have more tokens than vectors."""

from __future__ import annotations

from torch import Tensor, nn

from netsim.files.errors import InputError

__all__ = ["TokenEmbedding"]


class TokenEmbedding(nn.Embedding):
    """torch's, but for the line that tells of a token outside the vocabulary (on a CPU; a GPU asserts).

    Raises:
        InputError: a token is not below the number of vectors.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """The vector of each token."""
        try:
            return super().forward(tokens)
        except IndexError:
            lowest, highest = int(tokens.min()), int(tokens.max())
            token = highest if lowest >= 0 else lowest
            raise InputError(
                f"token {token} is outside the vocabulary of {self.num_embeddings}: "
                "give the task (or the model) its vocab_size"
            ) from None
