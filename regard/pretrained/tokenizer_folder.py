"""Loads, saves and exports the tokenizers of a model folder, of ours or of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.data.characters import Characters
from regard.data.tokenize import FIRST, SPACELESS, SubwordTokenizer
from regard.data.tokenizer import SPECIALS
from regard.errors import UsageError
from regard.files import plain_file, read_json, write_atomically, write_json
from regard.pretrained import sentencepiece_model as spm
from regard.pretrained.formats import is_huggingface
from regard.pretrained.formats.encoder_decoders import vocabularies
from regard.pretrained.imported_tokenizer import LETTERS, ImportedTokenizer, TokenFrame
from regard.pretrained.tokenizer_files import read_tokenizers

# how a file of ours begins -> what it holds
_KINDS: dict[str, Any] = {"characters": Characters, "foreign": ImportedTokenizer}
_SIDES = ("source", "target")
# before pieces and bytes of what is written, where they are beside those of what is read
_TARGET, _TARGET_BYTE = "<to>", "<byte>"
_BYTE_LEVEL = (
    "add_prefix_space",
    "trim_offsets",
    "use_regex",
)  # settings that joining does not ask
_OWN_NAMES: dict[str, str | None] = dict(zip(("pad", "bos", "eos", "unk"), SPECIALS, strict=True))
_OURS = "regard_tokenizer.json"  # beside another tool's tokenizer.json, in a model that we exported


def load_tokenizer_file(path: Path) -> Any:
    """Read one file that Regard has written."""
    plain_file(path)
    try:
        with open(path, "rb") as file:
            head = file.read(100)
    except OSError:
        head = b""
    named = (
        cls for kind, cls in _KINDS.items() if f'"regard_tokenizer": "{kind}"'.encode() in head
    )
    return next(named, SubwordTokenizer).load(path)


def load_tokenizers(folder: str | Path, public: bool | None = None) -> tuple[Any, Any]:
    """Read the tokenizers of a folder: for what the model reads, and for what it writes.

    `public` says whether it is a checkpoint of transformers, which its config.json says otherwise.
    """
    folder = Path(folder)
    public = is_huggingface(folder) if public is None else public
    one = folder / (_OURS if public else "tokenizer.json")
    if one.exists():
        both = load_tokenizer_file(one)
        return both, both
    pair = [folder / f"{side}_tokenizer.json" for side in _SIDES]
    if public and not all(path.exists() for path in pair):
        return read_tokenizers(folder)
    source, target = (load_tokenizer_file(path) for path in pair)
    return source, target


def load_tokenizer(folder: str | Path) -> Any:
    """Read the tokenizer of a folder whose model reads and writes in the same one."""
    return load_tokenizers(folder)[1]


def save_tokenizers(folder: Path, pair: tuple[Any, Any]) -> None:
    """Write one tokenizer.json, or source_tokenizer.json and target_tokenizer.json."""
    source, target = pair
    if source is target:
        source.save(folder / "tokenizer.json")
    else:
        # one of a start that was broken off would be taken for that of both sides
        (folder / "tokenizer.json").unlink(missing_ok=True)
        _save_sides(folder, pair)


def _save_sides(folder: Path, pair: tuple[Any, Any]) -> None:
    for side, tokenizer in zip(_SIDES, pair, strict=True):
        tokenizer.save(folder / f"{side}_tokenizer.json")


# ---- for other tools


def export_tokenizers(folder: Path, pair: tuple[Any, Any], config: Mapping[str, Any]) -> None:
    """Write the tokenizers of a model so that transformers' AutoTokenizer reads them."""
    source, target = pair
    if source is not target:
        _export_sides(folder, source, target, config)
    elif isinstance(source, ImportedTokenizer):
        names = {role: source.names[i] for role, i in source.about.specials.items()}
        names.pop("begin", None)
        _write(folder, source.file, source.about.frame, source.names, names, source.about.clean)
    else:
        running = config["task"] == "language" and config.get("running") is True
        frame = _own_frame(source, config["task"])
        _write(
            folder, _own(source, running), frame, SPECIALS, _OWN_NAMES, False, _own_settings(config)
        )
        source.save(folder / _OURS)


def _export_sides(folder: Path, source: Any, target: Any, config: Mapping[str, Any]) -> None:
    """Write Marian's pair of SentencePiece models, or two of ours as one."""
    if vocabularies(read_json(folder / "config.json")):
        _export_joined(folder, source, target, config)
        return
    if not isinstance(source, ImportedTokenizer) or not isinstance(target, ImportedTokenizer):
        raise UsageError(
            "no public format holds two tokenizers of ours, one for each language; "
            "train with vocabularies=joint to export"
        )
    tables = []
    for side, tokenizer in zip(_SIDES, (source, target), strict=True):
        write_atomically(folder / f"{side}.spm", spm.write_model(tokenizer.file))
        named = {name: n for n, name in enumerate(tokenizer.names) if name is not None}
        tables.append(named)
    write_json(folder / "vocab.json", tables[0])
    apart = tables[0] != tables[1]
    if apart:
        write_json(folder / "target_vocab.json", tables[1])
    settings: dict[str, Any] = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": apart}
    settings |= {"source_lang": config.get("from"), "target_lang": config.get("to")}
    for role in ("pad", "eos", "unk"):
        number = target.specials.get(role)
        settings[f"{role}_token"] = None if number is None else target.names[number]
    write_json(folder / "tokenizer_config.json", settings)


