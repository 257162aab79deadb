"""Data sets by their names on the Hugging Face Hub, loaded with `datasets`; nothing of them is in this repository."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl.data_error import DataError


@dataclass(frozen=True)
class HubSet:
    """A published data set: repository, configuration and split."""

    repository: str
    subset: str | None
    split: str


HUB_SETS = {
    "dapo_math_17k": HubSet("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
    "gsm8k_train": HubSet("openai/gsm8k", "main", "train"),
    "gsm8k_test": HubSet("openai/gsm8k", "main", "test"),
    "math_500": HubSet("HuggingFaceH4/MATH-500", None, "test"),
    "aime_2024": HubSet("HuggingFaceH4/aime_2024", None, "train"),
    "aime_2025": HubSet("math-ai/aime25", None, "test"),
}
"""Short names for scripts/prepare_data.py."""


def hub_set(source: str, subset: str | None = None, split: str | None = None) -> HubSet:
    """The set that a short name or `owner/name` stands for.

    Raises:
        DataError: `source` is neither.
    """
    if source in HUB_SETS:
        known = HUB_SETS[source]
        return HubSet(known.repository, subset or known.subset, split or known.split)
    owner, slash, name = source.partition("/")
    if not (owner and slash and name) or "/" in name or source.startswith((".", "/", "~")):
        raise DataError(
            f"{source}: no such file, and no data set's name; give a .parquet or .jsonl file, owner/name on the Hub, "
            f"or one of {', '.join(HUB_SETS)}"
        )
    return HubSet(source, subset, split or "train")


def iter_hub_rows(wanted: HubSet) -> Iterator[dict[str, Any]]:
    """Rows of a set, a batch in memory at a time.

    Raises:
        DataError: the Hub cannot be reached, or has no such set, configuration or split.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(wanted.repository, wanted.subset, split=wanted.split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as failure:
        reason = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
        raise DataError(
            f"{wanted.repository} ({wanted.subset or 'default'}, split {wanted.split}): cannot be loaded from the Hub "
            f"({reason[:200]}); check name, --subset, --split and the network, or download it and give the file"
        ) from failure
    for batch in loaded.iter(batch_size=1000):
        names = list(batch)
        yield from (dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True))
