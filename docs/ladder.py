"""Draws ladder.png: where the five rungs look when a word is to be repeated."""

import json
import random
from pathlib import Path
from tempfile import mkdtemp

import torch
from matplotlib.figure import Figure

import regard
from regard.models.ladder import RUNGS
from regard.viewer.panels import BLUES

HERE = Path(__file__).parent
SHOWN = "mzfa>mzfa"  # each letter after > is the one five places before


def texts(words: int) -> str:
    """Return random words, each repeated, as JSON lines."""
    chance = random.Random(1)
    made = ("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(words))
    return "".join(json.dumps({"text": f"{word}>{word}"}) + "\n" for word in made)


def train(folder: Path) -> dict[str, dict]:
    """Train a small model on each rung."""
    (folder / "words.jsonl").write_text(texts(6000))
    found = regard.compare(
        "language",
        data=folder / "words.jsonl",
        out=folder / "ladder",
        family="ladder",
        rung=",".join(RUNGS),
        seeds=1,
        lengths=1,
        tokenizer="characters",
        **{"depth": 2, "width": 48, "heads": 4, "ffn_width": 96, "dropout": 0, "context": 16},
        **{"batch_tokens": 704, "steps": 400, "valid_every": 400, "lr": 0.006, "warmup": 20},
        **{"valid_tokens": 8000, "threads": 1},
    )
    print(found)
    return {run["variant"]["rung"]: run for run in found.done}


@torch.no_grad()
def weights(folder: str) -> list[torch.Tensor]:
    """Return the weights (head, query, key) of each layer on the word that is shown."""
    model = regard.load(folder)
    ids = torch.tensor([model.codec.tokenizer.encode(SHOWN)])
    with regard.watch(model.model) as maps:
        model.model(ids)
    return [maps[name].weights()[0] for name in maps]


def main() -> None:
    """Train and draw."""
    found = train(Path(mkdtemp()))
    figure = Figure(figsize=(11, 5.0), facecolor="white")
    places = figure.subplots(2, len(found), sharex=True, sharey=True)
    letters = list(SHOWN)
    for column, (rung, run) in enumerate(found.items()):
        for layer, some in enumerate(weights(run["folder"])):
            # of many heads the one that looks most at the letter to be repeated
            best = some[:, range(4, 8), range(4)].sum(-1).argmax()
            shown = some.mean(0) if rung == "gated" else some[best]
            place = places[layer, column]
            place.imshow(shown, cmap=BLUES, vmin=0, vmax=1)
            place.set_xticks(range(len(letters)), letters, fontsize=8, family="monospace")
            place.set_yticks(range(len(letters)), letters, fontsize=8, family="monospace")
            if layer == 0:
                place.set_title(f"{rung}\nloss {run['scores']['loss']:.3f}", fontsize=9)
            if column == 0:
                place.set_ylabel(f"layer {layer}: looks at", fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "ladder.png", dpi=110)


if __name__ == "__main__":
    main()
