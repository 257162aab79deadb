"""The tiny model of ``make train``: its tokenizer, its Qwen3-MoE network and its accuracy on held-out problems.

A real mixture of experts (8 experts, top-2) of 2.7 M parameters, 0.85 M of them active for a token. Its shapes are
multiples of the blocks of NVFP4 and MXFP8 and of the tiles of their GPU kernels. ``rl.models.tiny_training`` trains it.

Shape suffixes: B sequences, T tokens of a sequence, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl import tiny_math
from rl.data import chat_ids, dapo_prompt
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
SIZES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 192,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mid": {
        "hidden_size": 512,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
}
"""tiny: the committed model, 2.7 M parameters. mid: 29 M, with head dimension and top-k of real models, for GPUs."""


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


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, size: str = "tiny") -> Qwen3MoeForCausalLM:
    """An untrained float32 model of a size of `SIZES` whose vocabulary is exactly the tokenizer's."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        **SIZES[size],
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
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


def prompt_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each problem as a chat prompt that ends where the assistant's turn begins."""
    return chat_ids(tokenizer, ([{"role": "user", "content": dapo_prompt(text)}] for text in texts))


@torch.inference_mode()
def generate(
    model: Qwen3MoeForCausalLM, prompts: list[list[int]], temperature: float, seed: int = 0
) -> list[list[int]]:
    """Continues each prompt until the end-of-turn token (kept) or ``MAX_NEW_TOKENS``.

    Prompts of equal length share a batch, so that nothing is padded and no mask is needed. Temperature 0 is greedy.
    """
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    responses: list[list[int]] = [[] for _ in prompts]
    device = model.device
    rng = torch.Generator(device).manual_seed(seed)
    end = model.config.eos_token_id
    for places in by_length.values():
        tokens_BT = torch.tensor([prompts[place] for place in places], device=device)
        cache = DynamicCache(config=model.config)
        written = []
        running_B = torch.ones(len(places), dtype=torch.bool, device=device)
        while len(written) < MAX_NEW_TOKENS and running_B.any():
            logits_BV = model(input_ids=tokens_BT, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
            if temperature == 0:
                tokens_BT = logits_BV.argmax(-1, keepdim=True)
            else:
                tokens_BT = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=rng)
            written.append(tokens_BT)
            running_B &= tokens_BT[:, 0] != end
        for place, ids in zip(places, torch.cat(written, 1).tolist(), strict=True):
            responses[place] = ids[: ids.index(end) + 1] if end in ids else ids
    return responses


@dataclass(frozen=True)
class Accuracy:
    """Share of right answers on held-out problems, in [0, 1], and mean lengths in tokens."""

    greedy: float
    sampled: float
    """At temperature 1."""
    prompt_tokens: float
    response_tokens: float
    problems: int
    samples: int
    """Samples a problem at temperature 1."""


def evaluate(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[tiny_math.Problem],
    samples: int = 4,
    seed: int = 0,
) -> Accuracy:
    """Accuracy of ``model``, greedy and at temperature 1, judged by the reward function of the training run."""
    model.eval()
    prompts = prompt_ids(tokenizer, [problem.text for problem in problems])

    def share_correct(repeats: int, temperature: float) -> tuple[float, float]:
        responses = generate(model, prompts * repeats, temperature, seed)
        texts = tokenizer.batch_decode(responses)
        right = [score(text, str(p.answer)).correct for text, p in zip(texts, problems * repeats, strict=True)]
        return sum(right) / len(right), sum(map(len, responses)) / len(responses)

    greedy, _ = share_correct(1, 0.0)
    sampled, response_tokens = share_correct(samples, 1.0)
    prompt_tokens = sum(map(len, prompts)) / len(prompts)
    return Accuracy(greedy, sampled, prompt_tokens, response_tokens, len(problems), samples)
