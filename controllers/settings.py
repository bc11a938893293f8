"""Settings of a script: flags override a file (`--config FILE`), which overrides class defaults."""

from __future__ import annotations

import io
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic

from ..dataflow.config import Config, flattened
from ..dataflow.errors import SettingError, UserError, nearest
from ..dataflow.peer_names import peer_hint
from ..dataflow.untrusted_text import show

# Settings files: YAML or TOML, with the line of each value for error messages


SUFFIXES = (".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class _Placed:
    value: Any
    """A plain value, or a mapping from names to `_Placed` values."""
    place: str
    """`FILE:LINE`."""


def read_settings_file(path: Path) -> dict[str, _Placed]:
    """Read the settings of a file, by name. Errors name the file and the line."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"--config {path}: settings are read from files ending with {', '.join(SUFFIXES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"--config {path}: there is no such file{nearest(path.name, others)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: it cannot be read: {error}") from None
    return _toml(path, text) if path.suffix == ".toml" else _yaml(path, text)


def _yaml(path: Path, text: str) -> dict[str, _Placed]:
    import yaml

    try:
        # `yaml.compose` keeps line numbers, which `yaml.load` drops.
        root = yaml.compose(text, yaml.SafeLoader)
        loader = yaml.SafeLoader("")
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(
                f"{path}:{root.start_mark.line + 1}: a file of settings has `name: value` in each line"
            )
        return _yaml_mapping(path, root, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: it is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: it is not YAML: {error}") from None


def _yaml_mapping(path: Path, node: Any, loader: Any) -> dict[str, _Placed]:
    import yaml

    found: dict[str, _Placed] = {}
    for key, value in node.value:
        name, place = str(loader.construct_object(key, deep=True)), f"{path}:{key.start_mark.line + 1}"
        # YAML itself would silently use the last value.
        if name in found:
            raise UserError(f"{place}: {name} is given twice, the first time in {found[name].place}")
        inner = isinstance(value, yaml.MappingNode)
        made = _yaml_mapping(path, value, loader) if inner else loader.construct_object(value, deep=True)
        found[name] = _Placed(made, place)
    return found


def _toml(path: Path, text: str) -> dict[str, _Placed]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{path}:{line[1]}" if line else f"{path}:{len(text.splitlines())}"
        raise UserError(f"{place}: it is not TOML: {error}") from None
    return _toml_mapping(path, values, "", _toml_lines(text))


def _toml_mapping(
    path: Path, values: Mapping[str, Any], above: str, lines: Mapping[str, int]
) -> dict[str, _Placed]:
    found: dict[str, _Placed] = {}
    for name, value in values.items():
        full = f"{above}.{name}" if above else name
        line = lines.get(full) or next(
            (n for known, n in lines.items() if known.startswith(f"{full}.")), None
        )
        place = f"{path}:{line}" if line else str(path)
        made = _toml_mapping(path, value, full, lines) if isinstance(value, Mapping) else value
        found[name] = _Placed(made, place)
    return found


def _toml_lines(text: str) -> dict[str, int]:
    """Return a mapping from the full name of each key to its line number.

    >>> _toml_lines("steps = 3\\n[lora]\\nrank = 8\\n")
    {'steps': 1, 'lora': 2, 'lora.rank': 3}
    """
    # tomllib does not report lines.
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*(?:\[\s*([\w.\"' -]+?)\s*\]|([\w.\"' -]+?)\s*=)", line):
            header, key = (re.sub(r"[\"' ]", "", part or "") for part in match.groups())
            table = header or table
            found.setdefault(".".join(filter(None, (table, key))), number)
    return found


# Settings

OPTION = "--config"


def compose(
    settings_class: type[Config], arguments: Sequence[str], description: str | None = None
) -> tuple[Config, dict[str, str]]:
    """Read settings from the command line and, with `--config`, from a file.

    Returns:
        The settings, and a mapping from the name of each setting (nested names have dots) to its
            origin: its flag, `FILE:LINE`, or "default".

    Raises:
        UserError: A value is not allowed. The message has the flag or `FILE:LINE`, the value, and
            the allowed values.
        SystemExit: Help was printed (exit code 0), or an error about an argument (exit code 2).
    """
    import tyro

    rest, file = without_file(settings_class, arguments, OPTION, "settings.yaml")
    # Check the file first: errors of `check` name lines, which tyro does not know.
    given = check(settings_class, read_settings_file(file)) if file is not None else {}
    about = f"{description or ''}\n\n{OPTION} FILE reads settings from a YAML or TOML file; flags win over it.".strip()
    # Check before tyro does, for shorter messages that name the nearest setting.
    _check_flags(settings_class, rest)
    default = _default(settings_class, given) if given else tyro.MISSING_NONPROP
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            settings = tyro.cli(settings_class, default=default, description=about, args=rest)
    except SystemExit as end:
        # tyro raises SystemExit instead, with the error as its context.
        error: BaseException | None = end
        while error is not None and not isinstance(error, SettingError):
            error = error.__context__
        if error is not None:  # a settings class rejected a value
            raise UserError("\n".join(_placed(settings_class, error, given, rest))) from None
        show(said.getvalue(), end="")
        raise
    return settings, dict(_origins(settings, given, rest))


def _check_flags(settings_class: type[Config], arguments: Sequence[str]) -> None:
    """Check the names of all flags, and single values. tyro checks the rest."""
    leaves = dict(_leaves(settings_class))
    if any(config_of(field.annotation) for field in leaves.values()):
        return  # for alternatives, tyro makes subcommands with separate flags
    wrong: list[str] = []
    for word in arguments:  # verl's style: actor.lr=1e-6
        name = word.partition("=")[0] if re.match(r"(?!--)[^=]*\.[^=]*=", word) else ""
        if name and (hint := peer_hint(name, leaves)):
            wrong.append(f"{word}: settings are given as --name value{hint}")
    for flag, values in _given_flags(arguments):
        name = flag.removeprefix("--").replace("-", "_")
        field = leaves.get(name) or leaves.get(re.sub(r"(^|\.)no_", r"\1", name))
        said = " ".join([flag, *values])
        has_one = len(values) == 1 and values != ["None"]
        if field is None and not name.startswith(("help", "tyro_")):
            flags = [f"--{known.replace('_', '-')}" for known in leaves]
            hint = peer_hint(flag, leaves) or nearest(flag, flags) or f"; there are {', '.join(flags)}"
            wrong.append(f"{said}: there is no such setting{hint}")
        elif field is not None and has_one and _takes_one(field.annotation):
            try:
                _valid("", field, _Placed(values[0], said))
            except UserError as error:
                wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))


def _takes_one(annotation: Any) -> bool:
    """Whether a setting takes one plain value, which pydantic and tyro parse alike."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    is_choice = get_origin(annotation) is Literal or any(get_origin(kind) is Literal for kind in kinds)
    return is_choice or all(kind in (int, float) for kind in kinds)


def _leaves(settings_class: type[Config], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of each setting (nested names have dots), and its field."""
    for name, field in settings_class.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _leaves(field.annotation, f"{above}{name}.")
        else:
            yield f"{above}{name}", field


def check(
    settings_class: type[Config], found: Mapping[str, _Placed], above: str = ""
) -> dict[str, _Placed]:
    """Check a file's values and convert them to their fields' types. Return full name -> value.

    Raises:
        UserError: A name or value is wrong; the message has one line per problem.
    """
    checked: dict[str, _Placed] = {}
    wrong: list[str] = []
    for name, placed in found.items():
        field = settings_class.model_fields.get(name)
        inner = None if field is None else config_of(field.annotation)
        try:
            if field is None:
                raise UserError(_unknown(settings_class, f"{above}{name}", placed))
            if isinstance(placed.value, Mapping) and inner is not None:
                checked |= check(inner, placed.value, f"{above}{name}.")
            else:
                checked[f"{above}{name}"] = _Placed(
                    _valid(f"{above}{name}", field, placed), placed.place
                )
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))
    return checked


def config_of(annotation: Any) -> type[Config] | None:
    """Return the Config class in a field's annotation, such as `Lora | None`; None without one."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Config):
            return each
    return None


def _unknown(settings_class: type[Config], name: str, placed: _Placed) -> str:
    value = _plain(placed.value)
    for inner in flattened(value, name) if isinstance(value, Mapping) else ():
        if hint := peer_hint(inner, settings_class.model_fields):
            return f"{placed.place}: there is no setting {inner!r}{hint}"
    hint = peer_hint(name, settings_class.model_fields) or settings_class.hint(
        name.rpartition(".")[2].replace("-", "_")
    )
    return f"{placed.place}: there is no setting {name!r} (value {value!r}){hint}"


def _valid(name: str, field: Any, placed: _Placed) -> Any:
    value = _plain(placed.value)
    try:
        made: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        # Allow fields of any class; a pydantic model has its own configuration.
        any_class = pydantic.ConfigDict(arbitrary_types_allowed=True)
        config = None if config_of(made) is made else any_class
        return pydantic.TypeAdapter(made, config=config).validate_python(value)
    except pydantic.ValidationError as error:
        what = f"{placed.place}: {name}" if name else placed.place
        raise UserError(f"{what}: {Config.problem(error.errors()[0])}") from None


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _plain(each.value) for name, each in value.items()}


def without_file(
    settings_class: type[Config],
    arguments: Sequence[str],
    option: str,
    example: str,
    suffix: str | None = None,
) -> tuple[list[str], Path | None]:
    """Return the arguments without `option FILE`, and the file.

    If the script has a setting of that name, the option is the script's, except for files that end
    with `suffix`.
    """
    has_setting = option.removeprefix("--") in settings_class.model_fields
    if has_setting and suffix is None:
        return list(arguments), None
    rest, files = list[str](), list[str]()
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if name != option:
            rest.append(word)
            continue
        given = [word] if has_value else [word, *itertools.islice(words, 1)]
        value = value if has_value else "".join(given[1:])
        if has_setting and not value.endswith(suffix or ""):
            rest += given
        else:
            files.append(value)
    if len(files) > 1:
        raise UserError(f"{option} is given {len(files)} times ({', '.join(files)}); give one file")
    if files and not files[0]:
        raise UserError(f"{option} needs a file, such as {option} {example}")
    return rest, Path(files[0]) if files else None


def _default(settings_class: type[Config], given: Mapping[str, _Placed], above: str = "") -> Config:
    """Return settings from the file and defaults, unvalidated, because a flag may fix them."""
    import tyro

    values: dict[str, Any] = {}
    for name, field in settings_class.model_fields.items():
        full = f"{above}{name}"
        inner = config_of(field.annotation)
        if full in given:
            values[name] = given[full].value
        elif inner is not None and any(key.startswith(f"{full}.") for key in given):
            values[name] = _default(inner, given, f"{full}.")
        elif field.is_required():
            values[name] = tyro.MISSING_NONPROP
        else:
            values[name] = field.get_default(call_default_factory=True)
    return settings_class.model_construct(_fields_set=set(values), **values)


def _given_flags(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it.

    >>> list(_given_flags(["--seed=3", "--sizes", "1", "2", "--small"]))
    [('--seed', ['3']), ('--sizes', ['1', '2']), ('--small', [])]
    """
    for at, word in enumerate(arguments):
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            behind = itertools.takewhile(lambda each: not each.startswith("--"), arguments[at + 1 :])
            yield flag, [value] if has_value else list(behind)


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return a mapping from the name of each given setting to its flag and value.

    >>> _flags(["--lora.max-rank", "8", "--no-small", "--seed=3"])
    {'lora.max_rank': '--lora.max-rank 8', 'no_small': '--no-small', 'small': '--no-small', 'seed': '--seed 3'}
    """
    found: dict[str, str] = {}
    for flag, values in _given_flags(arguments):
        name, said = flag.removeprefix("--").replace("-", "_"), " ".join([flag, *values])
        found[name] = said
        if (path := name.rpartition("."))[2].startswith("no_"):
            found[f"{path[0]}{path[1]}{path[2].removeprefix('no_')}"] = said
    return found


def _origins(
    settings: Config, given: Mapping[str, _Placed], arguments: Sequence[str], above: str = ""
) -> Iterator[tuple[str, str]]:
    flags = _flags(arguments)
    for name in type(settings).model_fields:
        full, value = f"{above}{name}", getattr(settings, name)
        if isinstance(value, Config):
            yield from _origins(value, given, arguments, f"{full}.")
        elif full in flags:
            yield full, flags[full]
        else:
            yield full, given[full].place if full in given else "default"


def _placed(
    settings_class: type[Config],
    error: SettingError,
    given: Mapping[str, _Placed],
    arguments: Sequence[str],
) -> Iterator[str]:
    """Yield the problems that a settings class found, each with its flag or line."""
    flags = _flags(arguments)
    above = next(iter(_names_of(settings_class, error.of)), "")
    for name, problem in error.problems:
        full = f"{above}{name}"
        if full in flags:
            yield f"{flags[full]}: {problem}"
        elif full in given:
            yield f"{given[full].place}: {full}: {problem}"
        else:
            yield f"--{full.replace('_', '-')}: {problem}" if full else problem


def _names_of(settings_class: type[Config], name: str, above: str = "") -> Iterator[str]:
    """Yield the prefix of each setting of this class, such as `lora.`; '' for the outermost."""
    if settings_class.__name__ == name:
        yield above
    for field, about in settings_class.model_fields.items():
        inner = config_of(about.annotation)
        if inner is not None:
            yield from _names_of(inner, name, f"{above}{field}.")
