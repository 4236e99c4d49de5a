"""HuggingFace transformers with LLN attention.

`register()` adds two names to transformers: attn_implementation="lln" and "lln_diag" (LLN+Diag).
`configure()` sets their options on a model, and `LLNCache` makes generation run in constant memory.

Example:
    >>> from transformers import BertConfig, BertModel
    >>> from lln_attention import hf
    >>> hf.register()
    >>> config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1,
    ...                     intermediate_size=64, vocab_size=100)
    >>> model = BertModel(config).eval()
    >>> model.set_attn_implementation("lln_diag")
    >>> hf.configure(model, diag_block=16)
"""

# SPDX-License-Identifier: Apache-2.0
try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "lln_attention.hf needs transformers: pip install 'lln-attention[hf]'"
    ) from error

if tuple(int(part) for part in _transformers.__version__.split(".")[:2]) < (5, 10):
    raise ImportError(
        f"lln_attention.hf needs transformers 5.10 or newer, found {_transformers.__version__}: "
        "pip install --upgrade transformers"
    )

from .cache import LLNCache
from .configuration import configure
from .registry import register
from .settings import Settings

__all__ = ["LLNCache", "Settings", "configure", "register"]
