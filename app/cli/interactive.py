"""inkstream complete -i: a text that a person and the model write in turns, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from app.api.native.routes import CompleteRequest
from app.cli.client import CONNECTION_LOST, Client, ServiceError, ServiceUnreachable, error_message
from app.cli.request_flags import add_flags, given_fields, printable
from app.http.errors import from_validation
from model.files import one_line

_HISTORY_LINES = 1000
_TAIL_CHARACTERS = 24
_DEFAULT_MAX_TOKENS = 128
_NOT_SETTINGS = {"prompt", "stream", "n", "echo"}
_COLORS = ((0.5, "32", "50 % and more"), (0.2, "36", "20 %"), (0.05, "33", "5 %"), (0.0, "31", "less"))
"""Least probability of a token, its color, and the legend."""
_HELP = """\
What you type is joined to the end of the text, exactly as you type it; then the model continues.
  Enter            continue the text as it is
  \\ at a line's end  a new line; pasted lines stay together
  Ctrl+C           stop the model, or clear the line
  Ctrl+D           leave
{commands}
A line that starts with // is text that starts with /."""


def interact(client: Client, prompt: str, fields: Mapping[str, Any]) -> int:
    """Runs until Ctrl+D or /quit. Returns the exit code. Raises ServiceError, ServiceUnreachable before it starts."""
    model = _wait_for_model(client)
    print(f"{one_line(str(model['id']))} at {client.url}, context {model['max_model_len']} tokens.")
    print("Type a text and the model continues it; /help lists the commands, Ctrl+D leaves.")
    session = _Session(client, int(model["max_model_len"]), dict(fields))
    with _line_editing(_history_file(os.environ)):
        if prompt:
            print(printable(prompt), end="", flush=True)
            session.submit(prompt)
        while not session.is_over:
            with contextlib.suppress(KeyboardInterrupt):
                session.take_turn()
    return 0


def _wait_for_model(client: Client) -> dict[str, Any]:
    """The model that the service serves, once it is loaded. Raises ServiceError, ServiceUnreachable."""
    is_waiting = False
    while True:
        try:
            models = client.get("/v1/models").get("data")
        except ServiceError as error:
            if error.status != 503:
                raise
            if not is_waiting:
                print(f"waiting: {error}", file=sys.stderr)
            is_waiting = True
            time.sleep(0.5)
            continue
        if not isinstance(models, list) or not models:
            raise ServiceUnreachable(f"{client.url} is not an inkstream service: check --url")
        return dict(models[0])


@dataclass(slots=True)
class _Turn:
    """What the person typed, and what the model continued it with."""

    typed: str
    generated: str = ""


