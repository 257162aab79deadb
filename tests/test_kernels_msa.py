"""Sparse attention: scores and selections against plain loops, attention against softmax and finite differences."""

import pytest
import torch

from kernels import msa

BLOCK = 4


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def positions(tokens: int) -> torch.Tensor:
    return torch.arange(tokens)


# ---- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 4, 7, 16])
def test_a_blocks_score_is_its_best_visible_key(keys):
    q, k = random(keys, 2, 8), random(keys, 8, seed=1)
    scores = msa.index_scores(q, k, positions(keys), BLOCK)
    assert scores.shape == (keys, 2, -(-keys // BLOCK)) and scores.dtype == torch.float32
    for t in range(keys):
        for h in range(2):
            for b in range(scores.shape[2]):
                seen = [float(q[t, h] @ k[s]) for s in range(b * BLOCK, min((b + 1) * BLOCK, t + 1))]
                assert float(scores[t, h, b]) == pytest.approx(max(seen, default=float("-inf")), abs=1e-5)


def test_queries_may_be_the_end_of_a_longer_sequence():
    q, k = random(10, 2, 8), random(10, 8, seed=1)
    whole = msa.index_scores(q, k, positions(10), BLOCK)
    assert torch.equal(msa.index_scores(q[7:], k, positions(10)[7:], BLOCK), whole[7:])


# ---- selection -----------------------------------------------------------------------------------------------------


def select(rows: list[list[float]], position: int, **options) -> list[int]:
    scores = torch.tensor(rows).view(1, 1, -1)
    return msa.select_blocks(scores, torch.tensor([position]), block_size=BLOCK, **options)[0, 0].tolist()


NOT_VISIBLE = float("-inf")


@pytest.mark.parametrize(
    ("scores", "position", "options", "expected"),
    [
        ([3.0, 9.0, 5.0, 1.0], 15, {"top_k": 2}, [3, 1]),  # the local block first, whatever its score
        ([3.0, 9.0, 5.0, 1.0], 15, {"top_k": 3, "local_blocks": 2}, [2, 3, 1]),
        ([3.0, 9.0, 5.0, 1.0], 15, {"top_k": 2, "local_blocks": 0}, [1, 2]),
        ([3.0, 9.0, 5.0, 1.0], 15, {"top_k": 3, "init_blocks": 1}, [0, 3, 1]),
        ([5.0, 5.0, 5.0, 1.0], 15, {"top_k": 3}, [3, 0, 1]),  # ties to the lower id
        ([3.0, 9.0, NOT_VISIBLE, NOT_VISIBLE], 7, {"top_k": 3}, [1, 0, -1]),
        ([3.0, NOT_VISIBLE, NOT_VISIBLE, NOT_VISIBLE], 2, {"top_k": 2, "init_blocks": 1}, [0, -1]),  # init and local
        ([float("nan"), -4.0, 5.0, 1.0], 15, {"top_k": 3}, [3, 2, 1]),  # NaN is below everything
        ([3.0], 3, {"top_k": 4}, [0, -1, -1, -1]),
    ],
)
def test_selection(scores, position, options, expected):
    assert select(scores, position, **options) == expected


def test_selection_does_not_look_ahead_and_always_has_the_own_block():
    scores = random(30, 2, 8)
    blocks = msa.select_blocks(scores, positions(30), top_k=3, block_size=BLOCK)
    own = (positions(30) // BLOCK).view(-1, 1, 1)
    assert bool((blocks <= own).all()) and bool((blocks == own).any(-1).all())
    counts = (blocks >= 0).sum(-1)
    assert torch.equal(counts, torch.minimum(own.squeeze(-1) + 1, torch.tensor(3)).expand_as(counts))


def test_impossible_numbers_of_blocks_are_refused():
    with pytest.raises(ValueError, match="top_k 1 must hold 1 init and 1 local"):
        select([1.0, 2.0], 7, top_k=1, init_blocks=1)


# ---- attention -----------------------------------------------------------------------------------------------------


def inputs(tokens: int = 14, dtype: torch.dtype = torch.float64):
    q, k, v = (random(tokens, heads, 8, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 2, 2)))
    scores = msa.index_scores(random(tokens, 2, 8, seed=7), random(tokens, 8, seed=8), positions(tokens), BLOCK)
    return q, k, v, msa.select_blocks(scores, positions(tokens), top_k=2, block_size=BLOCK)


def test_each_head_attends_to_the_visible_keys_of_its_own_blocks():
    q, k, v, blocks = inputs()
    out, lse = msa.sparse_attention(q, k, v, blocks, positions(14), 0.3, BLOCK)
    for t in range(14):
        for h in range(4):
            seen = [s for s in range(t + 1) if s // BLOCK in blocks[t, h // 2].tolist()]
            logits = 0.3 * k[seen, h // 2] @ q[t, h]
            torch.testing.assert_close(out[t, h], logits.softmax(-1) @ v[seen, h // 2])
            torch.testing.assert_close(lse[t, h], logits.logsumexp(-1))


def test_with_every_block_it_is_dense_causal_attention():
    q, k, v, _ = inputs(dtype=torch.float32)
    every = torch.arange(4, dtype=torch.int32).expand(14, 2, 4)
    out, _ = msa.sparse_attention(q, k, v, every, positions(14), 8**-0.5, BLOCK)
    heads_first = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    dense = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)


def test_gradients_against_finite_differences_in_float64():
    q, k, v, blocks = inputs(9)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *qkv: msa.sparse_attention(*qkv, blocks, positions(9), 0.3, BLOCK), (q, k, v), atol=1e-7, rtol=1e-5
    )


def test_keys_outside_the_blocks_get_no_gradient():
    q, k, v, blocks = inputs()
    k.requires_grad_()
    out, _ = msa.sparse_attention(q, k, v, blocks, positions(14), 0.3, BLOCK)
    out[13, 0].sum().backward()
    chosen = set(blocks[13, 0].tolist())
    for s in range(14):
        assert bool(k.grad[s, 0].any()) == (s // BLOCK in chosen) and not k.grad[s, 1].any()


def test_bf16_is_computed_in_float32_and_rounded_once():
    q, k, v, blocks = inputs(dtype=torch.bfloat16)
    out, lse = msa.sparse_attention(q, k, v, blocks, positions(14), 0.3, BLOCK)
    exact, _ = msa.sparse_attention(q.float(), k.float(), v.float(), blocks, positions(14), 0.3, BLOCK)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32 and torch.equal(out, exact.bfloat16())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"at": positions(13)}, "do not fit 14 queries"),
        ({"at": positions(14) + 1}, "lie outside 0..13"),
        ({"blocks": torch.full((14, 2, 2), -1, dtype=torch.int32)}, "no visible key"),
        ({"blocks": torch.zeros(14, 3, 2, dtype=torch.int32)}, "do not fit"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, words):
    q, k, v, blocks = inputs()
    given = {"blocks": blocks, "at": positions(14)} | change
    with pytest.raises(ValueError, match=words):
        msa.sparse_attention(q, k, v, given["blocks"], given["at"], 0.3, BLOCK)


# ---- what training calls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1 << 24, 14 * 5])
def test_attention_of_a_whole_sequence_is_the_reference_also_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(msa, "CHUNK_ELEMENTS", chunk)
    q, k, v, blocks = inputs()
    grad = random(14, 4, 8, seed=5, dtype=torch.float64)
    results = []
    for attend in (
        lambda *qkv: msa.sparse_attention(*qkv, blocks, positions(14), 0.3, BLOCK)[0],
        lambda *qkv: msa.attend(*qkv, blocks, 0.3, BLOCK),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for fast, reference in zip(*results[::-1], strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-10, atol=1e-12)


def test_attention_without_blocks_is_causal_over_a_batch():
    q, k, v, _ = inputs()
    every = torch.arange(4, dtype=torch.int32).expand(14, 2, 4)
    expected, _ = msa.sparse_attention(q, k, v, every, positions(14), 0.3, BLOCK)
    batch = msa.attend(torch.stack((q, q)), torch.stack((k, k)), torch.stack((v, v)), None, 0.3)
    torch.testing.assert_close(batch[1], expected)


def test_margin_is_the_lead_of_the_worst_block_chosen_for_its_score():
    """Two blocks of four: the own one is forced, so the lead is of the best other one over the next."""
    q, k = random(16, 2, 8), random(16, 8, seed=1)
    blocks, margin = msa.Selection(2, 0, 1, BLOCK).choose(q, k, positions(16))
    scores = msa.index_scores(q, k, positions(16), BLOCK)
    assert torch.equal(blocks, msa.select_blocks(scores, positions(16), 2, 0, 1, BLOCK))
    assert bool((margin[:8] == float("inf")).all())  # at most two blocks are visible
    others = scores[15, :, :3].sort(-1, descending=True).values
    torch.testing.assert_close(margin[15], others[:, 0] - others[:, 1])


def kl(sparse: bool):
    q, k, _, blocks = inputs()
    q_index, k_index = random(14, 2, 8, seed=11, dtype=torch.float64), random(14, 8, seed=12, dtype=torch.float64)
    return q_index, k_index, q, k, blocks if sparse else None


@pytest.mark.parametrize("sparse", [False, True])
def test_index_loss_in_chunks_is_the_same(sparse, monkeypatch):
    results = []
    for chunk in (1 << 22, 14 * 4):
        monkeypatch.setattr(msa, "CHUNK_ELEMENTS", chunk)
        q_index, k_index, q, k, blocks = kl(sparse)
        leaves = (q_index.requires_grad_(), k_index.requires_grad_())
        loss = msa.index_loss(*leaves, q, k, blocks, 0.3, 0.5, BLOCK)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_index_loss_is_the_divergence_from_the_mean_attention_of_the_group(sparse):
    q_index, k_index, q, k, blocks = kl(sparse)
    total = 0.0
    for t in range(14):
        for h in range(2):
            seen = [s for s in range(t + 1) if blocks is None or s // BLOCK in blocks[t, h].tolist()]
            teacher = torch.stack([(0.3 * k[seen, h] @ q[t, 2 * h + g]).softmax(-1) for g in range(2)]).mean(0)
            student = (0.5 * k_index[seen] @ q_index[t, h]).softmax(-1)
            total += float((teacher * (teacher / student).log()).sum())
    loss = msa.index_loss(q_index, k_index, q, k, blocks, 0.3, 0.5, BLOCK)
    assert float(loss) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_the_index_loss_against_finite_differences(sparse):
    q_index, k_index, q, k, blocks = kl(sparse)
    leaves = (q_index.requires_grad_(), k_index.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda a, b: msa.index_loss(a, b, q, k, blocks, 0.3, 0.5, BLOCK), leaves, atol=1e-7, rtol=1e-5
    )


def test_added_loss_changes_the_gradient_and_not_the_value():
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
    out = msa.AddLoss.apply(x, 5 * y)
    assert torch.equal(out, x)
    (2 * out).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0] and float(y.grad) == 5.0
