"""Train one model.

    python experiments/train.py --config=configs/digits.py:osa --workdir=runs/osa
    python experiments/train.py --config=configs/digits.py:vit --workdir=runs/deep \
        --config.model.depth=12 --config.optimizer.learning_rate=1e-3

The part of `--config` after the colon picks the system. Writes `config.json` and `metrics.jsonl`.
"""

from absl import app, flags, logging
from ml_collections import config_flags

from osa_jax.training import Trainer, one_line_errors, run

_CONFIG = config_flags.DEFINE_config_file("config", None, "The config file, with its argument.")
_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for config and metrics.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    """Train the config's model and print its last metrics."""
    logging.set_verbosity(logging.WARNING)
    with one_line_errors():
        trainer = Trainer(_CONFIG.value)
        print(f"Training {trainer.num_parameters:,} parameters for {trainer.config.num_steps} steps.")
        last = run(trainer, seed=trainer.config.seed, workdir=_WORKDIR.value)[-1]
        print(f"Test accuracy {100 * last['test_accuracy']:.1f} %, test loss {last['test_loss']:.3f}.")
        print(f"Metrics: {_WORKDIR.value}/metrics.jsonl")


if __name__ == "__main__":
    app.run(main)
