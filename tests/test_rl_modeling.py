"""The trainer's model around the frozen base: its head."""

import pytest
import torch
from tiny_model import build, logits, spec, token_ids

from rl import modeling


def test_padding_of_the_vocabulary_gets_no_probability_and_no_gradient():
    ids = token_ids(2, 8)
    whole, limited = build(spec()), build(spec(), vocabulary=600)
    limited.model.train()
    out = logits(limited, ids)
    with torch.no_grad():
        assert torch.equal(out[..., :600], logits(whole, ids)[..., :600])
    probabilities = out.softmax(-1)
    assert not probabilities[..., 600:].any() and (probabilities * out).sum().isfinite()
    out.log_softmax(-1)[..., 5].sum().backward()
    grads = [p.grad for p in limited.model.parameters() if p.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(("chunk", "vocabulary"), [(1 << 28, None), (5 * 12, None), (5 * 12, 9)])
def test_head_gives_log_probs_and_entropy_without_its_logits_ever_being_whole(chunk, vocabulary, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_TOGETHER", chunk)
    torch.manual_seed(0)
    head = modeling.FloatLogits(torch.nn.Linear(8, 12, bias=False), vocabulary)
    x = torch.randn(2, 7, 8, requires_grad=True)
    labels = torch.randint(0, vocabulary or 12, (2, 7))
    logp = head(x)[..., :vocabulary].log_softmax(-1)
    expected = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)
    weights = torch.randn(2, 2, 7)
    grads = torch.autograd.grad((weights[0] * expected[0] + weights[1] * expected[1]).sum(), x)
    head.ask(labels, entropy=True)
    got = head(x)
    assert got.shape == (2, 7, 2)
    torch.testing.assert_close(got[..., 0], expected[0])
    torch.testing.assert_close(got[..., 1], expected[1], rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad((weights[0] * got[..., 0] + weights[1] * got[..., 1]).sum(), x)
    torch.testing.assert_close(again, grads, rtol=1e-4, atol=1e-5)
    head.ask(labels)
    assert not head(x)[..., 1].any()
    head.ask(None)
    assert head(x).shape == (2, 7, 12)
