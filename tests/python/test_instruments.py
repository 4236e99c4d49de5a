"""The instruments against plain torch, what is collected from models, and the page of a report."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lln_attention import LLNAttention, analyze, collect, match, report
from lln_attention.instruments import Collection


def test_entropy_and_gap_of_the_matrix() -> None:
    q, k = torch.randn(2, 1, 1, 96, 16).unbind()
    alpha, beta = (x.double().item() for x in match(q, k))
    entries = analyze(q, k)
    q, k = q.double(), k.double()
    softmax = torch.softmax(q[0, 0] @ k[0, 0].T / 4, -1)
    lln = torch.exp(alpha * q[0, 0]) @ torch.exp(beta * k[0, 0]).T
    lln = lln / lln.sum(1, keepdim=True)
    for entry, p in zip(entries, (softmax, lln), strict=True):
        entropy = -(p * p.log()).sum(1).mean().item()
        assert entry["entropy_nats"] == pytest.approx(entropy, rel=1e-6)
        second = torch.linalg.eigvals(p).abs().sort(descending=True).values[1].item()
        assert entry["spectral_gap"] == pytest.approx(1 - second, abs=2e-3)
        assert entry["log_var"] == pytest.approx(p.log().var(correction=0).item(), rel=1e-3)
    assert entry["alpha"] == pytest.approx(alpha) and entry["matching"] == "per_head"


def test_options() -> None:
    q, k = torch.randn(3, 4, 32, 16), torch.randn(3, 2, 32, 16)
    scales = {"alpha": torch.full((4,), 1.5), "beta": torch.full((2,), 0.5)}
    entries = analyze(q, k, kinds=("lln", "lln+diag8"), layer=3, name="a", **scales)
    assert [e["head"] for e in entries] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {e["layer"] for e in entries} == {3} and entries[0]["samples"] == 3
    assert entries[0]["alpha"] == 1.5 and entries[0]["matching"] == "frozen"
    causal = analyze(q, k, causal=True)[0]
    assert causal["spectral_gap"] is None and len(causal["by_position"]) > 1
    with pytest.raises(ValueError, match="there twice"):
        analyze(q, k, kinds=("lln", "lln"))
    with pytest.raises(ValueError, match="median"):
        analyze(q, k, kinds=("median",))


def test_collecting_from_any_module() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.MultiheadAttention(32, 4, batch_first=True)
            self.second = LLNAttention(32, 4, num_kv_heads=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x + self.first(x, x, x, need_weights=False)[0])

    model = Block()
    x = torch.randn(2, 16, 32)
    mask = torch.arange(16) < torch.tensor([[16], [10]])
    expected = model(x)
    with collect(model) as found:
        assert torch.equal(model(x), expected)
        found.key_mask = mask
        model(x)
    assert list(found.layers) == ["first", "second"]
    assert torch.equal(model(x), expected)
    q, k = found.tensors("second", 10)
    assert q.shape == (4, 4, 10, 8) and k.shape == (4, 2, 10, 8)
    assert found.tensors("second", 16)[0].shape == (3, 4, 16, 8)
    with pytest.warns(UserWarning, match="layer second: 1 sequences of less than 16 tokens"):
        assert found.tensors("second")[0].shape == (3, 4, 16, 8)
    with pytest.raises(ValueError, match="17 tokens"):
        found.tensors("second", 17)
    with torch.no_grad():
        y = model.first(x, x, x, need_weights=False)[0] + x
        projected = model.second.q_proj(y).unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(found.tensors("second", 16)[0][:2], projected)
    results = found.analyze(kinds=("softmax",), tokens=16)
    assert [(e["layer_name"], e["head"]) for e in results][:5] == [
        *(("first", h) for h in range(4)),
        ("second", 0),
    ]


def test_short_sequences_do_not_cut_the_others() -> None:
    found = Collection()
    lengths = (30, 20, 20, 1, 0)
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    q = torch.randn(5, 2, 30, 8)
    found.add("layer", q, q, mask)
    with pytest.warns(UserWarning, match="2 sequences of less than 20 tokens are left out"):
        taken, _ = found.tensors("layer")
    assert torch.equal(taken, q[:3, :, :20])
    empty = Collection()
    empty.add("layer", q[4:], q[4:], mask[4:])
    with pytest.raises(ValueError, match="no sequence of layer layer has 1 tokens"):
        empty.tensors("layer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.layers["layer"] = found.layers["layer"][1:3]
        assert found.tensors("layer")[0].shape == (2, 2, 20, 8)


def test_report(tmp_path: Path) -> None:
    """The page of the program, with these results in it; names cannot end its script."""
    q = torch.randn(1, 2, 48, 16)
    name = "</script><b>&layer"
    results = analyze(q, q.roll(1, 2), layer=0, name=name)
    report(results, tmp_path / "page.html", title="A & B", facts=[("tokens", "48")])
    page = (tmp_path / "page.html").read_text()
    assert (
        "@DATA@" not in page
        and name not in page
        and list(tmp_path.iterdir()) == [tmp_path / "page.html"]
    )
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["results"] == results and data["title"] == "A & B"
    assert data["results"][0]["layer_name"] == name
    assert math.isfinite(data["results"][0]["entropy_nats"])
