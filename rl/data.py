"""Data sets of math problems: rows in the schema of DAPO-Math-17K, read, checked and written (see ``rl.prepare``).

A row is::

    {"data_source": str,                                         # names the data set, and so the verifier
     "prompt": [{"role": str, "content": str}, ...],             # a chat; the last message asks for "Answer: ..."
     "ability": str,
     "reward_model": {"ground_truth": str, "style": str},        # the gold answer as text
     "extra_info": {"index": int or str, ...}}

No torch here: a bad data set is refused before anything heavy is imported.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl.data_error import DataError
from rl.hub import hub_set, iter_hub_rows

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
_ASKS_FOR_ANSWER_LINE = ("of the form Answer:", 'after "Answer:"')

_MESSAGE_FIELDS = ("role", "content")
Messages = tuple[tuple[str, str], ...]
"""A prompt that can be compared and hashed: (role, content) of each message."""
_READERS = (".parquet", ".jsonl")


def dapo_prompt(problem: str) -> str:
    """The problem in the form DAPO-Math-17K was published with: the last line must be ``Answer: $Answer``."""
    return f"{DAPO_PREFIX}{problem}{DAPO_SUFFIX}"


def asks_for_answer_line(prompt: str) -> bool:
    """Whether a prompt already tells the model to end with ``Answer: ...``, which ``rl.reward`` reads first."""
    return any(marker in prompt for marker in _ASKS_FOR_ANSWER_LINE)


def messages_of(row: dict[str, Any]) -> Messages:
    """The prompt of a checked row."""
    return tuple((message["role"], message["content"]) for message in row["prompt"])


def with_answer_line(messages: Messages) -> Messages:
    """The prompt with DAPO's instruction around its last message, unless a message has it already."""
    if any(asks_for_answer_line(content) for _, content in messages):
        return messages
    role, content = messages[-1]
    return (*messages[:-1], (role, dapo_prompt(content)))


def with_prompt(row: dict[str, Any], messages: Messages) -> dict[str, Any]:
    """The row with another prompt."""
    return {**row, "prompt": [dict(zip(_MESSAGE_FIELDS, message, strict=True)) for message in messages]}


def chat_ids(tokenizer, prompts: Iterable[Iterable[dict[str, str]]]) -> list[list[int]]:
    """Token ids of each prompt (its messages), up to where the assistant's turn begins: as rollouts are asked."""
    conversations = [list(messages) for messages in prompts]
    return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)


def load_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a .parquet or .jsonl file as plain dicts, unchecked (see ``validate_rows``).

    Raises:
        DataError: no such file, another suffix, or a file that cannot be read.
    """
    return list(_iter_rows(Path(path)))


def _iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix not in _READERS:
        raise DataError(f"{path}: a data set is a {' or '.join(_READERS)} file; convert it first")
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path, or prepare the data set first")
    yield from _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


def problem_rows(path: str | Path, name: str | Path | None = None) -> list[dict[str, Any]]:
    """Checked rows of a data set in this schema, or of any file of {question or problem, answer} objects.

    An answer may end a worked solution after "####", as in GSM8K. A prompt that does not ask for the ``Answer:`` line
    gets DAPO's instruction, as in training (``rl.prepare``). `name` stands for the path in messages about rows.

    Raises:
        DataError: the file cannot be read, or a row has neither form.
    """
    rows = list(_problems(_iter_rows(Path(path)), name or path))
    validate_rows(rows, name or path)
    return [with_prompt(row, with_answer_line(messages_of(row))) for row in rows]


def _problems(rows: Iterable[Any], path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows in this schema, each checked when it comes."""
    for index, row in enumerate(rows):
        if isinstance(row, dict) and "prompt" not in row:
            row = _from_question(row, index, path)
        fault = _fault(row)
        if fault:
            raise DataError(f"{path}: row {index}: {fault}")
        yield row


def source_rows(source: str, subset: str | None = None, split: str | None = None) -> dict[str, tuple[dict, int]]:
    """Checked rows of a file, or of a set on the Hub (``rl.hub``), each with the number of its exact copies.

    Prompts are as the set has them, without an added instruction.
    The Hub's DAPO-Math-17k repeats each problem a hundred times: 1.8 million rows, of which the first copies are kept.

    Raises:
        DataError: nothing of that name, it cannot be read, or a row has neither form.
    """
    path = Path(source)
    from_file = path.suffix in _READERS or path.exists()
    rows: dict[str, tuple[dict, int]] = {}
    for row in _problems(_iter_rows(path) if from_file else iter_hub_rows(hub_set(source, subset, split)), source):
        text = repr((messages_of(row), row["reward_model"]["ground_truth"]))
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        first, copies = rows.get(key, (row, 0))
        rows[key] = (first, copies + 1)
    if not rows:
        raise DataError(f"{source}: no rows; training needs at least one")
    return rows


