"""Completion for bash, zsh and fish: a script with all that there is to complete.

The script is made once and then stands alone: pressing TAB runs no Python.
"""

from collections.abc import Iterator
from string import Template

from regard.errors import lookup
from regard.settings import Setting
from regard.tasks import TASKS
from regard.verbs import VERBS, Call, Verb, resolve

_FLAGS = ("--help", "--json", "--quiet", "--version")
_TYPES = {"text", "number", "path"}  # that are no names
_ANY = "-"  # stands for a first word that names nothing known

# what stands in a command so far, as "VERB WORD" -> what may come next
_WordTable = dict[str, tuple[str, ...]]

_BASH = r"""
_regard_words() {
    case "$$1" in
$cases
    esac
}

_regard() {
    local line="$${COMP_LINE:0:COMP_POINT}" word found task
    local cur="$${line##*[[:space:]]}" before=() plain=()
    read -ra before <<< "$${line%"$$cur"}"
    for word in "$${before[@]:1}"; do
        [[ $$word == *=* || $$word == -* ]] || plain+=("$$word")
    done
    found="$$(_regard_words "$${plain[*]:0:2}")"
    if [[ -z $$found && -f $${plain[1]}/config.json ]]; then
        task="$$(sed -n 's/.*"task": *"\([a-z_]*\)".*/\1/p' "$${plain[1]}/config.json")"
        found="$$(_regard_words "$${plain[0]} $$task")"
    fi
    [[ -n $$found || $${#plain[@]} -lt 2 ]] || found="$$(_regard_words "$${plain[0]} $any")"
    COMPREPLY=()
    for word in $$found; do
        [[ $$word == "$$cur"* ]] || continue
        [[ $$cur == *=* || $$word != *=?* ]] || continue
        [[ $$word != *= ]] || compopt -o nospace 2> /dev/null
        [[ $$cur != *=* || $$COMP_WORDBREAKS != *=* ]] || word="$${word#*=}"
        COMPREPLY+=("$$word")
    done
}

complete -o default -F _regard regard
"""

_ZSH = r"""#compdef regard
_regard_words() {
    case "$$1" in
$cases
    esac
}

_regard() {
    local cur="$${words[CURRENT]}" found task
    local -a plain all
    plain=($${$${words[2,CURRENT-1]:#*=*}:#-*})
    found="$$(_regard_words "$${plain[1,2]}")"
    if [[ -z $$found && -f $${plain[2]}/config.json ]]; then
        task="$$(sed -n 's/.*"task": *"\([a-z_]*\)".*/\1/p' "$${plain[2]}/config.json")"
        found="$$(_regard_words "$${plain[1]} $$task")"
    fi
    [[ -n $$found || $${#plain} -lt 2 ]] || found="$$(_regard_words "$${plain[1]} $any")"
    all=($${=found})
    if [[ $$cur == *=* ]]; then
        all=($${(M)all:#$${cur%%=*}=?*})
    else
        all=($${all:#*=?*})
    fi
    compadd -S '' -- $${(M)all:#*=} && found=
    compadd -- $${all:#*=} && found=
    if [[ -n $$found || -z $$all ]]; then
        compset -P '*='
        _files
    fi
}

if [[ $${funcstack[1]} == _regard ]]; then
    _regard "$$@"
else
    compdef _regard regard
fi
"""

_FISH = r"""
function __regard_words
    switch "$$argv[1]"
$cases
    end
end

function __regard
    set -l cur (commandline -ct)
    set -l plain
    for word in (commandline -opc)[2..-1]
        string match -qr '=|^-' -- $$word; or set -a plain $$word
    end
    set -l found (__regard_words "$$plain[1..2]")
    if test -z "$$found" -a -f "$$plain[2]/config.json"
        set -l task (sed -n 's/.*"task": *"\([a-z_]*\)".*/\1/p' "$$plain[2]/config.json")
        set found (__regard_words "$$plain[1] $$task")
    end
    test -n "$$found" -o (count $$plain) -lt 2; or set found (__regard_words "$$plain[1] $any")
    set -l begun '^'(string escape --style=regex -- $$cur)'.*'
    set found (string split ' ' -- $$found | string match -r -- $$begun)
    if string match -q '*=*' -- $$cur
        string match -r -- '^.*=.+' $$found
    else
        string match -rv -- '=.|^$$' $$found
    end
end

complete -c regard -n 'test (count (__regard)) -gt 0' -f -a '(__regard)'
"""

# shell -> its script, and one of its cases
SHELLS = {
    "bash": (_BASH, "    {names}) echo '{words}' ;;", "|"),
    "zsh": (_ZSH, "    {names}) echo '{words}' ;;", "|"),
    "fish": (_FISH, "        case {names}\n            echo '{words}'", " "),
}


def complete(call: Call) -> None:
    """Print the completion script of a shell."""
    (shell,) = call.take(("SHELL",))
    print(script(shell))


def script(shell: str) -> str:
    """Completion script of a shell."""
    text, case, separator = lookup("shell", shell, SHELLS)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, words in table().items():
        alike.setdefault(words, []).append(f"'{name}'")
    cases = [
        case.format(names=separator.join(names), words=" ".join(words))
        for words, names in alike.items()
    ]
    return Template(text).substitute(cases="\n".join(cases), any=_ANY).strip()


def table() -> _WordTable:
    """All that can be completed."""
    found: _WordTable = {"": (*VERBS, *_FLAGS)}
    for verb in VERBS.values():
        names = verb.known_names() if verb.names else {}
        found[verb.name] = tuple(names)
        found[f"{verb.name} {_ANY}"] = tuple(candidates(verb, None))
        if verb.settings and not isinstance(resolve(verb.settings), type):
            tasks = TASKS if verb.takes_model else {}  # that of a folder
            found |= {
                f"{verb.name} {name}": tuple(candidates(verb, name)) for name in {**names, **tasks}
            }
    return found


def candidates(verb: Verb, name: str | None) -> Iterator[str]:
    """Keys of a verb for what its first word names, and values of those that are names."""
    for row in verb.rows(name, values={}):
        yield f"{row.key}="
        yield from (f"{row.key}={value}" for value in values(row))


def values(row: Setting) -> list[str]:
    """Names that the value of a setting can be."""
    kinds = [kind for kind in row.type.split("|") if kind.isidentifier() and kind not in _TYPES]
    return row.names() or (kinds if len(kinds) > 1 else [])
