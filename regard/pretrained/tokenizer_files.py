"""Reads the tokenizer of a public checkpoint from whichever files there are."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.data.tokenize import MOST_PIECES
from regard.errors import UsageError
from regard.files import read_json, read_text
from regard.pretrained import sentencepiece_model as spm
from regard.pretrained.chat_template import token_name, token_settings
from regard.pretrained.format import BERT_TEMPLATE, BOS_TEMPLATE, ROBERTA_TEMPLATE, TokenTemplate
from regard.pretrained.formats import FORMATS
from regard.pretrained.imported_tokenizer import (
    MOST_FRAME,
    TOKEN_ROLES,
    About,
    ImportedTokenizer,
    TokenFrame,
    checked,
)
from regard.pretrained.tokenizer_checks import (
    CLIP_PATTERN,
    MOST_BYTES,
    QWEN_PATTERN,
    check_added,
    check_id,
    check_vocab,
    count,
    flag,
)

# names of special tokens in well-known vocabularies, where a folder does not name them
_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "bos": ("<s>", "<bos>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "<|endoftext|>"),
}
_NFC = {"type": "NFC"}
_QWEN = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated"}
_CLIP = {"type": "Split", "pattern": {"Regex": CLIP_PATTERN}, "behavior": "Removed"}
_ONE_SPACE = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
# byte-level BPE that differs from GPT-2's: normalizer, pre-tokenizer, and what ends a word
_BYTE_LEVEL: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    **dict.fromkeys(("qwen2", "qwen3"), (_NFC, {**_QWEN, "invert": False}, "")),
    "gpt_neox": (_NFC, None, ""),
    **dict.fromkeys(
        ("clip", "clip_text_model"),
        (
            {"type": "Sequence", "normalizers": [_NFC, _ONE_SPACE, {"type": "Lowercase"}]},
            {**_CLIP, "invert": True},
            "</w>",
        ),
    ),
}
_ENDS = ("bos", "eos")
_SENTENCEPIECE = ("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model")
# fairseq's vocabularies: special tokens before the pieces of a SentencePiece model, of which so
# many are then left out
_FAIRSEQ: dict[str, tuple[tuple[str, ...], int]] = {
    "xlm-roberta": (("<s>", "<pad>", "</s>", "<unk>"), 3),
    "camembert": (("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"), 1),
}


# tokenizer classes that put special tokens of their own around a text, without "Tokenizer"
_CLASSES: dict[str, TokenTemplate] = {
    **dict.fromkeys(("Albert", "Bert", "DistilBert", "Electra"), BERT_TEMPLATE),
    **dict.fromkeys(("Deberta", "DebertaV2"), BERT_TEMPLATE),
    **dict.fromkeys(("Bart", "Camembert", "MPNet", "Roberta", "XLMRoberta"), ROBERTA_TEMPLATE),
    "GPTNeoX": TokenTemplate(),
    **{n: FORMATS[n.lower()].template for n in ("CLIP", "Marian", "Pegasus", "T5")},
}


@dataclass(frozen=True)
class Source:
    """A folder with what its small files say about the tokenizer."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    settings: Mapping[str, Any]  # tokenizer_config.json, with what special_tokens_map.json adds

    @property
    def model_type(self) -> str:
        """Return the model_type of the checkpoint."""
        return str(self.config.get("model_type", ""))

    @property
    def template(self) -> TokenTemplate:
        """Return what stands around a text, where the tokenizer's own file does not say."""
        format = FORMATS.get(self.model_type)
        return format.template if format else TokenTemplate()

    @property
    def class_template(self) -> TokenTemplate | None:
        """Return what a tokenizer class of transformers puts around a text, whatever its file says.

        Others do what tokenizer.json says, and nothing more. Where no class is named it is that
        of the model, and those of language models are such others.
        """
        named = self.settings.get("tokenizer_class")
        if isinstance(named, str):
            return _CLASSES.get(named.removesuffix("Fast").removesuffix("Tokenizer"))
        own = not self.open_ended and self.model_type != "modernbert"
        return self.template if own or self.model_type == "gpt_neox" else None

    @property
    def open_ended(self) -> bool:
        """Tell whether a text may go on: at most a token before it is told."""
        return self.template in (BOS_TEMPLATE, TokenTemplate())

    def has(self, name: str) -> bool:
        """Tell whether the folder has a file."""
        return (self.folder / name).exists()

    def rows(self, key: str = "vocab_size") -> int:
        """Return the number of the model's rows, as far as a tokenizer may have so many."""
        rows = self.config.get(key) or self.config.get("vocab_size")
        return min(rows, MOST_PIECES - 1) if type(rows) is int and rows > 0 else 0

    def flag(self, key: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self.settings.get(key)
        return default if value is None else flag(value)

    def name(self, role: str) -> str | None:
        """Return the name of a special token."""
        return token_name(self.settings, role)


Pair = tuple[ImportedTokenizer, ImportedTokenizer]


def read_tokenizers(folder: str | Path, config: Mapping[str, Any] | None = None) -> Pair:
    """Read the tokenizer of a public checkpoint: for what is read, and for what is written."""
    folder = Path(folder)
    if config is None:
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    source = Source(folder, config, token_settings(folder))
    readers = {
        ("source.spm", "target.spm", "vocab.json"): _read_marian,
        ("tokenizer.json",): _read_file,
        ("vocab.txt",): _read_wordpiece,
        ("vocab.json", "merges.txt"): _read_bytes,
        **{(name,): _read_spm for name in _SENTENCEPIECE},
    }
    for names, read in readers.items():
        if all(map(source.has, names)):
            try:
                return read(source, folder / names[0])
            except UsageError as error:
                if str(folder) in str(error):
                    raise
                raise UsageError(f"{folder / names[0]}: {error}") from None
    raise UsageError(
        f"{folder}: no tokenizer; expected tokenizer.json, vocab.txt, vocab.json with merges.txt, "
        "spiece.model, or source.spm with target.spm and vocab.json"
    )


def _read_file(source: Source, path: Path) -> Pair:
    file = read_json(path, MOST_BYTES)
    return _finish(source, checked(file), file)


def _read_wordpiece(source: Source, path: Path) -> Pair:
    """Read BERT's list of pieces."""
    if source.model_type == "esm":
        raise UsageError("ESM's list of amino acids is not supported; only tokenizer.json is")
    vocab = {
        piece.rstrip(): i
        for i, piece in enumerate(read_text(path, MOST_BYTES).rstrip("\n").split("\n"))
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": source.flag("tokenize_chinese_chars", True),
        "strip_accents": source.settings.get("strip_accents"),
        "lowercase": source.flag("do_lower_case", True),
    }
    model = {
        "type": "WordPiece",
        "vocab": vocab,
        "unk_token": source.name("unk") or "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    file = {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": model,
    }
    return _finish(source, checked(file))


def _read_bytes(source: Source, path: Path) -> Pair:
    """Read pieces and merges that are made of bytes, as GPT-2 and those after it have them."""
    lines = read_text(path.with_name("merges.txt"), MOST_BYTES).split("\n")
    merges = [line.rstrip("\r") for line in lines if line.strip() and line[:8] != "#version"]
    normalizer, split, suffix = _BYTE_LEVEL.get(source.model_type, (None, None, ""))
    byte_level = {
        "type": "ByteLevel",
        "trim_offsets": True,
        "use_regex": split is None or bool(suffix),
    }
    spaced = source.flag("add_prefix_space", False)
    before: dict[str, Any] = {**byte_level, "add_prefix_space": spaced}
    if split is not None:
        before = {"type": "Sequence", "pretokenizers": [split, before]}
    vocab = read_json(path, MOST_BYTES)
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "end_of_word_suffix": suffix}
    if suffix:
        model["unk_token"] = source.name("unk") or "<|endoftext|>"
    file = {
        "normalizer": normalizer,
        "pre_tokenizer": before,
        "decoder": {**byte_level, "use_regex": True, "add_prefix_space": True},
        "model": model,
    }
    return _finish(source, checked(file))


