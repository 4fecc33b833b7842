"""How often a classifier of images or sounds answers "none of these", rightly and wrongly.

    python bench/none_of_these.py MODEL --data FOLDER [--foreign FOLDER] [--write SHARE]

With --write the threshold is first measured on the validation part, of which SHARE is refused, and
written into the folder of the model, as `regard train ... none=SHARE foreign=FOLDER` does at the
end; an image model that does not know the ground of its training images is told it. Then the
share refused of the test part is printed, and of each kind of stranger the share that gets a label.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import regard
from regard.api import find_model
from regard.data.image_format import measure_ground
from regard.files import read_json, write_json
from regard.files.hashes import seal
from regard.modalities.image import IMAGE


def note_ground(folder: Path, train: Any) -> None:
    """Write the ground of training images into config.json."""
    rows = np.unique(np.linspace(0, len(train) - 1, 1000).astype(np.int64))
    ground, content = measure_ground(train.read(rows)[:, 0].numpy())
    config = read_json(folder / "config.json")
    config["image"] |= {"ground": ground, "content": round(content, 3)}
    write_json(folder / "config.json", config)
    seal(folder)


def main() -> None:
    """Measure, and write the threshold if that is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--foreign", help="files that are none of these, to choose by")
    parser.add_argument("--others", nargs="*", default=[], help="folders of further strangers")
    parser.add_argument("--write", type=float, metavar="SHARE")
    args = parser.parse_args()
    folder = find_model(args.model)

    def part(model: Any, name: str) -> Any:
        return model.read_part_of(args.data, name)[name]

    model: Any = regard.load(args.model)
    if args.write:
        train = part(model, "train")
        if model.inputs is IMAGE and model.format.channels == 1:
            note_ground(folder, train)
            model = regard.load(args.model)
        parts = {"train": train, "valid": part(model, "valid")}
        model.predictor.note_none(folder, parts, args.write, args.foreign)
        model = regard.load(args.model)
    test = part(model, "test")
    predictor = model.predictor
    inputs = model.inputs.raws(test, model.format)
    probs = predictor.probabilities(inputs, predictor.plain)
    refused = predictor.are_none(probs, inputs)
    print(f"test part: {100 * refused.mean():.1f}% of {len(test):,} refused")
    others = predictor.strangers(inputs, seed=1)
    for path in [*([args.foreign] if args.foreign else []), *args.others]:
        others[Path(path).name] = predictor.read_foreign(path)
    for name, some in others.items():
        probs = predictor.probabilities(some, predictor.plain)
        labelled = ~predictor.are_none(probs, some)
        sure = probs.max(1).mean()
        share = 100 * labelled.mean()
        print(f"{name}: {share:.1f}% of {len(probs)} labelled, at {sure:.2f} on average")


if __name__ == "__main__":
    main()
