"""Benchmarks are fair: every peer runs in its best layout, and the processor is named."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


@pytest.mark.parametrize("told", [{}, {"CT2_FORCE_CPU_ISA": "AVX2"}])
def test_a_peer_is_measured_in_the_setting_in_which_it_is_fastest(bench, capsys, told):
    script = bench("decode_translation")
    best = script.Setting((2, 1), (32, "examples"), tuple(told.items()))

    def ask(setting):  # slower the more settings differ
        return script.Took(9.0, 1.0 + sum(a != b for a, b in zip(setting, best, strict=True))), []

    assert script.best_setting("peer", ask, 2, "cpu") == best
    assert "1x2 16 examples" in capsys.readouterr().out


def test_the_processor_and_its_flags_are_named(bench):
    line = bench("apart").machine()
    assert line.startswith("machine: ") and "PyTorch" in line
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and " avx2 " in info.read_text():
        assert " avx2 " in line


SPEEDLESS = {  # claim no speed
    "apart.py",
    "defaults.py",
    "en_zh_data.py",
    "eole_steps.py",
    "everyday.py",
    "fuzz_folders.py",
    "hosts.py",
    "house.py",
    "kill_groups.py",
    "kills.py",
    "licence.py",
    "no_speech.py",
    "none_of_these.py",
    "parity.py",
    "plain_wikitext.py",
    "llama_cpp_peer.py",
    "planted.py",
    "planted_features.py",
    "pointing.py",
    "scenes.py",
    "segments.py",
    "seq2seq_folders.py",
    "slurm.py",
    "splice_words.py",
    "stories_weights.py",
    "text_many.py",
    "train_keys.py",
    "whisper_weights.py",
    "word_times.py",
}
SPEEDS = sorted({path.name for path in BENCH.glob("*.py")} - SPEEDLESS)


@pytest.mark.parametrize("script", SPEEDS)
def test_every_benchmark_of_speed_names_the_machine(script):
    assert "print(machine()" in (BENCH / script).read_text(encoding="utf-8")


def test_the_house_is_counted_by_meaning_not_by_lines(bench, tmp_path, monkeypatch):
    house = bench("house")
    package = tmp_path / "regard"
    (package / "examine").mkdir(parents=True)
    (package / "a.py").write_text('"""Doc."""\nMOST = 1\n\n\ndef f(data: Any):\n    """Doc."""\n')
    (package / "b.py").write_text("from regard.a import MOST\nMOST, _LOW = 2, 3\nMOST = 4\n")
    (package / "c.py").write_text("from regard.b import MOST\nfrom regard.a import f\n_LOW = 1\n")
    (package / "examine" / "d.py").write_text('"""image"""\nkind = "image"\n')
    (package / "examine" / "images.py").write_text('kind = "image"\n')
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", package)
    monkeypatch.setattr(house, "ASK_THE_MODALITY", ("examine",))
    assert house.statements([package / "a.py"]) == 2
    assert house.typed_any() == 1
    assert house.modality_files() == {"examine/d.py": 1}
    assert house.two_meanings() == ({"MOST"}, {"MOST"})


def test_scenes_are_drawn_as_their_captions_say(bench, tmp_path):
    scenes = bench("scenes")
    two = 0
    for n in range(30):
        scene = scenes.draw_scene(np.random.default_rng([3, n]), 48)
        mask, objects = np.asarray(scene.mask), np.asarray(scene.objects)
        assert scene.image.size == scene.mask.size == (48, 48) and scene.image.mode == "RGB"
        assert ((mask > 0) == (objects > 0)).all()
        words = scene.captions[0].split()
        named = [words[1:3], words[-2:]][: objects.max()]
        middles = []
        for number, (colour, shape) in enumerate(named, 1):
            there = objects == number
            assert set(mask[there]) == {scenes.CLASSES.index(shape)}
            # whatever the light, its own colour is nearest
            seen = np.median(np.asarray(scene.image, float)[there], 0)
            away = {
                name: np.abs(seen / seen.max() - np.array(rgb) / max(rgb)).sum()
                for name, rgb in scenes.COLOURS.items()
            }
            assert min(away, key=away.__getitem__) == colour
            middles.append(np.argwhere(there).mean(0))
        if len(middles) == 2:
            two += 1
            down, across = middles[1] - middles[0]
            assert (across if "left of" in scene.captions[0] else down) > 0
            assert scene.captions[1].startswith(" ".join(words[-3:]))
    assert 15 < two < 30
    for out in (tmp_path / "one", tmp_path / "two"):
        scenes.main(out, train=3, valid=1, test=1, size=16)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) == 3 * 5 + 3 + 1
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
