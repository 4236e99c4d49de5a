"""Multi-head LLN attention as modules, in the manner of ``torch.nn.MultiheadAttention``.

Inputs are batch first, [B, N, embed_dim]. The modules own their projections, where alpha and beta
come from, and how LLN and its block-diagonal part are mixed.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from .decode import DecodeState
from .functional import MODES, attention, match, update_moments

if TYPE_CHECKING:
    from .distributed import Pieces

_MODES = (*MODES, "ema", "frozen")
_CAUSAL_MODES = ("none", "ema", "frozen")
_MIXES = ("fixed", "per_head", "per_channel", "gated")


class _Masks(TypedDict):
    """Which tokens count, as `attention`, `match` and `update_moments` take it."""

    key_mask: Tensor | None
    key_lengths: Tensor | None
    query_mask: Tensor | None


class LLNAttention(nn.Module):
    """Multi-head Linear Log-Normal attention.

    Args:
        embed_dim: Channels of input and output; `num_heads` divides it.
        num_heads: Query heads.
        num_kv_heads: Key heads, which divide `num_heads`; as many where not given.
        bias: Whether the projections have biases.
        causal: Row i sees tokens j <= i.
        matching: Where alpha and beta come from: "per_head" (default), "exact", "entropy", "paper"
            from the q and k of each call; "ema" (default where causal) from running moments, which
            training updates; "frozen" from the buffers alpha and beta; "none" for ones.
        ema_decay: Of the running moments.
        feature: "exp", or another map, with matching "none" or "frozen".
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        running: Buffer float64 [2, num_kv_heads, 3], the running moments of mode "ema".
        alpha: Buffer float32 [num_heads], the scales of mode "frozen".
        beta: Buffer float32 [num_kv_heads].

    Example:
        >>> import torch
        >>> from lln_attention import LLNAttention
        >>> layer = LLNAttention(64, 4, num_kv_heads=2)
        >>> x = torch.randn(2, 100, 64)
        >>> layer(x).shape
        torch.Size([2, 100, 64])
    """

    running: Tensor
    alpha: Tensor
    beta: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = False,
        matching: str | None = None,
        ema_decay: float = 0.99,
        feature: str = "exp",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(embed_dim, num_heads, kv_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal = causal
        self.matching = _check_matching(matching, causal, feature)
        self.ema_decay = ema_decay
        self.feature = feature
        self.diag_block = 0
        kv_dim = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, kv_dim, bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, kv_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.register_buffer(
            "running", torch.zeros(2, kv_heads, 3, dtype=torch.float64, device=device)
        )
        self.register_buffer("alpha", torch.ones(num_heads, device=device, dtype=torch.float32))
        self.register_buffer("beta", torch.ones(kv_heads, device=device, dtype=torch.float32))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        query_mask: Tensor | None = None,
        state: DecodeState | None = None,
        pieces: Pieces | None = None,
    ) -> Tensor:
        """Attention of `x` to itself, or to `context`.

        Args:
            x: [B, N, embed_dim].
            context: [B, M, embed_dim], the tokens that keys and values come from; `x` if not given.
            key_mask: bool [B, M], True where a key counts.
            key_lengths: int32 or int64 [B]: the first so many keys count.
            query_mask: bool [B, N] for the moments that set alpha, with a context.
            state: Of `decode_state`: `x` holds the tokens that follow those before. `key_lengths`
                are then how many of them each sequence has.
            pieces: `x` is a piece of sequences that lie on several processes, as
                `lln_attention.distributed` has them; `pieces` says which tokens count.

        Returns:
            [B, N, embed_dim].
        """
        source = x if context is None else context
        q = self._heads(self.q_proj(x), self.num_heads)
        k = self._heads(self.k_proj(source), self.num_kv_heads)
        v = self._heads(self.v_proj(source), self.num_kv_heads)
        mix = self._mix(x)
        if pieces is not None:
            _check_pieces(context, key_mask, key_lengths, query_mask, state)
        if state is not None:
            self._check_state(context, key_mask, query_mask)
            weight = mix if isinstance(mix, Tensor) else None
            o = state.append(q, k, v, mix=weight, lengths=key_lengths)
            assert o is not None
        else:
            masks = _Masks(key_mask=key_mask, key_lengths=key_lengths, query_mask=query_mask)
            alpha, beta = self._scales(q, k, masks, context is not None)
            options: dict[str, Any] = {
                "causal": self.causal, "diag_block": self.diag_block, "mix": mix, "alpha": alpha,
                "beta": beta, "matching": "auto" if alpha is not None else self.matching,
                "feature": self.feature,
            }  # fmt: skip
            if pieces is None:
                o = attention(q, k, v, **options, **masks)
            else:
                o = _distributed().attention(q, k, v, pieces, **options)
            if self.training and self.matching == "ema":
                # After the attention: a call that it refuses changes nothing.
                self._update_running(q, k, masks, context is not None, pieces)
        return self.out_proj(o.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def freeze(self, alpha: Tensor | None = None, beta: Tensor | None = None) -> None:
        """Sets alpha and beta for good: mode "frozen".

        Args:
            alpha: [num_heads]; not given, what the running moments of mode "ema" say.
            beta: [num_kv_heads].

        Example:
            >>> import torch
            >>> from lln_attention import LLNAttention
            >>> layer = LLNAttention(64, 4, causal=True)
            >>> layer.freeze(torch.full((4,), 2.0), torch.full((4,), 2.0))
            >>> layer.matching
            'frozen'
        """
        if alpha is None and beta is None:
            if self.matching != "ema":
                raise ValueError(
                    f'matching is "{self.matching}", which has no running moments: give alpha and '
                    "beta, by lln_attention.calibrate for example"
                )
            alpha, beta = self._ema_scales()
        if alpha is None or beta is None:
            raise ValueError("give alpha and beta, or none of them")
        for name, scale, heads in (
            ("alpha", alpha, self.num_heads),
            ("beta", beta, self.num_kv_heads),
        ):
            if scale.shape != (heads,):
                raise ValueError(
                    f"{name} has shape {list(scale.shape)}: expected [{heads}], one for each head"
                )
        self.alpha.copy_(alpha)
        self.beta.copy_(beta)
        self.matching = "frozen"

    def decode_state(self, batch: int) -> DecodeState:
        """An empty state for token-by-token calls of this causal layer.

        Args:
            batch: Sequences that are decoded together.

        Example:
            >>> import torch
            >>> from lln_attention import LLNAttention
            >>> layer = LLNAttention(64, 4, causal=True).eval()
            >>> x = torch.randn(1, 20, 64)
            >>> state = layer.decode_state(1)
            >>> with torch.inference_mode():
            ...     rows = [layer(x[:, i : i + 1], state=state) for i in range(20)]
            ...     same = torch.allclose(torch.cat(rows, 1), layer(x), atol=1e-5)
            >>> same
            True
        """
        if not self.causal:
            raise ValueError("decoding is causal attention: this layer has causal=False")
        alpha: float | Tensor = 1.0
        beta: float | Tensor = 1.0
        if self.matching == "ema":
            alpha, beta = self._ema_scales()
        elif self.matching == "frozen":
            alpha, beta = self.alpha, self.beta
        mix = self._mix(None)
        return DecodeState(
            batch, self.num_heads, self.head_dim, heads_k=self.num_kv_heads, alpha=alpha, beta=beta,
            diag_block=self.diag_block, mix=mix, feature=self.feature, device=self.alpha.device,
        )  # fmt: skip

    def get_extra_state(self) -> Tensor:
        """The mode of matching for the state dict: its letters, as every file format has tensors.

        It says what the buffers beside it are for, and comes back with them.
        """
        return torch.tensor(list(self.matching.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Takes the mode of matching from a state dict."""
        matching = bytes(state.tolist()).decode()
        self.matching = _check_matching(matching, self.causal, self.feature)

    def extra_repr(self) -> str:
        """What the projections do not say."""
        return (
            f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, causal={self.causal}, "
            f"matching={self.matching!r}, feature={self.feature!r}, diag_block={self.diag_block}"
        )

    def _mix(self, x: Tensor | None) -> float | Tensor:
        """The mix of the tokens `x`; without them, where it is the same for all, that one."""
        return 0.5

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _scales(
        self, q: Tensor, k: Tensor, masks: _Masks, cross: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """alpha and beta, or none where the attention shall match them itself."""
        if self.matching == "frozen":
            return self.alpha, self.beta
        if self.matching == "ema":
            return match(q, k, mode="ema", running=self.running, causal=self.causal)
        if cross and self.matching != "none":
            return match(q, k, mode=self.matching, cross=True, **masks)
        return None, None

    def _update_running(
        self, q: Tensor, k: Tensor, masks: _Masks, cross: bool, pieces: Pieces | None
    ) -> None:
        if pieces is None:
            update_moments(self.running, q, k, decay=self.ema_decay, cross=cross, **masks)
        else:
            _distributed().update_moments(self.running, q, k, pieces, decay=self.ema_decay)

    def _ema_scales(self) -> tuple[Tensor, Tensor]:
        q = torch.zeros(1, self.num_heads, 1, self.head_dim, device=self.running.device)
        alpha, beta = match(q, q[:, : self.num_kv_heads], mode="ema", running=self.running)
        return alpha[0], beta[0]

    def _check_state(self, *unused: Tensor | None) -> None:
        if any(x is not None for x in unused):
            raise ValueError(
                "with a state there is no context, key_mask or query_mask: the tokens of x follow "
                "those before, and key_lengths says how many of them each sequence has"
            )
        if self.training and self.matching == "ema":
            raise ValueError("a state is for evaluation: call eval() first, or freeze()")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LLNAttention:
        # Moments and scales keep their types where parameters change theirs, as by half().
        kept = {name: getattr(self, name) for name in ("running", "alpha", "beta")}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = getattr(self, name)
            if now.dtype != before.dtype:
                setattr(self, name, before.to(now.device))
        return self


class LLNPlusDiagAttention(LLNAttention):
    """LLN attention mixed with softmax attention inside blocks of consecutive tokens.

    Args:
        embed_dim: As in `LLNAttention`, and so are the arguments that are not named here.
        num_heads: Query heads.
        diag_block: Tokens of a block.
        mix: How LLN is weighed against the blocks: "fixed" (`mix_value`), or learned, beginning at
            `mix_value`: "per_head", "per_channel", or "gated", where a linear map of the token
            gives one share per head.
        mix_value: Share of LLN, fixed or at the beginning.
        **options: `num_kv_heads`, `bias`, `causal`, `matching`, `ema_decay`, `feature`, `device`,
            `dtype`.

    Example:
        >>> import torch
        >>> from lln_attention import LLNPlusDiagAttention
        >>> layer = LLNPlusDiagAttention(64, 4, diag_block=16, mix="gated", matching="entropy")
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        diag_block: int = 64,
        mix: str = "fixed",
        mix_value: float = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        if mix not in _MIXES:
            raise ValueError(f"mix is {mix!r}: expected one of {', '.join(_MIXES)}")
        if diag_block < 1:
            raise ValueError(f"diag_block is {diag_block}: expected 1 or more")
        if mix == "gated" and not 0 < mix_value < 1:
            raise ValueError(f"mix_value is {mix_value}: a gate begins between 0 and 1")
        self.diag_block = diag_block
        self.mix = mix
        self.mix_value = mix_value
        device, dtype = options.get("device"), options.get("dtype")
        if mix == "gated":
            self.gate = nn.Linear(embed_dim, num_heads, device=device, dtype=dtype)
            nn.init.zeros_(self.gate.weight)
            nn.init.constant_(self.gate.bias, torch.logit(torch.tensor(mix_value)).item())
        elif mix != "fixed":
            shape = (num_heads,) if mix == "per_head" else (num_heads, self.head_dim)
            self.mix_weight = nn.Parameter(torch.full(shape, mix_value, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        """What the projections do not say."""
        return f"{super().extra_repr()}, mix={self.mix!r}"

    def _mix(self, x: Tensor | None) -> float | Tensor:
        if self.mix == "fixed":
            return self.mix_value
        if self.mix == "gated":
            return 0.5 if x is None else self.gate(x).float().sigmoid().transpose(1, 2)
        return self.mix_weight


def _check_heads(embed_dim: int, num_heads: int, kv_heads: int) -> None:
    if num_heads < 1 or embed_dim % num_heads != 0:
        raise ValueError(
            f"embed_dim {embed_dim} is not divisible into {num_heads} heads of equal width"
        )
    if kv_heads < 1 or num_heads % kv_heads != 0:
        raise ValueError(f"num_kv_heads {kv_heads} does not divide num_heads {num_heads}")


def _distributed() -> ModuleType:
    """Imported when pieces are given: it needs Dynamo, which takes seconds to import."""
    return importlib.import_module(".distributed", __package__)


def _check_pieces(*unused: object) -> None:
    if any(x is not None for x in unused):
        raise ValueError(
            "with pieces there is no context, key_mask, key_lengths, query_mask or state: the "
            "pieces say which tokens count"
        )


def _check_matching(matching: str | None, causal: bool, feature: str) -> str:
    if matching is None:
        matching = "none" if feature != "exp" else "ema" if causal else "per_head"
    if matching not in _MODES:
        raise ValueError(f"matching is {matching!r}: expected one of {', '.join(_MODES)}")
    if causal and matching not in _CAUSAL_MODES:
        raise ValueError(
            f"matching {matching!r} reads the whole sequence, so that a causal row would depend on "
            f"its future: use one of {', '.join(_CAUSAL_MODES)}"
        )
    if feature != "exp" and matching not in ("none", "frozen"):
        raise ValueError(
            f"matching {matching!r} is for the exponential, and feature is {feature!r}: use none "
            "or frozen"
        )
    return matching
