"""A model exported to CTranslate2 is the same model."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard import native
from regard.data.batches import pad
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.models.transformer import Transformer, TransformerConfig
from regard.pretrained.ctranslate2 import export_ctranslate2
from tests import searching

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew magic potions at dawn"
BLOCK = BlockConfig(width=32, heads=4, ffn_width=48, dropout=0.0)
SMALL = TransformerConfig(encoder_depth=2, decoder_depth=2, block=BLOCK, max_length=64)

CONFIGS = {
    "plain": SMALL,
    "post": replace(SMALL, block=replace(BLOCK, order="post")),
    "gelu": replace(SMALL, block=replace(BLOCK, feed_forward="gelu")),
    "swish": replace(SMALL, block=replace(BLOCK, feed_forward="swish")),
    "swiglu": replace(SMALL, block=replace(BLOCK, feed_forward="swiglu")),
    "rms": replace(SMALL, block=replace(BLOCK, norm="rms")),
    "norm_eps": replace(SMALL, block=replace(BLOCK, norm_eps=0.1)),
    "no_bias": replace(SMALL, block=replace(BLOCK, bias=False)),
    "kv_heads": replace(SMALL, block=replace(BLOCK, kv_heads=2)),
    "head_width": replace(SMALL, block=replace(BLOCK, head_width=12)),
    "no_position": replace(SMALL, position="none"),
    "learned": replace(SMALL, position="learned"),
    "rotary": replace(SMALL, position="rotary", position_base=500.0),
    "halves": replace(SMALL, position_layout="halves", position_base=500.0),
    "no_scale": replace(SMALL, scale_embedding=False),
    "head_bias": replace(SMALL, head_bias=True),
    "tie_target": replace(SMALL, tie="target"),
    "tie_none": replace(SMALL, tie="none"),
    "depths": replace(SMALL, encoder_depth=3, decoder_depth=1),
}


@pytest.fixture(scope="module")
def ctranslate2():
    native.library()  # whose symbols must not be taken by packages that are imported later
    return pytest.importorskip("ctranslate2", reason="pip install regard[ctranslate2]")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([WORDS] * 2, vocab=400)


def build(config, source, target):
    """Make a model whose random weights are large enough to have opinions."""
    config = replace(config, source_vocab=source.vocab, target_vocab=target.vocab)
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * noise + ("norm.weight" in name))
            elif "tokens" in name or "table" in name or "head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
    return model


def spell(tokenizer, ids):
    return [tokenizer.library.id_to_token(number) for number in ids]


def score(model, source, target):
    """Return the log-probability of each target piece and of the end."""
    source = torch.tensor([[*source, 2]])
    read = torch.tensor([[1, *target]])
    wanted = torch.tensor([[*target, 2]])
    with torch.no_grad():
        logs = model(source, read).log_softmax(-1)
    return logs.gather(-1, wanted.unsqueeze(-1)).flatten()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_probability_is_the_same(name, ctranslate2, tokenizer, tmp_path):
    """The probabilities of given targets: the start token's embedding and all parts survive."""
    model = build(CONFIGS[name], tokenizer, tokenizer)
    folder = export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported")
    translator = ctranslate2.Translator(str(folder), intra_threads=1, inter_threads=1)
    generator = torch.Generator().manual_seed(1)
    pairs = [
        [torch.randint(4, tokenizer.vocab, (size,), generator=generator).tolist() for size in sizes]
        for sizes in ((1, 7), (5, 1), (9, 12), (20, 6))
    ]
    columns = ([spell(tokenizer, pair[side]) for pair in pairs] for side in (0, 1))
    found = translator.score_batch(*columns)
    ours = torch.cat([score(model, source, target) for source, target in pairs])
    theirs = torch.tensor([value for result in found for value in result.log_probs])
    assert ours.std() > 0.7
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def sources(vocab, sizes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, vocab, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize(("beam", "penalty"), [(1, "none"), (5, "none"), (5, "average")])
def test_what_is_written_is_the_same(beam, penalty, ctranslate2, tokenizer, tmp_path):
    """Greedily and by beam: the same texts, with the same scores."""
    model = build(replace(SMALL, head_bias=True), tokenizer, tokenizer)
    with torch.no_grad():
        model.head.bias[2] += 6.0  # so that texts end, at various lengths
    folder = export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported")
    translator = ctranslate2.Translator(str(folder), intra_threads=1, inter_threads=1)
    read = sources(tokenizer.vocab, [3, 9, 1, 14, 6, 7, 22, 2] * 3)
    theirs = translator.translate_batch(
        [spell(tokenizer, ids) for ids in read],
        beam_size=beam,
        length_penalty=1 if penalty == "average" else 0,
        return_scores=True,
        max_decoding_length=24,
        min_decoding_length=0,
    )
    ids, lengths = pad([np.array([*row, 2]) for row in read], 0)
    if beam == 1:
        ours = searching.greedy(model, ids, lengths, max_length=24, length_penalty=penalty)
    else:
        ours = searching.beam(model, ids, lengths, beam=beam, max_length=24, length_penalty=penalty)
    assert len({len(mine[0].ids) for mine in ours}) > 2
    for mine, other in zip(ours, theirs, strict=True):
        assert spell(tokenizer, mine[0].ids) == other.hypotheses[0]
        assert mine[0].score == pytest.approx(other.scores[0], abs=1e-3)


def test_two_vocabularies(ctranslate2, tokenizer, tmp_path):
    """Each side keeps its own pieces."""
    other = train_tokenizer(["über sieben brücken musst du gehn"] * 3, vocab=320)
    assert other.vocab != tokenizer.vocab
    model = build(replace(SMALL, tie="target"), tokenizer, other)
    folder = export_ctranslate2(model, tokenizer, other, tmp_path / "exported")
    translator = ctranslate2.Translator(str(folder), intra_threads=1, inter_threads=1)
    source, target = tokenizer.encode("the lazy dog"), other.encode("sieben brücken")
    found = translator.score_batch([spell(tokenizer, source)], [spell(other, target)])[0]
    torch.testing.assert_close(
        torch.tensor(found.log_probs), score(model, source, target), atol=1e-4, rtol=1e-4
    )
    names = {path.name for path in folder.iterdir()}
    assert {"source_tokenizer.json", "target_tokenizer.json", "model.bin"} <= names
    assert json.loads((folder / "source_vocabulary.json").read_text())[:3] == [
        "<pad>",
        "<s>",
        "</s>",
    ]


def test_rounding_to_bytes_leaves_the_model_as_it_was(ctranslate2, tokenizer, tmp_path):
    """int8 is near the original, and the original is not touched."""
    model = build(SMALL, tokenizer, tokenizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported", "int8")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    full = export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "full")
    assert (folder / "model.bin").stat().st_size < 0.5 * (full / "model.bin").stat().st_size
    translator = ctranslate2.Translator(str(folder), intra_threads=1, inter_threads=1)
    source, target = tokenizer.encode("seven wizards"), tokenizer.encode("brew magic potions")
    found = translator.score_batch([spell(tokenizer, source)], [spell(tokenizer, target)])[0]
    torch.testing.assert_close(
        torch.tensor(found.log_probs), score(model, source, target), atol=0.5, rtol=0.1
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"norm": "lecture"}, "norm 'lecture'"),
        ({"score": "cosine"}, "score 'cosine'"),
        ({"score": "additive"}, "score 'additive'"),
    ],
)
def test_what_ctranslate2_cannot_hold_is_refused_by_name(
    change, word, ctranslate2, tokenizer, tmp_path
):
    model = build(replace(SMALL, block=replace(BLOCK, **change)), tokenizer, tokenizer)
    with pytest.raises(UsageError, match=word):
        export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported")
    assert not any(tmp_path.iterdir())


def test_mistakes_are_told(ctranslate2, tokenizer, tmp_path, monkeypatch):
    model = build(SMALL, tokenizer, tokenizer)
    with pytest.raises(UsageError, match="unknown quantization 'int9'.*'int8'"):
        export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported", "int9")
    larger = train_tokenizer([WORDS, WORDS[::-1]] * 2, vocab=500)
    with pytest.raises(UsageError, match=f"{larger.vocab} target pieces, the model only"):
        export_ctranslate2(model, tokenizer, larger, tmp_path / "exported")
    with pytest.raises(UsageError, match="takes a transformer from us, not a linear"):
        export_ctranslate2(torch.nn.Linear(2, 2), tokenizer, tokenizer, tmp_path / "exported")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "full")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file"):
        export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "file" / "exported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UsageError, match=r"pip install regard\[ctranslate2\]"):
        export_ctranslate2(model, tokenizer, tokenizer, tmp_path / "exported")
