"""The tiny model of ``make train``: its tokenizer, its Qwen3-MoE network, its supervised training and its evaluation.

A real mixture of experts (8 experts, top-2) of 2.7 M parameters whose shapes are multiples of the blocks and tiles that
NVFP4, MXFP8 and their kernels want. It is first trained on plain calculations, then on demonstrations half of which end
in a wrong answer (see ``rl.tiny_math``).

Shape suffixes: B sequences, T tokens of a sequence, V vocabulary, N response tokens of a batch.
"""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rl import tiny_math
from rl.data import dapo_prompt
from rl.reward import score

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 640
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_NEW_TOKENS = 40
IGNORE = -100


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly ``VOCAB_SIZE`` tokens, trained on generated problems.

    Every digit and every line break is a token of its own, so that arithmetic is digit by digit. Merges may cross
    spaces and sentences otherwise, so that DAPO's constant instruction costs one token in front of the problem and one
    behind it. All 256 bytes are in the vocabulary: any text can be encoded, and decoding gives it back.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|\n|[^0-9\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_corpus(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _tokenizer_corpus(seed: int) -> Iterator[str]:
    for problem in tiny_math.generate("train", 4000, seed):
        yield f"user\n{dapo_prompt(problem.text)}"
        yield f"assistant\n{tiny_math.worked_solution(problem)}"
    yield "system\n"


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3MoeForCausalLM:
    """An untrained float32 model whose vocabulary is exactly the tokenizer's."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.01,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model


@dataclass
class Batch:
    """``input_ids`` [B, T] and ``labels`` [B, T] (the next token, or ``IGNORE``), both int64, padded on the right."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def _collate(examples: list[tuple[list[int], int]], pad: int) -> Batch:
    """``examples``: (token ids, length of the part that carries no loss)."""
    width = max(len(ids) for ids, _ in examples) - 1
    input_ids = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), IGNORE)
    for row, (ids, skip) in enumerate(examples):
        input_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, skip - 1 : len(ids) - 1] = torch.tensor(ids[skip:])
    return Batch(input_ids, labels)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a problem as a chat prompt that ends where the assistant's turn begins."""
    messages = [{"role": "user", "content": dapo_prompt(text)}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def calculations(tokenizer: PreTrainedTokenizerFast, seed: int, batch_size: int, width: int = 48) -> Iterator[Batch]:
    """Endless batches of plain right calculations, the steps of training problems without their words."""
    problems = tiny_math.stream("train", seed)
    newline = tokenizer.encode("\n")
    while True:
        examples = []
        for _ in range(batch_size):
            ids: list[int] = list(newline)
            while len(ids) < width:
                ids += tokenizer.encode(tiny_math.worked_solution(next(problems)).rsplit("\n", 1)[0] + "\n")
            examples.append((ids[:width], 1))
        yield _collate(examples, tokenizer.pad_token_id)


def demonstrations(tokenizer: PreTrainedTokenizerFast, seed: int, batch_size: int) -> Iterator[Batch]:
    """Endless batches of chat demonstrations, half of them flawed; sequences of like length share a batch."""
    problems = tiny_math.stream("train", seed)
    rng = random.Random(f"demonstrations:{seed}")
    while True:
        pool = []
        for _ in range(16 * batch_size):
            problem = next(problems)
            prompt = prompt_ids(tokenizer, problem.text)
            answer = tokenizer.encode(tiny_math.demonstration(problem, rng)) + [tokenizer.eos_token_id]
            pool.append((prompt + answer, len(prompt)))
        pool.sort(key=lambda example: len(example[0]))
        batches = [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            yield _collate(batch, tokenizer.pad_token_id)


def loss_of(model: Qwen3MoeForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean cross-entropy over the labelled tokens, load-balancing loss over all tokens)."""
    output = model.model(input_ids=batch.input_ids, use_cache=False, output_router_logits=True)
    chosen = batch.labels != IGNORE
    logits_NV = model.lm_head(output.last_hidden_state[chosen])
    loss = torch.nn.functional.cross_entropy(logits_NV, batch.labels[chosen])
    config = model.config
    balance = load_balancing_loss_func(output.router_logits, config.num_experts, config.num_experts_per_tok)
    return loss, balance


def _learning_rate(done: float, peak: float, warmup: float = 0.04) -> float:
    """Linear warm-up, then a cosine down to a hundredth of ``peak``; ``done`` in [0, 1]."""
    if done < warmup:
        return peak * done / warmup
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))))
