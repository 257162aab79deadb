"""MiniMax-M3's attention on a machine without a GPU, and the record of the blocks that it selects on any machine.

vLLM 0.30.0 serves MiniMax Sparse Attention with CUDA kernels only. These stand-ins take the same paged caches and
metadata and round at the same points: per-head Gemma norm and rotary embedding in float32 with one rounding to bf16,
float32 index scores, float32 softmax, one rounding of the output. Prefill runs `kernels.msa` a request; decode is one
batch that gathers only the selected blocks.

Shapes: T tokens, R requests, P pages, B blocks of a request, Hq/Hkv query and key/value heads, Hi index heads (= Hkv),
D head dimension, K blocks that are selected. A page holds one block: keys and values [P, Hkv, 128, 2D], index keys
[P, 128, D].
"""

import itertools
from collections.abc import Iterator

import torch

from kernels import msa
from rollout.patching import patch_target

tensor_parallel_size = patch_target("vllm.distributed:get_tensor_model_parallel_world_size")

BLOCK = msa.BLOCK_SIZE
ROWS_TOGETHER = 512
"""Queries of a prefill that are attended at a time; bounds the score matrix."""

get_forward_context = patch_target("vllm.forward_context:get_forward_context")


# ---- norm, rotary embedding, cache ---------------------------------------------------------------------------------


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] in float32, times rsqrt(mean square + eps) times (1 + weight [D] or [heads, D]); float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """NeoX rotation of the first dims of x, float32 [T, H, D], by cos_sin [T, rotary dims] (cosines, then sines)."""
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qknorm_rope_kv_insert(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotary_dim: int,
    eps: float,
    index_q_norm_weight: torch.Tensor | None = None,
    index_k_norm_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    slot_mapping: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    kv_cache: torch.Tensor | None = None,
    index_cache: torch.Tensor | None = None,
    block_size: int = 0,
    q_out: torch.Tensor | None = None,
    index_q_out: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
    skip_index_branch: bool = False,
    q_fp8_out: torch.Tensor | None = None,
    q_fp8_scale: float = 1.0,
) -> None:
    """Stand-in for vllm._custom_ops.fused_minimax_m3_qknorm_rope_kv_insert (its arguments; everything in place).

    qkv [T, (Hq + 2 Hkv) D] or with [index_q | index_k] behind: q, k, index_q and index_k are normalised a head and
    rotated in float32 and rounded once; v stays. k, v and index_k are also written to the pages of their slots.
    """
    if skip_index_branch or q_fp8_out is not None or "fp8" in kv_cache_dtype:
        raise NotImplementedError("MiniMax-M3 on CPU: no FP8 cache and no reuse of another layer's blocks")
    heads = qkv.view(qkv.shape[0], -1, q_norm_weight.shape[0])
    keys, values = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads
    weights = [q_norm_weight.expand(num_heads, -1), k_norm_weight.expand(num_kv_heads, -1)]
    inputs = [heads[:, :keys]]
    if num_index_heads:
        weights += [index_q_norm_weight.expand(num_index_heads, -1), index_k_norm_weight.unsqueeze(0)]
        inputs.append(heads[:, values:])
    normed = gemma_norm(torch.cat(inputs, dim=1).float(), torch.cat(weights), eps)
    normed = rotate(normed, cos_sin_cache[positions, :rotary_dim]).to(qkv.dtype)
    heads[:, :keys] = normed[:, :keys]
    if q_out is not None:
        q_out.copy_(normed[:, :num_heads].flatten(1))
    if num_index_heads:
        heads[:, values:] = normed[:, keys:]
        if index_q_out is not None:
            index_q_out.copy_(normed[:, keys:-1].flatten(1))
        if index_cache is not None:
            _insert(
                index_cache.unsqueeze(1),
                slot_mapping if index_slot_mapping is None else index_slot_mapping,
                normed[:, -1:],
            )
    if kv_cache is not None:
        _insert(kv_cache, slot_mapping, torch.cat((normed[:, num_heads:keys], heads[:, keys:values]), dim=-1))


