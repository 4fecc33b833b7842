"""Laws of spectrograms: equal to those of Kaldi, librosa and Whisper; augmented by (seed, n)."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.data.augment import step_rng
from regard.data.sound_augment import (
    SoundAugment,
    change_speed,
    mask_stretches,
    warp_frequencies,
    warp_time,
)
from regard.data.spectrogram import SPECTROGRAM_KINDS, SoundFormat
from regard.errors import UsageError
from regard.settings import fill


def speechlike(seconds: float = 1.3, rate: int = 16000) -> np.ndarray:
    """Return a tone with harmonics that comes and goes, in some noise."""
    time = np.arange(int(seconds * rate)) / rate
    voice = sum(np.sin(2 * np.pi * 130 * k * time * (1 + 0.1 * time)) / k for k in range(1, 20))
    noise = np.random.default_rng(0).normal(0, 0.003, len(time))
    return (0.1 * voice * np.sin(2 * np.pi * 2 * time) ** 2 + noise).astype(np.float32)


def sounds(real_data: Path) -> list[np.ndarray]:
    files = sorted((real_data / "an4" / "audio").glob("*.ogg"))[:3]
    return [speechlike(), *(SoundFormat().read(file) for file in files)]


def near(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Tell whether features are equal to 1e-4 of the largest."""
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    return bool(np.abs(ours.numpy() - theirs).max() <= 1e-4 * max(1, np.abs(theirs).max()))


def kaldi(samples: np.ndarray, format: SoundFormat) -> np.ndarray:
    knf = pytest.importorskip("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither = 0
    options.frame_opts.samp_freq = format.rate
    options.frame_opts.frame_length_ms = 1000 * format.window
    options.frame_opts.frame_shift_ms = 1000 * format.hop
    options.mel_opts.num_bins = format.mels
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(format.rate, samples.tolist())
    bank.input_finished()
    return np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])


SETTINGS = [(16000, 80, 0.025, 0.01), (8000, 40, 0.025, 0.01), (16000, 23, 0.032, 0.016)]


@pytest.mark.parametrize(("rate", "mels", "window", "hop"), SETTINGS)
def test_kaldi_features_are_those_of_kaldi_native_fbank(real_data, rate, mels, window, hop):
    format = SoundFormat(rate, mels, window, hop, normalise="none").check()
    for samples in sounds(real_data):
        assert near(format.spectrogram(samples), kaldi(samples, format))


@pytest.mark.parametrize(("rate", "mels", "window", "hop"), SETTINGS)
def test_librosa_features_are_those_of_librosa(real_data, rate, mels, window, hop):
    librosa = pytest.importorskip("librosa")
    format = SoundFormat(rate, mels, window, hop, features="librosa", normalise="none").check()
    window, hop = format.sizes.window, format.sizes.hop
    fft = 2 ** math.ceil(math.log2(window))
    frames = {"n_fft": fft, "win_length": window, "hop_length": hop}
    for samples in sounds(real_data):
        power = librosa.feature.melspectrogram(y=samples, sr=rate, n_mels=mels, **frames)
        assert near(format.spectrogram(samples), np.log(np.maximum(power, 1e-10)).T)


@pytest.mark.parametrize("mels", [80, 128])
def test_whisper_features_are_those_of_whisper(real_data, mels):
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels)
    format = SoundFormat(mels=mels, features="whisper", normalise="none").check()
    for samples in sounds(real_data):
        theirs = extractor(samples, sampling_rate=16000, return_tensors="np").input_features[0].T
        padded = np.pad(samples, (0, 480_000 - len(samples)))
        assert near(format.spectrogram(padded), theirs)


def test_the_loudest_of_a_sound_sets_whispers_floor_for_all_its_frames():
    quiet = 1e-5 * np.random.default_rng(0).normal(size=16000).astype(np.float32)
    format = SoundFormat(features="whisper", normalise="none")
    alone = format.spectrogram(quiet)
    loud = format.spectrogram(np.concatenate([speechlike(1.0), quiet]))
    assert loud.max() - loud.min() == pytest.approx(2, abs=1e-5)  # 8 powers of ten, over 4
    assert (loud[-90:] == loud.min()).all() and (alone.std(0) > 0).all()


@pytest.mark.parametrize("features", SPECTROGRAM_KINDS)
def test_the_number_of_frames_is_known_beforehand(features):
    format = SoundFormat(features=features)
    samples = speechlike(0.3)
    for count in [1, 7, 100, 159, 160, 161, 199, 200, 201, 399, 400, 401, 559, 560, 561, 3333]:
        found = format.spectrogram(samples[:count])
        assert found.shape == (format.frames(count), 80) and len(found) >= 1
        assert found.isfinite().all()