def _read_spm(source: Source, path: Path) -> Pair:
    """Read a SentencePiece model with what each family does around it."""
    if source.model_type == "pegasus":
        raise UsageError(
            "Pegasus counts these pieces otherwise; write its tokenizer.json beside it"
        )
    model = spm.read_model(path)
    if source.model_type in ("t5", "mt5"):
        extra = count(source.settings.get("extra_ids", 100))
        sentinels = [f"<extra_id_{n}>" for n in reversed(range(extra))]
        model.pieces += [(name, 0.0, spm.CONTROL) for name in sentinels]
    elif source.model_type == "deberta-v2":
        name = source.name("mask") or "[MASK]"
        if name not in {piece for piece, _, _ in model.pieces}:
            model.pieces.append((name, 0.0, spm.CONTROL))
    elif source.model_type in _FAIRSEQ:
        first, left = _FAIRSEQ[source.model_type]
        kinds = {"<unk>": spm.UNKNOWN}
        rest = [*model.pieces[left:], ("<mask>", 0.0, spm.CONTROL)]
        model.pieces = [(name, 0.0, kinds.get(name, spm.CONTROL)) for name in first] + rest
        names = {name for name, _, _ in model.pieces}
        if len(model.of(spm.UNKNOWN)) != 1 or len(names) != len(model.pieces):
            raise UsageError(
                f"it does not begin as a SentencePiece model of {source.model_type} does"
            )
    before: list[dict[str, Any]] = []
    if source.model_type == "albert":
        for quote in ("``", "''"):
            before.append({"type": "Replace", "pattern": {"String": quote}, "content": '"'})
        if not source.flag("keep_accents", False):
            before += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if source.flag("do_lower_case", source.model_type == "albert"):
        before.append({"type": "Lowercase"})
    return _finish(source, checked(spm.as_tokenizer_json(model, before)))


