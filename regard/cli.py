"""The command line: verbs, plain words and key=value settings; a verb calls one function."""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from regard import __version__
from regard.errors import UsageError, as_json, log, lookup, printable, without_commands
from regard.settings import describe, parse

if TYPE_CHECKING:
    from regard.tasks.frame.task import Task

CHUNK = 512  # lines read before they are answered, which bounds memory for input of any length
LETTERS = 1_000_000  # and so many letters, if that is sooner
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
LISTS = (".txt", ".jsonl", ".list")  # files that name images, a line each
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")  # rows of named columns
# files that are inputs themselves -> where their suffixes are
FILES = {"image": "regard.data.image_format", "audio": "regard.data.sound_files"}

Choose = Callable[[list[str]], str]  # the column or field that is read, of all there are
# a text (or the messages of a conversation), and the JSON line it came in, if it did
Input = tuple[Any, dict[str, Any] | None]


@dataclass(frozen=True)
class Call:
    """What the user asked of a verb."""

    words: list[str]
    settings: dict[str, Any]
    json: bool = False
    quiet: bool = False
    literal: int = 0  # how many of the last words stood after --
    completed: Any = None  # the settings of a run, completed by the model

    def only(self, *names: str) -> list[str]:
        """Return exactly the plain words that are named, or refuse."""
        if len(self.words) < len(names):
            missing = names[len(self.words)]
            raise UsageError(f"{missing} is missing; add it, or see --help for examples")
        if len(self.words) > len(names):
            extra = self.words[len(names)]
            raise UsageError(f"unexpected word '{extra}'; settings are written key=value")
        return self.words

    def nothing(self) -> None:
        """Refuse any word and any setting."""
        self.only()
        for key in self.settings:
            raise UsageError(f"unknown key '{key}'; there is nothing to set")

    def first(self, name: str) -> tuple[str, list[str]]:
        """Return the first plain word and the rest, or refuse."""
        if not self.words:
            raise UsageError(f"{name} is missing; add it, or see --help for examples")
        return self.words[0], self.words[1:]


@dataclass(frozen=True)
class Verb:
    """One word of the command line with the page that explains it."""

    act: Callable[[Call], int | None]
    usage: str
    summary: str
    examples: tuple[str, str]
    settings: tuple[str, str] | None = None  # the module and class of its keys


def run(call: Call) -> None:
    """Answer texts given as words, lines of files or of standard input, or images, in order."""
    import regard

    name, texts = call.first("MODEL")
    model = regard.load(name, task=call.settings.pop("task", None))
    try:
        # completed once: a wrong setting is refused before the first line is read
        call = replace(call, completed=model.check(call.settings))
    except UsageError as mistake:
        hint = " (text that holds a = goes after --)" if "unknown key" in str(mistake) else ""
        raise UsageError(f"{mistake}{hint}") from None
    streams = model.streams
    live = streams and sys.stdout.isatty() and not call.json  # token by token
    if not texts:
        if live and sys.stdin.isatty():
            return model.session(call.completed, sys.stdout)
        size = 1 if sys.stdin.isatty() else CHUNK
        print_answers(model, chunks(sys.stdin.buffer, size, column_of(model, call)), call)
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
                model.say(text, call.completed, sys.stdout, first=number)
                number += 1
        elif words:
            for line in answers(model, words, call, first=number):
                print(line)
            number += len(words)
        words = []
        if word is not None:
            number = run_path(model, word, kind, call, number)


def kind_of(word: str) -> str:
    """Tell whether a word names a file or a folder: file, folder, or nothing of the kind."""
    try:
        return "folder" if os.path.isdir(word) else "file" if os.path.exists(word) else ""
    except (OSError, ValueError):  # longer than any path, or none at all
        return ""


