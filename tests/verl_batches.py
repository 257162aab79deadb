"""Small hand-made batches in the form in which verl's trainer hands them to a worker's loss."""

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

PROMPTS = (3, 1, 2, 4)
RESPONSES = (4, 2, 5, 3)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make(seed: int = 0, spread: float = 0.5) -> dict[str, list[torch.Tensor]]:
    """Rows by field: `log_probs` over prompt + response, the others over the response; one token is an observation."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator)

    lengths = list(zip(PROMPTS, RESPONSES, strict=True))
    own = [-normal(prompt + response).abs() - 0.1 for prompt, response in lengths]
    mask = [torch.ones(response, dtype=torch.long) for response in RESPONSES]
    mask[2][1] = 0
    return {
        "log_probs": own,
        "old_log_probs": [row[-n - 1 : -1] + spread * normal(n) for row, n in zip(own, RESPONSES, strict=True)],
        "advantages": [normal(1).expand(n).clone() for n in RESPONSES],
        "response_mask": mask,
    }


def micro_batch(batch: dict[str, list[torch.Tensor]], rows: list[int], workers: int = 1) -> TensorDict:
    """The rows of a batch as one micro-batch, without `log_probs` (the model's output)."""
    fields = {name: jagged([batch[name][row] for row in rows]) for name in batch if name != "log_probs"}
    fields["prompts"] = jagged([torch.ones(PROMPTS[row], dtype=torch.long) for row in rows])
    fields["responses"] = jagged([torch.ones(RESPONSES[row], dtype=torch.long) for row in rows])
    fields["input_ids"] = jagged([torch.ones(PROMPTS[row] + RESPONSES[row], dtype=torch.long) for row in rows])
    data = TensorDict(fields, batch_size=len(rows))
    tu.assign_non_tensor(
        data,
        dp_size=workers,
        batch_num_tokens=int(sum(row.sum() for row in batch["response_mask"])),
        global_batch_size=len(PROMPTS),
    )
    return data