def _read_marian(source: Source, path: Path) -> Pair:
    """Read Marian's pair of SentencePiece models, whose pieces have ids of their own."""
    apart = source.flag("separate_vocabs", False)
    made = []
    for side, vocabulary in (("source", "vocab"), ("target", "target_vocab" if apart else "vocab")):
        vocab = check_vocab(read_json(source.folder / f"{vocabulary}.json", MOST_BYTES))
        _fits(source, len(vocab))
        unknown = vocab.get(source.name("unk") or "<unk>")
        if unknown is None:
            raise UsageError(f"{source.folder / vocabulary}.json: no piece for what is unknown")
        model = spm.read_model(source.folder / f"{side}.spm")
        file = spm.as_tokenizer_json(model)
        numbers = [vocab.get(piece, unknown) for piece, _, _ in model.pieces]
        # the language to write, at the beginning of a text
        for code in [piece for piece in vocab if re.fullmatch(">>.{1,40}<<", piece)]:
            token = spm.special(len(numbers), code) | {"special": False}
            file["added_tokens"].append(token)
            numbers.append(vocab[code])
        names: list[str | None] = [None] * (max(vocab.values()) + 1)
        for piece, number in vocab.items():
            names[number] = piece
        about = _about(source, vocab, {})
        rows = source.rows(f"{'' if side == 'source' else 'decoder_'}vocab_size")
        about = replace(about, names=tuple(names), numbers=tuple(numbers), rows=rows)
        made.append(ImportedTokenizer(checked(file), about))
    return made[0], made[1]


