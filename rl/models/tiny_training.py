"""Supervised training of the tiny model, in float32: plain calculations first, then demonstrations in DAPO's form.

Matrices inside the layers are trained with Muon, everything else with AdamW. On this task Muon needs a third of the
tokens and works for every seed tried, where AdamW alone sometimes never learns to find the operands in the text.

Shape suffixes: B sequences, T tokens of a sequence, N labelled tokens of a batch, V vocabulary, R and C matrix sides.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rl import tiny_math
from rl.models.tiny import build_model, build_tokenizer, evaluate, prompt_ids
from rl.models.tiny_assets import Family

IGNORE = -100  # the label that torch's cross-entropy skips


@dataclass(frozen=True)
class Plan:
    """How the tiny model is trained; the defaults made the committed checkpoint."""

    seed: int = 0
    size: str = "tiny"
    """One of `tiny.SIZES`."""
    steps: int = 600
    batch_size: int = 120
    """Sequences a step, about 47 tokens each."""
    calculation_share: float = 0.35
    """Share of the steps on plain, right calculations, before the demonstrations."""
    slip_rate: float = tiny_math.SLIP_RATE
    """Chance that a digit of a result in a demonstration is wrong."""
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: float = 0.04
    """Share of the steps in which the learning rates rise to their peaks; then they follow a cosine down to 1 %."""
    balance: float = 0.01
    """Weight of the load-balancing loss, which keeps all experts in use."""
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Batch:
    """``input_ids`` [B, T] and ``labels`` [B, T] (the next token, or ``IGNORE``), both int64, padded on the right."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def calculations(tokenizer: PreTrainedTokenizerFast, seed: int, batch_size: int, width: int = 48) -> Iterator[Batch]:
    """Endless batches of plain right calculations, the steps of training problems without their words.

    Only results carry loss: operands are random, and learning to guess them would be wasted.
    """
    problems = tiny_math.stream("train", seed)
    (equals,), (newline,) = tokenizer.encode(" = "), tokenizer.encode("\n")
    needed = batch_size * (width + 1)
    while True:
        ids, is_result = [newline], [False]
        while len(ids) < needed:
            solutions = [tiny_math.worked_solution(problem) for problem in islice(problems, batch_size)]
            lines = [line for solution in solutions for line in solution.split("\n")[:-1]]
            for line_ids in tokenizer(lines).input_ids:
                start = line_ids.index(equals) + 1
                ids += [*line_ids, newline]
                is_result += [place >= start for place in range(len(line_ids) + 1)]
        ids_BT = torch.tensor(ids[:needed]).view(batch_size, width + 1)
        shown_BT = torch.tensor(is_result[:needed]).view(batch_size, width + 1)
        yield Batch(ids_BT[:, :-1], ids_BT.masked_fill(~shown_BT, IGNORE)[:, 1:])


