"""MiniMax Sparse Attention: block scores, block selection, attention over the selected blocks, the indexer's loss.

Every key/value head has its own selection: an index query of the head is scored against one shared stream of index
keys, a block's score is its largest visible one, and attention of the head's query group runs over the best `top_k`
blocks. One sequence at a time, blocks anchored at its start. All arithmetic is float32 (or the input's float64).
Source: the MSA layer of MiniMax-M3 as vLLM 0.30 computes it (index scores without scale, causal inside blocks, local
block always selected).

Shape suffixes: T queries, S keys, Hi index heads (= Hkv), Hq query heads, Hkv key/value heads, D head dimension,
B = ceil(S / block_size) blocks, K = top_k.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BLOCK_SIZE = 128
CHUNK_ELEMENTS = 1 << 22
"""`attend` and `Selection.choose` take as many queries at once as keep [queries, keys] under this."""
INIT_SCORE, LOCAL_SCORE = 1e30, 1e29
"""What init and local blocks count as; the local one is written last, and a NaN counts as -1e30."""


def _work(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def index_scores(
    q_index: torch.Tensor, k_index: torch.Tensor, positions: torch.Tensor, block_size: int = BLOCK_SIZE
) -> torch.Tensor:
    """Score of every block for every index query.

    Args:
        q_index: [T, Hi, D]; k_index: [S, D]; positions: int64 [T], the place of each query in its sequence (key j is
            visible to it if j <= position).

    Returns float32 [T, Hi, B]: the largest dot product with a visible key of the block, without scale; -inf where no
    key of the block is visible (a block may be the last one and shorter).
    """
    _check(positions, q_index.shape[0], k_index.shape[0])
    dots = torch.einsum("thd,sd->ths", _work(q_index), _work(k_index))
    visible = torch.arange(k_index.shape[0], device=positions.device) <= positions.unsqueeze(1)
    dots = dots.masked_fill(~visible.unsqueeze(1), float("-inf"))
    missing = -k_index.shape[0] % block_size
    return F.pad(dots, (0, missing), value=float("-inf")).unflatten(-1, (-1, block_size)).amax(-1)


def select_blocks(
    scores: torch.Tensor,
    positions: torch.Tensor,
    top_k: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """The blocks that each query attends to, by falling score, ties to the lower id.

    Args:
        scores: [T, Hi, B] of `index_scores`; positions: int64 [T]; init_blocks: blocks at the start that are always
            selected; local_blocks: blocks up to the query's own that are always selected.

    Returns int32 [T, Hi, top_k]: ids, then -1 where fewer blocks are visible.
    """
    if top_k < 1 or local_blocks < 0 or init_blocks < 0 or init_blocks + local_blocks > top_k:
        raise ValueError(f"top_k {top_k} must hold {init_blocks} init and {local_blocks} local blocks, and be positive")
    own = (positions // block_size).unsqueeze(1)
    ids = torch.arange(scores.shape[-1], device=scores.device)
    visible = (ids <= own).unsqueeze(1)
    forced = torch.nan_to_num(scores.detach(), nan=-INIT_SCORE, neginf=float("-inf"), posinf=float("inf"))
    forced = torch.where((ids < init_blocks) & visible, INIT_SCORE, forced)
    local = (ids > own - local_blocks).unsqueeze(1) & visible
    forced = torch.where(local, LOCAL_SCORE, forced).masked_fill(~visible, float("-inf"))
    values, order = forced.sort(dim=-1, descending=True, stable=True)
    order = order.masked_fill(values == float("-inf"), -1)[..., :top_k].to(torch.int32)
    return F.pad(order, (0, top_k - order.shape[-1]), value=-1)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    block_size: int = BLOCK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the visible keys of its head's selected blocks; differentiable in q, k and v.

    Args:
        q: [T, Hq, D]; k, v: [S, Hkv, D]; blocks: int32 [T, Hkv, K], -1 for none; Hq is a multiple of Hkv, and query
            head h belongs to key/value head h // (Hq / Hkv).

    Returns (out [T, Hq, D] in q's dtype, rounded once; log-sum-exp of the scaled logits, float32 [T, Hq]).

    Raises:
        ValueError: shapes that do not fit, or a query without any visible key.
    """
    _check(positions, q.shape[0], k.shape[0])
    if q.shape[1] % k.shape[1] or blocks.shape[:2] != (q.shape[0], k.shape[1]):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and blocks {tuple(blocks.shape)} do not fit")
    group = q.shape[1] // k.shape[1]
    allowed = _allowed_keys(blocks, positions, k.shape[0], block_size)
    if not bool(allowed.any(-1).all()):
        raise ValueError("a query has no visible key in its blocks; its own block must be among them")
    grouped = _work(q).unflatten(1, (k.shape[1], group))
    logits = torch.einsum("thgd,shd->thgs", grouped, _work(k)) * scale
    logits = logits.masked_fill(~allowed.unsqueeze(2), float("-inf"))
    lse = logits.logsumexp(-1)
    out = torch.einsum("thgs,shd->thgd", (logits - lse.unsqueeze(-1)).exp(), _work(v))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


