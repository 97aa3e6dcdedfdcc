"""Everything runs without the Hub and on one thread, so that two test processes do not slow each other down."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).parents[2] / "shared" / "data"

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Tests marked `shared_data` read real data sets that a user's clone does not have beside it."""
    if not SHARED.is_dir():
        absent = pytest.mark.skip(reason="the real data sets (../shared/data) are not beside the project")
        for item in items:
            if item.get_closest_marker("shared_data"):
                item.add_marker(absent)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