@dataclass(slots=True)
class _Session:
    """The text, the settings of requests, and the commands."""

    client: Client
    context: int
    fields: dict[str, Any]
    turns: list[_Turn] = field(default_factory=list)
    is_over: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(turn.typed + turn.generated for turn in self.turns)

    def take_turn(self) -> None:
        """Reads one entry and acts on it."""
        try:
            entry = _read_entry(_prompt(self.text))
        except EOFError:
            print()
            self.is_over = True
            return
        except KeyboardInterrupt:
            print()
            return
        except UnicodeError:
            _say("error: the line is not UTF-8")
            return
        if entry.startswith("/") and not entry.startswith("//"):
            self._run_command(entry[1:])
        else:
            self.submit(entry.removeprefix("/") if entry.startswith("//") else entry)

    def submit(self, typed: str) -> None:
        """Adds what was typed, and continues the text."""
        self.turns.append(_Turn(typed))
        self._generate()

    def _generate(self) -> None:
        """Continues the text in its last turn; Ctrl+C stops that."""
        has_line = False
        try:
            with contextlib.closing(self.client.events(self._request())) as events:
                for name, data in events:
                    has_line |= name == "token"
                    self._on_event(name, data)
        except KeyboardInterrupt:
            _say("\n(stopped)" if has_line else "(stopped)")
        except (ServiceError, ServiceUnreachable) as error:
            _say(f"\nerror: {error}" if has_line else f"error: {error}")
            _say("the text is kept: press Enter to continue it, once that is mended")

    def _request(self) -> dict[str, Any]:
        """The body of the next request; a text that may be too long for the model is read from its end."""
        body = {**self.fields, "prompt": self.text}
        limit = self.context - int(self.fields.get("max_tokens", _DEFAULT_MAX_TOKENS))
        if limit > 0 and len(self.text.encode()) > limit:  # a token is a byte or more
            body.setdefault("truncate_prompt_tokens", limit)
        return body

    def _on_event(self, name: str, data: Mapping[str, Any]) -> None:
        match name:
            case "start" if data.get("truncated"):
                _say("(the text exceeds the context: the model does not see its beginning)")
            case "token":
                self.turns[-1].generated += data["text"]
                print(_colored(data) if "logprobs" in self.fields else printable(data["text"]), end="", flush=True)
            case "error":
                raise ServiceError(error_message(data) or "the service failed")
            case "done":
                print()
                _say(_summary(data))
            case _ if name == CONNECTION_LOST:
                _say("\n(the connection was lost; resuming)")

    def _run_command(self, entry: str) -> None:
        name, _, argument = entry.partition(" ")
        if name in _COMMANDS:
            _COMMANDS[name][2](self, argument.strip())
            return
        close_matches = get_close_matches(name, _COMMANDS, n=1)
        _say(f"error: there is no command /{one_line(name)}: " + (
            f"did you mean /{close_matches[0]}?" if close_matches else "/help lists them"
        ))  # fmt: skip

    def regenerate(self, _: str) -> None:
        """Replaces the model's last continuation by another one."""
        if not self.turns:
            _say("error: there is nothing to regenerate yet: type a text first")
            return
        if "seed" in self.fields:
            _say(f"(the seed is fixed to {self.fields['seed']}, so the text stays the same: /set seed frees it)")
        self.turns[-1].generated = ""
        self._generate()

    def undo(self, _: str) -> None:
        """Removes the last turn."""
        if not self.turns:
            _say("error: there is nothing to undo: the text is empty")
            return
        turn = self.turns.pop()
        _say(f"(removed {len(turn.typed) + len(turn.generated)} characters)")

    def new(self, _: str) -> None:
        """Starts an empty text."""
        self.turns.clear()

    def show(self, _: str) -> None:
        """Prints the whole text."""
        print(printable(self.text))

    def save(self, name: str) -> None:
        """Writes the text to a file that does not exist yet."""
        if not name:
            _say("error: the file is missing: /save story.txt")
            return
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(self.text)
        except FileExistsError:
            _say(f"error: {name} exists, and nothing was written: choose another name")
        except (OSError, ValueError, RuntimeError) as error:
            _say(f"error: {name} cannot be written ({getattr(error, 'strerror', None) or error})")
        else:
            _say(f"(wrote {len(self.text)} characters to {path})")

    def set(self, argument: str) -> None:
        """Changes a setting, resets it, or lists those that differ from the model's own."""
        name, _, value = argument.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        if not name:
            _say("\n".join(f"{name} {value}" for name, value in self.fields.items()) or "(the model's own settings)")
            return
        names = [name for name in CompleteRequest.model_fields if name not in _NOT_SETTINGS]
        if name not in names:
            close_matches = get_close_matches(name, names, n=1)
            hint = f"did you mean {close_matches[0]}?" if close_matches else f"the settings are {', '.join(names)}"
            _say(f"error: {one_line(name)!r} is not a setting: {hint}")
            return
        changed = {known: old for known, old in self.fields.items() if known != name}
        try:
            if value.strip():
                changed.update(_parse_setting(name, value.strip()))
            CompleteRequest(prompt="", **changed)
        except argparse.ArgumentError as error:
            _say(f"error: {name} {error.message}")
        except ValidationError as error:
            _say(f"error: {from_validation(error, CompleteRequest.model_fields)}")
        else:
            self.fields = changed
            _say(f"({name} {changed[name]})" if name in changed else f"({name} is the model's own again)")

    def probabilities(self, _: str) -> None:
        """Switches the colors of tokens on or off."""
        if not _has_colors():
            _say("error: this terminal shows no colors (NO_COLOR is set, or TERM is dumb)")
        elif self.fields.pop("logprobs", None) is not None:
            _say("(colors off)")
        else:
            self.fields["logprobs"] = 0
            print("a token's probability: " + ", ".join(f"\033[{color}m{words}\033[0m" for _, color, words in _COLORS))

    def help(self, _: str) -> None:
        """Lists the commands."""
        lines = (f"  {usage:<17}{words}" for usage, words, _ in _COMMANDS.values())
        print(_HELP.format(commands="\n".join(lines)))

    def quit(self, _: str) -> None:
        """Ends the session."""
        self.is_over = True


_COMMANDS = {
    "regenerate": ("/regenerate", "replace the model's last continuation by another one", _Session.regenerate),
    "undo": ("/undo", "remove the last turn: what you typed, and its continuation", _Session.undo),
    "new": ("/new", "start an empty text", _Session.new),
    "set": ("/set NAME VALUE", "change a setting (/set temperature 0.7); without VALUE reset it", _Session.set),
    "probs": ("/probs", "color each token by its probability, or stop that", _Session.probabilities),
    "show": ("/show", "print the whole text", _Session.show),
    "save": ("/save FILE", "write the text to a file", _Session.save),
    "help": ("/help", "this list", _Session.help),
    "quit": ("/quit", "leave", _Session.quit),
}


