"""A training that takes seconds on a CPU and needs no data: what the tests of lln train share.

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cli"))

CONFIG = """
[data]
task = "mqar"
tokens = 32
pairs = 4
vocabulary = 64
train_rows = 1000
validation_rows = 32

[model]
layers = 2
dim = 32
heads = 2
dropout = 0.1

[attention]
name = "lln+diag"
diag_block = 16

[train]
steps = 60
batch = 8
accumulate = 2
warmup = 10
learning_rate = 3e-3
log_every = 5
evaluate_every = 20
checkpoint_every = 3
instruments_every = 30
"""

# What two runs of one config may differ in.
MEASURED = ("tokens_per_second", "rows_per_second", "memory_bytes", "seconds")


def rows(run, name):
    found = []
    for line in pathlib.Path(run, name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.append({key: value for key, value in row.items() if key not in MEASURED})
    return found


def checkpoint(run, step):
    return os.path.join(run, "checkpoints", f"step-{step:08}")


def files_of(run, step):
    """What must be the same, bit for bit."""
    return {name: pathlib.Path(checkpoint(run, step), name).read_bytes()
            for name in ("weights.safetensors", "optimizer.safetensors")}