@dataclass(frozen=True)
class Selection:
    """How blocks are chosen, as `select_blocks` takes it."""

    top_k: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    block_size: int = BLOCK_SIZE

    @torch.no_grad()
    def choose(
        self, q_index: torch.Tensor, k_index: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(blocks int32 [T, Hi, top_k], margin float32 [T, Hi]: by how much the worst block that was chosen for its
        score leads the best one that was not; inf where every visible block is chosen)."""
        step = max(1, CHUNK_ELEMENTS // max(k_index.shape[0], 1))
        if step < q_index.shape[0]:
            chunks = zip(q_index.split(step), positions.split(step), strict=True)
            parts = [self.choose(rows, k_index, places) for rows, places in chunks]
            return tuple(torch.cat(column) for column in zip(*parts, strict=True))
        scores = index_scores(q_index, k_index, positions, self.block_size)
        one_more = select_blocks(
            scores, positions, self.top_k + 1, self.init_blocks, self.local_blocks, self.block_size
        )
        blocks, rest = one_more[..., :-1], one_more[..., -1]
        found = scores.gather(-1, blocks.clamp(min=0).long())
        own = (positions // self.block_size).view(-1, 1, 1)
        forced = (blocks < self.init_blocks) | (blocks > own - self.local_blocks)
        worst = found.masked_fill(forced, float("inf")).amin(-1)
        margin = worst - scores.gather(-1, rest.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
        return blocks, margin.masked_fill(rest < 0, float("inf"))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor | None,
    scale: float,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """The last T queries of a sequence: q [T, Hq, D], k and v [S, Hkv, D], `blocks` int32 [T, Hkv, K] or None for all.

    Returns [T, Hq, D] in q's dtype; differentiable in q, k and v. Without `blocks` and with S = T there may be leading
    batch dimensions. On CPU the arithmetic is float32 with one rounding, as `sparse_attention`; on a GPU it is the
    library's attention in q's dtype. Memory is bounded by chunks of queries, time is dense: keys that no head selected
    are masked, not skipped.
    """
    queries, length, group = q.shape[-3], k.shape[-3], q.shape[-2] // k.shape[-2]
    work = _work if q.device.type == "cpu" else (lambda x: x)
    q_work = work(q).transpose(-3, -2)
    keys, values = (work(x).repeat_interleave(group, -2).transpose(-3, -2) for x in (k, v))
    single = q.dim() == 3
    if single:  # torch's fused kernels take four dimensions only
        q_work, keys, values = q_work.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    if blocks is None and queries == length:
        out = F.scaled_dot_product_attention(q_work, keys, values, is_causal=True, scale=scale)
        return (out[0] if single else out).transpose(-3, -2).to(q.dtype)
    positions = torch.arange(length - queries, length, device=q.device)

    def rows_of(q_rows, keys, values, positions, blocks) -> torch.Tensor:
        if blocks is None:
            mask = torch.arange(length, device=positions.device) <= positions.unsqueeze(1)
        else:
            mask = _allowed_keys(blocks, positions, length, block_size).transpose(0, 1)
            mask = mask.repeat_interleave(group, 0).unsqueeze(0)
        return F.scaled_dot_product_attention(q_rows, keys, values, attn_mask=mask, scale=scale)

    step = max(1, CHUNK_ELEMENTS // length)
    if step >= queries:
        out = rows_of(q_work, keys, values, positions, blocks)
    else:  # a chunk's mask is made again in the backward pass: all of them would not fit
        # Tensors as arguments: what a closure holds, a checkpoint around the layer cannot drop.
        chosen = itertools.repeat(None) if blocks is None else blocks.split(step)
        chunks = zip(q_work.split(step, 2), positions.split(step), chosen, strict=False)
        parts = [checkpoint(rows_of, q_rows, keys, values, *rest, use_reentrant=False) for q_rows, *rest in chunks]
        out = torch.cat(parts, 2)
    return out[0].transpose(0, 1).to(q.dtype)


def index_loss(
    q_index: torch.Tensor,
    k_index: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    blocks: torch.Tensor | None,
    scale: float,
    index_scale: float,
    block_size: int = BLOCK_SIZE,
) -> torch.Tensor:
    """KL(attention || indexer) of one sequence (without `blocks`: of a batch), summed over queries and index heads.

    The teacher is the mean over a group's heads of the attention probabilities, the student the softmax of
    `index_scale` times the index dot products, both over the visible keys of the selected blocks (`blocks` None: over
    all visible keys, the warm-up). Differentiable in q_index [T, Hi, D] and k_index [T, D] only. Source: flash-msa's
    objective (dS_index = P_index - teacher).

    Raises:
        ValueError: other queries than keys.
    """
    length = q.shape[-3]
    if k.shape[-3] != length:
        raise ValueError(f"the indexer's loss takes whole sequences, not {length} queries over {k.shape[-3]} keys")
    positions = torch.arange(length, device=q.device)
    constants = (scale, index_scale, block_size)
    step = max(1, CHUNK_ELEMENTS // length)
    if step >= length or q.dim() > 3:
        return _index_loss_of_rows(q_index, k_index, q, k, blocks, positions, *constants)
    parts = [
        checkpoint(
            _index_loss_of_rows,
            *(
                q_index[rows],
                k_index,
                q[rows],
                k,
                None if blocks is None else blocks[rows],
                positions[rows],
                *constants,
            ),
            use_reentrant=False,
        )
        for rows in (slice(start, start + step) for start in range(0, length, step))
    ]
    return torch.stack(parts).sum()


def _index_loss_of_rows(q_index, k_index, q, k, blocks, positions, scale, index_scale, block_size) -> torch.Tensor:
    """`index_loss` of the queries at `positions`."""
    heads, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    keys = torch.arange(k.shape[-3], device=q.device)
    if blocks is None:
        allowed = (keys <= positions.unsqueeze(1)).unsqueeze(1).expand(-1, heads, -1)
    else:
        allowed = _allowed_keys(blocks, positions, k.shape[-3], block_size)
    hidden = ~allowed
    with torch.no_grad():
        logits = torch.einsum("...thgd,...shd->...thgs", _work(q).unflatten(-2, (heads, group)), _work(k)) * scale
        teacher = logits.masked_fill(hidden.unsqueeze(-2), float("-inf")).softmax(-1).mean(-2)
    dots = torch.einsum("...thd,...sd->...ths", _work(q_index), _work(k_index)) * index_scale
    student = dots.masked_fill(hidden, float("-inf")).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(teacher, teacher) - teacher * student).sum()


class AddLoss(torch.autograd.Function):
    """`AddLoss.apply(x, loss)` is x; in the backward pass `loss` [] gets the gradient 1, as if added to the total."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, torch.ones_like(ctx.like)


def _allowed_keys(blocks: torch.Tensor, positions: torch.Tensor, keys: int, block_size: int) -> torch.Tensor:
    """bool [T, Hkv, S]: whether a key lies in a selected block and not behind the query."""
    count = -(-keys // block_size)
    chosen = torch.zeros(*blocks.shape[:2], count + 1, dtype=torch.bool, device=blocks.device)
    # -1 goes to a column of its own, which is cut off.
    chosen.scatter_(-1, blocks.long().masked_fill(blocks < 0, count), True)
    inside = chosen[..., :count].repeat_interleave(block_size, dim=-1)[..., :keys]
    return inside & (torch.arange(keys, device=positions.device) <= positions.unsqueeze(1)).unsqueeze(1)


def _check(positions: torch.Tensor, queries: int, keys: int) -> None:
    if positions.shape != (queries,):
        raise ValueError(f"positions {tuple(positions.shape)} do not fit {queries} queries")
    if queries and (int(positions.min()) < 0 or int(positions.max()) >= keys):
        raise ValueError(f"positions {int(positions.min())}..{int(positions.max())} lie outside 0..{keys - 1}")