def run_path(model: Any, path: str, kind: str, call: Call, number: int) -> int:
    """Answer the lines of a file, an image, a sound, or those of a folder; return the next number.

    A table of sounds names them from its own folder on.
    """
    from regard.data.lines import opened

    as_text = "; to answer the word itself, write it after --"
    suffix = os.path.splitext(path)[1].lower()
    table = suffix in TABLES or (suffix == ".jsonl" and model.input == "audio")
    if model.input in FILES:
        if kind == "file" and suffix not in LISTS and not (table and model.input == "audio"):
            for line in answers(model, [(path, None)], call, first=number):
                print(line)
            return number + 1
        if kind == "folder":
            suffixes = import_module(FILES[model.input]).SUFFIXES
            found = sorted(
                os.path.join(folder, name)
                for folder, _, names in os.walk(path)
                for name in names
                if os.path.splitext(name)[1].lower() in suffixes and not name.startswith(".")
            )
            if not found:
                ends = ", ".join(sorted(suffixes))
                what = {"image": "image", "audio": "sound"}[model.input]
                raise UsageError(f"{path}: no {what} in this folder; expected files in {ends}")
            some = [found[start : start + CHUNK] for start in range(0, len(found), CHUNK)]
            parts: Any = (([(name, None) for name in part], None) for part in some)
            return print_answers(model, parts, call, number, named=True)
    if model.input == "series" and kind == "file" and suffix not in LISTS:
        found = model.inputs_in(path, call.completed.columns)
        series = found if len(found) > 1 else [path]
        starts = range(0, len(series), CHUNK)
        parts = (([(one, None) for one in series[n : n + CHUNK]], None) for n in starts)
        return print_answers(model, parts, call, number, named=len(series) > 1)
    if kind == "folder":
        raise UsageError(f"{path} is a folder; name files whose lines are to be read{as_text}")
    if not call.quiet:
        what = "rows" if table else "lines"
        log(f"{path}: its {what} are answered{as_text}")
    choose = column_of(model, call)
    if table:
        rows = sound_rows(path) if model.input == "audio" else table_rows(path, model, call)
        return print_answers(model, in_chunks(rows, CHUNK), call, number)
    with opened(path) as file:
        return print_answers(model, chunks(file, CHUNK, choose, path), call, number)


def print_answers(
    model: "Task[Any, Any]",
    parts: Iterable[tuple[list[Input], UsageError | None]],
    call: Call,
    number: int = 0,
    *,
    named: bool = False,
) -> int:
    """Print one line for one line of each part, the first of this number; return the next."""
    for chunk, mistake in parts:
        for line in answers(model, chunk, call, first=number, named=named):
            print(line.replace("\n", " "))
        sys.stdout.flush()
        number += len(chunk)
        if mistake:
            raise mistake
    return number


def calls(verb: str, *words: str, quiet: bool = False) -> Callable[[Call], int]:
    """Return what calls the function of a verb with its words and settings, and tells the answer.

    Some functions can be `quiet`. A result may have an exit code, as that of what was stopped.
    """

    def act(call: Call) -> int:
        import regard

        given = call.only(*words)
        if quiet and "quiet" in call.settings:
            raise UsageError("unknown key 'quiet'; write --quiet")
        settings = {**call.settings, "quiet": call.quiet} if quiet else call.settings
        result = getattr(regard, verb)(*given, **settings)
        tell(result, call)
        return getattr(result, "exit_code", 0)

    return act


def look(call: Call) -> None:
    """Draw where a model looks."""
    import regard

    name, texts = call.first("MODEL")
    if not texts and "movie" not in call.settings:
        raise UsageError('TEXT is missing; write for example: regard look en-zh "How are you?"')
    tell(regard.look(name, texts, **call.settings), call)


def show(call: Call) -> None:
    """Draw a picture of the lectures, or list them all."""
    import regard
    from regard.insight.show import SHOWS

    if not call.words:
        call.nothing()
        width = max(map(len, SHOWS))
        listed = {name: one.summary for name, one in SHOWS.items()}
        rows = [f"{name:<{width}}  {summary}" for name, summary in listed.items()]
        return tell(listed if call.json else "\n".join(rows), call)
    (name,) = call.only("NAME")
    tell(regard.show(name, **call.settings), call)


def doctor(call: Call) -> int:
    """Examine data before it is trained on; return 1 if training would refuse them."""
    import regard

    (data,) = call.only("DATA")
    examined = regard.doctor(data, quiet=call.quiet, **call.settings)
    tell(examined, call)
    return 0 if examined.report.healthy else 1


