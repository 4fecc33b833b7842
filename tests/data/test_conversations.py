"""Training on conversations: only what the assistant says is learnt, as `run` would ask for it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.data.conversation import Conversation, Message, encode_answers, encode_truncated
from regard.data.documents import encode_documents, load_texts, tokenise_texts
from regard.data.windows import CausalBatches
from regard.tasks.text.language import LANGUAGE
from regard.tasks.text.language_modelling import span_loss

COLOURS = {"grass": "green", "snow": "white", "blood": "red", "coal": "black"}


def chat(n: int) -> list[dict[str, str]]:
    """Return a conversation of two rounds about the colours of things."""
    things = list(COLOURS)
    first, second = things[n % 4], things[(n // 4 + n) % 4]
    return [
        {"role": "user", "content": f"What colour is {first}?"},
        {"role": "assistant", "content": f"{COLOURS[first]}."},
        {"role": "user", "content": f"And {second}, number {n}?"},
        {"role": "assistant", "content": f"{COLOURS[second]}."},
    ]


def test_a_model_learns_to_answer_within_the_context_that_it_has(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat(n)}) + "\n" for n in range(40)))
    settings = {"data": str(data), "init": "shakespeare", "steps": 1, "quiet": True}
    regard.train("language", out=str(tmp_path / "a"), **settings)
    made = regard.load(tmp_path / "a", task="language")
    assert made.predictor.window < 128
    assert made.predictor.window == regard.load("shakespeare").predictor.window
    with pytest.raises(regard.UsageError, match="context=128 is more than"):
        regard.train("language", out=str(tmp_path / "b"), context=128, **settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("chats")
    rows = [json.dumps({"messages": chat(n)}) + "\n" for n in range(120)]
    (home / "chats.jsonl").write_text("".join(rows))
    how = {"depth": 2, "width": 48, "heads": 4, "ffn_width": 96, "pieces": 300, "context": 64}
    how |= {"steps": 220, "valid_every": 220, "batch_tokens": 1024, "lr": 0.006, "dropout": 0}
    how |= {"warmup": 20, "threads": 1, "quiet": True}
    regard.train("language", data=home / "chats.jsonl", out=home / "run", **how)
    return home


def test_it_answers_in_rounds(home):
    model = regard.load(home / "run")
    assert model.codec.template == "plain"
    rounds = chat(2)[:1]
    assert str(model.run(rounds, temperature=0)).strip() == f"{COLOURS['blood']}."
    rounds = [*chat(2)[:2], {"role": "user", "content": "And coal, number 7?"}]
    assert str(model.run(rounds, temperature=0)).strip() == "black."
    assert str(model.run("What colour is snow?", chat=True, temperature=0)).strip() == "white."


@pytest.mark.parametrize("template", ["plain", "alpaca", "chatml", "llama2"])
def test_what_is_read_is_what_run_gives_to_read(home, template):
    tokenizer = regard.load(home / "run").codec.tokenizer
    messages = [Message(**one) for one in chat(5)]
    conversation = Conversation.of(chat(5), "here")
    pairs = list(encode_answers(conversation, template, tokenizer, 512))
    assert len(pairs) == 2
    for place, (read, written) in zip((1, 3), pairs, strict=True):
        asked = encode_truncated(messages[:place], template, tokenizer, 512, begin=[tokenizer.bos])
        assert read == asked
        assert messages[place].content in tokenizer.decode(written)
        assert written[-1] == tokenizer.eos
    # without room for both rounds the older is left out, as it is when it is run
    read, _ = list(encode_answers(conversation, template, tokenizer, 30))[1]
    assert len(read) < len(pairs[1][0])


def test_the_loss_is_of_answers_only(home):
    texts = load_texts(home / "chats.jsonl")
    assert all(isinstance(text, Conversation) for text in texts.parts["train"])
    model = regard.load(home / "run")
    made = tokenise_texts(texts, model.codec.tokenizer, context=64)
    learnt, column = made.learnt["train"], made.columns["train"]
    said = [one["content"] for text in texts.parts["train"] for one in answers(text)]
    assert len(column) == len(said) and len(learnt) == len(column.ids)
    for row, wanted in zip(range(len(column)), said, strict=True):
        begin, end = column.offsets[row], column.offsets[row + 1]
        kept = column.ids[begin:end][learnt[begin:end] > 0]
        assert model.codec.tokenizer.decode(kept.tolist()[:-1]).strip() == wanted
    batch = CausalBatches(made, context=64, batch_tokens=512, seed=1)[0]
    predicted = batch.writes[batch.writes >= 0]
    assert len(predicted) == batch.tokens < 0.4 * batch.read
    with torch.no_grad():
        hidden = model.model.hidden(batch.reads, documents=batch.documents)
        loss = torch.nn.functional.cross_entropy(
            model.model.head(hidden).flatten(0, 1),
            batch.writes.flatten(),
            ignore_index=-1,
            reduction="sum",
        )
    settings = LANGUAGE.resolve({"data": str(home / "chats.jsonl"), "context": 64})
    lesson = LANGUAGE.learning.lesson(model, texts, settings)
    assert torch.allclose(lesson.loss(batch), loss, rtol=1e-5)


def answers(text: str) -> list[dict[str, str]]:
    return [
        {"content": message.content}
        for message in Conversation(text).messages()
        if message.role == "assistant"
    ]


def test_evaluation_counts_answers_only(home):
    model = regard.load(home / "run")
    found = regard.evaluate(home / "run", data=home / "chats.jsonl", part="valid")
    texts = load_texts(home / "chats.jsonl").parts["valid"]
    pairs = list(encode_documents(texts, model.codec.tokenizer, "plain", model.predictor.window))
    count = sum(sum(flags) for _, flags in pairs)
    assert f"tokens:{count}|" in str(found.scores[0])
    ids = np.concatenate([ids for ids, _ in pairs])
    ends = np.cumsum([0, *(len(ids) for ids, _ in pairs)])
    spans = np.stack([ends[:-1], ends[1:]], 1)
    flags = np.concatenate([flags for _, flags in pairs])
    total, number = span_loss(model.model, ids, spans, 4096, flags)
    assert number == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["loss"] < 0.5
    everything, _ = span_loss(model.model, ids, spans, 4096)
    assert everything > total


@pytest.mark.parametrize(
    ("row", "words", "wrong"),
    [
        ({"messages": [{"role": "user", "content": "Hello"}]}, "", "the assistant says nothing"),
        ({"messages": [{"role": "robot", "content": "Hello"}]}, "", "expected a role"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "", "content that is text"),
        ({"messages": chat(1)}, "template=plane", "Did you mean 'plain'?"),
        ({"messages": chat(1)}, "objective=masked", "choose objective=causal"),
    ],
)
def test_mistakes_cost_one_line(tmp_path, capsys, row, words, wrong):
    rows = [row, *({"messages": chat(n)} for n in range(60))]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    line = ["train", "language", f"data={tmp_path / 'chats.jsonl'}", f"out={tmp_path / 'run'}"]
    assert main([*line, *words.split(), "steps=1", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert wrong in error and error.count("\n") == 1


def test_losses_of_each_answer_are_refused(home, capsys):
    words = ["eval", str(home / "run"), f"data={home / 'chats.jsonl'}", "part=valid"]
    assert main([*words, f"outputs={home / 'out.jsonl'}"]) == 2
    assert "outputs= is for texts" in capsys.readouterr().err


def test_texts_and_conversations_may_be_mixed(tmp_path, home):
    rows = [{"text": "A plain text."}, {"messages": chat(0)}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = load_texts(tmp_path / "mixed.jsonl", need=("train",))
    tokenizer = regard.load(home / "run").codec.tokenizer
    (whole, all_of_it), first, second = encode_documents(
        texts.parts["train"], tokenizer, "plain", 64
    )
    assert all(all_of_it) and tokenizer.decode(whole[1:-1]) == "A plain text."
    assert 0 < sum(first[1]) < len(first[1]) and 0 < sum(second[1]) < len(second[1])
