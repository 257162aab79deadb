"""The trainer's tensors under the canonical names that `rollout.worker` uses for the engine's."""

from collections.abc import Iterator

import torch
from torch import nn

from quant.experts import QuantExperts
from quant.layers import QuantLinear
from quant.matmul import as_float
from rl.lora import LoRAExperts, LoRALinear, engine_name, whole
from rl.replay import ReplayRouter


def _canonical(name: str) -> str:
    return name.replace(".base_layer", "").replace("lm_head.head", "lm_head")


def _typed(part: str, tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a quantised weight as what they are, so that a report can show values; a fingerprint stays the same."""
    if part == "global_scale":
        return as_float(tensor)
    return tensor.view(torch.float8_e4m3fn) if part == "scale" else tensor


def base_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every frozen tensor of the trainer's model in the checkpoint's layout (collective under FSDP2)."""
    for raw_name, module in model.named_modules():
        name = engine_name(model, _canonical(raw_name))
        if isinstance(module, QuantLinear):
            data, *rest = (whole(part) for part in module.packed_bytes())
            parts = ("data", "scale") if module.format == "mxfp8" else ("packed", "scale", "global_scale")
            for part, tensor in zip(parts, (data, *rest), strict=True):
                yield f"{name}.weight#{part}", tensor
            if module.bias is not None:
                yield f"{name}.bias", whole(module.bias)
        elif isinstance(module, QuantExperts):
            for projection in ("gate_up", "down"):
                for part, attribute in (("packed", "packed"), ("scale", "scale"), ("global_scale", "global")):
                    tensor = whole(getattr(module, f"{projection}_{attribute}"))
                    yield f"{name}.{projection}_proj#{part}", _typed(part, tensor)
        elif isinstance(module, ReplayRouter):
            yield f"{name}.weight", module.as_stored(whole(module.weight))
            if module.bias is not None:
                yield engine_name(model, f"{name}.e_score_correction_bias"), module.bias
        elif not isinstance(module, LoRALinear | LoRAExperts):
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    yield f"{name}.{leaf}" if name else leaf, whole(parameter)
