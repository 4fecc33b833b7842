"""Say under which licence the weights of the starters are offered, in their folders.

    python bench/licence.py [STARTER ...]

config.json gets it as an SPDX name, which `regard models` shows, ATTRIBUTION.md as its last line,
and SHA256SUMS is written anew. What was learnt from data under a share-alike licence is under such
a one.
"""

import json
import sys
from pathlib import Path

from regard.api import starters_home
from regard.files import write_atomically, write_json
from regard.files.hashes import seal

# starter -> SPDX name of the licence
LICENCES = {
    "digits": "CC-BY-SA-4.0",  # FSDD
    "en-zh": "CC-BY-SA-4.0",  # Tatoeba, CC BY 2.0 FR, and perhaps words of CC-CEDICT, CC BY-SA 4.0
    "fashion": "MIT",
    "fill": "CC-BY-SA-4.0",  # of WikiText, whose 3.0 allows a later version
    "letters": "BSD-2-Clause",  # AN4
    "painter": "MIT",  # Fashion-MNIST
    "shakespeare": "MIT",
    "tag": "CC-BY-SA-4.0",  # UD English Web Treebank
}
BEGINNING = "Licence: the weights"


def offer(folder: Path, licence: str) -> None:
    """Write the licence of a starter's weights into its folder."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("licence", None)
    at = list(config).index("about") + 1
    items = [*config.items()]
    write_json(folder / "config.json", dict([*items[:at], ("licence", licence), *items[at:]]))
    path = folder / "ATTRIBUTION.md"
    text = path.read_text().partition(f"\n{BEGINNING}")[0].rstrip("\n")
    line = f"{BEGINNING} and all other files of this folder are offered under {licence}"
    write_atomically(path, f"{text}\n\n{line}\n(https://spdx.org/licenses/{licence}.html).\n")
    seal(folder)


if __name__ == "__main__":
    for name in sys.argv[1:] or LICENCES:
        offer(starters_home() / name, LICENCES[name])