@pytest.mark.parametrize("features", SPECTROGRAM_KINDS)
def test_a_frame_is_where_its_sound_is(features):
    """A click shows in the frame whose stretch it lies in."""
    format = SoundFormat(features=features, normalise="none")
    for at in (3200, 5000, 7777):
        samples = np.full(16000, 1e-5, np.float32) * np.random.default_rng(0).normal(size=16000)
        samples[at] = 1.0
        loudest = int(format.spectrogram(samples).sum(1).argmax())
        start, end = (format.seconds(frame) for frame in (loudest, loudest + 1))
        assert start - 0.001 <= at / 16000 <= end + 0.001
        assert end - start == pytest.approx(0.01)


@pytest.mark.parametrize("features", ["kaldi", "librosa"])
def test_frames_do_not_know_what_follows(features):
    """Up to rounding: products of other sizes are summed in another order."""
    format, samples = SoundFormat(features=features, normalise="none"), speechlike()
    whole, part = format.spectrogram(samples), format.spectrogram(samples[:10_000])
    assert (whole[: len(part) - 3] - part[:-3]).abs().max() < 1e-4


def test_each_filter_of_a_sound_is_brought_to_mean_0_and_deviation_1():
    found = SoundFormat().spectrogram(speechlike())
    assert found.mean(0).abs().max() < 1e-4 and (found.std(0, correction=0) - 1).abs().max() < 1e-4
    louder = SoundFormat().spectrogram(4 * speechlike())
    assert (louder - found).abs().max() < 0.2  # but for what lies at the floor


@pytest.mark.parametrize("features", SPECTROGRAM_KINDS)
def test_silence_is_no_number_of_its_own(features):
    for normalise in ("utterance", "none"):
        format = SoundFormat(features=features, normalise=normalise)
        assert format.spectrogram(np.zeros(8000, np.float32)).isfinite().all()


def test_a_format_is_filled_from_json_and_refused_by_name():
    given = {"rate": 8000, "mels": 2, "mean": [1, 2], "std": [0.5, 3], "normalise": "global"}
    format = fill(SoundFormat, given).check()
    assert format == SoundFormat(8000, 2, normalise="global", mean=(1, 2), std=(0.5, 3))
    for wrong, said in (
        ({"features": "kadli"}, "unknown features 'kadli'.*Did you mean 'kaldi'"),
        ({"normalise": "batch"}, "unknown normalise"),
        ({"hop": 0.05}, "hop"),
        ({"window": 0.0001, "hop": 0.0001}, "window"),
        ({"mean": (1.0,), "std": (1.0,)}, "1 means"),
        ({"rate": 0}, "rate=0"),
        ({"mels": 10_000}, "mels=10000"),
        ({"std": (0.0,)}, "std"),
    ):
        with pytest.raises(UsageError, match=said):
            fill(SoundFormat, wrong).check()
    with pytest.raises(UsageError, match="needs mean and std"):
        SoundFormat(normalise="global").spectrogram(speechlike())


# Augmentation


def test_what_is_augmented_follows_from_seed_and_number():
    augment, format = SoundAugment(time_warp=5, frequency_warp=0.1), SoundFormat()
    first, again, other, beside = (
        augment(speechlike(), format, step_rng(3, n, place))
        for n, place in ((10, 16), (10, 16), (11, 16), (10, 17))
    )
    assert torch.equal(first, again)
    for one in (other, beside):
        assert first.shape != one.shape or not torch.equal(first, one)


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.15])
def test_warped_frequencies_are_those_of_another_pitch(factor):
    time, format = np.arange(16000) / 16000, SoundFormat(normalise="none")
    for hertz in (300.0, 1000.0, 3000.0):
        tones = [np.sin(2 * np.pi * f * time).astype(np.float32) for f in (hertz, factor * hertz)]
        plain, higher = (format.spectrogram(tone) for tone in tones)
        warped = warp_frequencies(plain, factor, 16000)
        assert warped.shape == plain.shape
        assert (warped.mean(0).argmax() - higher.mean(0).argmax()).abs() <= 1
    assert factor != 1 or torch.allclose(warped, plain, atol=1e-4)
    edge = warp_frequencies(torch.arange(80.0).repeat(3, 1), factor, 16000)
    assert (edge.diff(dim=1) >= 0).all()  # filters keep their order


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.2])
def test_frequencies_are_warped_by_the_formula_of_jaitly_and_hinton(factor):
    mels = np.linspace(*(1127 * np.log1p(x / 700) for x in (20, 8000)), 82)[1:-1]
    hertz, edge = 700 * np.expm1(mels / 1127), 4800 * min(factor, 1)
    found = warp_frequencies(torch.from_numpy(mels[None]).float(), factor, 16000)[0].double()
    came = 700 * np.expm1(found.numpy() / 1127)  # from which frequency each filter has its number
    steep = (8000 - edge) / (8000 - edge / factor)
    moved = np.where(came <= edge / factor, came * factor, 8000 - steep * (8000 - came))
    assert np.allclose(moved[3:-3], hertz[3:-3], rtol=1e-4)


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.1, 1.3])
def test_speed_changes_length_and_pitch_together(factor):
    time = np.arange(16000) / 16000
    samples = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    found = change_speed(samples, factor)
    assert found.dtype == np.float32 and abs(len(found) - 16000 / factor) <= 1
    pitch = np.abs(np.fft.rfft(found)).argmax() * 16000 / len(found)
    assert pitch == pytest.approx(440 * factor, abs=1.5)
    assert change_speed(samples, 1.0) is samples


