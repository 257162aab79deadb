"""Rows of math problems (stub; extended below)."""

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_prompt(problem: str) -> str:
    """The problem in the prompt form that DAPO-Math-17K was published with: the last line must be ``Answer: $Answer``."""
    return f"{DAPO_PREFIX}{problem}{DAPO_SUFFIX}"
