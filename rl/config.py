"""Load a recipe: find the file, apply `key=value` overrides, validate, and word every error as one line.

No torch, verl, vLLM or Ray is imported here. The schema itself is `rl.schema`; `Recipe` is re-exported.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rl.schema import OBJECTIVES, Recipe

__all__ = [
    "OBJECTIVES",
    "REPO_ROOT",
    "ConfigError",
    "Recipe",
    "dump_yaml",
    "find_path",
    "find_recipe",
    "load_recipe",
    "recipe_keys",
    "run_root",
    "with_absolute_paths",
]

REPO_ROOT = Path(__file__).resolve().parent.parent
INPUT_PATHS = ("model.path", "model.shape", "model.adapter", "data.train", "data.val")


class ConfigError(ValueError):
    """A recipe, override or input file is wrong. The message is one line: key or file, value, remedy."""


class _Loader(yaml.SafeLoader):
    """YAML with YAML 1.2's scalars: 1e-3 is a number, yes/on/off are words, a key given twice is an error."""


_Loader.yaml_implicit_resolvers = {
    char: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
    for char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$"),
    list("-+0123456789."),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict:
    seen = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # construct_mapping refuses it
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
            )
        seen.add(key_node.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


_Loader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, lambda loader, node: _unique_mapping(loader, node, deep=True)
)


def load_recipe(name_or_path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        name_or_path: a file in recipes/ with or without `.yaml`, or a path.
        overrides: `section.key=value` each; the value is YAML (`trainer.logger=[console,wandb]`).

    Raises:
        ConfigError: one line that names the key or file, the value and the remedy.
    """
    path = find_recipe(name_or_path)
    raw = _read_yaml(path)
    _check_keys(raw, Recipe, "", str(name_or_path))
    for override in overrides:
        _apply_override(raw, override)
    return _validate(raw, str(name_or_path), {override.partition("=")[0].strip(): override for override in overrides})


def find_recipe(name_or_path: str | Path) -> Path:
    """Path of a recipe given by name or path; ConfigError with the nearest name if there is none."""
    given = Path(name_or_path)
    folder = REPO_ROOT / "recipes"
    candidates = [given, folder / given, folder / f"{given}.yaml"]
    for candidate in candidates:
        if candidate.is_file() and candidate.suffix in (".yaml", ".yml"):
            return candidate
    known = sorted(path.name for path in folder.glob("*.yaml"))
    if given.is_file():
        raise ConfigError(
            f"--config {given}: not a .yaml file; give a recipe such as {known[0] if known else 'x.yaml'}"
        )
    stems = [name.removesuffix(".yaml") for name in known]
    near = difflib.get_close_matches(given.stem, stems, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}.yaml?" if near else f"recipes/ has {', '.join(known) or 'none'}"
    raise ConfigError(f"--config {given}: no such recipe; {remedy}")


def find_path(value: str | Path) -> Path:
    """Absolute form of an input path in a recipe: relative to the working directory, or else to the repository."""
    path = Path(value).expanduser()
    if path.is_absolute() or path.exists():
        return path.absolute()
    in_repo = REPO_ROOT / path
    return in_repo if in_repo.exists() else path.absolute()


def run_root(recipe: Recipe) -> Path:
    """Absolute folder of the runs: below the working directory, for it is written to and not looked for."""
    return Path(recipe.run.root).expanduser().absolute()


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The same recipe with every path absolute, so that a process with another working directory can use it."""
    raw = recipe.model_dump()
    for dotted in INPUT_PATHS:
        section, key = dotted.split(".")
        if raw[section][key] is not None:
            raw[section][key] = str(find_path(raw[section][key]))
    raw["run"]["root"] = str(run_root(recipe))
    return Recipe.model_validate(raw)


def dump_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it again gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=110)


def recipe_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, Any]:
    """Every settable key in dotted form, with its pydantic field."""
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section is None:
            keys[prefix + name] = field
        else:
            keys.update(recipe_keys(section, f"{prefix}{name}."))
    return keys


def _section_of(field: Any) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _read_yaml(path: Path) -> dict:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (a SafeLoader subclass)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {error.problem}; fix this line") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}; fix the file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, this file holds {type(raw).__name__}")
    return raw


