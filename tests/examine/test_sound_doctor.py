"""The doctor on sounds: every planted fault is found, told where, and with a remedy."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import regard
from regard.errors import UsageError
from regard.examine.files import examine_files
from regard.examine.guess import guess_task
from regard.modalities.base import ExamineOptions
from regard.modalities.sound import SOUND
from tests.examine.test_doctor import found

TEXTS = ExamineOptions(target="text")

RATE = 16000
WORDS = ["YES", "NO", "GO", "STOP", "ENTER"]


def write(path: Path, seconds: float = 0.6, rate: int = RATE, seed: int = 0, **more: Any) -> None:
    """Write a tone with noise, of which a seed tells what it is."""
    time, rng = np.arange(int(seconds * rate)) / rate, np.random.default_rng([seed, 1])
    tone = 0.3 * np.sin(2 * np.pi * rng.uniform(100, 2000) * time)
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = more.get("scale", 1) * (tone + rng.normal(0, 0.02, len(time)))
    samples = np.stack([samples] * more.get("channels", 1), 1).clip(-1, 1)
    soundfile.write(path, samples, rate)


def text(i: int) -> str:
    return f"{WORDS[i % 5]} {WORDS[i // 5 % 5]}"


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    """Write sounds with transcripts, for every part."""
    home = tmp_path / "speech"
    for part, start in (("train", 0), ("valid", 100), ("test", 200)):
        rows = range(start, start + 12)
        for i in rows:
            write(home / f"audio/{i}.flac", seed=i)
        lines = "".join(f"audio/{i}.flac\t{text(i)}\n" for i in rows)
        (home / f"{part}.tsv").write_text(lines)
    return home


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Write ten sounds of each of two classes, for every part."""
    home = tmp_path / "commands"
    for k, part in enumerate(("train", "valid", "test")):
        for j, label in enumerate(("go", "stop")):
            for i in range(10):
                write(home / part / label / f"{i}.wav", 0.3, seed=100 * k + 20 * j + i)
    return home


