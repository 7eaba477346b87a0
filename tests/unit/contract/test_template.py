"""template.yaml: what is refused, with which line, and what a plain file gives."""

import time

import pytest

from mesh.contract.template import TEMPLATE_BYTES_MAX, Mistake, TemplateError, load_template


def mistakes(text: str) -> list[Mistake]:
    with pytest.raises(TemplateError) as caught:
        load_template(text)
    return caught.value.mistakes


def test_the_smallest_template_has_the_documented_defaults() -> None:
    """A name is all that is required."""
    template = load_template("name: echo\n")
    assert (template.runtime, template.supports_multi_turn, template.version) == ("python", False, "1")
    assert (template.context.max_tokens, template.context.recent_turns, template.context.older_turns) == (2000, 3, 8)
    assert (template.limits.timeout_s, template.limits.memory_mb, template.limits.max_attempts) == (60.0, 512, 3)


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "True", "TRUE", '"true"', "1"])
def test_only_true_and_false_are_booleans(word: str) -> None:
    """YAML 1.1's other spellings are refused rather than guessed."""
    assert mistakes(f"name: a\nsupports_multi_turn: {word}\n")[0].line == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [("no", "no"), ("1:20", "1:20"), ("2026-01-01", "2026-01-01"), ("0x10", "0x10"), ("on", "on")],
)
def test_what_yaml_would_guess_stays_text(value: str, expected: str) -> None:
    """A country code is not a boolean, and a time of day is not a number of minutes."""
    assert load_template(f"name: a\ndescription: {value}\n").description == expected


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one() -> None:
    """The author sees where and what was meant."""
    found = mistakes("name: a\n\nsuports_multi_turn: true\ncontext:\n  max_token: 4\n")
    assert [(m.line, m.path) for m in found] == [(3, "suports_multi_turn"), (5, "context.max_token")]
    assert "did you mean 'supports_multi_turn'?" in found[0].text
    assert "did you mean 'max_tokens'?" in found[1].text


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("name: a\nname: b\n", 2, "twice"),
        ("name: a\nlimits:\n  timeout_s: 1\n  timeout_s: 2\n", 4, "twice"),
        ("name: a\ninput_schema: &s {type: object}\n", 2, "anchors"),
        ("name: a\ninput_schema: *s\n", 2, "aliases"),
        ("name: a\n<<: {version: '2'}\n", 2, "merge"),
        ("name: a\ninput_schema: !!python/object:os.system {}\n", 2, "tags"),
        ("name: a\nruntime: exec\n", 2, "needs it"),
        ("name: a\ncommand: [sh]\n", 2, "only runtime 'exec'"),
        ("name: a\ninput_schema: {type: objct}\n", 2, "JSON Schema"),
        ("name: Bad Name\n", 1, "pattern"),
        ("version: '1'\n", 1, "required"),
        ("name: a\nlimits: {timeout_s: 0}\n", 2, "greater than 0"),
        ("name: a\nprice: .inf\n", 2, "number"),
        ("name: a\nmodel: {temperature: 1e999}\n", 2, "number"),
        ("- name\n", 1, "mapping"),
        ("", 1, "mapping"),
        ("name: [1,\n", 2, "not YAML"),
        ("name: a\n\tversion: 1\n", 2, "not YAML"),
        ("name: a\x00\n", 1, "not YAML"),
        ("? [a, b]\n: 1\n", 1, "not YAML"),
    ],
)
def test_a_mistake_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    """Every kind of mistake names its line and says what is wrong."""
    found = mistakes(text)
    assert found[0].line == line
    assert says in str(found[0])


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    """A small file cannot become a large value."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    started_s = time.monotonic()
    assert "not allowed" in str(mistakes(bomb)[0])
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 2000, "name: " + "- " * 3000, "x" * (TEMPLATE_BYTES_MAX + 1)])
def test_a_hostile_template_is_an_error_not_a_crash(text: str) -> None:
    """Depth and size end in a TemplateError."""
    assert mistakes(text)
