"""What is refused before it reaches a loss."""

import pytest

from rollout.sampling import check_finite


def test_log_probs_must_be_finite():
    check_finite([], "rollout")
    check_finite([-0.5, 0.0, -80.0], "rollout")
    for bad in (float("nan"), float("-inf"), float("inf")):
        with pytest.raises(FloatingPointError, match="rollout: the engine's log-prob of token 1 is"):
            check_finite([-0.5, bad, -1.0], "rollout")
