"""stub"""
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reward:
    score: float
    correct: bool
    answer: str | None
    error: str | None


def score(response, gold):
    m = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response.replace("<|im_end|>", ""))
    a = m[-1].strip() if m else None
    c = a is not None and a == gold
    return Reward(1.0 if c else -1.0, c, a, None)
