"""What run files say: words, numbers, keys and their places."""

import math
from pathlib import Path
from typing import Any

import pytest

from policyfit.strategies.errors import ConfigError
from policyfit.trainer.strict_yaml import Mark, read_file, read_text, read_word, write

WORDS: list[tuple[str, Any]] = [
    ("no", "no"),
    ("No", "No"),
    ("off", "off"),
    ("yes", "yes"),
    ("on", "on"),
    ("y", "y"),
    ("n", "n"),
    ("true", True),
    ("True", True),
    ("false", False),
    ("FALSE", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("none", "none"),
    ("'no'", "no"),
    ('"null"', "null"),
    ("'1e-4'", "1e-4"),
    ('"010"', "010"),
    ("0", 0),
    ("-7", -7),
    ("+3", 3),
    ("1000", 1000),
    ("1e-4", 1e-4),
    ("1E-4", 1e-4),
    ("1.e-4", 1e-4),
    ("5e-05", 5e-5),
    ("1e3", 1000.0),
    (".5", 0.5),
    ("-.5e+2", -50.0),
    ("1.", 1.0),
    ("0.0", 0.0),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("1.2.3", "1.2.3"),
    ("1e", "1e"),
    ("cuda:0", "cuda:0"),
    ("bf16", "bf16"),
    ("16-mixed", "16-mixed"),
    ("runs/2024-01-31", "runs/2024-01-31"),
    ("=", "="),
    ("[1, no, 1e-4]", [1, "no", 1e-4]),
    ("{a: on, 3: null}", {"a": "on", 3: None}),
]

TWO_MEANINGS = [
    "010",
    "-007",
    "0o7",
    "0x1F",
    "0b101",
    "1_000",
    "1_000.5",
    "01.5",
    "1:30",
    "190:20:30",
    "2024-01-31",
    "2024-1-3 12:00:00",
    "inf",
    "NaN",
]

REFUSED: list[tuple[str, str]] = [
    ("", "is empty"),
    ("# a comment\n", "is empty"),
    ("---\n", "is empty"),
    ("a: 1\na: 2\n", "run.yaml:2:1: the key 'a' is written twice; it first stands at run.yaml:1:1"),
    ("a:\n  b: 1\n  'b': 2\n", "run.yaml:3:3: the key 'b' is written twice"),
    ("a: {b: 1, b: 2}\n", "run.yaml:1:11: the key 'b'"),
    ("base: &b {x: 1}\na:\n  <<: *b\n", "run.yaml:3:3: merge keys (<<)"),
    ("a: &x [*x]\n", "contains itself"),
    ("a: *nobody\n", "run.yaml:1:4: this is not YAML: found undefined alias"),
    ("a: 1\n---\nb: 2\n", "run.yaml:3:1: a second document"),
    ("a:\n\tb: 1\n", "run.yaml:2:1: this is not YAML"),
    ("a:\n\tb: 1\n", "Indent with spaces"),
    ("a: [1, 2\n", "run.yaml:2:1: this is not YAML"),
    ("a: [1, 2\nb: 3\n", "Close the [ at run.yaml:1:4, or put the missing comma between two of its items."),
    ("a: {b: 1\nc:\n  d: 2\n", "Close the { at run.yaml:1:4, or put"),
    ('a: "x\nb: 3\n', 'Close the " at run.yaml:1:4.'),
    ("a:\n  b:8\n  c: 3\n", "Line 2: a space after the colon? b: 8"),
    ("a: 1\nb:8\n\nc: 3\n", "Line 2: a space after the colon? b: 8"),
    ("a:\n  b: 8\n   c: 3\n", "run.yaml:3:5: this is not YAML: mapping values are not allowed here.\nIndent alike"),
    ('"a": 1\n- b\n', "Indent alike what belongs together"),
    ("a: b: c\n", "put text with signs in it in single quotes."),
    ("a: b: c\n", "run.yaml:1:5: this is not YAML"),
    ("a: 'x\n", "this is not YAML"),
    ("a: @x\n", "run.yaml:1:4: this is not YAML"),
    ("a: 1\n b: 2\n", "this is not YAML"),
    ("a: !!python/name:os.system x\n", "run.yaml:1:4: tags (tag:yaml.org,2002:python/name:os.system)"),
    ("a: !!str 3\n", "are not supported"),
    ("a: !Thing {b: 1}\n", "tags (!Thing)"),
    ("true: 1\n", "run.yaml:1:1: a key must be a word or a whole number"),
    ("1.5: 1\n", "a key must be"),
    ("? [a, b]\n: 1\n", "a key must be"),
    ("a: \x01\n", "run.yaml:1:4: the character '\\x01'"),
    ("a: 1e999\n", "run.yaml:1:4: a: 1e999 is too large"),
    ("[" * 2000 + "]" * 2000, "run.yaml:1:101: more than 100 levels"),
]


def _same(found: Any, expected: Any) -> bool:
    return type(found) is type(expected) and bool(found == expected)


@pytest.mark.parametrize(("text", "value"), WORDS)
def test_a_word_means_the_same_in_a_file_and_on_the_command_line(text: str, value: Any) -> None:
    assert _same(read_text(f"key: {text}\n", "run.yaml").value["key"], value)
    if text:
        assert _same(read_word(text, "--key"), value)
    else:  # most likely a shell variable that is not set
        with pytest.raises(ConfigError, match=r"--key is empty\.\nGive a value, or write null"):
            read_word(text, "--key")


def test_not_a_number_is_read_as_one() -> None:
    assert math.isnan(read_word(".nan", "--key"))


@pytest.mark.parametrize("text", TWO_MEANINGS)
def test_a_word_with_two_meanings_is_refused_with_the_advice_to_quote_it(text: str) -> None:
    for read in (lambda: read_text(f"a:\n  key: {text}\n", "run.yaml"), lambda: read_word(text, "--key")):
        with pytest.raises(ConfigError, match="could be text or") as refused:
            read()
        assert f'Write "{text}" in quotes' in str(refused.value)
    assert read_word(f'"{text}"', "--key") == text


def test_a_refused_word_is_found_by_file_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^run.yaml:2:8: a.key: 1_000 could"):
        read_text("a:\n  key: 1_000\n", "run.yaml")


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[f"{t[:12]!r}-{m[:9]}" for t, m in REFUSED])
def test_text_that_is_no_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_text(text, "run.yaml")
    assert message in str(refused.value)


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read_text("\n".join(lines), "run.yaml")


