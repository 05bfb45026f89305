"""What holds for every test: a draw without a seed of its own is the same in any order of tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
