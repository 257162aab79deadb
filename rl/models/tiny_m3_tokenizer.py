"""The tokenizer of the tiny MiniMax-M3 model, for the problems of `rl.long_math`: a token a word, a token a digit."""

import json
from collections.abc import Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl import long_math
from rl.data import DAPO_PREFIX, DAPO_SUFFIX
from rl.models.tiny import CHAT_TEMPLATE, END, PAD, START, VOCAB_SIZE

MODEL_MAX_LENGTH = 2048
INSTRUCTIONS = (DAPO_PREFIX, DAPO_SUFFIX)
"""DAPO's constant text before and after a problem: one token each, which decodes to this text."""

# An operation with its spaces; a digit; a line break; a word with the space in front of it, and with the one behind it
# when a digit follows; a punctuation mark; other spaces. Marks are apart, so that "apples." has the token of "apples".
_PIECES = r" [-+*=] |[0-9]|\n| ?[^0-9\n .,?]+(?: (?=[0-9]))?|[.,?]| "

_RARE = (
    "system user solve step first then total number both left take add equals minus times half twice so problem answer"
)
"""Words of other prompts, for the ids that the problems leave."""


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` tokens, trained on generated problems.

    Every digit, line break and punctuation mark is a token of its own, every word of the problems one token with the
    space in front of it. All 256 bytes are in the vocabulary: any text can be encoded, and decoding gives it back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(INSTRUCTIONS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_with_instructions(tokenizer),
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL_MAX_LENGTH,
    )


def _with_instructions(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with `INSTRUCTIONS` as its last ids, in the model's vocabulary too, so that it counts them."""
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for text in INSTRUCTIONS:
        vocabulary[text] = len(vocabulary)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        state["added_tokens"].append({"id": vocabulary[text], "content": text, **flags})
    return Tokenizer.from_str(json.dumps(state))


def _corpus(seed: int) -> Iterator[str]:
    for problem in islice(long_math.stream("train", seed), 1000):
        yield f"user\n{problem.text}"
        yield f"assistant\n{long_math.worked_solution(problem)}"
    yield f"system\n {_RARE}"
