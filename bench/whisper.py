"""Whisper on two cores: Regard against faster-whisper (CTranslate2), with the same windows.

    python bench/whisper.py --model weights/tiny.en --python other/bin/python [--quick] [--by cpu]

`--model` is a folder in the Hugging Face layout (bench/whisper_weights.py makes one), and
`--python` an interpreter with faster-whisper 1.2.1, which lives in an environment of its own; the
model is converted for it by ctranslate2, once, beside the folder. Recordings are sentences of AN4
(REGARD_DATA) joined to long ones. All are cut at the same pauses, and each window is written
greedily, without timestamps: by Regard in batches, by faster-whisper with its batched pipeline.
Full precision is compared with full precision, and its int8 with our int8 and our bfloat16.
faster-whisper is first tried in several layouts: threads of a worker, workers at once, windows of a
batch, and recordings one by one or joined to as many as there are workers, so that batches are
full. The fastest then takes turns with Regard; times are medians over the rounds. A ratio above 1
means that Regard is faster; by processor time (`--by cpu`) its name ends in _cpu. How many words of
each text differ from those of our float32 is told, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


# ---- faster-whisper, in its own environment


def serve(
    by: str, folder: str, kind: str, threads: int, workers: int, batch: int, joined: int
) -> None:
    """Transcribe what the other process asks for, and tell how long it took.

    Args:
        by: clock
        folder: model
        kind: type of its products
        threads: of a worker
        workers: at once
        batch: windows at once
        joined: whether recordings are joined to as many as there are workers
    """
    import numpy as np
    from faster_whisper import BatchedInferencePipeline, WhisperModel  # pyright: ignore

    model = WhisperModel(
        folder, device="cpu", compute_type=kind, cpu_threads=threads, num_workers=workers
    )
    pipeline = BatchedInferencePipeline(model=model)

    def transcribe(sound: Any, cuts: list[dict[str, float]]) -> list[str]:
        segments, _ = pipeline.transcribe(
            sound,
            language="en",
            beam_size=1,
            temperature=0.0,
            without_timestamps=True,
            condition_on_previous_text=False,
            word_timestamps=False,
            vad_filter=False,
            clip_timestamps=cuts,
            batch_size=batch,
        )
        return [segment.text for segment in segments]

    print(json.dumps("ready"), flush=True)
    with ThreadPoolExecutor(workers) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            sounds = [np.load(path) for path in asked["sounds"]]
            clock = time.process_time if by == "cpu" else time.perf_counter
            start = clock()
            each = -(-len(sounds) // workers) if joined else 1
            groups = [range(n, min(n + each, len(sounds))) for n in range(0, len(sounds), each)]
            whole, places = [np.concatenate([sounds[i] for i in some]) for some in groups], []
            for some in groups:
                at, cuts = 0.0, []
                for i in some:
                    cuts += [{name: at + x for name, x in cut.items()} for cut in asked["cuts"][i]]
                    at += len(sounds[i]) / 16_000
                places.append(cuts)
            flat = iter([text for some in pool.map(transcribe, whole, places) for text in some])
            texts = [[next(flat) for _ in cuts] for cuts in asked["cuts"]]
            assert next(flat, None) is None  # a text for each window
            print(json.dumps([clock() - start, texts]), flush=True)


class Faster:
    """A process of faster-whisper with one layout of threads, workers and batches."""

    def __init__(self, by: str, python: str, folder: Path, kind: str, layout: tuple[int, ...]):
        words = [python, str(HERE), "--serve", by, str(folder), kind, *map(str, layout)]
        quiet = {**os.environ, "OMP_NUM_THREADS": str(layout[0]), "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=quiet)
        self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, asked: dict[str, Any]) -> tuple[float, list[list[str]]]:
        """Return the seconds and the texts of the windows of each recording."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        seconds, texts = self._read()
        return seconds, texts

    def end(self) -> None:
        """Let the process end."""
        self.process.communicate()


# ---- ours


def ours(folder: str, threads: int, dtype: str) -> Any:
    """Return what transcribes recordings at given cuts by Regard, in a process of its own."""
    import numpy as np

    import regard

    task: Any = regard.load(folder)
    kind = {"quantise": dtype} if dtype == "int8" else {"dtype": dtype}
    settings = task.check({"words": False, "fallback": False, "threads": threads, **kind})

    def act(asked: dict[str, Any]) -> list[list[str]]:
        sounds = [np.load(path) for path in asked["sounds"]]
        rate = task.format.rate
        with task.using(settings):
            spans = [
                (n, round(cut["start"] * rate), round(cut["end"] * rate))
                for n, cuts in enumerate(asked["cuts"])
                for cut in cuts
            ]
            windows = [task.predictor.utterance(sounds[n][start:end]) for n, start, end in spans]
            found = task.predictor.decoder(windows, settings)
        texts: list[list[str]] = [[] for _ in sounds]
        for (n, _, _), some in zip(spans, found, strict=True):
            texts[n].append(some[0].text)
        return texts

    return act


