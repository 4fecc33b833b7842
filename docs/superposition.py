"""Draws superposition.png, phases.png and fractions.png: toy models trained by `regard`."""

import sys
from pathlib import Path
from typing import Any

import regard

HOME = Path(__file__).parent
PICTURES: dict[str, dict[str, Any]] = {
    "superposition": {"n": 5, "m": 2, "sparsity": (0, 0.7, 0.9, 0.99), "tries": 8, "steps": 2000},
    "phases": {"view": "phase", "grid": 24, "tries": 2, "steps": 1000},
    "fractions": {"view": "fractions", "steps": 2000},
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        told = regard.superposition(out=HOME / f"{name}.png", quiet=False, **PICTURES[name])
        print(told)
