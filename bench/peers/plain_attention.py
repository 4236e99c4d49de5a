"""Attention in plain torch, as its users write it: the peers of this library on every device.

SPDX-License-Identifier: Apache-2.0
"""

import torch

from problem_text import sizes_of


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


def call_of(function, problem, gaussian):
    """One call of a problem on q, k, v and g of its own, of the shapes that gaussian() is given."""
    size, training = sizes_of(problem), problem["op"] != "forward"
    q = gaussian(size["b"], size["h"], size["n"], size["d"]).requires_grad_(training)
    k = gaussian(size["b"], size["k"], size["m"], size["d"]).requires_grad_(training)
    v = gaussian(size["b"], size["k"], size["m"], size["v"]).requires_grad_(training)
    g = gaussian(size["b"], size["h"], size["n"], size["v"])

    def forward():
        return function(q, k, v, 1.5, 1.5, bool(problem["causal"]))

    if problem["op"] == "forward":
        return forward
    if problem["op"] == "backward":
        output = forward()
        return lambda: torch.autograd.grad(output, (q, k, v), g, retain_graph=True)
    return lambda: torch.autograd.grad(forward(), (q, k, v), g)
