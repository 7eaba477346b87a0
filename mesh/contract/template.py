"""The schema of template.yaml, and a loader that refuses what YAML makes ambiguous.

Unique keys, no aliases, anchors or merges; only `true` and `false` are booleans; `no`, `1:20` and dates stay
text; an unknown key is refused with its line and the nearest known name.
Must never read a file: the caller hands in the text.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mesh.contract import canonical_json
from mesh.contract.errors import MeshError
from mesh.contract.ids import CapabilityName

TEMPLATE_BYTES_MAX = 256 * 1024


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ContextShare(_Part):
    """How much of the thread a worker gets. Units: o200k tokens, turns."""

    max_tokens: int = Field(2000, ge=1, le=200_000)
    recent_turns: int = Field(3, ge=0, le=100)
    older_turns: int = Field(8, ge=0, le=1000)


class Limits(_Part):
    """What one attempt may use before it is killed."""

    timeout_s: float = Field(60.0, gt=0, le=86_400)
    memory_mb: int = Field(512, ge=16, le=1_048_576)
    cpu_s: int = Field(300, ge=1, le=86_400)
    open_files: int = Field(256, ge=16, le=65_536)
    processes: int = Field(64, ge=1, le=4096)
    max_attempts: int = Field(3, ge=1, le=100)


class ModelChoice(_Part):
    """Which model the broker calls for this capability; `default` is INTENTMESH_LLM_MODEL."""

    name: str = Field("default", min_length=1, max_length=200)
    max_output_tokens: int = Field(512, ge=1, le=100_000)
    temperature: float | None = Field(None, ge=0, le=2)


class Template(_Part):
    """One capability as its author describes it."""

    name: CapabilityName
    version: str = Field("1", min_length=1, max_length=64)
    description: str = Field("", max_length=2000)
    supports_multi_turn: bool = False
    runtime: Literal["python", "exec", "prompt"] = "python"
    command: list[Annotated[str, Field(min_length=1)]] | None = None
    context: ContextShare = ContextShare.model_construct()
    input_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    triggers: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(default_factory=list)
    limits: Limits = Limits.model_construct()
    model: ModelChoice = ModelChoice.model_construct()
    tools: list[str] = Field(default_factory=list)
    isolation: Literal["process", "sandbox"] = "process"
    price: float = Field(1.0, ge=0, le=1_000_000)

    @field_validator("input_schema")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            jsonschema.Draft202012Validator.check_schema(value)
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema (draft 2020-12): {error.message}") from error
        return value


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a template. `line` counts from 1."""

    line: int
    path: str
    text: str

    def __str__(self) -> str:
        where = f"line {self.line}"
        return f"{where}: {self.path}: {self.text}" if self.path else f"{where}: {self.text}"


class TemplateError(Exception):
    """The template cannot be used; `mistakes` says where and why, in the order of lines."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        self.mistakes = sorted(mistakes, key=lambda mistake: mistake.line)
        super().__init__("; ".join(str(mistake) for mistake in self.mistakes))


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's few implicit types: true/false, integers, floats, null; the rest is text."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"^(?:true|false)$", "tf"),
    ("tag:yaml.org,2002:int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("tag:yaml.org,2002:null", r"^(?:null|~|)$", ["n", "~", ""]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _refuse_ambiguity(text: str) -> None:
    """Raise for anchors, aliases and explicit tags before anything is expanded (no alias bombs)."""
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise TemplateError([Mistake(line, "", "aliases (*name) are not allowed: write the value out")])
        if isinstance(event, yaml.NodeEvent) and event.anchor:
            raise TemplateError([Mistake(line, "", "anchors (&name) are not allowed: write the value out")])
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag:
            raise TemplateError([Mistake(line, "", f"tags ({event.tag}) are not allowed")])


def _collect(node: yaml.Node, path: str, lines: dict[str, int], mistakes: list[Mistake], depth: int = 1) -> None:
    """Note the line of every path, and every repeated or non-text key."""
    if depth > canonical_json.DEPTH_MAX:
        raise TemplateError([Mistake(_line(node), path, f"nested deeper than {canonical_json.DEPTH_MAX} levels")])
    lines.setdefault(path, _line(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            child = f"{path}.{key}" if path else key
            if key == "<<":
                mistakes.append(Mistake(_line(key_node), path, "merge keys (<<) are not allowed"))
            elif key in seen:
                mistakes.append(Mistake(_line(key_node), child, "this key stands twice"))
            seen.add(key)
            lines[child] = _line(key_node)
            _collect(value_node, child, lines, mistakes, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _collect(item, f"{path}.{index}", lines, mistakes, depth + 1)


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = Template
    for part in location[:-1]:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _explain(error: ValidationError, lines: dict[str, int]) -> list[Mistake]:
    mistakes = []
    for problem in error.errors():
        location = problem["loc"]
        path = ".".join(str(part) for part in location)
        near = path
        while near not in lines and near:
            near = near.rpartition(".")[0]
        if problem["type"] == "extra_forbidden":
            known = _known_keys(location)
            close = difflib.get_close_matches(str(location[-1]), known, n=1)
            guess = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
            text = f"unknown key; {guess}"
        elif problem["type"] == "missing":
            text = "this key is required"
        elif problem["type"] == "bool_type":
            text = f"{problem['input']!r} is not a boolean: write true or false"
        else:
            text = f"{problem['msg'].removeprefix('Value error, ')} (got {str(problem['input'])[:60]!r})"
        mistakes.append(Mistake(lines.get(near, 1), path, text))
    return mistakes


def load_template(text: str) -> Template:
    """Parse and verify the text of a template.yaml.

    Raises: TemplateError with every mistake found and its line.
    """
    if len(text.encode("utf-8", "surrogatepass")) > TEMPLATE_BYTES_MAX:
        raise TemplateError([Mistake(1, "", f"larger than {TEMPLATE_BYTES_MAX} bytes")])
    try:
        _refuse_ambiguity(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if not isinstance(root, yaml.MappingNode):
                raise TemplateError([Mistake(1, "", "a template is a mapping: start with 'name: …'")])
            lines: dict[str, int] = {}
            mistakes: list[Mistake] = []
            _collect(root, "", lines, mistakes)
            if mistakes:
                raise TemplateError(mistakes)
            values = loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise TemplateError([Mistake(mark.line + 1 if mark else 1, "", f"not YAML: {error.problem}")]) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TemplateError([Mistake(1, "", f"not YAML: {error}")]) from error
    try:
        canonical_json.check(values)
    except MeshError as error:
        raise TemplateError([Mistake(lines.get(error.field or "", 1), error.field or "", error.detail)]) from error
    try:
        template = Template.model_validate(values)
    except ValidationError as error:
        raise TemplateError(_explain(error, lines)) from error
    if (template.runtime == "exec") != (template.command is not None):
        text = (
            "runtime 'exec' needs it: the program and its arguments"
            if template.command is None
            else (f"only runtime 'exec' has a command; this one is {template.runtime!r}")
        )
        raise TemplateError([Mistake(lines.get("command", lines.get("runtime", 1)), "command", text)])
    return template
