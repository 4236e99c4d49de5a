"""Attention in plain torch, as its users write it: the peers of this library on every device.

SPDX-License-Identifier: Apache-2.0
"""

import torch


def softmax_attention(q, k, v, alpha, beta, causal):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def grouped(q, k, v):
    """Key heads repeated for their query heads."""
    repeats = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def lln_identity(q, k, v, alpha, beta, causal):
    """Softmax over keys turns v into one row per channel; softmax over channels reads it."""
    q, k, v = grouped(q, k, v)
    keys = (beta * k).float()
    channels = torch.logsumexp(keys, 2, keepdim=True)  # [b, h, 1, d]
    values = torch.exp(keys - channels).to(v.dtype).transpose(2, 3) @ v  # [b, h, d, dv]
    return torch.softmax((alpha * q).float() + channels, 3).to(v.dtype) @ values


def lln_features(q, k, v, alpha, beta, causal):
    """exp features, two products, one division; the largest exponent is taken out for safety."""
    q, k, v = grouped(q, k, v)
    phi_q = torch.exp(alpha * q - (alpha * q).amax(3, keepdim=True))
    phi_k = torch.exp(beta * k - (beta * k).amax((2, 3), keepdim=True))
    return (phi_q @ (phi_k.transpose(2, 3) @ v)) / (phi_q @ phi_k.sum(2).unsqueeze(3))
