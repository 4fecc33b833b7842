"""Whisper: equal to transformers' on the same weights, read, written and decoded."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.attention.watch import watch
from regard.decode.constraints import Constraints
from regard.decode.decoder import decode
from regard.decode.options import Decoding
from regard.errors import UsageError
from regard.insight.causes import attending, cut_tokens, measure
from regard.models import family
from regard.models.whisper import WhisperConfig
from regard.pretrained.folder import import_folder
from tests.pretrained.test_parity import parity

transformers = pytest.importorskip("transformers")
ODD = {
    "plain": {},
    "one side deeper": {"encoder_layers": 1, "decoder_layers": 4},
    "more mels; what is never used": {"num_mel_bins": 21, "scale_embedding": True},
    "relu, narrow": {"activation_function": "relu", "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    "long window": {"max_source_positions": 100, "max_target_positions": 30},
}


@pytest.fixture(scope="module", params=sorted(ODD))
def both(request, tmp_path_factory):
    """Return their model with enlarged weights, ours of its folder, and the folder."""
    folder = tmp_path_factory.mktemp("whisper")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 12}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 40 for side in ("encoder", "decoder")}
    sizes |= {"max_source_positions": 50, "max_target_positions": 64, **ODD[request.param]}
    tokens = {**parity.TOKENS, "decoder_start_token_id": 0, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(vocab_size=len(parity.PIECES), **sizes, **tokens)
    torch.manual_seed(0)
    theirs = transformers.WhisperForConditionalGeneration(config).eval()
    parity.enlarge(theirs, 2.0, 1)
    theirs.save_pretrained(folder)
    parity.write_tokenizer(folder, "text")
    return theirs, import_folder(folder)[0].eval(), folder


def spectrograms(theirs, rows=3):
    frames = 2 * theirs.config.max_source_positions
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, frames, theirs.config.num_mel_bins, generator=generator)


def targets(theirs, rows=3, length=9):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(5, theirs.config.vocab_size, (rows, length), generator=generator)


def equal(ours, right):
    most = float(right.abs().max())
    assert most >= 1 and (ours - right).abs().max() <= 2e-5 * max(1.0, most)


def test_logits_are_those_of_transformers(both):
    theirs, ours, _ = both
    sound, target = spectrograms(theirs), targets(theirs)
    with torch.inference_mode():
        right = theirs(sound.mT, decoder_input_ids=target).logits
        equal(ours(sound, None, target), right)
        state, steps = ours.start(sound, capacity=20), []
        for place in range(target.shape[1]):
            logits, state = ours.step(target[:, place : place + 1], state)
            steps.append(logits)
    equal(torch.cat(steps, 1), right)


def test_greedy_texts_are_those_of_transformers(both):
    theirs, ours, _ = both
    sound = spectrograms(theirs, rows=8)
    with torch.inference_mode():
        encoded = theirs.model.encoder(sound.mT)
        written = torch.zeros(8, 1, dtype=torch.long)
        for _ in range(12):  # their own generate needs the special tokens of a real Whisper
            logits = theirs(encoder_outputs=encoded, decoder_input_ids=written).logits
            written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
        options = Decoding(beam=1, max_length=12)
        found = decode(ours, sound, None, options, Constraints(bos=0, eos=2))
    for row, hypotheses in zip(written[:, 1:].tolist(), found, strict=True):
        end = row.index(2) if 2 in row else 12
        assert hypotheses[0].ids == row[:end]


def test_what_is_written_is_what_was_read(both, tmp_path):
    theirs, _, folder = both
    regard.import_model(str(folder), out=str(tmp_path / "here"))
    regard.export(str(tmp_path / "here"), format="huggingface", out=str(tmp_path / "back"))
    again = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_sound_that_is_longer_than_its_window_is_refused(both):
    theirs, ours, _ = both
    long = torch.cat([spectrograms(theirs)] * 2, 1)
    with pytest.raises(UsageError, match="cut the sound into windows"):
        ours.encode(long)


def test_watching_changes_nothing_and_neighbours_never_matter(both):
    theirs, ours, _ = both
    sound, target = spectrograms(theirs), targets(theirs)
    with torch.inference_mode():
        plain = ours(sound, None, target)
        with watch(ours) as maps:
            assert torch.equal(ours(sound, None, target), plain)
        alone = torch.cat([ours(sound[i : i + 1], None, target[i : i + 1]) for i in range(3)])
    assert len(maps) == len(ours.encoder) + 2 * len(ours.decoder)
    torch.testing.assert_close(alone, plain, atol=2e-5 * float(plain.abs().max()), rtol=0)


def test_every_parameter_learns_and_it_builds_on_meta():
    config = WhisperConfig(vocab=40, mels=12, max_frames=20)
    with torch.device("meta"):
        family("whisper")[1](config)
    torch.manual_seed(0)
    model = family("whisper")[1](config)
    sound, target = torch.randn(2, 40, 12), torch.randint(3, 40, (2, 6))
    logits = model(sound, torch.tensor([40, 30]), target)
    logits.logsumexp(-1).sum().backward()
    still = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not still


@pytest.fixture(scope="module")
def tiny_en():
    folder = Path(os.environ.get("REGARD_WHISPER", ""))
    if not (folder / "model.safetensors").is_file():
        pytest.skip("no real weights; make them by bench/whisper_weights.py, set REGARD_WHISPER")
    return regard.load(str(folder))


def test_real_weights_write_what_is_said(tiny_en, real_data):
    answer = tiny_en.run(str(real_data / "an4" / "audio" / "an87-fbbh-b.ogg"))
    assert "six" in str(answer).lower() or "6" in str(answer)


@pytest.mark.parametrize("both", ["plain"], indirect=True)
def test_causes_of_a_window_are_the_plain_loop(both, monkeypatch):
    """A sound shorter than the window: its cells are cut, and the silence after it is not."""
    task = regard.load(str(both[2]), task="transcribe")
    task.model.double()
    heard = task.predictor.spectrogram
    monkeypatch.setattr(task.predictor, "spectrogram", lambda samples: heard(samples).double())
    sound = np.random.default_rng(0).standard_normal(8000).astype(np.float32) / 10
    asked = task.look_settings({"forced": "the cat"})
    question = task.question(sound, asked)
    found = attending(task.model, question)
    cuts = cut_tokens(task.model, question, found)
    count = len(question.tokens)
    at_once = measure(task.model, question, cuts, count, copies=count + 1)
    assert np.abs(at_once - measure(task.model, question, cuts, count, copies=1)).max() < 1e-6
    assert count == 25 and np.abs(at_once[1:] - at_once[0]).min() > 1e-9
    reading = [layer for layer in found if layer.tokens is not None]
    assert {layer.name.partition(".")[0] for layer in reading} == {"encoder", "decoder"}
    for layer in reading:
        assert layer.tokens[0, :count].tolist() == list(range(count))
        assert (layer.tokens[0, count:] == -1).all() and layer.keys == 50
