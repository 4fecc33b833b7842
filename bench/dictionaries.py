"""Sparse dictionaries on planted features: Regard against sae-lens, on the same batches and steps.

    python bench/dictionaries.py --peer PYTHON [--quick]

PYTHON is that of an environment with sae-lens 6.54 and the same torch. 1,024 features are planted
in 64 dimensions (planted_features.py, a small copy of SynthSAEBench); both learn 256 features
by each method, and are judged by the same function. A ratio of F1 or MCC is ours over theirs, one
of time theirs over ours: over 1 is better. Learning rates were chosen for each side on another seed
(--seed 2), and the coefficient of their L1, so that as many features fire as with the others (ours
finds its own).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HOME))

import torch  # noqa: E402
from apart import machine  # noqa: E402
from planted_features import Planted, PlantedConfig, judge_features  # noqa: E402

from regard.insight.autoencoder import (  # noqa: E402
    AutoencoderConfig,
    SparseAutoencoder,
    VectorTraining,
    learn,
)

BATCH, WIDTH, FEATURES, K = 1024, 64, 256, 6
KEPT = 400  # batches that are drawn beforehand; more steps read them again
METHODS = ("matryoshka", "batch_topk", "l1")  # also: topk
START = {"matryoshka": 0.1, "l1": 0.1}  # of ours, chosen on seeds 2 and 3; theirs is 0.1
LR = {"regard": 1e-2, "sae_lens": 1e-2}
L1 = 0.65  # of sae-lens: 6.3 features fire


def learn_ours(method: str, data: list[torch.Tensor], steps: int, lr: float) -> tuple[Any, float]:
    """Train ours; return the model and the seconds it took."""
    start = START.get(method, 1.0)
    model = SparseAutoencoder(AutoencoderConfig(WIDTH, FEATURES, K, method, start=start))
    model.fit_scale(data[0], centre=False)
    training = VectorTraining(model, lambda n: data[n % len(data)], dead_after=100 * BATCH)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        learn(training, Path(folder), steps=steps, lr=lr)
    return model, time.perf_counter() - begun


class Theirs:
    """A model of sae-lens with the names that are judged."""

    def __init__(self, sae: Any):
        self.sae, self.decoder = sae, sae.W_dec.detach()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of vectors: by its threshold, as it is saved for inference."""
        if not hasattr(self.sae, "topk_threshold"):
            return self.sae.encode(x)
        pre = torch.relu(self.sae.encode_with_hidden_pre(x)[1])
        return pre * (pre >= self.sae.topk_threshold.to(pre.dtype))

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Return the vectors of features."""
        return self.sae.decode(z)


def learn_theirs(method: str, data: list[torch.Tensor], steps: int, lr: float) -> tuple[Any, float]:
    """Train sae-lens's; return the model and the seconds it took."""
    from sae_lens import (  # pyright: ignore[reportMissingImports]
        BatchTopKTrainingSAE,
        BatchTopKTrainingSAEConfig,
        MatryoshkaBatchTopKTrainingSAE,
        MatryoshkaBatchTopKTrainingSAEConfig,
        StandardTrainingSAE,
        StandardTrainingSAEConfig,
        TopKTrainingSAE,
        TopKTrainingSAEConfig,
    )
    from sae_lens.config import (  # pyright: ignore[reportMissingImports]
        LoggingConfig,
        SAETrainerConfig,
    )
    from sae_lens.training.sae_trainer import (  # pyright: ignore[reportMissingImports]
        SAETrainer,
    )

    shape: dict[str, Any] = {"d_in": WIDTH, "d_sae": FEATURES}
    torch.manual_seed(1)
    sae: Any
    if method == "l1":
        config = StandardTrainingSAEConfig(**shape, l1_coefficient=L1, l1_warm_up_steps=steps // 10)
        sae = StandardTrainingSAE(config)
    elif method == "topk":
        sae = TopKTrainingSAE(TopKTrainingSAEConfig(**shape, k=K))
    elif method == "batch_topk":
        sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**shape, k=K))
    else:
        widths = [FEATURES // 32, FEATURES // 8, FEATURES // 2, FEATURES]
        nested = MatryoshkaBatchTopKTrainingSAEConfig(**shape, k=K, matryoshka_widths=widths)
        sae = MatryoshkaBatchTopKTrainingSAE(nested)
    trainer = SAETrainer(
        cfg=SAETrainerConfig(
            n_checkpoints=0,
            checkpoint_path=None,
            save_final_checkpoint=False,
            total_training_samples=steps * BATCH,
            device="cpu",
            autocast=False,
            lr=lr,
            lr_end=lr / 10,
            lr_scheduler_name="constant",
            lr_warm_up_steps=steps // 50,
            adam_beta1=0.9,
            adam_beta2=0.999,
            lr_decay_steps=steps // 3,
            n_restart_cycles=1,
            train_batch_size_samples=BATCH,
            dead_feature_window=100,
            feature_sampling_window=2000,
            logger=LoggingConfig(log_to_wandb=False),
            n_batches_for_norm_estimate=10,
        ),
        sae=sae,
        data_provider=iter(data[step % len(data)] for step in range(steps + 1)),
    )
    begun = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - begun
    sae.eval()
    return Theirs(sae), seconds


def run_side(options: argparse.Namespace) -> None:
    """Train one side by each method and print a JSON line for each."""
    torch.set_num_threads(options.threads)
    planted = Planted(PlantedConfig(seed=options.seed))
    data = [planted.sample(n, BATCH)[0] for n in range(min(KEPT, options.steps))]
    side = learn_ours if options.side == "regard" else learn_theirs
    for method in options.methods.split(","):
        lr = options.lr or LR[options.side]
        model, seconds = side(method, data, options.steps, lr)
        found = judge_features(model, planted, batches=20)
        told = {"side": options.side, "method": method, "seconds": seconds, **asdict(found)}
        print(json.dumps(told), flush=True)


def main() -> None:
    """Run both sides and print their scores, and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", help="python of an environment with sae-lens")
    parser.add_argument("--side", choices=("regard", "sae_lens"), help="run one side, as JSON")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    options.steps = 300 if options.quick else options.steps
    if options.side:
        return run_side(options)
    if not options.peer:
        parser.error("--peer is missing: the python of an environment with sae-lens 6.54")
    print(machine(), flush=True)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for method in options.methods.split(","):
        for side, python in (("regard", sys.executable), ("sae_lens", options.peer)):
            words = ["--side", side, "--methods", method, "--steps", str(options.steps)]
            words += ["--seed", str(options.seed), "--threads", str(options.threads)]
            done = subprocess.run(
                [python, __file__, *words],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=os.environ | {"PYTHONPATH": str(HOME), "WANDB_MODE": "disabled"},
            )
            rows[side, method] = row = json.loads(done.stdout.splitlines()[-1])
            scores = ", ".join(
                f"{name} {row[name]:.3f}"
                for name in ("f1", "mcc", "l0", "true_l0", "dead", "explained", "seconds")
            )
            print(f"{side} {method}: {scores}", flush=True)
    for method in options.methods.split(","):
        ours, theirs = rows["regard", method], rows["sae_lens", method]
        for name in ("f1", "mcc"):
            print(f"ratio {name}_{method}_vs_sae_lens {ours[name] / theirs[name]:.3f}")
        print(f"ratio time_{method}_vs_sae_lens {theirs['seconds'] / ours['seconds']:.3f}")
    for side in ("regard", "sae_lens"):
        order = sorted(options.methods.split(","), key=lambda method: -rows[side, method]["f1"])
        print(f"{side} by F1: {' > '.join(order)}")


if __name__ == "__main__":
    main()