def filter_photo(call: Call) -> None:
    """Filter a photo."""
    import regard
    from regard.filters.program import SETTINGS

    name, _ = call.first("FILTER")
    lookup("filter", name, SETTINGS)
    _, photo = call.only("FILTER", "PHOTO")
    tell(regard.filter(name, photo, quiet=call.quiet, **call.settings), call)


def models(call: Call) -> None:
    """List the models that can be run and built."""
    call.nothing()
    from regard import api

    tell(api.models(), call)


def recipes(call: Call) -> None:
    """List the published runs that can be repeated."""
    call.nothing()
    from regard import api

    tell(api.recipes(), call)


VERBS = {
    "run": Verb(
        run,
        "regard run MODEL [TEXT|FILE|PHOTO|SOUND|FOLDER...] [key=value...]",
        "answer texts, lines of files or of standard input, photos or sounds",
        (
            'regard run en-zh "How are you?"',
            "regard run runs/mine beam=5 scores=true < test.en > test.de",
        ),
        ("regard.tasks.text.pair_settings", "PairRunSettings"),
    ),
    "train": Verb(
        calls("train", "TASK or RECIPE", quiet=True),
        "regard train TASK|RECIPE [key=value...]",
        "train a task on your own data, or repeat a published recipe",
        (
            "regard train translate data=folder from=en to=de minutes=25 out=runs/mine",
            "regard train multi30k_en_de data=multi30k out=runs/multi30k",
        ),
        ("regard.tasks.text.translate", "TranslateSettings"),
    ),
    "eval": Verb(
        calls("evaluate", "MODEL"),
        "regard eval MODEL data=... [key=value...]",
        "judge a model on a test set, alone or against another",
        (
            "regard eval runs/mine data=folder",
            "regard eval runs/mine data=folder against=runs/other",
        ),
        ("regard.tasks.text.translate", "TranslateEval"),
    ),
    "compare": Verb(
        calls("compare", "TASK or RECIPE", quiet=True),
        "regard compare TASK|RECIPE key=A,B,C [key=value...]",
        "train variants with several seeds, and see which is better and how surely",
        (
            "regard compare wikitext2_lab position=none,learned,rotary,alibi seeds=3 parallel=2",
            "regard compare translate data=folder from=en to=de norm=layer,rms lr=0.001,0.003",
        ),
        ("regard.lab.variants", "CompareSettings"),
    ),
    "look": Verb(
        look,
        "regard look MODEL TEXT|PHOTO|SOUND... [word=...] [key=value...]",
        "see where a model looks, as a picture or as a page to explore",
        (
            'regard look en-zh "How are you?" out=attention.html',
            "regard look runs/photos photo.jpg at=120,80 layers=2 heads=0,3 out=attention.png",
        ),
        ("regard.tasks.text.pair_settings", "PairLookSettings"),
    ),
    "heads": Verb(
        calls("heads", "MODEL", quiet=True),
        "regard heads MODEL data=... [key=value...]",
        "what each attention head does, by scores: previous token, induction, alignment, ...",
        (
            "regard heads en-zh data=tatoeba-en-zh examples=200 out=heads.png",
            "regard heads shakespeare repeated=30",
        ),
        ("regard.insight.heads", "HeadsSettings"),
    ),
    "misconceptions": Verb(
        calls("misconceptions", "MODEL", quiet=True),
        "regard misconceptions MODEL data=... [key=value...]",
        "two beliefs about attention, measured: nearest neighbours, and layer i reads layer i",
        (
            "regard misconceptions en-zh data=tatoeba-en-zh examples=100 out=beliefs.png",
            "regard misconceptions fashion data=fashion-mnist examples=20",
        ),
        ("regard.insight.misconceptions", "MisconceptionSettings"),
    ),
    "doctor": Verb(
        doctor,
        "regard doctor DATA [key=value...]",
        "examine data before training: its faults, and what time and memory it will take",
        (
            "regard doctor folder from=en to=de",
            "regard doctor reviews.csv task=classify columns=body,team",
        ),
        ("regard.examine.doctor", "DoctorSettings"),
    ),
    "filter": Verb(
        filter_photo,
        "regard filter FILTER|compare|grid PHOTO out=... [key=value...]",
        "smooth a photo by a weighted average: gaussian, bilateral, nonlocal_means, ...",
        (
            "regard filter nonlocal_means photo.png out=smooth.png h=0.1 window=21",
            "regard filter compare photo.png sigma=25 weights_at=120,80 out=compare.png",
        ),
        ("regard.filters.program", "FilterSettings"),
    ),
    "show": Verb(
        show,
        "regard show [NAME] [out=...] [key=value...]",
        "draw a picture of the lectures: receptive fields, softmax, diffusion, ...",
        (
            "regard show receptive_fields out=fields.png",
            "regard show scaling keys=128 out=scaling.html",
        ),
    ),
    "directions": Verb(
        calls("directions", "MODEL", quiet=True),
        "regard directions MODEL data=... [out=...] [key=value...]",
        "move images along directions of a latent space, and see what changes",
        (
            "regard directions runs/clothes data=fashion-mnist judge=fashion out=strips.png",
            "regard directions runs/clothes data=fashion-mnist by=components out=strips.html",
        ),
        ("regard.insight.directions", "DirectionSettings"),
    ),
    "cost": Verb(
        calls("cost", "MODEL"),
        "regard cost MODEL [image=...] [length=...] [batch=...] [key=value...]",
        "what a model takes: multiply-adds, memory, attention matrices, time, and how they grow",
        (
            "regard cost vit_b16 image=384 batch=8",
            "regard cost gpt size=base length=1024 model.position=rotary",
        ),
        ("regard.costs.report", "CostSettings"),
    ),
    "superposition": Verb(
        calls("superposition", quiet=True),
        "regard superposition [n=...] [m=...] [sparsity=...] [out=...]",
        "more features than dimensions: train toy models and see their polygons and phases",
        (
            "regard superposition n=5 m=2 sparsity=0,0.9,0.99 out=pentagon.png",
            "regard superposition view=phase out=phase.png",
        ),
        ("regard.insight.superposition", "SuperpositionSettings"),
    ),
    "dictionary": Verb(
        calls("dictionary", "MODEL", quiet=True),
        "regard dictionary MODEL at=... data=... out=... [key=value...]",
        "learn a sparse dictionary of features at a place of a model, and see their examples",
        (
            "regard dictionary shakespeare at=blocks.3 data=play.txt out=runs/features",
            "regard dictionary runs/photos at=blocks.2 data=photos width=8x k=16 out=runs/features",
        ),
        ("regard.insight.dictionary", "DictionarySettings"),
    ),
    "models": Verb(
        models,
        "regard models",
        "list the models that ship with Regard and the families it can build",
        ("regard models", "regard models --json"),
    ),
    "recipes": Verb(
        recipes,
        "regard recipes",
        "list the published recipes with what they promise",
        ("regard recipes", "regard recipes --json"),
    ),
    "import": Verb(
        calls("import_model", "FOLDER"),
        "regard import FOLDER out=...",
        "take over a public checkpoint: a folder of Hugging Face's kind, with safetensors",
        (
            "regard import bert-base-uncased out=runs/bert",
            "regard import ../downloads/opus-mt-en-de out=runs/en-de",
        ),
    ),
    "export": Verb(
        calls("export", "MODEL"),
        "regard export MODEL out=FOLDER [key=value...]",
        "write a trained model for another tool",
        (
            "regard export runs/mine out=exported",
            "regard export en-zh format=ctranslate2 quantization=int8 out=exported",
        ),
    ),
}


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
        if error.errno not in FULL:
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
    if version:
        print(f"regard {__version__}")
    elif not words:
        print(front_page())
    elif flags & {"--help", "-h"}:
        verb = lookup("verb", words[0], VERBS)
        print(page(words, verb), flush=True)  # at once: to know the keys, torch is imported
        if settings := keys_of(words, verb):
            print("\n" + keys(settings, short_keys(words)))
    else:
        verb = lookup("verb", words[0], VERBS)
        plain, settings = parse(words[1:])
        literal = max(0, words.count("--") and len(words) - words.index("--") - 1)
        return verb.act(Call(plain, settings, "--json" in flags, "--quiet" in flags, literal)) or 0
    return 0


