"""Command-line errors are one line and suggest the intended flag."""

from __future__ import annotations

import pytest

from model.command_line import OneLineParser


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="prog", allow_abbrev=False)
    parser.synonyms = {"--model": "--weights"}
    for name in ("--weights", "--max-running", "--max-waiting"):
        parser.add_argument(name)
    parser.add_argument("--out", required=True)
    parser.add_argument("text", nargs="*")
    return parser


def _parser_with_verbs() -> OneLineParser:
    parser = OneLineParser(prog="prog")
    parser.add_subparsers().add_parser("add").add_argument("--keys-file")
    return parser


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--out x --max-runing=4", "unrecognized arguments: --max-runing=4; did you mean --max-running? see"),
        ("--out x --max_waiting=4", "unrecognized arguments: --max_waiting=4; did you mean --max-waiting? see"),
        ("--out x --model", "unrecognized arguments: --model; did you mean --weights? see"),
        ("add --key-file y", "unrecognized arguments: --key-file y; did you mean --keys-file? see"),
        ("--out x --nonsense --max-runing", "unrecognized arguments: --nonsense --max-runing; did you mean"),
        ("--out x --nonsense", "unrecognized arguments: --nonsense; see"),
        ("--out x -p", "unrecognized arguments: -p; see"),
        ("--weights x", "the following arguments are required: --out; see"),
        ("--out", "argument --out: expected one argument; see"),
    ],
)
def test_unknown_flag_is_named_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], arguments: str, expected: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        (_parser_with_verbs() if arguments.startswith("add") else _parser()).parse_args(arguments.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {expected}") and line.endswith(" prog --help")


def test_valid_arguments_are_parsed() -> None:
    options = _parser().parse_args(["--out", "x", "--weights=y", "--max-runing is text"])
    assert (options.out, options.weights, options.text) == ("x", "y", ["--max-runing is text"])
    assert _parser_with_verbs().parse_args(["add", "--keys-file", "z"]).keys_file == "z"
