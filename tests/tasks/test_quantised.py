"""Products of integers: the same bits from a folder in bytes, refused where they cannot be had."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard import native
from regard.errors import UsageError
from regard.files.weights import LARGEST, byte_names, from_bytes, to_bytes
from regard.layers.fast.stack import step_logits
from regard.layers.vocabulary import CappedHead, VocabularyLinear
from regard.models.transformer import Transformer
from tests.native.test_kernel_fuzz import build
from tests.zoo import Zoo, plain_text, spoilt

pytestmark = pytest.mark.skipif(native.plain() is None, reason="no kernels here")
LINES = ["How are you?", "He went home.", "The cat sleeps on the table. The dog does not."]
KINDS = {
    "normal": lambda: torch.randn(40, 70),
    "float16, with ties": lambda: torch.randn(64, 200).half().float(),
    "rows of nothing": lambda: torch.randn(9, 33) * torch.tensor([[0.0], [1.0], [-2.0]] * 3),
    "almost nothing": lambda: torch.randn(40, 20) * 10.0 ** torch.linspace(-44, -32, 40)[:, None],
    "sizes far apart": lambda: torch.randn(40, 20) * 10.0 ** torch.arange(-20, 20)[:, None],
}


def bytes_of_the_kernel(weight: torch.Tensor) -> torch.Tensor:
    """What a kernel rounds a matrix to, as it multiplies unit vectors."""
    head = VocabularyLinear(weight.shape[1], weight.shape[0], bias=False).eval()
    head.weight = torch.nn.Parameter(weight)
    with torch.inference_mode(), native.fast(head, frozen=True, dtype=torch.int8):
        made = step_logits(head, 127 * torch.eye(weight.shape[1])[:, None], None)
    scale = weight.abs().amax(1) / 127
    return (made[:, 0] / (127 * scale.where(scale > 0, 1))).t().round()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_rounded_to_the_bytes_of_the_kernel_and_stays_so(kind):
    torch.manual_seed(0)
    weight = KINDS[kind]()
    rounded, largest = to_bytes(weight)
    assert torch.equal(bytes_of_the_kernel(weight), rounded.float())
    again = from_bytes(rounded, largest)
    assert all(map(torch.equal, to_bytes(again), (rounded, largest)))
    assert (again - weight).abs().amax(1).le(largest / 127 * 0.501 + 4e-37).all()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [8, 33])
def test_what_is_not_finite_stays_so_in_bytes(odd, width):
    head = VocabularyLinear(width, 5, bias=False).eval()
    x = torch.randn(3, 1, width)
    with torch.no_grad():
        head.weight[2, 1] = x[1, 0, 3] = odd
    with torch.inference_mode(), native.fast(head, frozen=True, dtype=torch.int8):
        made = step_logits(head, x, None)[:, 0]
    assert made.isfinite().equal(torch.tensor([[1, 1, 0, 1, 1], [0] * 5, [1, 1, 0, 1, 1]]).bool())


def test_rows_of_almost_nothing_are_none():
    head = VocabularyLinear(33, 5, bias=False).eval()
    x = torch.randn(4, 1, 33)
    x[:3] *= torch.tensor([1e-44, 1e-39, 1e-37])[:, None, None]
    with torch.inference_mode(), native.fast(head, frozen=True, dtype=torch.int8):
        made = step_logits(head, x, None)[:, 0]
    assert not made[:3].any() and made[3].all()


def test_a_table_that_is_read_by_products_too_is_not_rounded():
    model = regard.load("en-zh").model
    assert model.head.weight is model.target.tokens.weight
    names = byte_names(model)
    assert "encoder.0.attention.qkv.weight" in names and "decoder.2.cross.out.weight" in names
    assert not any("tokens" in name or "head" in name for name in names)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Starters as they are, with their names, and in bytes."""
    home = tmp_path_factory.mktemp("bytes")
    text = home / "test.txt"
    text.write_text(plain_text()[:3000])
    regard.export("en-zh", out=home / "en-zh", quantise="int8")
    regard.export("shakespeare", out=home / "shakespeare", quantise="int8", data=str(text))
    return home