def front_page() -> str:
    """Write the page that lists all verbs."""
    lines = ["Attention, from one weighted average to a trained model you can look into.", ""]
    lines += ["  regard VERB [words] [key=value...]", ""]
    width = max(map(len, VERBS)) + 1
    lines += [f"  {name:<{width}}{verb.summary}" for name, verb in VERBS.items()]
    lines += ["", "Examples:"]
    lines += [f"  {example}" for name in ("run", "train") for example in VERBS[name].examples[:1]]
    lines += ["", "regard VERB --help explains one verb and its settings. Text that looks like a"]
    lines += ["setting, or like the name of a file, goes after --."]
    lines += ["Everywhere: --json, --quiet, --version, --help."]
    return "\n".join(lines)


def page(words: list[str], verb: Verb) -> str:
    """Write the page of one verb, or of a task or recipe that is to be trained."""
    from regard.recipes import RECIPES
    from regard.tasks import TASKS

    name = words[1] if words[0] == "train" and len(words) > 1 else ""
    lines = [f"regard {words[0]}: {verb.summary}", "", f"  {verb.usage}", "", "Examples:"]
    shown = verb.examples
    if name in RECIPES:
        shown = (f"regard train {name} out=runs/{name}", f"regard train {name} minutes=10")
    elif name:
        shown = lookup("task or recipe", name, TASKS).examples
    lines += [f"  {example}" for example in shown]
    return "\n".join(lines)


