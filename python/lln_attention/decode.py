"""Decoding: causal LLN and LLN+Diag with a state whose size does not grow with the tokens."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _decode_ops as _ops
from ._attention_ops import refuse_tangents
from ._library import python_error


class DecodeState:
    """What causal LLN attention remembers of the tokens before: a fixed number of bytes.

    Appending tokens in any pieces gives the rows of the causal forward pass, to rounding. A state
    is copied by ``copy.deepcopy`` or `fork`, and pickled like any object. It has no gradients.

    On a CUDA device `append`, `read`, `step`, `reset` and `fork` put their work into the current
    stream and return, and can be captured in a CUDA graph; the others wait.

    Args:
        batch: Sequences that are decoded together.
        heads: Query heads.
        dim: Channels of queries and keys.
        heads_k: Key heads; as many as query heads where not given.
        dim_v: Channels of values; `dim` where not given.
        alpha: Scale of the queries: a number, [H] or [B, H].
        beta: Scale of the keys: a number, [Hk] or [B, Hk].
        diag_block: Block of the block-diagonal part; 0 for LLN alone.
        mix: Share of LLN in LLN+Diag: a number, or a tensor [H] or [H, Dv].
        feature: As in `lln_attention.attention`.
        device: Where the state and its tensors live.

    Example:
        >>> import torch
        >>> from lln_attention import DecodeState, attention
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> state = DecodeState(1, 4, 16, alpha=1.5, beta=1.5)
        >>> prompt = state.append(q[:, :, :9], k[:, :, :9], v[:, :, :9])
        >>> token = state.step(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:])
        >>> o = attention(q, k, v, causal=True, alpha=1.5, beta=1.5)
        >>> torch.allclose(torch.cat((prompt, token), 2), o, atol=1e-5)
        True
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        dim: int,
        *,
        heads_k: int | None = None,
        dim_v: int | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 1.0,
        diag_block: int = 0,
        mix: float | Tensor = 0.5,
        feature: str = "exp",
        device: torch.device | str = "cpu",
    ) -> None:
        place = torch.device(device)
        heads_k = heads if heads_k is None else heads_k
        dim_v = dim if dim_v is None else dim_v
        self._sizes = [batch, heads, heads_k, dim, dim_v]
        self._kind = f"lln+diag{diag_block}" if diag_block else "lln"
        self._mix = 0.5 if isinstance(mix, Tensor) else mix
        self._feature = feature
        self._weight = _f32(mix, place) if isinstance(mix, Tensor) else None
        self._alpha = _f32(alpha, place)
        self._beta = _f32(beta, place)
        on_host = place.type == "cpu"
        size = _call(_ops.state_bytes, self._sizes, self._kind, feature, not on_host)
        self._memory = torch.empty(size, dtype=torch.uint8, device=place)
        self._tokens = torch.zeros(batch if on_host else 0, dtype=torch.int64)
        self.reset()

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self._memory.device

    @property
    def nbytes(self) -> int:
        """Its memory, for any number of tokens."""
        return self._memory.numel()

    @property
    def tokens(self) -> Tensor:
        """Tokens that each sequence has seen, int64 [B] in host memory."""
        return self._run(_ops.tokens)

    def append(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        *,
        mix: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor | None:
        """Adds tokens; with queries, also their output rows.

        Args:
            q: Queries [B, H, N, D], or None where no rows are wanted.
            k: Keys [B, Hk, N, D].
            v: Values [B, Hk, N, Dv].
            mix: In place of the state's: [H], [H, Dv] or [B, H, N].
            lengths: int32 or int64 [B]: sequence b adds its first so many tokens, and its rows of
                the result after them are zero.

        Returns:
            [B, H, N, Dv], row i seeing token i and all before it; None without queries.
        """
        o = self._run(
            _ops.append,
            None if q is None else _row(q), _row(k), _row(v),
            self._alpha, self._beta, self._mix_of(mix), None, lengths,
        )  # fmt: skip
        return None if q is None else o

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, mix: Tensor | None = None) -> Tensor:
        """Adds one token and returns its row: `append` of one token, in one pass over the state.

        Args:
            q: [B, H, 1, D].
            k: [B, Hk, 1, D].
            v: [B, Hk, 1, Dv].
            mix: In place of the state's: [H], [H, Dv] or [B, H, 1].

        Returns:
            [B, H, 1, Dv].
        """
        return self._run(
            _ops.step,
            _row(q), _row(k), _row(v),
            self._alpha, self._beta, self._mix_of(mix), None,
        )  # fmt: skip

    def read(self, q: Tensor, *, mix: Tensor | None = None) -> Tensor:
        """Rows that see all tokens so far; nothing changes.

        Args:
            q: [B, H, N, D]; each as if it stood at the place of the last token.
            mix: In place of the state's: [H], [H, Dv] or [B, H, N].

        Returns:
            [B, H, N, Dv]; zero for a sequence without a token.
        """
        return self._run(_ops.read, _row(q), self._alpha, self._mix_of(mix), None)

    def merge(self, later: DecodeState) -> None:
        """Adds the tokens of another state, which follow those of this one.

        Args:
            later: Filled from nothing with the same configuration and beta. With LLN+Diag this
                state must end at a block border in every sequence where `later` has tokens.
        """
        if later._config() != self._config():
            raise ValueError(
                f"a state of {self._config()} and one of {later._config()}: "
                "expected the same configuration"
            )
        # Sums are of exp(beta k); alpha and mix belong to the reader.
        keys = (self._sizes[0], self._sizes[2])
        if not torch.equal(self._beta.expand(keys), later._beta.to(self.device).expand(keys)):
            raise ValueError(
                f"a state of beta {self._beta.tolist()} and one of {later._beta.tolist()}: their "
                "sums are of different features of the keys and cannot be added"
            )
        self._run(_ops.merge, later._memory, later._tokens)

    def fork(self) -> DecodeState:
        """A copy that goes its own way: prefix sharing, and the way back to a saved point."""
        return copy.deepcopy(self)

    def select(self, sequences: Tensor) -> DecodeState:
        """A state of these sequences in this order: beam search, or a batch that shrinks or grows.

        Args:
            sequences: int64 [B'], each from 0 to B - 1; any of them more than once or not at all.

        Example:
            >>> import torch
            >>> from lln_attention import DecodeState
            >>> state = DecodeState(2, 1, 16)
            >>> _ = state.append(None, torch.randn(2, 1, 5, 16), torch.randn(2, 1, 5, 16))
            >>> state.select(torch.tensor([1, 1, 0])).tokens
            tensor([5, 5, 5])
        """
        batch, _, heads_k, _, _ = self._sizes
        chosen = copy.copy(self)
        chosen._sizes = [len(sequences), *self._sizes[1:]]
        on_device = sequences.to(self.device)
        parts = [self._memory]
        if self.device.type == "cpu":
            chosen._tokens = self._tokens[sequences.cpu()]
        else:
            # Behind the sums of all sequences lie the counts, 8 bytes for each of their key heads.
            sums = self._memory.numel() - 8 * batch * heads_k
            parts = [self._memory[:sums], self._memory[sums:]]
        chosen._memory = torch.cat([part.view(batch, -1)[on_device].flatten() for part in parts])
        for name in ("_alpha", "_beta"):
            scale = getattr(self, name)
            setattr(chosen, name, scale[on_device] if scale.ndim == 2 else scale)
        return chosen

    def reset(self, sequence: int | None = None) -> None:
        """Forgets everything, or one sequence, whose place another may then take."""
        if sequence is not None and not 0 <= sequence < self._sizes[0]:
            raise ValueError(f"sequence {sequence}: expected 0 to {self._sizes[0] - 1}")
        self._run(_ops.reset, -1 if sequence is None else sequence)

    def to_bytes(self) -> bytes:
        """The state as bytes that any machine, device and language of the library reads back."""
        return bytes(self._run(_ops.save).tolist())

    def load_bytes(self, data: bytes) -> None:
        """Becomes the state that `to_bytes` made.

        Args:
            data: Of a state of the same configuration, alpha and beta not included.

        Raises:
            ValueError: bytes that are cut, corrupt, of another version or configuration.
        """
        self._run(_ops.load, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _mix_of(self, mix: Tensor | None) -> Tensor | None:
        if mix is None:
            return self._weight
        _refuse_gradients(mix)
        return mix.float()

    def _config(self) -> tuple[Any, ...]:
        return (*self._sizes, self._kind, self._mix, self._feature)

    def _run(self, op: Callable[..., Any], *args: Any) -> Any:
        return _call(
            op, self._memory, self._tokens, *args, self._sizes, self._kind, self._mix, self._feature
        )

    def __repr__(self) -> str:
        batch, heads, heads_k, dim, dim_v = self._sizes
        return (
            f"DecodeState(batch={batch}, heads={heads}, dim={dim}, heads_k={heads_k}, "
            f"dim_v={dim_v}, kind={self._kind!r}, feature={self._feature!r}, "
            f"device={str(self.device)!r})"
        )


def _call(op: Callable[..., Any], *args: Any) -> Any:
    try:
        return op(*args)
    except RuntimeError as error:
        raise python_error(error) from None


def _f32(x: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach().to(device, torch.float32)
    return torch.full((), x, dtype=torch.float32, device=device)


def _refuse_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            "decoding has no gradients: call it under torch.no_grad(), or use the causal "
            "lln_attention.attention to train"
        )
    refuse_tangents(x)


def _row(x: Tensor) -> Tensor:
    _refuse_gradients(x)
    if x.dtype == torch.float64:
        raise NotImplementedError("decoding takes float32, bfloat16 and float16, found float64")
    return x if x.stride(-1) == 1 else x.contiguous()
