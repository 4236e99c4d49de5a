"""Every test begins from the same random numbers."""

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
