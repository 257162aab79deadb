"""The trainer's model around the frozen base: ids that are no tokens have no probability."""

import torch
from tiny_model import build, logits, spec, token_ids


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
