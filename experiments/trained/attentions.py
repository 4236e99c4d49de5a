"""Attentions in place of softmax in a model of transformers, for the program beside this file.

LLN and the positive feature maps are run by lln_attention, with alpha and beta from a calibration
of the package; softmax at other temperatures, the quadratic and the uniform one are written out.

SPDX-License-Identifier: Apache-2.0
"""

import torch
from harness.trained_plan import MIX
from transformers import AttentionInterface, AttentionMaskInterface

from lln_attention import attention
from lln_attention.hf.masks import key_padding_mask

WRITTEN_OUT = ("softmax", "quadratic", "uniform")


def softmax(q, k, v, counts, temperature):
    mask = None if counts is None else counts[:, None, None].bool()
    return torch.nn.functional.scaled_dot_product_attention(q / temperature, k, v, attn_mask=mask)


def quadratic(q, k, v, counts, _):
    """(q.k)^2, rows normalised: a factor does not change it."""
    weights = (q @ k.mT).square()
    if counts is not None:
        weights = weights * counts[:, None, None].to(weights.dtype)
    return weights @ v / weights.sum(-1, keepdim=True)


def uniform(q, k, v, counts, _):
    """Every key counts the same: all rows are the mean of the values."""
    if counts is None:
        return v.mean(2, keepdim=True).expand_as(q)
    weights = counts[:, None, :, None].to(v.dtype)
    return ((v * weights).sum(2, keepdim=True) / weights.sum(2, keepdim=True)).expand_as(q)


def read(row, q, k, v, counts=None, scales=None, added=None, x=None):
    """What the row's attention gives for q, k, v [batch, heads, tokens, channels].

    Args:
        row: Of harness.trained_plan.
        q: Queries, such that the logits of softmax are q.k / sqrt(channels).
        k: Keys.
        v: Values.
        counts: [batch, tokens], the keys that count; none where all do.
        scales: alpha and beta of each head, where the row's mode asks for them.
        added: What the row's ideas add, where it has any (ideas.py).
        x: [batch, tokens, heads * channels] that the layer takes, for a gate.
    """
    if row.ideas:
        far = (
            added.lln(q, k, v, counts, scales or (row.factor, row.factor))
            if row.long == "lln"
            else globals()[row.long](q, k, v, counts, row.factor)
        )
        near = attention(q, k, v, diag_block=row.block, mix=0.0, key_mask=counts)
        return near + added.share(x) * (far - near)
    if row.long and row.long not in WRITTEN_OUT:
        alpha, beta = scales or (row.factor, row.factor)
        feature = "exp" if row.long == "lln" else row.long
        given = {"alpha": alpha, "beta": beta} if row.long == "lln" else {}
        block = row.block if row.diag else 0
        return attention(
            q, k, v, feature=feature, diag_block=block, mix=MIX, key_mask=counts, **given
        )
    far = globals()[row.long](q, k, v, counts, row.factor) if row.long else None
    if not row.diag:
        return far
    near = attention(q, k, v, diag_block=row.block, mix=0.0, key_mask=counts)
    return near if far is None else MIX * far + (1 - MIX) * near


def use(model, name, forward):
    """Has the model compute its attention by forward(module, q, k, v, mask), in place."""
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, key_padding_mask)
    model.set_attn_implementation(name)


def keep_input(module, arguments, named):
    """What an attention layer is called with, for its gate."""
    module.trained_input = arguments[0] if arguments else named["hidden_states"]


def swap(model, row, calibration=None, added=None):
    """Gives every layer of the model the row's attention, in place; added: what its ideas add to
    each layer, by name."""
    if calibration is not None:
        calibration.place(model)
    for name, own in (added or {}).items():
        module = model.get_submodule(name)
        module.trained_idea = own
        module.register_forward_pre_hook(keep_input, with_kwargs=True)

    def forward(module, query, key, value, attention_mask, **_):
        # The scaling of BERT is the usual one, and models in evaluation mode drop nothing.
        placed = getattr(module, "lln_scales", None)
        scales = None if placed is None else (placed.alpha, placed.beta)
        counts = None if attention_mask is None else attention_mask.bool()
        own, x = getattr(module, "trained_idea", None), module.__dict__.pop("trained_input", None)
        return read(row, query, key, value, counts, scales, own, x).transpose(1, 2), None

    use(model, f"trained-{row.name}", forward)


@torch.no_grad()
def inputs(model, batches):
    """[(name of the layer, q, k, v)] of the model with softmax, for batches without padding."""
    names = {module: name for name, module in model.named_modules()}
    found = {}

    def forward(module, query, key, value, attention_mask, **_):
        found.setdefault(names[module], []).append((query, key, value))
        return softmax(query, key, value, attention_mask, 1).transpose(1, 2), None

    before = model.config._attn_implementation
    use(model, "trained-inputs", forward)
    for batch in batches:
        model(**batch)
    model.set_attn_implementation(before)
    return [(name, *map(torch.cat, zip(*calls, strict=True))) for name, calls in found.items()]
