"""The tiny MiniMax-M3 of recipes/tiny_m3.yaml: 5 M parameters, four layers, contexts of which attention drops blocks.

Layer 0 is dense in attention and MLP; layers 1-3 have MSA (top 2 of the blocks of 128, one of them the own) and 16
routed experts with a shared one. Head dimension and block size are the real model's, so that the GPU's kernels run it.
It learns in float32: to calculate and to repeat the facts of a text, then short problems, in which every block is
selected, then long ones, with calculations again beside them. The indexer learns from attention itself
(`msa.index_loss`), the routers' selection bias from the load of the experts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from transformers import PreTrainedTokenizerFast

from rl import long_math
from rl.models.minimax_m3 import MiniMaxM3SparseForCausalLM, MiniMaxM3TopKRouter, train_indexer
from rl.models.minimax_m3_config import MiniMaxM3Config
from rl.models.tiny import prompt_ids
from rl.models.tiny_assets import Family
from rl.models.tiny_m3_tokenizer import build_tokenizer
from rl.models.tiny_training import IGNORE, Batch, Plan, calculations, collate, demonstrations, fit

RECALLED = 3
"""Facts of a text of `recalls`."""


@dataclass(frozen=True)
class LongPlan(Plan):
    """How it is trained. The committed checkpoint was trained in two parts, 1666 and 756 steps (its training.json)."""

    size: str = "tiny_m3"
    steps: int = 2400
    calculation_share: float = 0.275
    """Share of the steps on calculations and recall, in turns, before the demonstrations."""
    short_share: float = 0.275
    """Share of the steps on short problems after that; the rest is on long ones and calculations, in turns."""
    short_batch_size: int = 56
    long_batch_size: int = 12
    balance: float = 0.004
    """Step of the selection bias towards an even load (no loss)."""
    index_loss: float = 1.0
    """Weight of the indexer's loss, a mean over tokens and heads."""


SIZES: dict[str, dict] = {
    "tiny_m3": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "dense_intermediate_size": 512,
        "shared_intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
    },
    "mid_m3": {
        "hidden_size": 512,
        "intermediate_size": 256,
        "dense_intermediate_size": 1024,
        "shared_intermediate_size": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
        "num_experts_per_tok": 4,
    },
}
"""What differs between the sizes: 5 M parameters, and 34 M for figures on a GPU."""


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, size: str = "tiny_m3") -> MiniMaxM3SparseForCausalLM:
    """An untrained float32 model of a size of `SIZES` whose vocabulary is exactly the tokenizer's."""
    config = MiniMaxM3Config(
        vocab_size=len(tokenizer),
        num_hidden_layers=4,
        rope_theta=500.0,
        num_local_experts=16,
        moe_layer_freq=[0, 1, 1, 1],
        sparse_attention_config={"sparse_topk_blocks": 2, "sparse_attention_freq": [0, 1, 1, 1]},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES[size],
    )
    torch.manual_seed(seed)
    return MiniMaxM3SparseForCausalLM._from_config(config, dtype=torch.float32)


