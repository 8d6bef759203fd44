"""Set-up for all tests, and what they share: the cells, the oracle, a small model."""

import os
import sys
from pathlib import Path

# bfloat16 products kill the process on some CPUs that advertise AMX and do not have it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
