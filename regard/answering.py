"""Answers of `regard run`: to words, lines of files or of standard input, images and sounds."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from regard.errors import UsageError, as_json, log
from regard.verbs import Call

if TYPE_CHECKING:
    from regard.tasks.runner import Runner

CHUNK_LINES = 512  # read before they are answered, which bounds memory for input of any length
_LETTERS = 1_000_000  # and so many letters, if that is sooner

Choose = Callable[[list[str]], str]  # the column or field that is read, of all there are
# a text (or the messages of a conversation, or why there is none), and the JSON line it came in,
# if it did
Input = tuple[Any, dict[str, Any] | None]


def run(call: Call) -> None:
    """Answer texts given as words, lines of files or of standard input, or images, in order."""
    import regard
    from regard.cluster import Folders, answer_folder

    name, texts = call.take(("MODEL", "TEXT..."))
    folders = Folders.taken(call.settings, texts)
    device, task = call.settings.pop("device", "cpu"), call.settings.pop("task", None)
    model = regard.load(name, device, task=task)
    try:
        # completed once: a wrong setting is refused before the first line is read
        call = replace(call, completed=model.check(call.settings))
    except UsageError as mistake:
        hint = " (text that holds a = goes after --)" if "unknown key" in str(mistake) else ""
        raise UsageError(f"{mistake}{hint}") from None
    if folders is not None:
        return answer_folder(model, folders, call)
    streams = model.streams
    live = streams and sys.stdout.isatty() and not call.json  # token by token
    if not texts:
        if live and sys.stdin.isatty():
            return session(model, call.completed, sys.stdout)
        size = 1 if sys.stdin.isatty() else CHUNK_LINES
        lines = read_lines(sys.stdin.buffer, column_of(model, call))
        print_answers(model, in_chunks(lines, size), call)
        return
    number, literal = 0, len(texts) - call.literal
    words: list[Input] = []
    for place, word in enumerate([*texts, None]):
        kind = "" if word is None or place >= literal else kind_of(word)
        if word is not None and not kind:
            words.append((word, None))
            continue
        if words and live:
            for text, _ in words:
                say(model, text, call.completed, sys.stdout, first=number)
                number += 1
        elif words:
            for lines in answers(model, words, call, first=number):
                print(*lines, sep="\n")
            number += len(words)
        words = []
        if word is not None:
            number = run_path(model, word, kind, call, number)


def say(model: "Runner[Any]", given: Any, settings: Any, out: TextIO, *, first: int = 0) -> Any:
    """Write the answer to one input to a terminal while it is generated."""

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    if settings.forced or settings.n_best > 1 or settings.beam > 1:
        (answer,) = model.answer([given], settings, first=first)
        write("\n".join(answer.lines(settings)))
    else:
        if settings.echo and not settings.chat:
            write(given)
        answer = model.stream(given, settings, write, first=first)
    write("\n")
    return answer


def session(model: "Runner[Any]", settings: Any, out: TextIO) -> None:
    """Answer what is typed until it ends; a conversation remembers its rounds."""
    messages: list[dict[str, str]] = []
    for number in itertools.count():
        try:
            text = input("> ")
        except EOFError:
            out.write("\n")
            return
        given: Any = text
        if settings.chat:
            given = [*messages, {"role": "user", "content": text}]
        try:
            answer = say(model, given, settings, out, first=number)
        except KeyboardInterrupt:  # enough of this answer, not of all
            out.write("\n")
            continue
        if settings.chat:
            messages = [*given, {"role": "assistant", "content": answer.completion}]


def kind_of(word: str) -> str:
    """Tell whether a word names a file or a folder: file, folder, or nothing of the kind."""
    try:
        return "folder" if os.path.isdir(word) else "file" if os.path.exists(word) else ""
    except (OSError, ValueError):  # longer than any path, or none at all
        return ""


def run_path(model: "Runner[Any]", path: str, kind: str, call: Call, number: int) -> int:
    """Answer the inputs that a file or folder holds, or its lines; return the next number."""
    as_text = "; to answer the word itself, write it after --"
    found = model.inputs_at(path, call.completed)
    if found is not None and not found.rows:
        parts = in_chunks(found.inputs, CHUNK_LINES)
        many = found.several
        return print_answers(model, parts, call, number, named=many, whole=not many)
    if kind == "folder":
        raise UsageError(f"{path} is a folder; name files whose lines are to be read{as_text}")
    if not call.quiet:
        what = "rows" if found or is_table(path) else "lines"
        log(f"{path}: its {what} are answered{as_text}")
    rows = found.inputs if found else rows_in(path, model, call)
    return print_answers(model, in_chunks(rows, CHUNK_LINES), call, number)


def is_table(path: str) -> bool:
    """Tell whether a file has rows of named columns."""
    from regard.modalities.base import TABLES

    return os.path.splitext(path)[1].lower() in TABLES


def rows_in(path: str, model: "Runner[Any]", call: Call) -> Iterator[Input]:
    """Inputs of the rows of a table, or of the lines of any other file."""
    from regard.data.lines import opened

    if is_table(path):
        yield from table_rows(path, model, call)
        return
    with opened(path) as file:
        yield from read_lines(file, column_of(model, call), path)


def print_answers(
    model: "Runner[Any]",
    parts: Iterable[tuple[list[Input], UsageError | None]],
    call: Call,
    number: int = 0,
    *,
    named: bool = False,
    whole: bool = False,
) -> int:
    """Print one line for one line of each part, the first of this number; return the next.

    An answer that is shown `whole` may have several lines.
    """
    for chunk, mistake in parts:
        for lines in answers(model, chunk, call, first=number, named=named) if chunk else ():
            for line in lines:
                print(line if whole else line.replace("\n", " "))
        sys.stdout.flush()
        number += len(chunk)
        if mistake:
            raise mistake
    return number


def read_lines(file: BinaryIO, choose: Choose, name: str = "standard input") -> Iterator[Input]:
    """Inputs of lines, or of JSON lines; the first line decides which of the two they are.

    In the place of an input that cannot be read is the error that says why.
    """
    from regard.data.lines import scan_stream

    records: bool | None = None
    for number, line, fault in scan_stream(file, name):
        if fault is not None:
            yield UsageError(fault.message), {} if records else None
            continue
        if records is None:
            records = is_record(line)
        yield read_record(line, f"{name}:{number}", choose) if records else (line, None)


def in_chunks(
    rows: Iterable[Input], size: int, *, faulty: bool = False
) -> Iterator[tuple[list[Input], UsageError | None]]:
    """Inputs a chunk at a time, none of them empty; what is wrong comes after those before it.

    Inputs that cannot be read end the rows, unless `faulty` ones are to be given, too.
    """
    chunk: list[Input] = []
    letters, mistake = 0, None
    try:
        for text, record in rows:
            if isinstance(text, UsageError) and not faulty:
                raise text
            chunk.append((text, record))
            letters += len(str(record or text))
            if len(chunk) == size or letters >= _LETTERS:
                yield chunk, None
                chunk, letters = [], 0
    except UsageError as error:
        mistake = error
    if chunk or mistake:
        yield chunk, mistake


def table_rows(path: str, model: Any, call: Call) -> Iterator[Input]:
    """Read the rows of a table of texts, whose columns its first row names, or else numbers."""
    from regard.data.table import Table, like_header

    header: list[str] | None = None
    columns, choose, table = call.completed.columns, column_of(model, call), Table(path)
    for row in table:
        if row.fault is not None:
            yield UsageError(row.fault.message), {}
            continue
        if row.value is None:
            continue
        if isinstance(row.value, list) and header is None:
            header = [cell.strip() for cell in row.value]
            numbered = columns and columns.split(",")[0].isdecimal()
            known = [*model.usual_columns, *model.columns, *(columns.split(",") if columns else [])]
            named = {*header, *map(str.casefold, header)} & {*known}
            if not named and not numbered:
                raise UsageError(
                    f"{path}: no column of its first row is named {' or '.join(known)}; "
                    "name the one to read with columns=, or give its texts as lines"
                )
            if isinstance(wrong := text_of(dict.fromkeys(header, ""), path, choose)[0], UsageError):
                raise wrong
            at = range(len(header))
            if not numbered or named or like_header(table.cells(), at):
                continue
            header = [str(n + 1) for n in at]
        cells: Any = row.value if header is None else zip(header, row.value, strict=False)
        yield text_of(dict(cells), f"{path}:{row.number}", choose)


def is_record(line: str) -> bool:
    """Tell whether a line is a JSON object."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def read_record(line: str, where: str, choose: Choose) -> tuple[Any, dict[str, Any]]:
    """Take the text out of a JSON line and keep the rest beside it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return UsageError(f"{where}: not JSON, as the first line is ({error})"), {}
    if not isinstance(record, dict):
        return UsageError(f"{where}: {line[:40]!r} is not a JSON object, unlike the first line"), {}
    return text_of(record, where, choose)


def text_of(record: dict[str, Any], where: str, choose: Choose) -> tuple[Any, dict[str, Any]]:
    """Return the input that a record holds, or why it holds none, beside all of it."""
    try:
        name = choose(list(record))
    except UsageError as mistake:
        return UsageError(f"{where}: {mistake}"), record
    if not isinstance(record[name], str | list | dict):
        said = f"{where}: no text; name it src or text, or say which with columns="
        return UsageError(said), record
    return record[name], record


def column_of(model: Any, call: Call) -> Choose:
    """Return what chooses the column of a table or the field of a JSON line that is read."""
    return lambda names: model.column_of(names, call.completed.columns)


def answers(
    model: "Runner[Any]",
    chunk: list[Input],
    call: Call,
    *,
    first: int = 0,
    named: bool = False,
) -> Iterator[list[str]]:
    """Lines of the answer to each input, the first of this number: JSON where JSON was given.

    Those that are named have the name of the input and a TAB before them.
    """
    how = call.completed or model.check(call.settings)
    forced, n_best = getattr(how, "forced", False), getattr(how, "n_best", 1)
    pairs = str(forced).lower() == "true"
    names = model.inputs.targets
    texts = [as_pair(text, record, names) if pairs else text for text, record in chunk]
    results = model.answer(texts, how, first=first)
    for (text, record), result in zip(chunk, results, strict=True):
        if record is not None or call.json:
            brought = record or {model.inputs.key: text}
            told = result.record(how)
            if forced and isinstance(told["prediction"], str):  # it was given, and only judged
                del told["prediction"]
            yield [as_json(merge_record(brought, told))]
        elif text or model.from_nothing:
            subtitles = getattr(how, "format", "") in ("srt", "vtt")  # of many lines
            before = f"{text}\t" if named and not subtitles else ""
            yield [before + line for line in result.lines(how)]
        else:
            yield [""] * n_best


def merge_record(brought: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Add the fields of an answer to those of its JSON line, none of which is written over."""
    whole = dict(brought)
    for key, value in told.items():
        if key in brought and brought[key] == value:
            continue
        names = (key, f"prediction_{key}", *(f"prediction_{key}_{n}" for n in range(2, 100)))
        whole[next(name for name in names if name not in whole)] = value
    return whole


def as_pair(text: str, record: dict[str, Any] | None, names: Iterable[str]) -> str:
    """Put the two sides of a JSON line beside each other as in a line of text."""
    sides = [(record or {}).get(name) for name in names]
    return next((f"{text}\t{side}" for side in sides if isinstance(side, str)), text)