def _insert(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [T, H, C] to `slots` [>= T] of a paged cache [P, H, block, C]; a negative slot is padding."""
    slots = slots[: rows.shape[0]].long()
    kept = slots >= 0
    if not bool(kept.all()):
        slots, rows = slots[kept], rows[kept]
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = rows.to(cache.dtype)


# ---- places of the tokens of a step --------------------------------------------------------------------------------


def token_places(metadata) -> tuple[torch.Tensor, torch.Tensor]:
    """(request int64 [T], position int64 [T]) of every token, from the metadata of vLLM's M3 attention or indexer.

    Requests are rows of the batch; those that decode come first.
    """
    requests, positions = [], []
    device = metadata.seq_lens.device
    if metadata.num_decodes:
        length = metadata.decode.decode_query_len
        rows = torch.arange(metadata.num_decodes, device=device).repeat_interleave(length)
        steps = torch.arange(length, device=device).repeat(metadata.num_decodes)
        requests.append(rows)
        positions.append(metadata.decode.seq_lens.long()[rows] - length + steps)
    if metadata.num_prefills:
        starts = metadata.prefill.cu_seqlens_q.long()
        rows = torch.arange(metadata.num_prefills, device=device).repeat_interleave(starts.diff())
        steps = torch.arange(rows.shape[0], device=device) - starts[rows]
        requests.append(rows + metadata.num_decodes)
        positions.append(metadata.prefill.context_lens.long()[rows] + steps)
    return torch.cat(requests), torch.cat(positions)


def _places(metadata) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_places`, kept on the metadata: all layers of a step share it."""
    if not hasattr(metadata, "lockstep_places"):
        metadata.lockstep_places = token_places(metadata)
    return metadata.lockstep_places


def _prefills(metadata, positions: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, int]]:
    """(rows of at most ROWS_TOGETHER queries, their request's pages, its keys so far) of every prefill."""
    starts = metadata.prefill.cu_seqlens_q.tolist()
    first = metadata.num_decode_tokens
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        for row in range(start, end, ROWS_TOGETHER):
            rows = slice(first + row, first + min(row + ROWS_TOGETHER, end))
            keys = int(positions[rows.stop - 1]) + 1
            yield rows, metadata.prefill.block_table[request, : -(-keys // BLOCK)].long(), keys


# ---- selection -----------------------------------------------------------------------------------------------------


def decode_scores(
    index_q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`msa.index_scores` of a decode batch: index_q [T, Hi, D], cache [P, 128, D], table [R, >= B]; float32 [T, Hi, B].

    T is a multiple of R: every request has the same number of tokens, which lie together.
    """
    blocks = int(positions.max()) // BLOCK + 1
    keys = cache[table[:, :blocks].long().clamp(min=0)].flatten(1, 2).float()
    dots = torch.bmm(index_q.float().reshape(keys.shape[0], -1, keys.shape[2]), keys.transpose(1, 2))
    dots = dots.view(index_q.shape[0], index_q.shape[1], -1)
    visible = torch.arange(dots.shape[-1]) <= positions.unsqueeze(1)
    return dots.masked_fill_(~visible.unsqueeze(1), float("-inf")).unflatten(-1, (blocks, BLOCK)).amax(-1)


def select(metadata, index_q: torch.Tensor, cache: torch.Tensor, **selection: int) -> torch.Tensor:
    """Blocks of every token, int32 [T, Hi, K] as `msa.select_blocks` gives them; index_q [T, Hi, D]."""
    positions, decoded = _places(metadata)[1], metadata.num_decode_tokens
    found = []
    if metadata.num_decodes:
        scores = decode_scores(index_q[:decoded], cache, metadata.decode.block_table, positions[:decoded])
        found.append(msa.select_blocks(scores, positions[:decoded], **selection))
    if metadata.num_prefills:
        for rows, pages, keys in _prefills(metadata, positions):
            scores = msa.index_scores(index_q[rows], cache[pages].flatten(0, 1)[:keys], positions[rows])
            found.append(msa.select_blocks(scores, positions[rows], **selection))
    return torch.cat(found)


def _indexer_forward(self, index_query: torch.Tensor, **_unused):
    """MiniMaxM3IndexerTritonImpl.forward: fills the shared buffer [>= T, Hi, K] of selected blocks."""
    per_layer = get_forward_context().attn_metadata
    if not isinstance(per_layer, dict):
        return None, None  # the profiling run
    metadata = per_layer[self.index_cache.prefix]
    tokens, decoded = metadata.num_actual_tokens, metadata.num_decode_tokens
    index_q = index_query[:tokens].view(tokens, self.num_index_heads, self.index_head_dim)
    blocks = self.topk_indices_buffer[:tokens]
    blocks.copy_(
        select(
            metadata,
            index_q,
            self.index_cache.kv_cache,
            top_k=self.topk_blocks,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
        )
    )
    return blocks[:decoded].transpose(0, 1), blocks[decoded:].transpose(0, 1)


# ---- attention -----------------------------------------------------------------------------------------------------


def decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`msa.sparse_attention` of a decode batch over the selected pages alone; q [T, Hq, D], blocks [T, Hkv, K].

    `requests` int64 [T] are rows of `table` [R, >= B]. Returns [T, Hq, D] in q's dtype, rounded once.
    """
    tokens, kv_heads = blocks.shape[:2]
    blocks = blocks[..., : int(positions.max()) // BLOCK + 1].long()  # what lies behind is -1 for every token
    pages = table[requests.view(-1, 1, 1), blocks.clamp(min=0)].long()
    kv = cache[pages, torch.arange(kv_heads).view(1, -1, 1)].flatten(2, 3).flatten(0, 1).float()
    k, v = kv.chunk(2, dim=-1)
    grouped = q.float().reshape(tokens * kv_heads, -1, q.shape[-1])
    key_positions = blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)
    visible = (blocks.unsqueeze(-1) >= 0) & (key_positions <= positions.view(-1, 1, 1, 1))
    logits = torch.bmm(grouped, k.transpose(1, 2)) * scale
    logits = logits.masked_fill_(~visible.view(tokens * kv_heads, 1, -1), float("-inf"))
    return torch.bmm(logits.softmax(-1), v).view(q.shape).to(q.dtype)


def attend(
    metadata, q: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Write attention of every token over its blocks to out [T, Hq, D]; q [T, Hq, D], blocks int32 [T, Hkv, K]."""
    (requests, positions), decoded = _places(metadata), metadata.num_decode_tokens
    if metadata.num_decodes:
        part = slice(0, decoded)
        table = metadata.decode.block_table
        out[part] = decode_attention(q[part], cache, blocks[part], table, requests[part], positions[part], scale)
    if metadata.num_prefills:
        for rows, pages, keys in _prefills(metadata, positions):
            k, v = cache[pages].transpose(1, 2).flatten(0, 1)[:keys].chunk(2, dim=-1)
            out[rows] = msa.sparse_attention(q[rows], k, v, blocks[rows], positions[rows], scale)[0]


def _attention_forward(self, layer, query, kv_cache, output, *, query_fp8=None):
    """MiniMaxM3SparseTritonImpl.forward: query and output [>= T, Hq D], blocks from the shared buffer."""
    per_layer = get_forward_context().attn_metadata
    if not isinstance(per_layer, dict):
        return output  # the profiling run
    metadata = per_layer[layer.layer_name]
    tokens = metadata.num_actual_tokens
    q = query[:tokens].view(tokens, self.num_heads, self.head_size)
    out = output[:tokens].view(tokens, self.num_heads, self.head_size)
    attend(metadata, q, kv_cache, layer.topk_indices_buffer[:tokens], self.scale, out)
    return output


def _norm_forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
    """MiniMAXGemmaRMSNorm.forward as FlashInfer computes it: the norm is of the float32 sum, which is kept as bf16."""
    total = x.float() if residual is None else x.float() + residual.float()
    normed = gemma_norm(total, self.weight, self.variance_epsilon).to(x.dtype)
    return normed if residual is None else (normed, total.to(x.dtype))


def install() -> None:
    """Replace the CUDA parts of vLLM's MiniMax-M3 by the stand-ins; raises PatchError if a name moved."""
    operations = patch_target("vllm._custom_ops")
    patch_target("vllm._custom_ops:fused_minimax_m3_qknorm_rope_kv_insert")
    operations.fused_minimax_m3_qknorm_rope_kv_insert = qknorm_rope_kv_insert
    package = "vllm.models.minimax_m3"
    _replace_forward(f"{package}.nvidia.model:MiniMAXGemmaRMSNorm", _norm_forward)
    _replace_forward(f"{package}.common.indexer:MiniMaxM3IndexerTritonImpl", _indexer_forward)
    _replace_forward(f"{package}.common.sparse_attention:MiniMaxM3SparseTritonImpl", _attention_forward)


def _replace_forward(path: str, forward) -> None:
    patch_target(f"{path}.forward")
    patch_target(path).forward = forward


# ---- the record of selected blocks ---------------------------------------------------------------------------------


class BlockRecorder:
    """Notes, on any platform, which blocks every sparse layer selects in every forward call.

    A CUDA graph replays without Python: record eager calls (prefill, or enforce_eager).
    """

    def __init__(self, model_runner) -> None:
        self.model_runner = model_runner
        self.records: list[dict] = []
        self._hooks: list = []

    def start(self) -> None:
        """Note every call from now on. Raises ValueError for a model without MiniMax Sparse Attention."""
        self.records = []
        if self._hooks:
            return
        indexer = patch_target("vllm.models.minimax_m3.common.indexer:MiniMaxM3Indexer")
        modules = [module for module in self.model_runner.model.modules() if isinstance(module, indexer)]
        if not modules:
            raise ValueError("this model has no sparse attention whose blocks could be recorded")
        heads = modules[0].num_index_heads * tensor_parallel_size()
        total = self.model_runner.model.config.num_key_value_heads
        if heads != total:
            raise ValueError(
                f"{heads} index heads on all workers, {total} in the model: replicated heads are not gathered"
            )
        self._hooks = [module.register_forward_hook(self._note) for module in modules]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> list[dict]:
        """The records since the last take, in the order of the calls."""
        taken, self.records = self.records, []
        return taken

    def _note(self, module, _args, _output) -> None:
        per_layer = get_forward_context().attn_metadata
        if not isinstance(per_layer, dict):
            return
        prefix = module.index_cache.prefix
        metadata = per_layer[prefix]
        requests, positions = token_places(metadata)
        self.records.append(
            {
                "layer": int(prefix.partition(".layers.")[2].partition(".")[0]),
                "request_ids": list(self.model_runner.input_batch.req_ids),
                "requests": requests.int().cpu().numpy(),
                "positions": positions.cpu().numpy(),
                "blocks": module.impl.topk_indices_buffer[: metadata.num_actual_tokens].cpu().numpy().copy(),
            }
        )
