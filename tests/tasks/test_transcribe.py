"""Speech recognition: tones that stand for letters are learnt, transcribed, timed and judged."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch.nn import functional as F

import regard
from regard.cli import main
from regard.data.sound_augment import SoundAugment, change_speed
from regard.data.sound_batches import in_buckets, pad_sounds
from regard.decode.speech.decoder import Recognised, likely_texts
from regard.decode.speech.words import Word
from regard.errors import UsageError
from regard.tasks import task
from regard.tasks.prepare import PreparedRun, prepare
from regard.tasks.sound.transcribing import make_batch, speech_loss
from tests.decode.test_beams import check_tree
from tests.tones import RATE, said, sentence, spoken, tones, write_tones
from tests.zoo import ANIMALS

LEARN = {**ANIMALS["transcribe"].settings, "quiet": True}
SMALL = {key: LEARN[key] for key in LEARN if key not in ("steps", "valid_every", "quiet")}


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("transcribe")


@pytest.fixture(scope="module")
def run(zoo) -> Path:
    return zoo.model("transcribe")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("speech")


@pytest.fixture(scope="module")
def model(run):
    return regard.load(run, task="transcribe")


@pytest.fixture(scope="module")
def both(zoo, data):
    """A model with CTC and a decoder."""
    how = {**LEARN, "decoder_depth": 1, "ctc_weight": 0.7, "steps": 140}
    run = zoo.once("both", lambda out: regard.train("transcribe", data=data, out=out, **how))
    return regard.load(run, task="transcribe")


def utterance(seed: int) -> tuple[np.ndarray, str]:
    rng = np.random.default_rng(1000 + seed)
    text = sentence(rng)
    return tones(text, rng), text


# What it learns


def test_it_learns_to_transcribe(run, model, data):
    judged = regard.evaluate(run, data=data, part="valid")
    assert judged["wer"] < 10 and judged["cer"] < 5
    assert "norm:words" in judged.scores[0].signature
    assert [model.run(tones("AB C", np.random.default_rng(n))).text for n in range(3)] == [
        "AB C"
    ] * 3


def test_a_sound_is_transcribed_the_same_alone_and_among_others(model):
    sounds = [utterance(n)[0] for n in range(12)]
    alone = [model.run(samples, beam=1) for samples in sounds]
    for answer, among in zip(alone, model.run(sounds, beam=1), strict=True):
        assert among.text == answer.text
        assert among.score == pytest.approx(answer.score, abs=1e-4)
        assert [word.start for word in among.words] == [word.start for word in answer.words]


def test_every_word_has_a_time_that_is_its_own(model):
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(2000 + seed)
        text = sentence(rng)
        samples, letters = said(text, rng)
        words = model.run(samples, forced=text).words
        assert [word.text for word in words] == text.split()
        begin = 0
        for word in words:
            first, last = letters[begin], letters[begin + len(word.text) - 1]
            begin += len(word.text)
            assert 0 <= word.start < word.end <= len(samples) / RATE
            assert 0 < word.confidence <= 1
            errors += [abs(word.start - first[0]), abs(word.end - last[1])]
    assert np.mean(errors) < 0.06  # seconds


def test_ways_to_decode_agree_where_all_is_clear_and_a_missing_head_is_named(model, both):
    samples, text = utterance(1)
    assert str(both.run(samples, decoding="ctc")) == text
    assert both.predictor.decoder.ways == [
        "joint",
        "ctc",
        "attention",
    ] and model.predictor.decoder.ways == ["ctc"]
    for way in both.predictor.decoder.ways:
        answer = both.run(samples, decoding=way, beam=3, n_best=2)
        assert len(answer.words) == len(answer.text.split())
    # the weight of CTC alone decides where it is 1
    joint = [both.run(utterance(n)[0], decoding="joint", ctc_weight=1.0) for n in range(5)]
    assert [str(one) for one in joint] == [
        str(both.run(utterance(n)[0], decoding="ctc")) for n in range(5)
    ]
    for way, why in (("attention", "no decoder; choose ctc"), ("jiont", "Did you mean 'joint'")):
        with pytest.raises(UsageError, match=why):
            model.run(samples, decoding=way)
    with pytest.raises(UsageError, match="sampling is for decoding=attention"):
        model.run(samples, temperature=0.5)


def test_hypotheses_are_different_texts_and_the_best_comes_first(model):
    text = "AB C"
    answer = model.run(tones(text, np.random.default_rng(0)), n_best=4)
    texts = [answer.text, *(other.text for other in answer.others)]
    scores = [answer.score, *(other.score for other in answer.others)]
    assert texts[0] == text and len(set(texts)) == len(texts) and scores == sorted(scores)[::-1]


# Several speeds


def test_a_text_has_the_mean_of_its_probabilities_at_all_speeds(model):
    speeds = (0.9, 1.0, 1.15)
    for seed in range(3):
        samples, _ = utterance(seed)
        played = [model.predictor.utterance(change_speed(samples, speed)) for speed in speeds]
        (texts,) = model.predictor.decoder.at_speeds([played], speeds, model.check({"n_best": 3}))
        for one in texts:
            each = []
            for some in played:
                table = model.predictor.decoder.encode([some]).frames(0)[:, None]
                sizes = torch.tensor([len(table)]), torch.tensor([len(one.ids)])
                each.append(-F.ctc_loss(table, torch.tensor([one.ids]), *sizes, 0, "sum").item())
            assert one.score == pytest.approx(np.logaddexp.reduce(each) - np.log(3), abs=1e-3)
        assert len(texts) == 3 and texts == sorted(texts, key=lambda one: -one.score)


def test_one_speed_given_twice_changes_nothing_and_a_bonus_counts_once(model):
    for seed in range(4):
        samples, _ = utterance(seed)
        plain, twice = (model.run(samples, beam=5, speeds=s) for s in ((1.0,), (1.0, 1.0)))
        assert twice.text == plain.text and twice.words == plain.words
        assert twice.score == pytest.approx(plain.score, abs=1e-3)
        more = model.run(samples, beam=5, speeds=(1.0, 1.0), length_bonus=0.01)
        count = len(model.codec.tokenizer.encode(more.text))
        assert more.score == pytest.approx(twice.score + 0.01 * count, abs=1e-3)


def test_words_of_a_sound_that_is_played_slower_have_the_times_of_the_sound(model):
    table = torch.randn(9, 4).log_softmax(-1)
    heard = Recognised([1, 2], "AB", -1.0, [Word("AB", 1.0, 2.0, 0.9)])
    (found,) = likely_texts([table], [[heard]], [0.8])
    assert found.words == [Word("AB", 0.8, 1.6, 0.9)] and found.ids == [1, 2]
    # through the model: a tone played slower may be heard as another, but lies where it was
    samples, letters = said("ABC DE", np.random.default_rng(5))
    words = model.run(samples, speeds=0.85).words
    assert words[0].start == pytest.approx(letters[0][0], abs=0.1)
    assert words[-1].end == pytest.approx(letters[-1][1], abs=0.1)


def test_a_text_that_a_speed_has_no_frames_for_is_taken_from_the_others(model):
    samples = tones("ABCDE", np.random.default_rng(1))
    short = samples[: int(0.05 * RATE)]
    for given in (samples, short, np.zeros(3 * RATE, np.float32)):
        assert np.isfinite(model.run(given, speeds=(1.0, 2.0)).score)
    assert model.run(np.zeros(3 * RATE, np.float32), speeds=(0.9, 1.0)).text == ""


def test_speeds_that_cannot_be_compared_are_refused(model, both):
    samples, text = utterance(0)
    for one, given, why in (
        (model, {"forced": text}, "leave it out with forced="),
        (both, {}, "add decoding=ctc"),
        (both, {"decoding": "attention"}, "compares texts by CTC"),
        (model, {"speeds": "0.9,3"}, "speeds"),
        (model, {"speeds": ()}, "names none"),
    ):
        with pytest.raises(UsageError, match=why):
            one.run(samples, **{"speeds": "0.9,1.0", **given})
    assert both.run(samples, speeds="0.9,1.0", decoding="ctc").text == text


# Long recordings, and no speech


@pytest.mark.parametrize("forced", [False, True])
def test_a_long_recording_is_cut_at_pauses_and_joined_again(model, forced):
    rng = np.random.default_rng(3)
    parts, starts, at = [], [], 0
    texts = ["ABC", "DE", "CAB", "EAD", "BD", "CE", "DAB"]
    for text in texts:
        samples = tones(text, rng)
        pause = rng.normal(0, 0.003, int(RATE * rng.uniform(0.6, 2.5))).astype(np.float32)
        starts.append((at + len(pause)) / RATE)
        parts += [pause, samples]
        at += len(pause) + len(samples)
    whole = np.concatenate(parts)
    asked = {"forced": " ".join(texts)} if forced else {}
    answer = model.run(whole, segment_seconds=2, **asked)
    assert answer.text == " ".join(texts) and answer.seconds == len(whole) / RATE
    for word, start, samples in zip(answer.words, starts, parts[1::2], strict=True):
        assert start - 0.1 < word.start < word.end < start + len(samples) / RATE + 0.1


def test_silence_and_noise_give_nothing(model):
    rng = np.random.default_rng(0)
    assert model.config["generation"]["gate"] is False  # tones are no speech, but what it learnt
    for samples in (np.zeros(5 * RATE), rng.normal(0, 0.1, 5 * RATE), np.zeros(3)):
        answer = model.run(samples.astype(np.float32), gate=True)
        assert answer.text == "" and answer.words == [] and answer.seconds == len(samples) / RATE
    assert model.run(np.zeros(5 * RATE, np.float32)).text == ""


def test_words_are_written_as_subtitles(model, home):
    path = str(write_tones(home / "subtitles.wav", "AB C"))
    answer = model.run(path)
    told = {name: list(answer.lines(model.check({"format": name}))) for name in ("srt", "vtt")}
    assert told["srt"][0] == "1" and told["srt"][2] == "AB C" and "," in told["srt"][1]
    assert told["vtt"][0] == "WEBVTT" and told["vtt"][3].count(".") == 2


# Training


def rehearse(data: Path, **settings: Any) -> PreparedRun:
    """All that a training would begin with."""
    values = {**SMALL, "data": str(data), "steps": 1, **settings}
    out = data.parent / "none"
    out.mkdir(exist_ok=True)
    try:
        return prepare(task("transcribe"), {**values, "out": str(out)})
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_batches_are_a_function_of_seed_and_number(data):
    augmented = {"speeds": "0.9,1.0,1.1", "time_masks": 2, "frequency_masks": 2}
    one, two = (rehearse(data, **augmented).training for _ in range(2))
    other = rehearse(data, **augmented, seed=2).training
    for n in (7, 0, 31):
        a, b = one.batch(n), two.batch(n)
        assert all(torch.equal(x, y) for x, y in zip(a[:6], b[:6], strict=True))
    assert not torch.equal(one.batch(0).sound[0], other.batch(0).sound[0])
    seconds = [float(one.batch(n).sound.shape[0] * one.batch(n).sound.shape[1]) for n in range(9)]
    assert max(seconds) * 0.01 <= SMALL["batch_seconds"] / 0.9 + 1
    assert one.count(one.batch(0)) == (one.batch(0).tokens, int(one.batch(0).lengths.sum()))


def test_buckets_hold_about_as_many_and_none_is_longer_than_its_bucket():
    lengths = np.random.default_rng(0).integers(50, 900, 500)
    of = in_buckets(lengths, 8)
    assert (of >= lengths).all()
    counts = np.unique(of, return_counts=True)[1]
    assert len(counts) == 8 and counts.min() > 50


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_loss_is_the_weighted_sum_of_both_heads(both, weight):
    model, tokenizer = both.model, both.codec.tokenizer
    pairs = [utterance(n) for n in range(3)]
    rows = [np.array(tokenizer.encode(text)) for _, text in pairs]
    sound = pad_sounds([both.format.spectrogram(samples) for samples, _ in pairs])
    batch = make_batch(rows, *sound, int(sound[1].sum()), tokenizer)
    expected = 0.0
    for (samples, _), row in zip(pairs, rows, strict=True):  # one by one, without padding
        memory, lengths = model.encode(both.format.spectrogram(samples)[None])
        probs = model.ctc_logits(memory).log_softmax(-1)[0]
        ids = torch.from_numpy(row)
        ctc = F.ctc_loss(probs[:, None], ids[None], lengths, torch.tensor([len(ids)]), 0, "sum")
        reads = torch.cat([torch.tensor([tokenizer.bos]), ids])[None]
        logits = model.head(model.decode(memory, lengths, reads))[0]
        writes = torch.cat([ids, torch.tensor([tokenizer.eos])])
        entropy = F.cross_entropy(logits, writes, reduction="sum", label_smoothing=0.1)
        expected += (weight * ctc + (1 - weight) * entropy).item()
    assert speech_loss(model, batch, weight, 0.1).item() == pytest.approx(expected, rel=1e-5)
    assert batch.tokens == sum(len(row) + 1 for row in rows)


def too_long(home: Path) -> Path:
    """Write a set with two transcripts that their sounds have no time for."""
    data = spoken(home, 30)
    rows = data.read_text().splitlines()
    for n in (4, 9):
        rows[n] = f"{n}.wav\t" + "AABB" * 30
    data.write_text("\n".join(rows))
    return data


def test_pairs_that_ctc_cannot_align_are_named_before_training(tmp_path):
    data = too_long(tmp_path)
    with pytest.raises(UsageError) as caught:
        rehearse(data, valid=str(data))
    message = str(caught.value)
    assert message.startswith("2 of 30 sounds of the train part are too short")
    assert "4.wav" in message and "broken=skip" in message and "subsampling=2" in message
    made = rehearse(data, valid=str(data), broken="skip")
    batches, lesson = made.lesson.batches, made.lesson
    assert len(batches.sounds) == 28 and "left out" in made.data.notes[-2]
    losses = [lesson.loss(batches[n]).item() for n in range(4)]
    assert np.isfinite(losses).all() and np.isfinite(lesson.validate(1.0)["loss"])


def test_speed_never_makes_a_sound_too_short_for_its_text(tmp_path):
    data = spoken(tmp_path, 30)
    made = rehearse(data, speeds="1.9", valid="0.2")
    batches, out = made.lesson.batches, made.runner.model.out_lengths
    kept = 0
    batches.too_short = lambda i, frames: frames < len(batches.sounds.read(i)) / RATE / 0.012
    for n in range(3):
        rows, batch = batches.batches[n], batches[n]
        plain = [batches.format.frames(len(batches.sounds.read(i))) for i in rows.tolist()]
        kept += int((batch.lengths == torch.tensor(plain)).sum())
    assert kept > 0 and isinstance(batches.plain, SoundAugment) and out(torch.tensor(9)) == 5


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ctc_weight": 0.3}, "decoder_depth=2"),
        ({"ctc_weight": 1, "decoder_depth": 1}, "nothing to learn"),
        ({"tokenizer": "letters"}, "unknown"),
        ({"speeds": "0"}, "speeds"),
        ({"normalise": "loud"}, "unknown normalise"),
        ({"broken": "no"}, "unknown broken"),
        ({"hop": 0.5, "window": 0.1}, "window"),
        ({"valid": "*_9.wav"}, "fits no file"),
    ],
)
def test_settings_that_mean_nothing_are_refused(data, given, why):
    with pytest.raises(UsageError, match=why):
        rehearse(data, **given)


def test_a_trained_model_is_trained_on_in_its_own_format(home, run, data):
    out = home / "more"
    report = regard.train(
        "transcribe", data=data, init=run, out=out, steps=2, quiet=True, valid=0.2
    )
    assert report.finished and regard.load(out).format == regard.load(run).format
    assert report["wer"] < 20


# Language models


@pytest.fixture(scope="module")
def lm(home, data) -> Path:
    texts = home / "texts.txt"
    texts.write_text("\n".join(row.split("\t")[1] for row in data.read_text().splitlines()))
    how = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 32, "context": 16, "quiet": True}
    regard.train("language", data=texts, out=home / "lm", steps=3, tokenizer="characters", **how)
    return home / "lm"


def test_a_language_model_is_fused_by_its_weight(both, lm):
    samples, text = utterance(4)
    for way in both.predictor.decoder.ways:
        plain = both.run(samples, decoding=way, beam=4)
        fused = both.run(samples, decoding=way, beam=4, lm=str(lm), lm_weight=0.0)
        assert fused.text == plain.text and fused.score == pytest.approx(plain.score, abs=1e-4)
        other = both.run(samples, decoding=way, beam=4, lm=str(lm), lm_weight=0.5)
        assert other.score != pytest.approx(plain.score, abs=1e-4)
    # it has no say where all it could say is worth nothing
    longer = both.run(samples, decoding="ctc", lm=str(lm), length_bonus=20.0)
    assert len(longer.text) > len(text)


def test_a_language_model_of_other_tokens_or_tasks_is_refused(home, model, run, data):
    texts = home / "others.txt"
    texts.write_text("xyz zyx yyy\n" * 40)
    how = {"depth": 1, "width": 16, "heads": 2, "ffn_width": 32, "context": 16, "quiet": True}
    regard.train("language", data=texts, out=home / "xyz", steps=1, tokenizer="characters", **how)
    with pytest.raises(UsageError, match="lm=.*has never seen"):
        model.run(utterance(0)[0], lm=str(home / "xyz"))
    with pytest.raises(UsageError, match="is a model for transcribe; expected one"):
        model.run(utterance(0)[0], lm=str(run))


# Forced alignment


def test_a_transcript_that_cannot_be_aligned_is_refused(model):
    samples, _ = utterance(0)
    for text, why in (
        ("AB x", "never wrote 'x'"),
        ("", "it is empty"),
        ("ABCDE" * 40, "is it the text of another sound"),
    ):
        with pytest.raises(UsageError, match=why):
            model.run(samples, forced=text)
    with pytest.raises(UsageError, match="no transcript; expected"):
        model.run(samples, forced=True)


def test_the_right_transcript_is_likelier_than_another(model):
    samples, text = utterance(5)
    wrong = text.translate(str.maketrans("ABCDE", "BCDEA"))
    assert model.run(samples, forced=text).score > model.run(samples, forced=wrong).score + 5


# The command line


def test_sounds_tables_folders_and_json_lines_are_inputs(run, home, capsys, monkeypatch):
    folder = home / "asked"
    (folder / "inner").mkdir(parents=True)
    write_tones(folder / "one.wav", "AB C", 1)
    write_tones(folder / "inner" / "two.wav", "DE", 2)
    (folder / "list.tsv").write_text("one.wav\tAB C\ninner/two.wav\tDE\n")
    (folder / "list.jsonl").write_text('{"audio": "one.wav", "text": "AB C", "id": 7}\n')

    def told(*words: str) -> list[str]:
        assert main(["run", str(run), *words, "--quiet"]) == 0
        return capsys.readouterr().out.splitlines()

    one, two = str(folder / "one.wav"), str(folder / "inner" / "two.wav")
    assert told(one, two) == ["AB C", "DE"]
    assert told(str(folder)) == [f"{two}\tDE", f"{one}\tAB C"]
    rows = [json.loads(line) for line in told(str(folder / "list.tsv"))]
    assert [row["prediction"] for row in rows] == ["AB C", "DE"]
    assert rows[0]["audio"] == "one.wav" and [word["word"] for word in rows[1]["words"]] == ["DE"]
    (row,) = [json.loads(line) for line in told(str(folder / "list.jsonl"), "forced=true")]
    assert row["id"] == 7 and "prediction" not in row
    assert [word["word"] for word in row["words"]] == ["AB", "C"]
    (row,) = [json.loads(line) for line in told(one, "format=json")]
    assert row["prediction"] == "AB C" and row["seconds"] > 0.4
    line = json.dumps({"audio": two, "text": "of another field"}).encode()
    stdin = SimpleNamespace(buffer=io.BytesIO(line), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", stdin)
    assert json.loads(told()[0])["prediction"] == "DE"


def test_what_is_no_sound_costs_one_line_or_is_passed_over(run, model, home, capsys):
    bad = home / "bad.wav"
    bad.write_text("no sound at all")
    (home / "outside.tsv").write_text("../../secret.wav\tAB\n")
    for words in ([str(bad)], [str(home / "outside.tsv")], [str(run), "format=mp4"]):
        assert main(["run", str(run), *words, "--quiet"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("regard: ")
    first, second = model.run([str(bad), utterance(0)[0]], broken="skip")
    assert str(first) == "" and "first bytes" in first.why and str(second)
    with pytest.raises(UsageError, match="is no sound; give a path"):
        model.run([3.5])


def test_models_of_another_format_are_compared_on_the_same_utterances(home, run, data, capsys):
    other = {**LEARN, "rate": 8000, "mels": 16, "steps": 2, "valid_every": 2, "out": home / "other"}
    regard.train("transcribe", data=data, **other)
    judged = regard.evaluate(run, data=data, part="valid", against=home / "other", samples=200)
    wer = judged.comparison[0]
    assert wer.name == "WER" and wer.ours < 10 < wer.theirs and wer.p < 0.01
    path = home / "outputs.jsonl"
    regard.evaluate(run, data=data, part="valid", outputs=path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == judged.sentences and {"audio", "text", "prediction"} <= rows[0].keys()


def test_parts_are_told_apart_by_names_and_remembered(home, data):
    out = home / "named"
    how = {**LEARN, "valid": "?.wav", "test": "1?.wav", "steps": 1, "valid_every": 1}
    regard.train("transcribe", data=data, out=out, **how)
    assert regard.evaluate(out, data=data).sentences == 10
    assert regard.evaluate(out, data=data, part="valid").sentences == 10
    assert regard.evaluate(out, data=data, part="train", test="2?.wav").sentences == 220


def test_looking_shows_the_beams_of_every_way_to_decode(both, home):
    path = str(write_tones(home / "beams.wav", "AB C"))
    for way in both.predictor.decoder.ways:
        check_tree(both.picture(path, decoding=way, beam=4, beams=True))


def test_looking_shows_words_posteriors_and_cross_attention(both, home):
    path = write_tones(home / "look.wav", "AB C")
    picture = both.picture(str(path), decoding="ctc")
    recording = picture.recording
    assert [word.text for word in recording.words] == picture.output.split()
    assert recording.units[0] == "" and recording.posteriors.sum(1) == pytest.approx(1, abs=0.1)
    names = [view.name for view in picture.views]
    assert "encoder.0.attention" in names and any(name.endswith("cross") for name in names)
    forced = both.picture(str(path), forced="DD")
    assert forced.output == "DD"
    soundfile.write(home / "long.wav", np.zeros(RATE * 61, np.float32), RATE)
    with pytest.raises(UsageError, match="at most 60 are looked at"):
        both.picture(str(home / "long.wav"))
