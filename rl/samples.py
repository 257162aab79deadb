"""A few samples of every step, kept in the run folder's samples.jsonl and shown in the report."""

from collections.abc import Callable

SAMPLES_A_STEP = 4


def choose(keys: list[str], tags: list[dict], count: int = SAMPLES_A_STEP) -> list[int]:
    """Places of `count` samples, spread evenly over the batch; padding is left out."""
    places = [place for place, tag in enumerate(tags) if not tag.get("is_padding", False)]
    count = min(count, len(places))
    assert len(keys) == len(tags)
    return [places[index * len(places) // count] for index in range(count)]


def sample_rows(data, decode: Callable[[list[int]], str]) -> list[dict]:
    """Rows of samples.jsonl from what TransferQueue holds of the samples: texts, gold and read answer, reward, error.

    Args:
        data: TensorDict with prompts and responses (jagged), rm_scores, reward_model and extra_fields.
        decode: token ids -> text.
    """
    rows = []
    parts = (data[name].unbind() for name in ("prompts", "responses", "rm_scores"))
    # A list of dicts, or of tensordict's wrappers around them, depending on where the TensorDict comes from.
    plain = ([getattr(item, "data", item) for item in data[name]] for name in ("reward_model", "extra_fields"))
    for prompt, response, score, reward_model, extra in zip(*parts, *plain, strict=True):
        judged = extra.get("reward_extra_info", {})
        rows.append(
            {
                "prompt": decode(prompt.tolist()),
                "response": decode(response.tolist()),
                "tokens": len(response),
                "gold": reward_model["ground_truth"],
                "answer": judged.get("pred") or None,
                "correct": bool(judged.get("acc", 0)),
                "error": judged.get("error") or None,
                "reward": float(score.sum()),
            }
        )
    return rows