def test_every_speed_is_drawn():
    augment = SoundAugment(speeds=(0.5, 1.0, 2.0), time_masks=0, frequency_masks=0)
    format, samples = SoundFormat(), speechlike(0.5)
    found = {len(augment(samples, format, step_rng(0, n))) for n in range(40)}
    lengths = {format.frames(round(len(samples) / speed)) for speed in augment.speeds}
    assert found == lengths


@pytest.mark.parametrize("axis", [0, 1])
def test_masks_are_stretches_of_the_mean_no_wider_than_told(axis):
    features = torch.randn(200, 80)
    size, widths = features.shape[axis], set()
    for n in range(200):
        found = mask_stretches(features, step_rng(0, n), 1, 0.1, axis)
        changed = (found != features).any(1 - axis)
        at = changed.nonzero()[:, 0]
        widths.add(len(at))
        assert len(at) <= 0.1 * size
        if len(at):
            assert int(at[-1] - at[0]) + 1 == len(at)  # one stretch
            masked = found.transpose(0, axis)[changed]
            assert (
                torch.allclose(masked, features.mean())
                and masked.numel() == len(at) * found.numel() / size
            )
        assert torch.equal(
            found.transpose(0, axis)[~changed], features.transpose(0, axis)[~changed]
        )
    assert widths == set(range(int(0.1 * size) + 1))


def test_a_mask_reaches_both_ends():
    features = torch.randn(20, 4)
    seen = torch.zeros(20, dtype=torch.bool)
    for n in range(300):
        seen |= (mask_stretches(features, step_rng(1, n), 1, 0.2, 0) != features).any(1)
    assert seen.all()


def test_a_warp_keeps_length_and_ends():
    features = torch.arange(50.0)[:, None].expand(50, 3)
    moved = 0.0
    for n in range(50):
        found = warp_time(features, step_rng(0, n), 8)
        assert found.shape == features.shape and (found.diff(dim=0) >= -1e-4).all()
        moved = max(moved, float((found - features).abs().max()))
        assert torch.equal(found[0], features[0]) and (found[-1] - features[-1]).abs().max() <= 8
    assert 4 < moved <= 9
    for few in (1, 2, 3):
        assert warp_time(features[:few], step_rng(0, 0), 8).shape == (few, 3)


def test_speeds_that_are_none_are_refused():
    with pytest.raises(UsageError, match="speeds"):
        SoundAugment(speeds=()).check()
    with pytest.raises(UsageError, match=r"speeds=0\.1 is too small"):
        fill(SoundAugment, {"speeds": "0.1,1"})


def test_digital_silence_around_a_sound_does_not_move_its_features():
    format = SoundFormat(normalise="utterance")
    samples = np.random.default_rng(0).normal(0, 0.01, 16000).astype(np.float32)
    samples[6000:10000] *= 10
    plain = format.spectrogram(samples)
    before = 16000  # a multiple of the hop
    found = format.spectrogram(np.pad(samples, (before, before)))
    hop = format.sizes.hop
    inside = found[before // hop : before // hop + len(plain)]
    assert (inside - plain).abs().max() < 0.3  # 2.7 if they are counted
    # what is silent is as the softest of the sound, not far beneath it
    assert found[: before // hop - 5].min() > plain.min() - 0.3
    none = format.spectrogram(np.zeros(16000, np.float32))
    assert none.abs().max() == 0  # nothing but silence