def _parse_setting(name: str, value: str) -> dict[str, Any]:
    """The field of a request, from the text that its flag takes. Raises argparse.ArgumentError."""
    if CompleteRequest.model_fields[name].annotation == bool | None:
        if value not in ("on", "off", "true", "false"):
            raise argparse.ArgumentError(None, f"must be on or off, not {value[:60]!r}")
        return {name: value in ("on", "true")}
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_flags(parser, CompleteRequest.model_json_schema(), without=_NOT_SETTINGS)
    return given_fields(parser.parse_args([f"--{name.replace('_', '-')}={value}"]), [name])


def _summary(data: Mapping[str, Any]) -> str:
    """One line about a continuation: tokens, speed, and the reason of its end if the limit was not reached."""
    count, speed = data["usage"]["completion_tokens"], data["timings"]["tokens_per_second"]
    reason = {"length": "", "stop": ", the model ended the text"}
    end = data["choices"][0]
    why = f", ended by the stop {end['stop_reason']!r}" if end["stop_reason"] is not None else None
    return (
        f"({count} tokens, {speed:.0f} tokens/s{why or reason.get(end['finish_reason'], ', ' + end['finish_reason'])})"
    )


def _colored(data: Mapping[str, Any]) -> str:
    """The text of a token event, each token in the color of its probability."""
    tokens = [(token["text"], token["logprob"]) for token in data.get("tokens", [])]
    if "".join(text for text, _ in tokens) != data["text"]:  # a character of several tokens, or a stop held some back
        tokens = [(data["text"], min((logprob for _, logprob in tokens), default=0.0))]
    return "".join(f"\033[{_color(logprob)}m{printable(text)}\033[0m" for text, logprob in tokens)


def _color(logprob: float | None) -> str:
    probability = math.exp(logprob) if logprob is not None else 0.0
    return next(color for least, color, _ in _COLORS if probability >= least)


def _say(text: str) -> None:
    """Prints something that is not text of the model."""
    print(f"\033[2m{printable(text)}\033[0m" if _has_colors() else printable(text), flush=True)


def _has_colors() -> bool:
    """Whether the terminal shows colors and the user wants them (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in (None, "dumb")


def _prompt(text: str) -> str:
    """The end of the text, to which the entry is joined. readline must know which characters take no space."""
    if not text:
        return "> "
    tail = ("..." if len(text) > _TAIL_CHARACTERS else "") + one_line(text[-_TAIL_CHARACTERS:])
    return f"\001\033[2m\002{tail}\001\033[0m\002" if _has_colors() else tail


def _read_entry(prompt: str) -> str:
    """One line, or several if they end with a backslash. Raises EOFError, KeyboardInterrupt, UnicodeError."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    text = "\n".join(lines)
    text.encode()  # bytes that are not UTF-8 arrive as lone surrogates
    return text


def _history_file(environment: Mapping[str, str]) -> Path | None:
    """Where entries are kept between sessions: the user's state directory (XDG); None without a home directory."""
    if (state := Path(environment.get("XDG_STATE_HOME", ""))).is_absolute():
        return state / "inkstream" / "history"
    try:
        return Path.home() / ".local" / "state" / "inkstream" / "history"
    except RuntimeError:
        return None


@contextlib.contextmanager
def _line_editing(file: Path | None) -> Iterator[None]:
    """The line editor of input(), with Tab and the entries of earlier sessions, where this Python has it."""
    try:
        readline = importlib.import_module("readline")  # by name: some builds of Python lack it
    except ImportError:
        _say("(no line editing and no history: this Python was built without readline)")
        yield
        return
    readline.set_completer(partial(_complete_word, readline))
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    with _history(readline, file):
        yield


def _complete_word(readline: ModuleType, text: str, state: int) -> str | None:
    """What readline calls at Tab: commands, and the names of settings after /set."""
    line = readline.get_line_buffer()
    if line.startswith("/set "):
        words = [name for name in CompleteRequest.model_fields if name not in _NOT_SETTINGS]
    else:
        words = [f"/{name}" for name in _COMMANDS] if line.startswith("/") and " " not in line else []
    found = [f"{word} " for word in words if word.startswith(text)]
    return found[state] if state < len(found) else None


@contextlib.contextmanager
def _history(readline: ModuleType, file: Path | None) -> Iterator[None]:
    """Entries of earlier sessions; those of this one are appended at its end, so that two sessions lose nothing."""
    readline.clear_history()
    readline.set_history_length(_HISTORY_LINES)
    is_kept = False
    if file:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            file.chmod(0o600)
            readline.read_history_file(file)
            is_kept = True
        except OSError as error:
            _say(f"(what you type is not kept for the next session: {file}: {error.strerror})")
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        if file and is_kept:
            with contextlib.suppress(OSError):
                _append_history(readline, file, readline.get_current_history_length() - before)


def _append_history(readline: ModuleType, file: Path, count: int) -> None:
    if hasattr(readline, "append_history_file"):
        readline.append_history_file(max(0, count), file)
    else:  # libedit before Python 3.13
        readline.write_history_file(file)