def keys_of(words: list[str], verb: Verb) -> type | None:
    """Return the class of a verb's keys, or that of the task, model or filter named after it."""
    from regard.tasks import TASKS, task

    name = words[1] if len(words) > 1 else ""
    if words[0] == "filter" and name:
        from regard.filters.program import SETTINGS

        return lookup("filter", name, SETTINGS)
    if words[0] == "show" and name:
        from regard.insight.show import SHOWS

        return lookup("picture", name, SHOWS).settings_class()
    if words[0] == "train" and name:
        return task(trained_task(name)).Train
    if words[0] in ("run", "look", "eval") and name:
        from regard.api import model_task

        kind = task(name if name in TASKS else model_task(name))
        return {"run": kind.Run, "look": kind.Look, "eval": kind.Eval}[words[0]]
    return verb.settings and getattr(import_module(verb.settings[0]), verb.settings[1])


def short_keys(words: list[str]) -> dict[str, Any]:
    """Return the short keys of a task that is trained."""
    from regard.tasks import task

    named = words[0] == "train" and len(words) > 1
    return dict(task(trained_task(words[1])).short) if named else {}


def trained_task(name: str) -> str:
    """The task of that name, or the one that a recipe trains."""
    from regard.recipes import RECIPES, recipe

    return recipe(name).TASK if name in RECIPES else name


def keys(settings: type, short: dict[str, Any]) -> str:
    """Write all settings of a class, with their defaults."""
    rows = list(describe(settings))
    width = max(len(row.key) for row in rows)
    lines = ["Settings (type, default):"]
    for key, kind, default, help, *_ in rows:
        lines.append(f"  {key:<{width}}  {help + ' ' if help else ''}({kind}, {default or 'none'})")
    for key, long in short.items():
        lines.append(f"  {key:<{width}}  short for {long}")
    return "\n".join(lines)


def chunks(
    file: BinaryIO, size: int, choose: Choose, name: str = "standard input"
) -> Iterator[tuple[list[Input], UsageError | None]]:
    """Read lines, or JSON lines, a chunk at a time; what is wrong comes after the lines before it.

    The first line decides which of the two they are.
    """
    from regard.data.lines import read_stream

    chunk: list[Input] = []
    records: bool | None = None
    letters = 0
    try:
        for number, line in read_stream(file, name):
            if records is None:
                records = is_record(line)
            where = f"{name}:{number}"
            chunk.append(read_record(line, where, choose) if records else (line, None))
            letters += len(line)
            if len(chunk) == size or letters >= LETTERS:
                yield chunk, None
                chunk, letters = [], 0
        yield chunk, None
    except UsageError as mistake:
        yield chunk, mistake