def loss_of(model: MiniMaxM3SparseForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the labelled tokens."""
    hidden = model.model(batch.input_ids.to(model.device)).last_hidden_state
    labels = batch.labels.to(model.device)
    labelled = labels != IGNORE
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[labelled]), labels[labelled])


class Balance:
    """Moves each router's selection bias towards an even load, as DeepSeek-V3 and MiniMax-M3 were balanced."""

    def __init__(self, model: MiniMaxM3SparseForCausalLM, rate: float) -> None:
        self.rate, self.loads = rate, {}
        for module in model.modules():
            if isinstance(module, MiniMaxM3TopKRouter):
                module.register_forward_hook(self._count)

    def _count(self, router: MiniMaxM3TopKRouter, _inputs, output) -> None:
        self.loads[router] = torch.bincount(output[2].flatten(), minlength=router.weight.shape[0])

    @torch.no_grad()
    def step(self) -> float:
        """After a backward pass; returns the largest load over the mean load."""
        worst = 0.0
        for router, load in self.loads.items():
            mean = load.float().mean()
            router.e_score_correction_bias += self.rate * torch.sign(mean - load)
            worst = max(worst, float(load.max() / mean))
        return worst


def recalls(tokenizer: PreTrainedTokenizerFast, seed: int, batch_size: int) -> Iterator[Batch]:
    """Endless batches of a few facts that are said again in another order; only the numbers in the repetition carry
    loss. The induction that this needs finds the facts of problems later."""
    rng = random.Random(f"recalls:{seed}")
    digits = torch.tensor(sorted(tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)))
    while True:
        rows = []
        for _ in range(batch_size):
            facts = long_math.some_facts(rng, RECALLED)
            text = tokenizer.encode(long_math.tell(rng, facts) + "\n")
            rows.append((text + tokenizer.encode(long_math.recall(rng.sample(facts, RECALLED))), len(text)))
        batch = collate(rows, tokenizer.pad_token_id)
        yield Batch(batch.input_ids, batch.labels.masked_fill(~torch.isin(batch.labels, digits), IGNORE))


def train(
    model: MiniMaxM3SparseForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    plan: LongPlan,
    minutes: float | None = None,
    show_progress: bool = True,
) -> dict:
    """Trains ``model`` in place; see ``tiny_training.fit``."""
    plain = calculations(tokenizer, plan.seed + 1, plan.batch_size)
    recalled = recalls(tokenizer, plan.seed + 4, plan.short_batch_size)
    short = _demonstrations(tokenizer, plan.seed + 2, plan.short_batch_size, plan.slip_rate, long_math.SHORT)
    long = _demonstrations(tokenizer, plan.seed + 3, plan.long_batch_size, plan.slip_rate, long_math.LONG)
    basics, problems = cycle((plain, recalled)), cycle((long, plain))
    balance = Balance(model, plan.balance)
    heads = model.config.num_key_value_heads

    def step(done: float) -> tuple[int, float, float]:
        if done < plan.calculation_share:
            batch = next(next(basics))
        else:
            batch = next(short if done < plan.calculation_share + plan.short_share else next(problems))
        tokens = batch.input_ids.numel()
        train_indexer(model, plan.index_loss / (tokens * heads), dense=True)
        loss = loss_of(model, batch)
        loss.backward()
        return tokens, loss.item(), balance.step()

    try:
        return fit(model, step, plan, minutes, show_progress)
    finally:
        train_indexer(model, 0.0)


def _demonstrations(tokenizer, seed: int, batch_size: int, slip_rate: float, sentences) -> Iterator[Batch]:
    stream = long_math.stream("train", seed, sentences)
    return demonstrations(tokenizer, seed, batch_size, slip_rate, stream, long_math.demonstration)


@torch.no_grad()
def solves(
    model: MiniMaxM3SparseForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[long_math.LongProblem]
) -> dict[str, float]:
    """What the model makes of the worked solutions, in one pass a problem.

    `greedy`: share whose every token is the likeliest, which is what greedy decoding then writes; `sampled`: mean
    probability of the whole solution, which is what sampling at temperature 1 gets at least.
    """
    model.eval()
    greedy, sampled = 0, 0.0
    for problem in problems:
        prompt = prompt_ids(tokenizer, [problem.text])[0]
        answer = [*tokenizer.encode(long_math.worked_solution(problem)), tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
        target = ids[0, -len(answer) :]
        greedy += bool((logits.argmax(-1) == target).all())
        sampled += float(logits.log_softmax(-1).gather(-1, target.unsqueeze(1)).sum().exp())
    return {"greedy": greedy / len(problems), "sampled": sampled / len(problems), "problems": len(problems)}


FAMILY = Family(
    generate=long_math.generate,
    to_rows=long_math.to_rows,
    build_tokenizer=build_tokenizer,
    build_model=lambda tokenizer, plan: build_model(tokenizer, plan.seed, plan.size),
    train=train,
    evaluate=lambda model, tokenizer, problems, _seed: solves(model, tokenizer, problems),
    rows=(2048, 128),
)
