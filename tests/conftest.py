"""Every test starts from the same random state, whatever ran before it."""

import random
import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # not imported here: some tests do without it
        torch.manual_seed(0)
