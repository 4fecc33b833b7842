"""The command line: verbs, plain words and key=value settings; a verb calls one function."""

import errno
import os
import sys
from contextlib import redirect_stdout
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, TextIO

from regard import __version__
from regard.errors import UsageError, as_json, lookup, printable, without_commands
from regard.settings import parse
from regard.verbs import VERBS, Call, Verb, resolve, spelled_anew

_DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        use_utf8()
        shown = Terminal(sys.stdout) if sys.stdout.isatty() else sys.stdout
        with redirect_stdout(shown):
            code = act(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        return code
    except UsageError as mistake:
        return refuse(str(mistake))
    except KeyboardInterrupt:
        leave_stdout()
        return 130
    except BrokenPipeError:
        leave_stdout()
        return 141  # what a program that SIGPIPE ends is seen to return
    except MemoryError:
        return refuse("out of memory; choose a smaller size, batch_tokens or max_length")
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's own word for the same
            raise
        return refuse("out of memory; choose a smaller size, batch_tokens or max_length")
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return refuse(f"{place}{(error.strerror or str(error)).lower()}; make room and try again")


def act(words: list[str]) -> int:
    """Find the verb and do it, or show the page that was asked for; return the exit code."""
    for word in words:
        if not word.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{word!r} is not UTF-8; convert it with: iconv -f latin1 -t utf-8")
    end = words.index("--") if "--" in words else len(words)
    flags = {word for word in words[:end] if word in ("--help", "-h", "--json", "--quiet")}
    version = "--version" in words[:end]
    words = [w for w in words[:end] if w not in flags and w != "--version"] + words[end:]
    words = spelled_anew(words)
    if version:
        print(f"regard {__version__}")
    elif not words:
        print(front_page())
    elif flags & {"--help", "-h"}:
        verb = lookup("verb", words[0], VERBS)
        print(verb.page(*words[1:2]), flush=True)  # at once: to know the keys, torch is imported
        plain, settings = parse(words[1:])
        _use(settings)
        if rows := verb.rows(*plain[:1], values=settings):
            print(f"\nKeys (type or choices, default)\n\n{resolve('regard.help:table')(rows)}")
        if verb.group == "use" and not plain:
            print(f"\nregard {verb.name} {verb.words[0]} --help lists its own keys, too.")
    else:
        verb = lookup("verb", words[0], VERBS)
        plain, settings = parse(words[1:])
        _use(settings)
        if not plain and "from" in settings and verb.words == ("TASK|RECIPE",):
            plain = [settings.pop("from")]  # a run to repeat, and no language
        literal = max(0, words.count("--") and len(words) - words.index("--") - 1)
        return perform(verb, Call(plain, settings, "--json" in flags, "--quiet" in flags, literal))
    return 0


def perform(verb: Verb, call: Call) -> int:
    """Call the function of a verb, print what it returns, and return the exit code.

    A result may have an exit code of its own, as that of a training which was stopped.
    """
    if call.settings and not verb.settings:
        raise UsageError(f"unknown key '{min(call.settings)}'; there is nothing to set")
    if verb.terminal:
        return resolve(verb.function)(call) or 0
    words, settings = call.take(verb.words), call.settings
    function = resolve(verb.function)
    if "quiet" in signature(function).parameters:
        if "quiet" in settings:
            raise UsageError("unknown key 'quiet'; write --quiet")
        settings = {**settings, "quiet": call.quiet}
    result = function(*words, **settings)
    print_result(result, call)
    return getattr(result, "exit_code", 0)


def front_page() -> str:
    """Write the page that lists all verbs."""
    lines = ["Attention, from one weighted average to a trained model you can look into.", ""]
    lines += ["  regard VERB [words] [key=value...]"]
    width = max(map(len, VERBS)) + 1
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        lines += ["", f"{group.capitalize()}:"]
        lines += [f"  {v.name:<{width}}{v.summary}" for v in VERBS.values() if v.group == group]
    lines += ["", "Examples:"]
    lines += [f"  {example}" for name in ("run", "train") for example in VERBS[name].examples[:1]]
    lines += ["", "regard VERB --help explains one verb and its settings. Text that looks like a"]
    lines += ["setting, or like the name of a file, goes after --."]
    lines += ["Everywhere: use=FILE (parts of your own), --json, --quiet, --version, --help."]
    return "\n".join(lines)

    return "\n".join(lines)


def print_result(result: Any, call: Call) -> None:
    """Print what a library function returned: JSON for machines, its own words for people."""
    if call.json:
        print(as_json(result, as_data))
    elif not call.quiet:
        print(result)


def as_data(value: Any) -> Any:
    """Give JSON the parts of a result, and of all else its words."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def _use(settings: dict[str, Any]) -> None:
    """Run the files of own parts that are given, which the front page need not know of."""
    if "use" in settings:
        from regard.own import use

        use(settings.pop("use"))


def refuse(message: str) -> int:
    """Say in one line what is wrong."""
    leave_stdout()
    print(f"regard: {printable(message)}", file=sys.stderr)
    return 2


def leave_stdout() -> None:
    """Flush what was answered; if nobody can take it, drop it rather than fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def use_utf8() -> None:
    """Write UTF-8 wherever the locale would not."""
    for stream in (sys.stdout, sys.stderr):
        if (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8":
            stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]


class Terminal:
    """A terminal to which labels, names of files and answers can send no commands.

    What is piped to other programs stays as it is.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text that is shown, and not obeyed."""
        self.stream.write(without_commands(text))
        return len(text)

    def flush(self) -> None:
        """Flush the terminal."""
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