def demonstrations(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    batch_size: int,
    slip_rate: float,
    stream: Iterator[tiny_math.Problem] | None = None,
    write: Callable[[tiny_math.Problem, random.Random, float], str] = tiny_math.demonstration,
) -> Iterator[Batch]:
    """Endless batches of chat demonstrations, loss on the response only; sequences of like length share a batch."""
    stream = tiny_math.stream("train", seed) if stream is None else stream
    rng = random.Random(f"demonstrations:{seed}")
    while True:
        problems = list(islice(stream, 8 * batch_size))
        prompts = prompt_ids(tokenizer, [problem.text for problem in problems])
        texts = [write(problem, rng, slip_rate) for problem in problems]
        answers = tokenizer(texts).input_ids
        pool = [
            ([*prompt, *answer, tokenizer.eos_token_id], len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        pool.sort(key=lambda example: len(example[0]))
        batches = [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
        rng.shuffle(batches)
        for batch in batches:
            yield collate(batch, tokenizer.pad_token_id)


def collate(examples: list[tuple[list[int], int]], pad: int) -> Batch:
    """A batch of ``examples``: (token ids, length of the prompt, which carries no loss)."""
    width = max(len(ids) for ids, _ in examples) - 1
    input_ids = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), IGNORE)
    for row, (ids, skip) in enumerate(examples):
        input_ids[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels[row, skip - 1 : len(ids) - 1] = torch.tensor(ids[skip:])
    return Batch(input_ids, labels)


def losses(model: Qwen3MoeForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean cross-entropy over the labelled tokens, load-balancing loss over all tokens, at least top_k)."""
    device = model.device
    output = model.model(input_ids=batch.input_ids.to(device), use_cache=False, output_router_logits=True)
    labels = batch.labels.to(device)
    labelled = labels != IGNORE
    logits_NV = model.lm_head(output.last_hidden_state[labelled])  # the head only where there is a label
    loss = torch.nn.functional.cross_entropy(logits_NV, labels[labelled])
    config = model.config
    balance = load_balancing_loss_func(output.router_logits, config.num_experts, config.num_experts_per_tok)
    return loss, balance


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, matrix by matrix; leading dimensions are stacks of matrices.

    As torch.optim.Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon), which takes no stacked experts.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update from the gradients in ``.grad``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                average = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
                average.lerp_(gradient, 1 - group["momentum"])
                update = _orthogonal(gradient.lerp(average, group["momentum"]))
                rows, columns = parameter.shape[-2:]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def _orthogonal(matrix_RC: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Newton-Schulz: the same singular vectors, all singular values moved to about 1."""
    x = matrix_RC / (matrix_RC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


def _optimizers(model: PreTrainedModel, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for embeddings, head, routers and norms (norms without weight decay)."""
    matrices, others, norms = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            norms.append(parameter)
        elif ".layers." in name and not name.endswith(".gate.weight"):
            matrices.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": others, "weight_decay": plan.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=plan.adam_lr, betas=(0.9, 0.98), fused=True)
    return [Muon(matrices, plan.muon_lr, plan.weight_decay), adam]


def _schedule(done: float, warmup: float) -> float:
    """The factor on the learning rates when the share ``done`` of the training lies behind."""
    if done < warmup:
        return done / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def train(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    plan: Plan,
    minutes: float | None = None,
    show_progress: bool = True,
) -> dict:
    """Trains ``model`` in place, where it lies; see ``fit``."""
    plain = calculations(tokenizer, plan.seed + 1, plan.batch_size)
    chats = demonstrations(tokenizer, plan.seed + 2, plan.batch_size, plan.slip_rate)

    def step(done: float) -> tuple[int, float, float]:
        batch = next(plain if done < plan.calculation_share else chats)
        loss, balance = losses(model, batch)
        (loss + plan.balance * balance).backward()
        return batch.input_ids.numel(), loss.item(), balance.item()

    return fit(model, step, plan, minutes, show_progress)


def fit(
    model: PreTrainedModel,
    step: Callable[[float], tuple[int, float, float]],
    plan: "Plan",
    minutes: float | None = None,
    show_progress: bool = True,
) -> dict:
    """Trains ``model`` in place and returns the plan with what was seen, for training.json.

    Args:
        step: given the share of the training that is done, runs a batch forward and backward and returns its tokens,
            loss and balance.
        minutes: a limit in wall-clock minutes; the schedule is shortened to meet it, and the result then depends on
            the machine's speed. None: exactly ``plan.steps`` steps, the same on every run on one machine.
    """
    model.train()
    optimizers = _optimizers(model, plan)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    started, steps, tokens, done, smooth = time.monotonic(), 0, 0, 0.0, None
    with tqdm(total=plan.steps, desc="train", unit="step", disable=not show_progress) as bar:
        while done < 1.0:
            for group, peak in peaks:
                group["lr"] = peak * _schedule(done, plan.warmup)
            seen, loss, balance = step(done)
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + seen
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            elapsed = time.monotonic() - started
            done = max(steps / plan.steps, elapsed / (60 * minutes) if minutes else 0.0)
            bar.set_postfix(loss=f"{smooth:.3f}", tokens_per_s=f"{tokens / elapsed:.0f}", refresh=False)
            bar.update()
    model.eval()
    return {
        "plan": asdict(plan),
        "device": model.device.type,
        "steps": steps,
        "tokens": tokens,
        "seconds": round(time.monotonic() - started, 1),
        "loss": round(smooth, 4),
        "balance": round(balance, 4),
    }


FAMILY = Family(
    generate=tiny_math.generate,
    to_rows=tiny_math.to_rows,
    build_tokenizer=build_tokenizer,
    build_model=lambda tokenizer, plan: build_model(tokenizer, plan.seed, plan.size),
    train=train,
    evaluate=lambda model, tokenizer, problems, seed: asdict(evaluate(model, tokenizer, problems, seed=seed)),
)
