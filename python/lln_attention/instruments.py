"""How attention concentrates: entropy, spectral gap, log-normality and the rest, and the report.

`analyze` measures given queries and keys, `collect` takes them from a model while it runs, and
`report` writes the page that ``lln analyze --report`` writes. docs/instruments.md says what the
numbers mean.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._library import python_error
from .observation import observe

_analyze = torch.ops.lln.analyze.default
_KINDS = ("softmax", "lln")

Results = list[dict[str, Any]]


@torch.library.register_fake("lln::analyze")
def _analyze_fake(*_: Any) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def analyze(
    q: Tensor,
    k: Tensor,
    *,
    kinds: Sequence[str] = _KINDS,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    matching: str | None = None,
    causal: bool = False,
    rows: int = 0,
    layer: int | None = None,
    name: str = "",
) -> Results:
    """Every kind of attention asked for, on every head; the sequences of the batch are its samples.

    Args:
        q: Queries [B, H, N, D].
        k: Keys [B, Hk, N, D].
        kinds: "softmax", "lln", "lln+diag64", "diag64", "elu", "relu", "quadratic", "performer" ...
        alpha: [H] or [B, H], for mode frozen, which they imply.
        beta: [Hk] or [B, Hk].
        matching: How alpha and beta of LLN are set where they are not given: as in `match`;
            "per_head" by default, "none" for causal attention.
        causal: Row i sees keys j <= i; there is no spectrum then.
        rows: Rows of each matrix that are looked at; 0: all. A row costs O(N D).
        layer: Index of the layer, for the report.
        name: Name of the layer.

    Returns:
        One dictionary for each head and kind, as ``lln analyze --json`` prints them.

    Example:
        >>> import torch
        >>> from lln_attention import analyze
        >>> q, k = torch.randn(2, 1, 1, 128, 32).unbind()
        >>> [entry["kind"] for entry in analyze(q, k)]
        ['softmax', 'lln']
    """
    if matching is None:
        matching = "frozen" if alpha is not None else "none" if causal else "per_head"

    def on_host(x: Tensor) -> Tensor:
        x = x.detach().cpu()
        x = x.float() if x.dtype == torch.float64 else x
        return x if x.stride(-1) == 1 else x.contiguous()

    try:
        found = _analyze(
            on_host(q),
            on_host(k),
            None if alpha is None else alpha.detach().cpu().float(),
            None if beta is None else beta.detach().cpu().float(),
            ",".join(kinds),
            matching,
            causal,
            rows,
            -1 if layer is None else layer,
            name,
        )
    except RuntimeError as error:
        raise python_error(error) from None
    results: Results = json.loads(bytes(found.tolist()))
    return results


class Collection:
    """Queries and keys of the attentions that ran, by the name of the module they ran in."""

    def __init__(self) -> None:
        self.layers: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.key_mask: Tensor | None = None

    def add(self, name: str, q: Tensor, k: Tensor, mask: Tensor | None = None) -> None:
        """Takes one call; `mask`, or `key_mask` in its place, says which of its tokens count."""
        if q.shape[-2] != k.shape[-2]:
            return
        q, k = (x.detach().float().cpu().reshape(-1, *x.shape[-3:]) for x in (q, k))
        calls = self.layers.setdefault(name, [])
        if self.key_mask is not None:
            mask = self.key_mask
        if mask is None:
            calls.append((q, k))
            return
        for counts, query, key in zip(mask.bool().cpu(), q, k, strict=True):
            calls.append((query[None, :, counts], key[None, :, counts]))

    def tensors(self, name: str, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """q [S, H, N, D] and k of a layer: its sequences, cut to the same number of tokens.

        Args:
            name: Of the layer.
            tokens: Shorter sequences are left out, longer ones cut. If not given, the number that
                leaves the most tokens in all; a warning says so where sequences are left out.
        """
        calls = self.layers[name]
        length = _most_tokens(calls) if tokens is None else tokens
        long = [(q[:, :, :length], k[:, :, :length]) for q, k in calls if q.shape[2] >= length]
        if not long or length == 0:
            raise ValueError(f"no sequence of layer {name} has {max(length, 1)} tokens")
        left_out = sum(len(q) for q, _ in calls) - sum(len(q) for q, _ in long)
        if tokens is None and left_out:
            warnings.warn(
                f"layer {name}: {left_out} sequences of less than {length} tokens are left out, "
                "longer ones are cut to that; tokens= sets another number",
                stacklevel=2,
            )
        return torch.cat([q for q, _ in long]), torch.cat([k for _, k in long])

    def analyze(self, *, tokens: int | None = None, **options: Any) -> Results:
        """`analyze` of every layer.

        Args:
            tokens: As in `tensors`.
            **options: As in `lln_attention.analyze`: kinds, matching, causal, rows.
        """
        results: Results = []
        for index, name in enumerate(self.layers):
            q, k = self.tensors(name, tokens)
            results += analyze(q, k, layer=index, name=name, **options)
        return results


def _most_tokens(calls: list[tuple[Tensor, Tensor]]) -> int:
    """The length that leaves the most tokens: shorter sequences are dropped, longer ones cut."""
    best = most = sequences = 0
    for length, count in sorted(((q.shape[2], len(q)) for q, _ in calls), reverse=True):
        sequences += count
        if length * sequences > most:
            best, most = length, length * sequences
    return best


@contextmanager
def collect(model: nn.Module, *, key_mask: Tensor | None = None) -> Iterator[Collection]:
    """Takes the queries and keys of every attention that runs inside `model`.

    Attention is seen as `lln_attention.observe` says. Calls with as many queries as keys are taken,
    without the tokens that their masks leave out.

    Args:
        model: Any module.
        key_mask: bool or int [B, N]: the tokens that count, where the model does not mask them
            itself. May be set anew for each batch, as the attribute `key_mask` of what this yields.

    Example:
        >>> import torch
        >>> from lln_attention import collect
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> with collect(layer) as found:
        ...     y = layer(torch.randn(2, 16, 32))
        >>> list(found.layers)
        ['self_attn']
        >>> results = found.analyze(kinds=("softmax", "lln"))
        >>> len(results)
        8
    """
    found = Collection()
    found.key_mask = key_mask
    with observe(model, lambda seen: found.add(seen.name, seen.q, seen.k, seen.key_mask)):
        yield found


def report(
    results: Results,
    path: str | os.PathLike[str],
    *,
    title: str = "How attention concentrates",
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Writes the page with figures that ``lln analyze --report`` writes.

    Args:
        results: Of `analyze` or `Collection.analyze`.
        path: File to write; it appears complete or not at all.
        title: Head line.
        facts: Names and values to show under it.

    Example:
        >>> import tempfile, torch
        >>> from lln_attention import analyze, report
        >>> q, k = torch.randn(2, 1, 1, 64, 32).unbind()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report(analyze(q, k), f"{folder}/page.html")
    """
    from . import __version__

    data = {
        "title": title,
        "lead": "Entropy, spectral gap and log-normality of the attention of each head, with its "
        "own queries and keys, and of what could take its place.",
        "facts": [list(fact) for fact in facts],
        "command": "lln_attention.report(results, path)",
        "version": __version__,
        "results": results,
        "sweep": [],
        "cost": {"heads": 0, "dim": 0, "threads": 0, "rows": []},
    }
    text = json.dumps(data, allow_nan=False)
    # In JSON these stand inside strings only, where an escape means the same; without them no tag
    # can begin or end.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_text(page.replace("@DATA@", text), encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
