"""Renders chat templates of strangers: a program of its own, which can be ended at any time.

It reads a JSON object a line (template, messages, tokens) and answers one (text or error). What a
template sees is plain data; it runs in Jinja's sandbox, with a bound on memory and on what it
writes. The bound on time is kept by whoever started this.
"""

import json
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

_OLDEST = (3, 1, 6)  # before, there were ways out of the sandbox
_MOST_MEMORY = 2**30
_MOST_TEXT = 2**20  # letters that a template may add


class Generation(jinja2.ext.Extension):
    """What stands between {% generation %} marks, which only training reads, is written as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Text between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Names(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a name {name!r}, which may not be set")
        super().__setitem__(name, value)


class Dicts:
    """Makes dicts, and gives nothing else of them away."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        """Dict."""
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        """Dict with the same value everywhere."""
        return dict.fromkeys(*given)


def _refuse(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False
) -> str:
    """Write JSON without escaping what HTML would need."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> jinja2.Environment:
    """Sandbox, with what transformers gives templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["namespace"] = Names
    made.globals["dict"] = Dicts()
    for name in ("lipsum", "cycler", "joiner"):
        del made.globals[name]
    return made


def render(asked: dict[str, Any], env: jinja2.Environment) -> str:
    """Write the conversation up to where the assistant is to speak."""
    made, room = [], _MOST_TEXT + 4 * sum(len(one["content"]) for one in asked["messages"])
    given = {"messages": asked["messages"], "tools": None, "documents": None, **asked["tokens"]}
    for part in env.from_string(asked["template"]).generate(**given, add_generation_prompt=True):
        made.append(part)
        room -= len(part)
        if room < 0:
            raise jinja2.exceptions.TemplateError("it writes too much")
    return "".join(made)


def answer(line: str, env: jinja2.Environment) -> dict[str, str]:
    """Text of a conversation, or what is wrong with its template."""
    try:
        return {"text": render(json.loads(line), env)}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # whatever a template may do
        return {"error": f"{str(error) or type(error).__name__}"}


def main() -> None:
    """Answer line by line until there is no more."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # where there are no such bounds, there is still the one on time
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
    env = environment()
    print("ready" if version >= _OLDEST else f"jinja2 {jinja2.__version__}", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, env)), flush=True)


if __name__ == "__main__":
    main()
