"""Texts as padded batches of token ids, in an order that a seed fixes, for `lln_attention.convert`.

Texts of about the same length share a batch, so that little of the work is on padding; which texts
those are still changes from one pass over the texts to the next.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]  # input_ids and attention_mask, [texts, tokens] each
_POOL = 16  # batches that are cut from one list of texts by length


class TextBatches:
    """Batches for training, for comparison and for calibration from one list of texts.

    Args:
        tokenizer: Of transformers.
        texts: At least `held_out` + `batch_size`.
        max_tokens: Longer texts are cut.
        batch_size: Texts of a batch.
        held_out: Texts that are kept from training.
        seed: Draws the texts that are held out, and the order of the others.
        device: Of the batches.

    Attributes:
        digest: Tells other texts from these.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str],
        max_tokens: int,
        batch_size: int,
        held_out: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        ids = self._tokenized(texts)
        self.digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        order = _shuffled(len(ids), seed)
        self._held_out = [ids[i] for i in order[:held_out]]
        self._ids = [ids[i] for i in order[held_out:]]
        self._size, self._seed, self._device = batch_size, seed, device
        self._pass = -1
        self._order: list[list[int]] = []

    def of_step(self, step: int) -> Batch:
        """The batch of a training step; what would not fill a batch is left out of a pass."""
        per_pass = len(self._ids) // self._size
        if step // per_pass != self._pass:
            self._pass = step // per_pass
            self._order = self._ordered(self._pass)
        return self._padded([self._ids[i] for i in self._order[step % per_pass]])

    def held_out(self) -> Iterator[Batch]:
        """The texts that are not trained on, by length."""
        return self._by_length(self._held_out)

    def first(self, count: int) -> list[Batch]:
        """So many of the texts to train on."""
        return list(self._by_length(self._ids[:count]))

    def of_texts(self, texts: Sequence[str]) -> list[Batch]:
        """Other texts, by length."""
        return list(self._by_length(self._tokenized(texts)))

    def summary(self) -> dict[str, float]:
        """How many texts there are, and how long they are."""
        tokens = sum(map(len, self._ids)) / len(self._ids)
        return {
            "texts_trained": len(self._ids),
            "texts_held_out": len(self._held_out),
            "mean_tokens": round(tokens, 2),
        }

    def _tokenized(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), truncation=True, max_length=self._max_tokens
        )["input_ids"]
        return ids

    def _ordered(self, number: int) -> list[list[int]]:
        """Batches of indices for one pass over the texts."""
        order = _shuffled(len(self._ids), self._seed + 1 + number)
        order = order[: len(order) // self._size * self._size]
        batches = []
        for begin in range(0, len(order), self._size * _POOL):
            pool = order[begin : begin + self._size * _POOL]
            pool.sort(key=lambda i: len(self._ids[i]))
            batches += [pool[i : i + self._size] for i in range(0, len(pool), self._size)]
        return [batches[i] for i in _shuffled(len(batches), self._seed + 1 + number)]

    def _by_length(self, ids: list[list[int]]) -> Iterator[Batch]:
        ids = sorted(ids, key=len)
        for begin in range(0, len(ids), self._size):
            yield self._padded(ids[begin : begin + self._size])

    def _padded(self, ids: list[list[int]]) -> Batch:
        return padded(self._tokenizer, ids, self._device)


def padded(tokenizer: Any, ids: Sequence[list[int]], device: torch.device | str = "cpu") -> Batch:
    """Texts of different lengths as one batch, with the padding behind them."""
    # Tokenizers of decoders often have no padding; it is masked, so that any token serves.
    padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = max(map(len, ids))
    rows = [each + [padding] * (tokens - len(each)) for each in ids]
    counts = [[1] * len(each) + [0] * (tokens - len(each)) for each in ids]
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(counts, device=device),
    }


def _shuffled(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order