def _finish(source: Source, file: dict[str, Any], told: Mapping[str, Any] | None = None) -> Pair:
    """Add what the folder says about special tokens, and its tokenizer.json if there is one."""
    vocab = file["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
    added = {token["content"]: token for token in file["added_tokens"]}
    for token in _more_tokens(source, vocab):
        added.setdefault(token["content"], token)
    file["added_tokens"] = check_added(list(added.values()))
    ids = vocab | {token["content"]: token["id"] for token in file["added_tokens"]}
    _fits(source, len(ids))
    about = _about(source, ids, file["model"], told)
    both = ImportedTokenizer(file, about)
    return both, both


def _fits(source: Source, pieces: int) -> None:
    """Refuse more pieces than the model has rows for, before time is spent on them."""
    rows = source.rows()
    if rows and pieces > rows:
        raise UsageError(
            f"the tokenizer has {pieces} pieces, the model only {rows}; "
            "use the tokenizer that belongs to it"
        )


def _more_tokens(source: Source, vocab: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Describe the tokens that the small files name."""
    described = source.settings.get("added_tokens_decoder", {})
    if isinstance(described, dict):
        for number, token in described.items():
            if not isinstance(token, dict) or not str(number).isdecimal():
                raise UsageError(f"added_tokens_decoder has {number!r:.20}: {token!r:.40}")
            yield {**token, "id": int(str(number)[:9])}
    if source.has("added_tokens.json"):
        for name, number in read_json(source.folder / "added_tokens.json", MOST_BYTES).items():
            special = name in {source.name(role) for role in TOKEN_ROLES}
            yield {"content": name, "id": number, "special": special}
    for role, known in _NAMES.items():
        value = source.settings.get(f"{role}_token")
        for name in known if value is None else (source.name(role) or "",):
            if name in vocab:
                described = value if isinstance(value, dict) else {}
                yield spm.special(vocab[name], name) | described | {"special": True}


def _about(
    source: Source,
    ids: Mapping[str, int],
    model: Mapping[str, Any],
    told: Mapping[str, Any] | None = None,
) -> About:
    """Find the ids of special tokens, and what stands around a text."""
    pieces = max(ids.values()) + 1
    specials: dict[str, int] = {}
    for role, known in _NAMES.items():
        named = source.name(role) or ""
        number = source.config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if named in ids:
            specials[role] = ids[named]
        elif isinstance(number, int) and 0 <= number < pieces:
            specials[role] = number
        elif found := [ids[name] for name in known if name in ids]:
            specials[role] = found[0]
    start, format = source.config.get("decoder_start_token_id"), FORMATS.get(source.model_type)
    if isinstance(start, int) and 0 <= start < pieces:
        specials["begin"] = start
    elif format and format.decoder_start in specials:
        specials["begin"] = specials[format.decoder_start]
    template = source.template
    if told is not None:
        template = source.class_template
    elif source.open_ended and any(f"add_{role}_token" in source.settings for role in _ENDS):
        before, after = ([role] * source.flag(f"add_{role}_token", False) for role in _ENDS)
        one, other = ([*before, text, *after] for text in "AB")
        types = (0,) * len(one) + (1,) * len(other)
        template = TokenTemplate(tuple(one), tuple(one + other), types)
    if template == ROBERTA_TEMPLATE:
        specials |= {"cls": specials.get("cls", _role(specials, "bos"))}
        specials |= {"sep": specials.get("sep", _role(specials, "eos"))}
    if template is not None:
        frame = _filled(template, specials)
    else:
        frame = _frame_of((told or {}).get("post_processor"), pieces) or TokenFrame()
    ends = source.config.get("eos_token_id")
    ends = [i for i in ends if isinstance(i, int)][:MOST_FRAME] if isinstance(ends, list) else []
    clean = source.flag("clean_up_tokenization_spaces", False) and model.get("type") != "BPE"
    ends = tuple(i for i in ends if 0 <= i < pieces)
    return About(specials, frame, ends, clean, rows=source.rows())


def _role(specials: Mapping[str, int], role: str) -> int:
    if role not in specials:
        raise UsageError(f"it names no {role}_token")
    return specials[role]


def _filled(template: TokenTemplate, specials: Mapping[str, int]) -> TokenFrame:
    """Put ids in the place of roles."""

    def ids(parts: tuple[str, ...]) -> tuple[int | str, ...]:
        return tuple(part if part in "AB" else _role(specials, part) for part in parts)

    return TokenFrame(ids(template.single), ids(template.pair), template.types)


def _frame_of(processor: Any, pieces: int, depth: int = 0) -> TokenFrame | None:
    """Read what a post-processor puts around a text, or None if it does no such thing."""
    if processor is None:
        return None
    kind = processor.get("type") if isinstance(processor, dict) else None
    if kind == "ByteLevel":
        return None
    if kind == "Sequence" and depth < 4 and isinstance(processor.get("processors"), list):
        found = (_frame_of(p, pieces, depth + 1) for p in processor["processors"][:MOST_FRAME])
        return next((frame for frame in found if frame is not None), None)
    try:
        if kind in ("BertProcessing", "RobertaProcessing"):
            ids = {role: processor[role][1] for role in ("cls", "sep")}
            for number in ids.values():
                check_id(number, pieces)
            bert = kind == "BertProcessing"
            return _filled(BERT_TEMPLATE if bert else ROBERTA_TEMPLATE, ids)
        if kind == "TemplateProcessing":
            single, _ = _template(processor, "single", pieces)
            pair, types = _template(processor, "pair", pieces)
            return TokenFrame(single, pair, types)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"a post_processor {kind} that does not say what it should") from error
    known = "BertProcessing, ByteLevel, RobertaProcessing, TemplateProcessing"
    raise UsageError(f"a post_processor of type {kind!r:.40}; known are {known}")


def _template(
    processor: Mapping[str, Any], key: str, pieces: int
) -> tuple[tuple[int | str, ...], tuple[int, ...]]:
    """Read the parts of a template with their token types."""
    parts: list[int | str] = []
    types: list[int] = []
    for part in processor[key]:
        ((kind, values),) = part.items()
        named = values["id"]
        one = [named] if kind == "Sequence" else processor["special_tokens"][named]["ids"]
        for value in one:
            if value not in ("A", "B") and check_id(value, pieces) is None:
                raise ValueError
            parts.append(value)
            if values["type_id"] not in (0, 1):
                raise ValueError
            types.append(int(values["type_id"]))
    if [p for p in parts if isinstance(p, str)] != ["A", "B"][: 1 + (key == "pair")]:
        raise ValueError
    if len(parts) > MOST_FRAME:
        raise UsageError(f"{len(parts)} tokens around a text; expected at most {MOST_FRAME}")
    return tuple(parts), tuple(types)