def _apply_override(raw: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key=value, e.g. trainer.steps=20")
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader subclass)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or _one_line(error)
        raise ConfigError(f"override {override!r}: the value is not valid YAML ({problem}); quote it") from None
    target, parts = raw, key.split(".")
    if isinstance(value, dict) or key not in recipe_keys():
        _check_keys(_nest(parts, value), Recipe, "", f"override {override!r}")
    for part in parts[:-1]:
        child = target.setdefault(part, {})
        if not isinstance(child, dict):  # the file itself has a scalar where a section belongs
            child = target[part] = {}
        target = child
    target[parts[-1]] = value


def _nest(parts: list[str], value: Any) -> dict:
    for part in reversed(parts):
        value = {part: value}
    return value


def _check_keys(raw: dict, model: type[BaseModel], prefix: str, source: str) -> None:
    """Refuse unknown keys with the nearest known one, before types are looked at."""
    for key, value in raw.items():
        if key not in model.model_fields:
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {_nearest_key(f'{prefix}{key}', model, prefix)}")
        section = _section_of(model.model_fields[key])
        if section is not None:
            if not isinstance(value, dict):
                example = next(iter(section.model_fields))
                raise ConfigError(
                    f"{source}: {prefix}{key} = {_short(value)}: this is a section; set its keys, e.g. "
                    f"{prefix}{key}.{example}"
                )
            _check_keys(value, section, f"{prefix}{key}.", source)
        elif isinstance(value, dict):
            raise ConfigError(f"{source}: {prefix}{key} = {_short(value)}: this key has no keys below it; give a value")


def _nearest_key(unknown: str, model: type[BaseModel], prefix: str) -> str:
    known = list(recipe_keys())
    leaf = unknown.rsplit(".", 1)[-1].lstrip("+-~")
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    here = {key.rsplit(".", 1)[-1]: key for key in known if key.startswith(prefix)}
    near = (
        same_leaf
        or difflib.get_close_matches(unknown, known + list(Recipe.model_fields), n=1, cutoff=0.7)
        or [here[match] for match in difflib.get_close_matches(leaf, list(here), n=1, cutoff=0.5)]
        or difflib.get_close_matches(unknown, known, n=1, cutoff=0.55)
    )
    if near:
        return f"did you mean {near[0]}?"
    return f"{prefix.rstrip('.') or 'a recipe'} has {', '.join(model.model_fields)}"


def _validate(raw: dict, source: str, overridden: dict[str, str]) -> Recipe:
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        key = ".".join(str(part) for part in problems[0]["loc"] if isinstance(part, str))
        where = f"override {overridden[key]!r}" if key in overridden else source
        raise ConfigError(f"{where}: {_word(problems[0])}{more}") from None


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (quote it)",
    "list_type": "a list, e.g. [a, b]",
    "finite_number": "a finite number",
}


def _word(problem: dict) -> str:
    """One pydantic error as: key = value: what is expected; what the key means."""
    names = [str(part) for part in problem["loc"]]
    key = ""
    for part in names:
        key += f"[{part}]" if part.isdigit() else (f".{part}" if key else part)
    field = recipe_keys().get(re.sub(r"\[\d+\].*$", "", key))
    kind, context = problem["type"], problem.get("ctx", {})
    meaning = f" ({_one_line(field.description)})" if field is not None and field.description else ""
    if kind == "missing":
        return f"{key} is missing; set it{meaning}"
    if kind == "value_error":
        text = _one_line(context["error"])  # checks across keys name their keys themselves
        return text if field is None else f"{key} = {_short(problem['input'])}: {text}"
    if kind == "literal_error":
        expected = f"one of {context['expected']}"
    elif kind in ("too_short", "too_long"):
        expected = f"a list of {context.get('min_length') or context.get('max_length')} item(s) or {_more(kind)}"
    else:
        expected = _EXPECTED.get(kind) or re.sub(r"^(Input|String) should (be )?(a valid )?", "", problem["msg"])
    return f"{key} = {_short(problem['input'])}: expected {expected}{meaning}"


def _more(kind: str) -> str:
    return "more" if kind == "too_short" else "fewer"


def _short(value: Any, limit: int = 60) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())
