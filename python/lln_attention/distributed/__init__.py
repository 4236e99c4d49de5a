"""Attention over sequences that lie in pieces on several processes.

Every process of a group has a piece of the sequence and calls `attention` with its q, k and v;
`Pieces` says how the sequence is cut and which of its tokens count. What travels between processes
is the state of each piece's keys, whose size does not depend on the number of tokens.
"""

# SPDX-License-Identifier: Apache-2.0
from .functional import attention, update_moments
from .pieces import Pieces

__all__ = ["Pieces", "attention", "update_moments"]
