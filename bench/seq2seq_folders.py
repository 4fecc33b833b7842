"""Run folders of BART, T5 and mT5 as transformers does, whatever their files ask for.

    python bench/seq2seq_folders.py [NAME ...]

A folder is a small random model with a tokenizer, with or without a post-processor, and with a
generation_config.json of each kind. Its texts must be those of transformers' `generate`; else it
must be refused, or a line must say what is done otherwise.
"""

import importlib
import io
import itertools
import json
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

import regard
from regard.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
made: Any = importlib.import_module("tests.models.test_seq2seq")

TEXTS = ["The red dog ran.", "A cat", "saw the old green tree far", "a big small house!"]
KINDS = ["bart", "bart scaled", "t5", "t5 1.1", "t5 gated silu", "mt5", "mt5, tied, relu"]
POSTS = ("usual", "null")
# what generation_config.json asks for; None: there is none
ASKED: dict[str, dict[str, Any] | None] = {
    "no file": None,
    "nothing": {},
    "beams": {"num_beams": 3},
    "beams, early": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
    "long beams": {"num_beams": 2, "length_penalty": 2.0, "early_stopping": False},
    "n-grams": {"no_repeat_ngram_size": 2},
    "penalty": {"repetition_penalty": 1.4, "num_beams": 2},
    "min length": {"min_length": 6},
    "short": {"max_length": 5},
    "sampled": {"do_sample": True, "top_k": 1},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "forced end": {"forced_eos_token_id": 2},
}


def write(folder: Path, kind: str, post: str, asked: dict[str, Any] | None) -> None:
    """Write a folder as transformers would, then change what is asked."""
    tokenizer, roles = made.byte_tokenizer() if "bart" in kind else made.piece_tokenizer()
    names = {f"{role}_token": name for role, name in roles.items()}
    words = made.transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    theirs = made.their_model(kind, vocab_size=len(words))
    rest: dict[str, Any] = {}
    if "bart" in kind:
        theirs.final_logits_bias[:, :5] = -1e4  # special tokens mean nothing as text
        theirs.final_logits_bias[:, 2] = 1.0
    else:
        rest = {"bad_words_ids": [[0], [2]]}  # padding and what is unknown mean nothing as text
    theirs.generation_config.update(**rest)
    theirs.save_pretrained(folder)
    words.save_pretrained(folder)
    if post == "null":
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    path = folder / "generation_config.json"
    if asked is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **asked}))


def by_transformers(folder: Path, most: int) -> list[str]:
    """Texts that transformers writes, each input for itself."""
    words = made.transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = made.transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    texts = []
    for text in TEXTS:
        batch = words(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            # transformers' cache counts the encoder's layers for the decoder's
            found = model.generate(**batch, max_new_tokens=most, use_cache=False)
        texts += words.batch_decode(found, skip_special_tokens=True)
    return texts


def judge(folder: Path, most: int = 12) -> tuple[str, str]:
    """Whether a folder is equal, refused, told or WRONG, and the words for it."""
    try:
        theirs = by_transformers(folder, most)
    except Exception as error:  # what transformers itself refuses is compared with nothing
        theirs = [f"{type(error).__name__}: {str(error)[:80]}"]
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            ours = [str(one) for one in regard.load(folder).run(TEXTS, max_length=most)]
    except UsageError as error:
        return "refused", str(error)
    if ours == theirs:
        return "equal", ""
    lines = told.getvalue().strip()
    return ("told", lines) if lines else ("WRONG", f"{ours} is not {theirs}")


def main(names: list[str]) -> int:
    """Print a row for each folder, and counts."""
    made.transformers.logging.set_verbosity_error()
    made.transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    for kind, post, asked in itertools.product(KINDS, POSTS, ASKED):
        name = f"{kind} / {post} / {asked}"
        if names and not any(one in name for one in names):
            continue
        with tempfile.TemporaryDirectory() as place:
            write(Path(place), kind, post, ASKED[asked])
            result, why = judge(Path(place))
        counts[result] += 1
        print(f"{result:8} {name:44} {why[:200]}", flush=True)
    print(f"{sum(counts.values())} folders: {dict(counts)}")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