def test_a_plain_alias_stands_for_its_value() -> None:
    assert read_text("a: &x [1]\nb: *x\n", "run.yaml").value == {"a": [1], "b": [1]}


def test_every_key_and_item_keeps_its_place() -> None:
    marks = read_text("a:\n  b: [x, {c: 1}]\n", "run.yaml").marks
    assert marks == {
        ("a",): Mark("run.yaml", 1, 1),
        ("a", "b"): Mark("run.yaml", 2, 3),
        ("a", "b", 0): Mark("run.yaml", 2, 7),
        ("a", "b", 1): Mark("run.yaml", 2, 10),
        ("a", "b", 1, "c"): Mark("run.yaml", 2, 11),
    }
    assert str(marks[("a", "b")]) == "run.yaml:2:3"


def test_text_on_the_command_line_stays_whole_where_yaml_would_split_it() -> None:
    assert read_word("a: b", "--key") == "a: b"
    assert read_word("x #1", "--key") == "x #1"
    assert read_word("*", "--key") == "*"
    assert read_word("- 3", "--key") == "- 3"


def test_json_means_the_same_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"a": {"b": [1, 2.5, "no", null, true]}}')
    assert read_file(tmp_path / "run.json").value == {"a": {"b": [1, 2.5, "no", None, True]}}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(tmp_path / "run.yaml").value == {"a": 1}


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\x80\x81\xff")
    for path, message in (
        (tmp_path / "missing.yaml", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "binary.yaml", "binary.yaml:1:1: this is not text in UTF-8"),
        (tmp_path / "binary.yaml" / "inside.yaml", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_file(path)


def test_what_is_written_is_read_back_equal() -> None:
    words = [text for text, _ in WORDS] + TWO_MEANINGS
    words += [
        "<<",
        "a: b",
        "#x",
        " x ",
        "x\ny\n",
        "*a",
        "&a",
        "!a",
        "é",
        "- a",
        "? a",
        "'",
        '"',
        "\t",
        "%",
        "@",
        "{",
    ]
    words += ["x" * 300 + " " + "y" * 300, "\x07", "\U0001f600"]
    value = {
        "words": words,
        "as keys": {word: index for index, word in enumerate(dict.fromkeys(words))},
        "numbers": [
            0,
            -1,
            10**20,
            1e-5,
            1e22,
            5e-324,
            1.7976931348623157e308,
            -0.0,
            0.1,
            math.inf,
            -math.inf,
        ],
        "rest": [True, False, None, [], {}, {"a": {}}, {3: [[1], []]}],
    }
    text = write(value)
    assert read_text(text, "run.yaml").value == value
    assert '"1e-4"' in text


def test_a_value_that_is_not_plain_is_not_written() -> None:
    with pytest.raises(ConfigError, match="no plain value"):
        write({"a": object()})