def in_chunks(rows: Iterable[Input], size: int) -> Iterator[tuple[list[Input], UsageError | None]]:
    """Return inputs a chunk at a time; what is wrong comes after those before it."""
    chunk: list[Input] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == size:
                yield chunk, None
                chunk = []
        yield chunk, None
    except UsageError as mistake:
        yield chunk, mistake


def table_rows(path: str, model: Any, call: Call) -> Iterator[Input]:
    """Read the rows of a table of texts, whose columns its first row names, or else numbers."""
    from regard.data.table import Table, like_header

    header: list[str] | None = None
    columns, choose, table = call.completed.columns, column_of(model, call), Table(path)
    for row in table:
        if row.fault is not None:
            raise UsageError(row.fault.message)
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
            text_of(dict.fromkeys(header, ""), path, choose)
            at = range(len(header))
            if not numbered or named or like_header(table.cells(), at):
                continue
            header = [str(n + 1) for n in at]
        cells: Any = row.value if header is None else zip(header, row.value, strict=False)
        yield text_of(dict(cells), f"{path}:{row.number}", choose)


def sound_rows(path: str) -> Iterator[Input]:
    """Read the rows of a table of sounds."""
    from pathlib import Path

    from regard.data.sound_sets import listed_sounds

    yield from listed_sounds(Path(path))


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
        raise UsageError(f"{where}: not JSON, as the first line is ({error})") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where}: {line[:40]!r} is no JSON object, as the first line is")
    return text_of(record, where, choose)


def text_of(record: dict[str, Any], where: str, choose: Choose) -> tuple[Any, dict[str, Any]]:
    """Return the input that a record holds, beside all of it."""
    try:
        name = choose(list(record))
    except UsageError as mistake:
        raise UsageError(f"{where}: {mistake}") from None
    if not isinstance(record[name], str | list | dict):
        raise UsageError(f"{where}: no text; name it src or text, or say which with columns=")
    return record[name], record


def column_of(model: Any, call: Call) -> Choose:
    """Return what chooses the column of a table or the field of a JSON line that is read."""
    return lambda names: model.column_of(names, call.completed.columns)


def answers(
    model: "Task[Any, Any]",
    chunk: list[Input],
    call: Call,
    *,
    first: int = 0,
    named: bool = False,
) -> Iterator[str]:
    """Answer inputs, of which the first has this number: lines for lines, JSON for JSON.

    Those that are named have the name of the input and a TAB before them.
    """
    how = call.completed or model.check(call.settings)
    forced, n_best = getattr(how, "forced", False), getattr(how, "n_best", 1)
    pairs = str(forced).lower() == "true"
    texts = [as_pair(text, record, model.input) if pairs else text for text, record in chunk]
    results = model.answer(texts, how, first=first)
    for (text, record), result in zip(chunk, results, strict=True):
        if record is not None or call.json:
            brought = record or {model.input: text}
            told = result.record(how)
            if forced and isinstance(told["prediction"], str):  # it was given, and only judged
                del told["prediction"]
            yield as_json(beside(brought, told))
        elif text or model.from_nothing:
            subtitles = getattr(how, "format", "") in ("srt", "vtt")  # of many lines
            before = f"{text}\t" if named and not subtitles else ""
            yield from (before + line for line in result.lines(how))
        else:
            yield from [""] * n_best


def beside(brought: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """Add the fields of an answer to those of its JSON line, none of which is written over."""
    whole = dict(brought)
    for key, value in told.items():
        if key in brought and brought[key] == value:
            continue
        names = (key, f"prediction_{key}", *(f"prediction_{key}_{n}" for n in range(2, 100)))
        whole[next(name for name in names if name not in whole)] = value
    return whole


def as_pair(text: str, record: dict[str, Any] | None, field: str) -> str:
    """Put the two sides of a JSON line beside each other as in a line of text."""
    names = ("text", "transcript", "sentence") if field == "audio" else ("tgt", "target")
    sides = [(record or {}).get(name) for name in names]
    return next((f"{text}\t{side}" for side in sides if isinstance(side, str)), text)


def tell(result: Any, call: Call) -> None:
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
