"""The chat template of a public checkpoint: how its makers write conversations down."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import errors_in, read_json, read_text, write_atomically

_LONGEST_TEMPLATE = 200_000
_LONGEST_TOKEN = 256
_FILE = "chat_template.jinja"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def token_settings(folder: Path) -> dict[str, Any]:
    """Settings of tokenizer_config.json, with what special_tokens_map.json adds."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            settings |= {k: v for k, v in read_json(folder / name).items() if v is not None}
    return settings


def token_name(settings: Mapping[str, Any], role: str) -> str | None:
    """Name of a special token, if the settings of a tokenizer tell it."""
    value = settings.get(f"{role}_token")
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def read_chat(folder: Path) -> dict[str, Any] | None:
    """Return the template and the special tokens that it may write, if a folder has one."""
    settings = token_settings(folder)
    where, template = folder / "tokenizer_config.json", settings.get("chat_template")
    if (folder / "chat_template.json").is_file():
        where = folder / "chat_template.json"
        template = read_json(where).get("chat_template")
    if (folder / _FILE).is_file():
        where = folder / _FILE
        template = read_text(where, _LONGEST_TEMPLATE)
    if isinstance(template, list):  # several, each with a name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is None:
        return None
    names = {f"{role}_token": token_name(settings, role) for role in _ROLES}
    tokens = {role: name for role, name in names.items() if name is not None}
    with errors_in(where):
        return check_chat({"template": template, "tokens": tokens})


def check_chat(chat: Any) -> dict[str, Any]:
    """Return a template with the names of special tokens, or refuse it."""
    chat = chat if isinstance(chat, Mapping) else {}
    template, tokens = chat.get("template"), chat.get("tokens")
    if not isinstance(template, str) or len(template) > _LONGEST_TEMPLATE:
        raise UsageError(f"chat_template is not a text of at most {_LONGEST_TEMPLATE:,} characters")
    if not isinstance(tokens, Mapping) or len(tokens) > len(_ROLES):
        raise UsageError("the special tokens of its chat template are not an object")
    for name, value in tokens.items():
        known = isinstance(name, str) and name in {f"{role}_token" for role in _ROLES}
        if not known or not isinstance(value, str) or len(value) > _LONGEST_TOKEN:
            raise UsageError(f"{name!r:.40} of its chat template is not a special token")
    try:
        json.dumps([template, *tokens.values()], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError("chat_template holds half a character") from error
    return {"template": template, "tokens": dict(tokens)}


def write_chat(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the template of a model that came with one, where transformers looks for it."""
    if "chat" in config:
        write_atomically(folder / _FILE, check_chat(config["chat"])["template"])