def test_a_translator_in_bytes_answers_as_one_that_is_asked_for_int8(folders):
    words = {"n_best": 2, "scores": True}
    ours, theirs = regard.load(folders / "en-zh"), regard.load("en-zh")
    found = ours.run(LINES, **words)
    assert found == theirs.run(LINES, quantise="int8", **words)
    assert found != theirs.run(LINES, **words)
    assert ours.predictor.decoder.engine.dtype == torch.int8
    assert ours.run(LINES, quantise="none", **words) != found
    assert "decoded natively in int8" in str(regard.doctor(str(folders / "en-zh")))


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.8}, {"forced": True}])
def test_a_language_model_in_bytes_answers_as_one_that_is_asked_for_int8(folders, how):
    words = {"max_length": 40, "scores": True, **how}
    texts = ["ROMEO:", "First Citizen:\nBefore we", "x"]
    ours, theirs = regard.load(folders / "shakespeare"), regard.load("shakespeare")
    found = ours.run(texts, **words)
    assert found == theirs.run(texts, quantise="int8", **words)
    assert [a.score for a in found] != [a.score for a in theirs.run(texts, **words)]


def test_a_language_model_may_be_in_bytes_if_its_steps_are(tmp_path):
    starter = regard.load("shakespeare").folder
    config = json.loads((starter / "config.json").read_text())
    made = spoilt(starter, tmp_path / "alibi", model={**config["model"], "position": "alibi"})
    tensors = load_file(starter / "model.safetensors")
    learned = {name: x for name, x in tensors.items() if "position" not in name}
    save_file(learned, made / "model.safetensors")
    found = regard.doctor(str(made))
    assert "decoded step by step in Python, steps natively: its embedding (ALiBi" in str(found)
    regard.export(str(made), out=tmp_path / "bytes", quantise="int8")
    assert "steps natively in int8: " in str(regard.doctor(str(tmp_path / "bytes")))
    words: dict[str, Any] = {"temperature": 0.0, "max_length": 20, "scores": True}
    ours = regard.load(tmp_path / "bytes").run("ROMEO:", **words)
    assert ours == regard.load(made).run("ROMEO:", quantise="int8", **words)
    assert ours != regard.load(made).run("ROMEO:", **words)


def test_what_bytes_cost_stands_in_the_card(folders):
    text = str(folders / "test.txt")
    before = regard.evaluate(regard.load("shakespeare"), data=text)
    after = regard.evaluate(regard.load(folders / "shakespeare"), data=text)
    assert before["perplexity"] != after["perplexity"]
    assert before["perplexity"] == pytest.approx(after["perplexity"], rel=0.01)
    card = (folders / "shakespeare" / "README.md").read_text()
    row = f"| perplexity | {before['perplexity']:.3f} | {after['perplexity']:.3f} |"
    assert row in card and "test.txt" in card
    assert "was not measured" in (folders / "en-zh" / "README.md").read_text()


def test_bytes_without_their_scales_are_refused(folders, tmp_path):
    made = spoilt(folders / "shakespeare", tmp_path / "spoilt")
    tensors = load_file(made / "model.safetensors")
    name = "blocks.0.attention.out.weight"
    assert tensors[name].dtype == torch.int8
    save_file({n: x for n, x in tensors.items() if n != name + LARGEST}, made / "model.safetensors")
    with pytest.raises(UsageError, match=f"missing {name}{LARGEST}"):
        regard.load(made)


def test_what_cannot_be_in_bytes_is_refused_before_anything_is_written(tmp_path, zoo: Zoo):
    out = tmp_path / "out"
    for words, told in (
        ({"data": "x.txt"}, "add quantise=int8"),
        ({"quantise": "int8", "format": "onnx"}, "not for format=onnx"),
        ({"quantise": "int4"}, "unknown quantise"),
        ({"quantise": "int8", "data": str(tmp_path / "none.tsv")}, "none.tsv"),
    ):
        with pytest.raises(UsageError, match=told):
            regard.export("en-zh", out=out, **words)
    with pytest.raises(UsageError, match="writes no texts"):
        regard.export(zoo.model("classify"), out=out, quantise="int8")
    assert not out.exists()


def test_int8_is_never_silently_float32(monkeypatch):
    with pytest.raises(UsageError, match="leave it out"):
        regard.load("en-zh").run("How are you?\t你好", forced=True, quantise="int8")
    model, ids = build("llama").eval(), torch.tensor([[5, 6, 7]])
    model.head = CappedHead(32, model.config.vocab).eval()
    with torch.inference_mode(), native.fast(model, frozen=True, dtype=torch.int8):
        state = model.start(ids, capacity=1)
        with pytest.raises(UsageError, match="int8"):
            model.step(ids[:, -1:], state)
    monkeypatch.delattr(Transformer, "why_no_engine")  # as other families have none
    with pytest.raises(UsageError, match="not for Transformer"):
        regard.load("en-zh").run("How are you?", quantise="int8")