def _from_question(row: Any, index: int, path: str | Path) -> dict[str, Any]:
    fields = row if isinstance(row, dict) else {}
    question, answer = fields.get("problem") or fields.get("question"), fields.get("answer")
    if not isinstance(question, str) or answer is None:
        raise DataError(
            f"{path}: row {index}: has neither prompt nor question and answer; see rl/data.py for the schema"
        )
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or answer != answer:
        raise DataError(f"{path}: row {index}: answer is {_short(answer)}; give a text or a number")
    return {
        "data_source": Path(path).stem,
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": str(answer).rpartition("####")[2].strip(), "style": "rule"},
        "extra_info": {"index": index},
    }


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as failure:
        reason = str(failure).splitlines()[0]
        raise DataError(f"{path}: not a readable parquet file ({reason}); write or download it again") from failure


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as failure:
                raise DataError(f"{path}: line {number} is not JSON ({failure.msg}); one object a line") from failure
            except UnicodeDecodeError as failure:
                raise DataError(f"{path}: line {number} is not UTF-8; convert the file") from failure
            yield row


def validate_rows(rows: Sequence[Any], path: str | Path) -> None:
    """Checks every row against the schema above; ``path`` is only named in the message.

    Raises:
        DataError: the data set is empty, or a field is missing, empty or of the wrong type.
    """
    if not rows:
        raise DataError(f"{path}: no rows; training needs at least one")
    for index, row in enumerate(rows):
        fault = _fault(row)
        if fault:
            raise DataError(f"{path}: row {index}: {fault}")


_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write one; no file can


def _fault(row: Any) -> str | None:
    """What is wrong with one row and what to do about it, or None."""
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, expected an object with prompt and reward_model"
    reward_model = row.get("reward_model")
    checks = [
        _text_fault(row, "data_source", "", "name the data set, for example math_dapo"),
        _prompt_fault(row.get("prompt")),
        _type_fault(reward_model, dict, "reward_model", 'give {"ground_truth": "...", "style": "rule"}'),
    ]
    if isinstance(reward_model, dict):
        checks.append(_text_fault(reward_model, "ground_truth", "reward_model.", "add the gold answer or drop the row"))
    if row.get("extra_info") is not None:
        checks.append(_type_fault(row["extra_info"], dict, "extra_info", 'give {"index": ...} or leave it out'))
    return next((fault for fault in checks if fault), None)


def _type_fault(value: Any, expected: type, name: str, remedy: str) -> str | None:
    if value is None:
        return f"{name} is missing; {remedy}"
    if not isinstance(value, expected):
        return f"{name} is {type(value).__name__} {_short(value)}, expected {expected.__name__}; {remedy}"
    return None


def _text_fault(parent: dict, key: str, prefix: str, remedy: str) -> str | None:
    value = parent.get(key)
    fault = _type_fault(value, str, prefix + key, remedy)
    if fault is None and not value.strip():
        return f"{prefix}{key} is empty; {remedy}"
    if fault is None and not value.isascii() and _SURROGATE.search(value):
        return f"{prefix}{key} has half of a character (a lone surrogate); remove it"
    return fault


def _prompt_fault(prompt: Any) -> str | None:
    remedy = 'give a list such as [{"role": "user", "content": "..."}]'
    fault = _type_fault(prompt, list, "prompt", remedy)
    if fault is None and not prompt:
        return f"prompt is empty; {remedy}"
    if fault:
        return fault
    for place, message in enumerate(prompt):
        fault = _type_fault(message, dict, f"prompt[{place}]", remedy)
        for field in _MESSAGE_FIELDS:
            fault = fault or _text_fault(message, field, f"prompt[{place}].", remedy)
        if fault:
            return fault
    if prompt[-1]["role"] != "user":
        return f"prompt ends with role {prompt[-1]['role']!r}, expected user; {remedy}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def write_rows(rows: Iterable[dict[str, Any]], path: str | Path) -> None:
    """Writes rows as parquet; the file appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), partial, compression="zstd")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
