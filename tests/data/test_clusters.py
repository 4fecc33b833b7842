"""Many labels by clusters: even, sensible, all reachable, and the same as scoring all labels."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.data.label_clusters import (
    balanced_clusters,
    cluster_labels,
    label_vectors,
    load_clusters,
    save_clusters,
)
from regard.data.labelled import Example
from regard.errors import UsageError
from regard.layers.heads import ClassificationHead, ClusterClassify, logit_of_both
from regard.metrics.labels import precision_at_k
from regard.models import preset
from regard.models.bert import Bert
from regard.tasks.prepare import Training
from regard.tasks.text import classify
from regard.training.label_loss import clustered

TOPICS, EACH = 6, 5  # 30 labels
TINY: dict[str, Any] = {"depth": 1, "width": 32, "heads": 2, "ffn_width": 64, "dropout": 0.0}
QUICK: dict[str, Any] = {**TINY, "lr": 0.01, "warmup": 5, "pieces": 400, "label_smoothing": 0.0}
QUICK |= {"batch_tokens": 512, "ema": 0.9, "quiet": True}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts with the words of their labels, which are of one topic, and of the topic."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        topic = int(rng.integers(TOPICS))
        labels = rng.choice(EACH, int(rng.integers(1, 4)), replace=False)
        words = [f"word{'abcdef'[topic]}{'vwxyz'[n]}" for n in labels]
        words += [f"topic{'abcdef'[topic]}", *rng.choice(["some", "other", "noise"], 3)]
        rng.shuffle(words)
        made.append({"text": " ".join(words), "labels": [f"{topic}-{n}" for n in labels]})
    return made


def write(path: Path, made: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write(folder / "train.jsonl", rows(600, 0))
    write(folder / "valid.jsonl", rows(80, 1))
    return folder


def train(data: Path, out: Path, **more: Any) -> Any:
    return regard.train("classify", data=data, out=out, **{**QUICK, "valid_every": 300, **more})


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    train(data, data / "run", clusters=6, cluster_beam=2, steps=300)
    return data / "run"


# Clusters


@given(some.integers(1, 60), some.integers(1, 60), some.integers(0, 3))
def test_clusters_are_even_the_larger_first(count: int, clusters: int, seed: int):
    vectors = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    if clusters > count:
        with pytest.raises(UsageError, match="choose at most one a label"):
            balanced_clusters(vectors, clusters)
        return
    sizes = torch.bincount(balanced_clusters(vectors, clusters, seed=seed), minlength=clusters)
    assert sizes.tolist() == [len(part) for part in np.array_split(np.arange(count), clusters)]


def test_labels_of_alike_texts_fall_together():
    examples = [Example(row["text"], tuple(row["labels"]), "") for row in rows(600, 0)]
    labels = sorted({label for example in examples for label in example.labels})
    found = cluster_labels(examples, labels, TOPICS, seed=1)
    assert sorted(label for cluster in found for label in cluster) == labels
    assert all(len({label[0] for label in cluster}) == 1 for cluster in found)


def test_a_label_is_the_mean_of_its_texts_in_any_order():
    texts = [["a", "b", "b"], ["c", "d"], ["b", "a", "b"], ["d", "c"]]
    vectors = label_vectors(texts, [[0], [1], [2], [0, 3]])
    assert vectors.norm(dim=1) == pytest.approx(torch.ones(4))
    torch.testing.assert_close(vectors[1], vectors[3])
    assert vectors[0] @ vectors[2] > 0.5 > vectors[1] @ vectors[2]


# The head


def head_of(clusters: int, beam: int, labels: int = 11) -> ClusterClassify:
    torch.manual_seed(0)
    return ClusterClassify(8, labels, 0.0, "mean", clusters=clusters, beam=beam).double().eval()


def parts(head: ClusterClassify) -> list[slice]:
    return [head.part(number) for number in range(head.match.out_features)]


def by_hand(head: ClusterClassify, x: Tensor) -> Tensor:
    """The probability of every label: that of its cluster times its own."""
    vector, probs = x.mean(1), []
    for number, part in enumerate(parts(head)):
        cluster = head.match(vector)[:, number].sigmoid()
        probs += [cluster * head.out(vector)[:, n].sigmoid() for n in range(part.start, part.stop)]
    return torch.stack(probs, 1)


@pytest.mark.parametrize("clusters", [1, 3, 4, 11])
def test_a_beam_of_all_clusters_scores_all_labels(clusters: int):
    head, x = head_of(clusters, clusters), torch.randn(7, 5, 8).double()
    torch.testing.assert_close(head(x).sigmoid(), by_hand(head, x))


def test_a_beam_scores_the_labels_of_the_likeliest_clusters_and_no_others():
    head, x = head_of(4, 2), torch.randn(9, 5, 8).double()
    every, reached = by_hand(head, x), torch.zeros(9, 11, dtype=torch.bool)
    for row, likely in enumerate(head.match(x.mean(1)).topk(2).indices.tolist()):
        for number in likely:
            reached[row, head.part(number)] = True
    probs = head(x).sigmoid()
    torch.testing.assert_close(probs[reached], every[reached])
    assert (probs[~reached] < 1e-12).all() and head(x).isfinite().all()


def test_every_label_can_be_reached():
    head = head_of(4, 1)
    covered = [n for part in parts(head) for n in range(part.start, part.stop)]
    assert covered == list(range(11))
    for number, part in enumerate(parts(head)):
        torch.nn.init.zeros_(head.match.weight)
        torch.nn.init.constant_(head.match.bias, -9.0)
        with torch.no_grad():
            head.match.bias[number] = 9.0
        probs = head(torch.zeros(1, 2, 8).double()).sigmoid()[0]
        assert (probs > 1e-3).nonzero().flatten().tolist() == list(range(part.start, part.stop))


def test_the_logit_of_a_product_is_exact_where_numbers_are_extreme():
    one = torch.tensor([-400.0, 30.0, 0.0, 400.0, 400.0], dtype=torch.float64)
    other = torch.tensor([3.0, 30.0, 0.0, 2.0, 400.0], dtype=torch.float64)
    found = logit_of_both(one, other)
    assert found.isfinite().all() and found[0] < -399
    assert found[2:4].tolist() == pytest.approx([-np.log(3), 2.0])
    assert found[1] == pytest.approx(30 - np.log(2), abs=1e-9)


@pytest.mark.parametrize("clusters", [0, 1, 4, 11])
def test_a_model_begins_with_the_frequency_of_each_label(clusters: int):
    targets = torch.rand(4000, 11, generator=torch.Generator().manual_seed(0)) < 0.1
    head = (
        head_of(clusters, clusters) if clusters else ClassificationHead(8, 11, 0.0, "mean").double()
    )
    head.start_at(targets)
    probs = head(torch.zeros(1, 2, 8).double()).sigmoid()[0]
    torch.testing.assert_close(probs, targets.double().mean(0), atol=3e-4, rtol=0)


def test_padding_never_matters_to_a_clustered_head():
    config = replace(preset("bert", "tiny"), vocab=50, head="classify", labels=9, pool="mean")
    model = Bert(replace(config, clusters=3, cluster_beam=2)).double().eval()
    ids = torch.randint(0, 50, (1, 6))
    padded = F.pad(ids, (0, 4), value=7)
    torch.testing.assert_close(model(padded, torch.tensor([6])), model(ids))


def test_the_loss_is_that_of_clusters_and_of_the_labels_inside_them():
    logits, targets = torch.randn(5, 3 + 7).double(), (torch.rand(5, 7) < 0.2).double()
    matched, ranked = logits[:, :3], logits[:, 3:]
    parts, total = [[0, 1, 2], [3, 4], [5, 6]], torch.zeros((), dtype=torch.float64)
    bce = F.binary_cross_entropy_with_logits
    for row in range(5):
        for number, part in enumerate(parts):
            own = targets[row, part].max()
            total += bce(matched[row, number], own)
            if own or matched[row].argmax() == number:
                total += bce(ranked[row, part], targets[row, part], reduction="sum")
    torch.testing.assert_close(clustered(7, 3, 1).loss(logits, targets, 0.0, None), total)


# Training, running, judging


def test_a_model_of_clusters_finds_labels_and_is_told_as_such(trained: Path, data: Path):
    model: Any = regard.load(trained)
    assert model.name == "classify" and len(model.codec.clusters) == 6
    clusters = load_clusters(trained)
    assert [label for cluster in clusters for label in cluster] == model.labels
    found = model.run("some wordbv topicb noise wordbx other")
    assert sorted(found.label) == ["1-0", "1-2"]
    judged: Any = regard.evaluate(trained, data=data, part="valid")
    assert judged["precision@1"] > 90 and judged["micro F1"] > 80
    assert judged["precision@5"] < judged["precision@1"]  # three labels at most
    assert judged.made_with["cluster_beam"] == 2
    wide: Any = regard.evaluate(trained, data=data, part="valid", cluster_beam=6)
    assert wide.made_with["cluster_beam"] == 6
    compared: Any = regard.evaluate(trained, data=data, part="valid", against=trained)
    assert {row.name for row in compared.comparison} >= {"micro F1", "precision@1"}


def test_the_beam_is_asked_for_and_forgotten(trained: Path):
    model: Any = regard.load(trained)
    text = "some wordbv topicb noise"
    few, every = (model.run(text, cluster_beam=n).probabilities for n in (1, 6))
    outside = 1 / (1 + np.exp(-ClusterClassify.OUTSIDE, dtype=np.float32))
    assert (~np.isclose(few, outside, rtol=1e-3, atol=0)).sum() == EACH
    assert (~np.isclose(every, outside, rtol=1e-3, atol=0)).sum() == TOPICS * EACH
    assert model.model.head.beam == 2
    with torch.inference_mode():
        rows = model.codec.encoder.texts([text], 64)[0].ids
        x = model.model.hidden(torch.tensor([list(rows)]))
        match, out = model.model.head.all_logits(x).split([TOPICS, TOPICS * EACH], dim=1)
    product = match.sigmoid().repeat_interleave(EACH, 1) * out.sigmoid()
    np.testing.assert_allclose(every, product[0], rtol=1e-4, atol=1e-7)


def test_a_run_of_clusters_goes_on_where_it_stopped(data: Path, tmp_path: Path, monkeypatch):
    settings = {"clusters": 4, "steps": 12, "valid_every": 6}
    train(data, tmp_path / "whole", **settings)
    batch = Training.batch

    def stopping(self: Training, n: int) -> Any:
        if n == 8:
            raise KeyboardInterrupt
        return batch(self, n)

    monkeypatch.setattr(Training, "batch", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "parts", **settings)
    monkeypatch.undo()
    monkeypatch.setattr(classify, "cluster_labels", None)  # they are read, not made again
    assert train(data, tmp_path / "parts", **settings).finished
    for name in ("model.safetensors", "clusters.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_what_clusters_cannot_do_is_refused(data: Path, trained: Path, tmp_path: Path):
    def refused(match: str, **settings: Any) -> None:
        with pytest.raises(UsageError, match=match):
            train(data, tmp_path / "no", **{"steps": 1, **settings})

    refused("31 clusters of 30 labels; choose at most one a label", clusters=31)
    refused("cluster_beam=9 is more than clusters=4", clusters=4, cluster_beam=9)
    refused("cluster_beam=2 is more than clusters=0", cluster_beam=2)
    refused("clusters", clusters=-1)
    single = [{"text": row["text"], "label": row["labels"][0]} for row in rows(60, 2)]
    write(tmp_path / "one.jsonl", single)
    with pytest.raises(UsageError, match="clusters=4 is for texts of several labels"):
        train(tmp_path / "one.jsonl", tmp_path / "no", clusters=4, steps=1)
    with pytest.raises(UsageError, match="cluster_beam=7 is more than the 6 clusters"):
        regard.load(trained).run("some", cluster_beam=7)
    with pytest.raises(UsageError, match="clusters"):
        regard.export(trained, format="huggingface", out=tmp_path / "public")


HOSTILE = {
    "no json": ("[", "not JSON"),
    "no lists": ('{"clusters": {"a": 1}}', "expected lists of labels"),
    "numbers": ('{"clusters": [[1, 2], [3]]}', "expected lists of labels"),
    "nothing": ('{"clusters": []}', "expected lists of labels"),
    "empty clusters": ('{"clusters": [[], []]}', "expected lists of labels"),
    "twice": ('{"clusters": [["a", "b"], ["a"]]}', "each in one cluster"),
    "uneven": ('{"clusters": [["a", "b", "c"], ["d"]]}', "clusters of the same size"),
    "others": ('{"clusters": [["a", "b"], ["c", "d"]]}', "not those of 'labels'"),
    "deep": ("[" * 100_000, "not JSON|over"),
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_file_of_clusters_that_lies_is_refused(trained: Path, tmp_path: Path, lie: str):
    text, told = HOSTILE[lie]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    (tmp_path / "clusters.json").write_text(text)
    with pytest.raises(UsageError, match=told) as caught:
        regard.load(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "value"), [("clusters", 31), ("clusters", -1), ("clusters", "six"), ("clusters", 10**9)]
)
def test_a_config_that_lies_about_clusters_is_refused(
    trained: Path, tmp_path: Path, key: str, value: Any
):
    for name in ("clusters.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    config = json.loads((trained / "config.json").read_text())
    config["model"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="clusters"):
        regard.load(tmp_path)


def test_clusters_are_saved_as_they_were(tmp_path: Path):
    save_clusters(tmp_path, [["a", "ä"], ["c"]])
    assert load_clusters(tmp_path) == [["a", "ä"], ["c"]]


def test_precision_counts_right_labels():
    probs = np.array([[0.1, 0.8, 0.7, 0.6, 0.9], [0.9, 0.8, 0.7, 0.6, 0.5]])
    targets = np.array([[0, 0, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
    found = {name: each.mean() for name, each in precision_at_k(targets, probs).items()}
    assert found == pytest.approx({"precision@1": 50, "precision@3": 100 / 3, "precision@5": 20})
