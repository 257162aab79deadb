"""FSDP2 with integer parameters before torch 2.13: it asks them for gradients, and casts them to the compute dtype.

Packed bytes must be sharded and gathered as they are. Later releases do that by themselves.
"""

import functools
import importlib
import types

import torch
from torch import nn

FIXED_IN = (2, 13)
MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"


def allow_integer_parameters() -> None:
    """Patch FSDP2 where torch is older than `FIXED_IN`; idempotent.

    Raises ImportError, naming the installed release, if a private name that it patches is not there.
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < FIXED_IN:
        patch(importlib.import_module(MODULE))


def patch(module: types.ModuleType) -> None:
    """Make `FSDPParam` of `module` keep integer parameters without gradient and in their own dtype."""
    param_class = getattr(module, "FSDPParam", None)
    if not all(hasattr(param_class, name) for name in ("_init_sharded_param", "init_dtype_attrs")):
        raise ImportError(
            f"{MODULE}.FSDPParam is not as in torch 2.11 (torch {torch.__version__} is installed): "
            "quant/fsdp.py patches it so that packed weights can be sharded; install torch 2.11 or 2.13"
        )
    if getattr(param_class, "_lockstep", False):
        return
    init, dtypes = param_class._init_sharded_param, param_class.init_dtype_attrs
    # The one name it looks up at module level and not on the parameter: nn.Parameter, whose default is a gradient.
    without_grad = types.SimpleNamespace(
        **{**vars(nn), "Parameter": functools.partial(nn.Parameter, requires_grad=False)}
    )

    @functools.wraps(init)
    def init_sharded_param(self, param, *args, **kwargs):
        if param.is_floating_point():
            return init(self, param, *args, **kwargs)
        module.nn = without_grad
        try:
            return init(self, param, *args, **kwargs)
        finally:
            module.nn = nn

    @functools.wraps(dtypes)
    def init_dtype_attrs(self, mp_policy):
        dtypes(self, mp_policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    param_class._init_sharded_param, param_class.init_dtype_attrs = init_sharded_param, init_dtype_attrs
    param_class._lockstep = True
