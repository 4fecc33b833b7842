"""Trains with eole, a few steps at a time when asked, and prints what each step took.

Runs inside eole's own environment. It reads numbers of steps from standard input, one a line, and
after each step prints a JSON line: seconds since the step before (waiting for a request left out),
source pieces and target pieces without padding, and the places of both with padding. Its own log
counts the same pieces, but over wall time that would include the turns of others.
"""

import json
import os
import sys
import time


def main() -> None:
    """Hook eole's trainer and train by its command line."""
    config, threads = sys.argv[1], int(sys.argv[2])
    # The answers go out on the real standard output; whatever eole prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    import torch

    torch.set_num_threads(threads)
    from eole.bin.run.train import Train  # pyright: ignore[reportMissingImports]
    from eole.trainer import Trainer  # pyright: ignore[reportMissingImports]

    turn = {"left": 0, "since": 0.0}
    plain_step = Trainer._train_step
    plain_batches = Trainer._accum_batches

    def batches(self, iterator):
        """Yield eole's batches, waiting for a request before fetching each first one of a turn."""
        source = plain_batches(self, iterator)
        while True:
            if turn["left"] == 0:
                line = sys.stdin.readline()
                if not line.strip():
                    answers.flush()
                    os._exit(0)  # no last checkpoint
                turn["left"] = int(line)
                turn["since"] = time.perf_counter()
            yield next(source)

    def step(self, batches, *arguments, **settings):
        """Train one step and report it."""
        plain_step(self, batches, *arguments, **settings)
        now = time.perf_counter()
        pad = self.train_loss.padding_idx
        # The decoder start token is read, never predicted: the pieces are those predicted.
        report = {
            "seconds": now - turn["since"],
            "source": sum(int(b["srclen"].sum()) for b in batches),
            "target": sum(int(b["tgt"][:, 1:].ne(pad).sum()) for b in batches),
            "source_places": sum(b["src"].numel() for b in batches),
            "target_places": sum(b["tgt"][:, 1:].numel() for b in batches),
        }
        answers.write(json.dumps(report) + "\n")
        turn["left"] -= 1
        turn["since"] = time.perf_counter()

    Trainer._accum_batches = batches
    Trainer._train_step = step
    from argparse import ArgumentParser

    parser = ArgumentParser()
    Train.add_args(parser)
    Train.run(parser.parse_args(["--config", config]))


if __name__ == "__main__":
    main()
