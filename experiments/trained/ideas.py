"""Ideas that bring LLN + Diag nearer to softmax + Diag, for attentions.py: each as the zoo defines
it (lln_torch/zoo/lln.cc, and attention.cc for the weights of the two parts), here with alpha and
beta from a calibration on q and k as the map takes them.

SPDX-License-Identifier: Apache-2.0
"""

import dataclasses

import torch
from harness.trained_plan import FEATURES, MIX

import lln_attention

MAPPING = ("two-sided", "centred", *FEATURES)  # which change q and k before the map


class Added(torch.nn.Module):
    """What the ideas of a row add to the attention of a layer.

    Args:
        ideas: Of harness.trained_plan.
        heads: Of the layer.
        channels: Of a head.
        seed: Of what is drawn at random.
    """

    def __init__(self, ideas, heads, channels, seed=0):
        super().__init__()
        self.ideas = ideas
        if "gate" in ideas:
            self.gate = torch.nn.Linear(heads * channels, heads)
            for x in self.gate.parameters():
                torch.nn.init.zeros_(x)  # the mix begins at one half
        if "mix" in ideas:
            self.mix = torch.nn.Parameter(torch.full((heads, channels), MIX))
        if "contrast" in ideas:
            self.chain = torch.nn.Parameter(torch.zeros(heads))
        for idea in (idea for idea in FEATURES if idea in ideas):
            self.wide = rotations(heads, channels, FEATURES[idea], seed)
            if idea != "rotations":  # which stay what the others begin with
                self.wide = torch.nn.Parameter(self.wide)
        if "scales" in ideas:  # what the calibrated ones are multiplied by
            self.log_alpha = torch.nn.Parameter(torch.zeros(heads))
            self.log_beta = torch.nn.Parameter(torch.zeros(heads))

    def mapped(self, q, k, counts=None):
        """q and k as the map takes them."""
        if "centred" in self.ideas:
            k = k - mean_of_tokens(k, counts)
        if hasattr(self, "wide"):
            q, k = q @ self.wide, k @ self.wide
        if "two-sided" in self.ideas:
            q, k = torch.cat([q, -q], -1), torch.cat([k, -k], -1)
        return q, k

    def lln(self, q, k, v, counts, scales):
        """What LLN gives, without Diag."""
        alpha, beta = scales
        if "scales" in self.ideas:
            alpha, beta = alpha * self.log_alpha.exp(), beta * self.log_beta.exp()
        q, k = self.mapped(q, k, counts)
        options = {"alpha": alpha, "beta": beta, "key_mask": counts}
        once = lln_attention.attention(q, k, v, **options)
        if "contrast" not in self.ideas:
            return once
        twice = lln_attention.attention(q, k, once, **options)
        return once + self.chain.sigmoid()[:, None, None] * (once - twice)

    def share(self, x):
        """Of what reads all keys, beside Diag, as it is multiplied with [batch, heads, tokens,
        channels]; x [batch, tokens, dim] is what the layer takes."""
        if "gate" in self.ideas:
            return self.gate(x).sigmoid().mT[..., None]
        return self.mix[:, None] if "mix" in self.ideas else MIX


def rotations(heads, channels, features, seed):
    """[heads, channels, features]: random rotations side by side, the last one cut."""
    blocks = -(-features // channels)
    draw = torch.randn(
        heads,
        blocks,
        channels,
        channels,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
    orthogonal, upper = torch.linalg.qr(draw)
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return (orthogonal * signs).transpose(1, 2).flatten(2)[..., :features].float().contiguous()


def mean_of_tokens(k, counts):
    if counts is None:
        return k.mean(2, keepdim=True)
    weights = counts[:, None, :, None].to(k.dtype)
    return (k * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp(min=1)


class Seen(torch.nn.Module):
    """An attention over given q and k, for a calibration to see them."""

    def forward(self, q, k):
        return torch.nn.functional.scaled_dot_product_attention(q, k, k)


@torch.no_grad()
def calibrate(layers, added, mode, batch):
    """As lln_attention.calibrate, on q and k as the map takes them.

    Args:
        layers: [(name, q, k, v)] of the model with softmax, of sequences without padding.
        added: Name -> Added.
        mode: Of the calibration.
        batch: Sequences that are taken at a time.
    """
    found = []
    for name, q, k, _ in layers:
        seen = zip(*(x.split(batch) for x in added[name].mapped(q, k)), strict=True)
        (own,) = lln_attention.calibrate(Seen(), list(seen), mode=mode).layers
        found.append(dataclasses.replace(own, name=name))
    return lln_attention.Calibration(mode, tuple(found))


def learned(model):
    """{parameter: mean, deviation, least and largest of its numbers in all layers}, and how many
    numbers the ideas add."""
    own, count = {}, 0
    for module in model.modules():
        if isinstance(module, Added):
            for name, x in module.named_parameters():
                own.setdefault(name, []).append(x.detach().flatten())
                count += x.numel()
    numbers = {name: torch.cat(parts) for name, parts in own.items()}
    return {
        "added_parameters": count,
        "learned": {
            name: [x.mean().item(), x.std().item(), x.min().item(), x.max().item()]
            for name, x in numbers.items()
        },
    }
