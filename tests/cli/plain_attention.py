"""Attention by its definition, in plain loops of f64, for inputs of a few tokens.

SPDX-License-Identifier: Apache-2.0
"""

import math


def weighted(weights, rows, dim_v):
    total = sum(weights)
    if total == 0:
        return [0.0] * dim_v
    return [sum(w * row[c] for w, row in zip(weights, rows)) / total for c in range(dim_v)]


def lln_row(q, keys, values, alpha, beta, dim_v):
    weights = [sum(math.exp(alpha * a + beta * b) for a, b in zip(q, key)) for key in keys]
    return weighted(weights, values, dim_v)


def softmax_row(q, keys, values, dim_v):
    scale = 1 / math.sqrt(len(q))
    weights = [math.exp(scale * sum(a * b for a, b in zip(q, key))) for key in keys]
    return weighted(weights, values, dim_v)


def attend(kind, q, k, v, alpha=1, beta=1, mix=0.5, block=64, causal=False, valid=None):
    """One head of one sequence: lists of rows in, list of rows out."""
    dim_v = len(v[0])
    valid = valid or [True] * len(k)
    first = valid.index(True) if True in valid else 0

    def block_of(token):
        return (token - first) // block

    out = []
    for i, row in enumerate(q):
        seen = [j for j in range(len(k)) if valid[j] and (j <= i or not causal)]
        near = [j for j in seen if block_of(j) == block_of(i)]
        near = seen if kind == "softmax" else near
        keys, values = [k[j] for j in seen], [v[j] for j in seen]
        near_keys, near_values = [k[j] for j in near], [v[j] for j in near]
        if kind == "lln":
            out.append(lln_row(row, keys, values, alpha, beta, dim_v))
        elif kind in ("softmax", "diag"):
            out.append(softmax_row(row, near_keys, near_values, dim_v))
        else:
            far = lln_row(row, keys, values, alpha, beta, dim_v)
            local = softmax_row(row, near_keys, near_values, dim_v)
            out.append([mix * a + (1 - mix) * b for a, b in zip(far, local)])
    return out


def rows(values, shape):
    """Flat values of a [batch, head, token, channel] tensor as [batch][head][token] lists."""
    _, heads, tokens, dim = shape
    cut = [values[i : i + dim] for i in range(0, len(values), dim)]
    by_head = [cut[i : i + tokens] for i in range(0, len(cut), tokens)]
    return [by_head[i : i + heads] for i in range(0, len(by_head), heads)]


def flat(nested):
    return [x for batch in nested for head in batch for row in head for x in row]
