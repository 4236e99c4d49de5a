"""The names that transformers learns: which function each one runs, and which mask it gets."""

# SPDX-License-Identifier: Apache-2.0
from transformers import AttentionInterface, AttentionMaskInterface

from .forward import lln_diag_forward, lln_forward
from .masks import key_padding_mask


def register() -> None:
    """Makes attn_implementation="lln" and "lln_diag" known to transformers.

    Once per process, before a model is made or `set_attn_implementation` is called with one of
    the names; calling it again changes nothing.

    Example:
        >>> from transformers import AttentionInterface
        >>> register()
        >>> "lln" in AttentionInterface() and "lln_diag" in AttentionInterface()
        True
    """
    for name, forward in (("lln", lln_forward), ("lln_diag", lln_diag_forward)):
        AttentionInterface.register(name, forward)
        # Without its own mask function a name gets no mask at all, padding included.
        AttentionMaskInterface.register(name, key_padding_mask)