def recordings(data: Path, home: Path, minutes: float) -> dict[str, Any]:
    """Write long recordings joined from sentences of AN4, and where they are cut."""
    import numpy as np

    from regard.data.sound_files import read_sound
    from regard.decode.speech.segments import cut_at_pauses

    rate, rng = 16_000, np.random.default_rng(1)
    lines = (data / "an4" / "train.tsv").read_text().splitlines()
    names = [lines[i].split("\t")[0] for i in rng.permutation(len(lines))]
    asked: dict[str, Any] = {"sounds": [], "cuts": [], "seconds": 0.0}
    for number in range(4):
        parts, length = [], 0
        while length < minutes * 60 / 4 * rate:
            sound = read_sound(data / "an4" / names.pop(), rate)
            parts += [sound, np.zeros(int(rng.uniform(0.2, 0.8) * rate), np.float32)]
            length += len(parts[-1]) + len(parts[-2])
        sound = np.concatenate(parts)
        path = home / f"{number}.npy"
        np.save(path, sound)
        cuts = cut_at_pauses(sound, rate, 30.0)
        asked["sounds"].append(str(path))
        asked["cuts"].append([{"start": a / rate, "end": b / rate} for a, b in cuts])
        asked["seconds"] += len(sound) / rate
    return asked


def words_apart(ours: list[list[str]], theirs: list[list[str]]) -> tuple[int, int, int]:
    """Return windows with the same text, all windows, and the words that differ."""
    import jiwer

    pairs = [
        (a.strip(), b.strip())
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    same = sum(a == b for a, b in pairs)
    different = [(a or "-", b or "-") for a, b in pairs if a != b]
    edits = 0
    for a, b in different:
        told = jiwer.process_words(a, b)
        edits += told.substitutions + told.insertions + told.deletions
    return same, len(pairs), edits


def converted(folder: Path, kind: str) -> Path:
    """Return the model as CTranslate2 has it, converted beside the folder if it is not yet."""
    from ctranslate2.converters import TransformersConverter

    out = folder.with_name(f"{folder.name}-ctranslate2-{kind}")
    if not (out / "model.bin").exists():
        files = ["tokenizer.json", "preprocessor_config.json"]
        TransformersConverter(str(folder), copy_files=files).convert(
            str(out), quantization=kind, force=True
        )
    return out


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with tiny.en")
    parser.add_argument("--python", required=True, help="interpreter that has faster-whisper")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="of sound")
    parser.add_argument("--threads", type=int, default=2, help="cores of each")
    parser.add_argument(
        "--by", choices=("wall", "cpu"), default="wall", help="the time that counts"
    )
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    asked = parser.parse_args()
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    from apart import Peer, machine

    if asked.quick:
        asked.rounds, asked.minutes = 2, 3.0
    print(machine())
    cores = asked.threads
    data = Path(os.environ.get("REGARD_DATA", HERE.parents[2] / "shared" / "data"))
    shapes = dict.fromkeys([(cores, 1), (1, cores)])  # threads, workers
    sizes = [(8, 0), (4, 1), (8, 1), (16, 1)]  # batch, joined
    layouts = [(*shape, *size) for shape in shapes for size in sizes]
    with tempfile.TemporaryDirectory() as home:
        given = recordings(data, Path(home), asked.minutes)
        count = sum(map(len, given["cuts"]))
        print(f"{given['seconds']:.0f} s of sound in {count} windows of up to 30 s")
        mine = {
            dtype: Peer(ours, str(asked.model), cores, dtype, threads=cores, by=asked.by)
            for dtype in ("float32", "bfloat16", "int8")
        }
        theirs: dict[Any, Faster] = {}
        for kind in ("int8", "float32"):
            folder, tried = converted(asked.model, kind), {}
            for layout in layouts:
                one = Faster(asked.by, asked.python, folder, kind, layout)
                one(given)  # to warm up
                tried[layout] = min(one(given)[0] for _ in range(1 if asked.quick else 2))
                one.end()
            best = min(tried, key=lambda layout: tried[layout])
            told = "; ".join(f"{layout}: {took:.2f}" for layout, took in tried.items())
            print(f"faster-whisper {kind}, seconds by threads, workers, batch, joined: {told}")
            theirs[kind, best] = Faster(asked.by, asked.python, folder, kind, best)
        acts: dict[Any, Any] = {**{dtype: one.act for dtype, one in mine.items()}, **theirs}
        taken: dict[Any, list[float]] = {name: [] for name in acts}
        texts: dict[Any, Any] = {}
        for turn in range(asked.rounds + 1):  # the first one warms up
            for name in acts if turn % 2 else reversed(acts):
                seconds, texts[name] = acts[name](given)
                taken[name] += [seconds] if turn else []
        for one in (*mine.values(), *theirs.values()):
            one.end()
    middle = {name: sorted(some)[len(some) // 2] for name, some in taken.items()}
    for name in acts:
        who = f"regard {name}"
        if name in theirs:
            kind, (threads, workers, batch, joined) = name
            who = f"faster-whisper {kind}, {threads} threads, {workers} workers, batch {batch}"
            who += ", recordings joined" if joined else ""
        same, windows, edits = words_apart(texts["float32"], texts[name])
        print(
            f"{who}: {middle[name]:.2f} s, {given['seconds'] / middle[name]:.1f} x real time; "
            f"{same} of {windows} windows have the text of our float32, {edits} words differ"
        )
    suffix = "_cpu" if asked.by == "cpu" else ""
    pairs = (("bfloat16", "int8", "bf16"), ("int8", "int8", "int8"), ("float32", "float32", "fp32"))
    for dtype, kind, name in pairs:
        best = min(middle[key] for key in theirs if key[0] == kind)
        print(f"ratio whisper_vs_faster_{name}{suffix} {best / middle[dtype]:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        by, folder, kind, *numbers = sys.argv[2:9]
        threads, workers, batch, joined = map(int, numbers)
        serve(by, folder, kind, threads, workers, batch, joined)
    else:
        main()