def change(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def test_good_sounds_have_no_findings(speech: Path, commands: Path) -> None:
    report = examine_files(str(speech), SOUND, TEXTS)
    assert report.healthy and not report.findings
    lines = report.lines()
    assert "12 sounds, 16,000 Hz, 0.1 minutes, 0.6 seconds on average, 24 words" in lines[1]
    assert lines[-1] == "nothing found"
    report = examine_files(str(commands), SOUND)
    assert not report.findings and "20 sounds of 2 classes, 16,000 Hz" in report.lines()[1]


# fault -> what is done to the set of speech; the kind, level and place that are told
FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "cut short": (
        lambda home: (home / "audio/3.flac").write_bytes(
            (home / "audio/3.flac").read_bytes()[:3000]
        ),
        "broken",
        "error",
        "audio/3.flac",
    ),
    "no sound": (
        lambda home: (home / "audio/103.flac").write_bytes(b"hello"),
        "broken",
        "error",
        "audio/103.flac",
    ),
    "missing": (lambda home: (home / "audio/3.flac").unlink(), "broken", "error", "audio/3.flac"),
    "outside": (
        lambda home: change(home / "train.tsv", "audio/3.flac", "../3.flac"),
        "bad_rows",
        "error",
        "train.tsv:4",
    ),
    "no text": (
        lambda home: change(home / "train.tsv", f"3.flac\t{text(3)}", "3.flac\t"),
        "bad_rows",
        "error",
        "train.tsv:4",
    ),
    "silent": (
        lambda home: write(home / "audio/3.flac", seed=3, scale=0.0005),
        "silent",
        "warning",
        "audio/3.flac",
    ),
    "digital silence": (
        lambda home: write(home / "audio/3.flac", seed=3, scale=0),
        "silent",
        "warning",
        "audio/3.flac",
    ),
    "clipped": (
        lambda home: write(home / "audio/3.flac", seed=3, scale=6),
        "clipped",
        "warning",
        "audio/3.flac",
    ),
    "very short": (
        lambda home: write(home / "audio/203.flac", 0.04, seed=203),
        "short",
        "warning",
        "audio/203.flac",
    ),
    "very long": (
        lambda home: write(home / "audio/3.flac", 40, seed=3),
        "long",
        "note",
        "audio/3.flac",
    ),
    "two channels": (
        lambda home: write(home / "audio/3.flac", seed=3, channels=2),
        "channels",
        "note",
        "audio/3.flac",
    ),
    "text too long": (
        lambda home: change(home / "train.tsv", f"3.flac\t{text(3)}", "3.flac\t" + "ABCDE " * 20),
        "long_text",
        "error",
        "119 characters in 0.60 seconds",
    ),
    "text too long by repetitions": (
        lambda home: change(home / "train.tsv", f"3.flac\t{text(3)}", "3.flac\t" + "A" * 9),
        "long_text",
        "error",
        "9 characters in 0.60 seconds",
    ),
    "text too short": (
        lambda home: write(home / "audio/3.flac", 25, seed=3),
        "short_text",
        "note",
        "audio/3.flac",
    ),
    "other rate": (
        lambda home: write(home / "audio/203.flac", rate=8000, seed=203),
        "rates",
        "warning",
        "test 8,000 to 16,000",
    ),
    "copy": (
        lambda home: soundfile.write(
            home / "audio/3.flac", soundfile.read(home / "audio/4.flac")[0], RATE, subtype="PCM_24"
        ),
        "torn_label",
        "warning",
        "audio/4.flac",
    ),
    "leak": (
        lambda home: shutil.copy(home / "audio/4.flac", home / "audio/203.flac"),
        "leak_sound",
        "warning",
        "audio/203.flac",
    ),
    "lost letters": (
        lambda home: change(home / "train.tsv", "STOP", "ST\ufffdP"),
        "replaced",
        "warning",
        "U+FFFD",
    ),
    "no validation": (
        lambda home: (home / "valid.tsv").unlink(),
        "no_valid",
        "note",
        "split off train by hash",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(speech: Path, fault: str) -> None:
    plant, kind, level, where = FAULTS[fault]
    plant(speech)
    report = examine_files(str(speech), SOUND, TEXTS)
    finding = found(report, kind)
    assert finding.level == level and where in finding.where + finding.what
    assert report.healthy == (level != "error")


def test_training_refuses_what_the_doctor_calls_an_error(speech: Path) -> None:
    out = str(speech.parent / "run")
    for fault, said in (
        ("text too long", "too short for their transcripts"),
        ("outside", "outside"),
    ):
        FAULTS[fault][0](speech)
        with pytest.raises(UsageError, match=f"{said}.*broken=skip"):
            regard.train("transcribe", data=str(speech), out=out, steps=1)


def test_faults_of_labels_are_found(commands: Path) -> None:
    shutil.copy(commands / "train/go/3.wav", commands / "train/stop/copy.wav")
    (commands / "test/turn").mkdir()
    shutil.move(commands / "test/go/3.wav", commands / "test/turn/3.wav")
    (commands / "train/go/5.wav").unlink()
    report = examine_files(str(commands), SOUND)
    assert "stop/copy.wav" in found(report, "torn_label").where
    assert found(report, "unknown_label").level == "error"
    assert "'go'" in found(report, "rare_label").what


def test_one_low_rate_is_told_with_the_setting_for_it(commands: Path) -> None:
    for k, file in enumerate(sorted(commands.rglob("*.wav"))):
        write(file, 0.3, rate=8000, seed=k)
    assert "rate=8000" in found(examine_files(str(commands), SOUND), "low_rate").remedy


def test_no_sound_can_be_read(speech: Path) -> None:
    for i in range(12):
        (speech / f"audio/{i}.flac").write_bytes(b"")
    report = examine_files(str(speech), SOUND, TEXTS)
    assert found(report, "broken").count == 12 and found(report, "no_sounds").level == "error"
    assert "train" not in report.parts


def test_only_some_sounds_are_looked_at(speech: Path) -> None:
    report = examine_files(str(speech), SOUND, ExamineOptions(most=5, target="text"))
    assert report.parts["train"].sounds == 5 and report.parts["train"].total == 12


def test_what_sounds_are_for_is_guessed(speech: Path, commands: Path) -> None:
    assert (
        guess_task(str(speech)).task == guess_task(str(speech / "train.tsv")).task == "transcribe"
    )
    assert guess_task(str(commands)).task == "sounds"
    change(speech / "train.tsv", "\t", "\tYES\t")
    lines = [line.split("\t") for line in (speech / "train.tsv").read_text().splitlines()]
    (speech / "train.tsv").write_text("".join(f"{row[0]}\t{row[1]}\n" for row in lines))
    assert guess_task(str(speech)).task == "sounds"


@pytest.mark.parametrize("task", ["transcribe", "sounds"])
def test_the_whole_of_it_with_a_forecast(speech: Path, commands: Path, task: str) -> None:
    data = str(speech if task == "transcribe" else commands)
    examined = regard.doctor(data)
    told = json.loads(json.dumps(examined.to_dict()))
    assert told["healthy"] and told["task"] == task
    assert told["forecast"]["of"] == "sounds" and told["forecast"]["a_second"] > 0
    assert "sounds/s" in str(examined)
    with pytest.raises(UsageError, match="these are sounds"):
        languages: dict[str, Any] = {"from": "en", "to": "de"}
        regard.doctor(data, **languages)
    assert regard.doctor(str(commands), task="classify").task == "sounds"


def test_labels_in_file_names_are_taken_by_a_pattern(tmp_path: Path) -> None:
    for i in range(24):
        write(tmp_path / f"{i % 2}_ann_{i}.wav", 0.3, seed=i)
    examined = regard.doctor(str(tmp_path), pattern="{label}_{speaker}_{take}", test="*_[0-3].*")
    assert examined.report.parts["train"].classes == {"0": 10, "1": 10}
    assert examined.report.parts["test"].sounds == 4 and examined.report.healthy
