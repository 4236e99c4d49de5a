"""The functions behind attn_implementation="lln" and "lln_diag".

transformers calls them with q, k and v [batch, heads, tokens, dim] of one layer. Here is what lies
between that and `lln_attention.attention`: the model's own scaling of the logits, the mask, the
cache, and an answer to everything that LLN attention cannot do.
"""

# SPDX-License-Identifier: Apache-2.0
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from ..functional import attention
from ..observation import with_usual_scaling
from .cache import NewKeys
from .settings import scales_of, settings_of

# Arguments of attention functions that change single weights, and what to do without them.
WEIGHT_ARGUMENTS = {
    "head_mask": "prune the heads in place of masking them",
    "position_bias": "use a model without biases that depend on pairs of positions",
    "softcap": "use a model without soft caps on its logits",
    "s_aux": "use a model without attention sinks",
    "cu_seq_lens_q": "give each sequence its own row of the batch",
    "cache": "generate without continuous batching",
}


def lln_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """LLN attention as AttentionInterface calls it: o [batch, tokens, heads, dim]."""
    return _forward(module, query, key, value, attention_mask, False, **kwargs)


def lln_diag_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same for LLN+Diag."""
    return _forward(module, query, key, value, attention_mask, True, **kwargs)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    diag: bool,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    causal = causality(module, is_causal)
    if sliding_window is not None and not causal:
        # What is far is masked here anyway: these layers keep softmax.
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, False
        )
        return output, None
    _refuse(module, attention_mask, dropout, sliding_window, kwargs)
    settings = settings_of(_config_of(module))
    alpha, beta = scales_of(module, settings)
    if causal and alpha is None and settings.matching != "none":
        raise ValueError(
            "causal LLN attention needs alpha and beta that do not depend on the tokens to come: "
            "lln_attention.calibrate(model, batches).apply(model), or "
            "hf.configure(model, matching='none') for alpha = beta = 1"
        )
    query = with_usual_scaling(query, scaling)
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "matching": settings.matching}
    if diag:
        options |= {"diag_block": settings.diag_block, "mix": settings.mix}
    if isinstance(key, NewKeys):
        if not causal:
            raise NotImplementedError(
                "LLNCache is for causal attention: call a model that sees tokens to come without "
                "past_key_values"
            )
        return key.attend(query, value, attention_mask, options).transpose(1, 2), None
    past = key.shape[2] - query.shape[2] if causal else 0
    if past > 0:
        # With a cache of all keys: rows of the tokens before are computed and thrown away.
        query = functional.pad(query, (0, 0, past, 0))
    output = attention(query, key, value, causal=causal, key_mask=attention_mask, **options)
    return output[:, :, past:].transpose(1, 2), None


def causality(module: nn.Module, is_causal: bool | None) -> bool:
    """Whether a layer is causal, by the rule of transformers: the argument, else the module."""
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _config_of(module: nn.Module) -> PreTrainedConfig:
    config = module.config
    assert isinstance(config, PreTrainedConfig)  # transformers found the attention's name there
    return config


def _refuse(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    config = _config_of(module)
    instead = ", or use set_attn_implementation('sdpa')"
    if sliding_window is not None:
        raise NotImplementedError(
            f"LLN attention has no causal sliding window (this layer's is {sliding_window}): "
            "set config.sliding_window to None before the model is made" + instead
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise NotImplementedError(
            "LLN attention is for encoders and for decoders without cross attention: use such a "
            "model" + instead
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"LLN attention got a mask of shape {list(attention_mask.shape)} over the attention "
            "matrix: give an attention_mask [batch, tokens] of the tokens that count" + instead
        )
    if dropout > 0:
        raise NotImplementedError(
            f"LLN attention has no weights to drop (dropout {dropout}): set the attention dropout "
            "of the config to 0 when the model is made, as in from_pretrained(..., "
            "attention_probs_dropout_prob=0) (attn_pdrop for GPT-2, attention_dropout for Llama "
            "and ModernBERT)" + instead
        )
    # Of what it is to return a model tells only its collector: GPT-2 drops the argument.
    if kwargs.get("output_attentions") or "attentions" in (_active_collector.get() or ()):
        raise NotImplementedError(
            "LLN attention never forms its weights, so output_attentions cannot return them: "
            "use lln_attention.analyze for what they are like, or set_attn_implementation('eager')"
        )
    for name, advice in WEIGHT_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"LLN attention does not take {name}: {advice}{instead}")