def _export_joined(folder: Path, source: Any, target: Any, config: Mapping[str, Any]) -> None:
    """Write two tokenizers as one that reads as the first and joins pieces as the second.

    The pieces of the second have names that no word can spell, with bytes in letters: so what is no
    character comes out as we show it.
    """
    if not isinstance(source, SubwordTokenizer) or not isinstance(target, SubwordTokenizer):
        raise UsageError(
            "no public format holds these two tokenizers; train with vocabularies=joint"
        )
    file, other = _own(source), _own(target)
    model, names = file["model"], _target_names(other["model"])
    if model["type"] == "BPE":
        more = {name: source.vocab + n for n, name in enumerate(names)}
        vocab = {**model["vocab"], **more}
    else:
        least = min(score for _, score in model["vocab"])
        vocab = [*model["vocab"], *([name, least] for name in names)]
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": prefix}, "content": ""}
        for prefix in (_TARGET, _TARGET_BYTE)
    ]
    parts += [dict.fromkeys(_BYTE_LEVEL, True) | {"type": "ByteLevel"}]
    parts += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": source.vocab + n, "content": names[n], **kind, "special": True}
        for n in range(len(SPECIALS))
    ]
    file |= {"model": {**model, "vocab": vocab}, "added_tokens": added}
    file |= {"decoder": {"type": "Sequence", "decoders": parts}}
    frame = _own_frame(source, config["task"])
    _write(folder, file, frame, SPECIALS, _OWN_NAMES, False, _own_settings(config))
    _save_sides(folder, (source, target))


def _target_names(model: Mapping[str, Any]) -> list[str]:
    """Return names of all pieces in the order of their ids, with each byte as a letter."""
    vocab, letters = model["vocab"], {byte: letter for letter, byte in LETTERS.items()}
    if isinstance(vocab, list):
        pieces = [piece for piece, _ in vocab]
    else:
        pieces = sorted(vocab, key=lambda piece: vocab[piece])
    names = [_TARGET + piece for piece in SPECIALS]
    names += [_TARGET_BYTE + letters[byte] for byte in range(256)]
    for piece in pieces[len(FIRST) :]:
        names.append(_TARGET + "".join(letters[byte] for byte in piece.encode()))
    return names


def _write(
    folder: Path,
    file: Mapping[str, Any],
    frame: TokenFrame,
    pieces: Any,
    names: Mapping[str, str | None],
    clean: bool,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write tokenizer.json with what stands around a text, and tokenizer_config.json."""
    whole = {**file, "post_processor": as_template(frame, pieces)}
    write_atomically(folder / "tokenizer.json", json.dumps(whole, ensure_ascii=False) + "\n")
    settings: dict[str, Any] = {f"{role}_token": name for role, name in names.items()}
    suffix = file["model"].get("end_of_word_suffix") == "</w>"
    settings["tokenizer_class"] = "CLIPTokenizer" if suffix else "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = clean
    write_json(folder / "tokenizer_config.json", {**settings, **(more or {})})


def _own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a tokenizer of ours, none of whose texts spells a special token."""
    writes = config["task"] in ("language", "fill")  # whose texts may be begun or masked by them
    settings: dict[str, Any] = {} if writes else {"split_special_tokens": True}
    model = config.get("model")
    if config["task"] in ("classify", "tag") and "max_length" in config:
        settings["model_max_length"] = config["max_length"]
    if not isinstance(model, Mapping) or not model.get("types"):
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    return settings


def as_template(frame: TokenFrame, pieces: Any) -> dict[str, Any]:
    """Describe a frame as the library's template."""

    def part(value: int | str, kind: int) -> dict[str, Any]:
        if isinstance(value, str):
            return {"Sequence": {"id": value, "type_id": kind}}
        return {"SpecialToken": {"id": pieces[value], "type_id": kind}}

    used = sorted({value for value in frame.pair if isinstance(value, int)})
    return {
        "type": "TemplateProcessing",
        "single": [part(value, 0) for value in frame.single],
        "pair": [part(v, kind) for v, kind in zip(frame.pair, frame.types, strict=True)],
        "special_tokens": {
            pieces[n]: {"id": pieces[n], "ids": [n], "tokens": [pieces[n]]} for n in used
        },
    }


def _own_frame(tokenizer: Any, task: str) -> TokenFrame:
    """Return what stands around a text that one of our models reads."""
    bos, eos = tokenizer.bos, tokenizer.eos
    if task in ("translate", "text"):
        return TokenFrame(("A", eos), ("A", eos, "B", eos), (0, 0, 0, 0))
    if task in ("fill", "classify", "tag", "embed"):
        return TokenFrame((bos, "A", eos), (bos, "A", eos, "B", eos), (0, 0, 0, 1, 1))
    return TokenFrame()


def _own(tokenizer: Any, running: bool = False) -> dict[str, Any]:
    """Describe one of our tokenizers as the library's tokenizer.json.

    In the midst of a running text there is no unseen space before a text.
    """
    file = json.loads(tokenizer.text)
    if isinstance(tokenizer, Characters):
        vocab = {piece: n for n, piece in enumerate([*SPECIALS, *tokenizer.characters])}
        model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>"}
        parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
        rest = {"added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
        return {"version": "1.0", **parts, **rest}
    if running:
        return file
    # the unseen space before a text
    space = {"Regex": rf"\A(?=[^{SPACELESS}])"}
    return {**file, "normalizer": {"type": "Replace", "pattern": space, "content": " "}}
