"""Train one model.

    python experiments/train.py --config=configs/digits.py:osa --workdir=runs/osa
    python experiments/train.py --config=configs/digits.py:vit --workdir=runs/deep \
        --config.model.depth=12 --config.optimizer.learning_rate=1e-3 --config.ema_decay=0.99
    python experiments/train.py --config=configs/digits.py:osa --workdir=runs/osa --resume

The part of `--config` after the colon picks the system; every key of `run_settings` and of the
functions behind its sections can be given, whether it is in the file or not. Writes `config.json`,
`metrics.jsonl` and `checkpoints`. SIGTERM saves and ends the run; `--resume` goes on from the newest
checkpoint, bit for bit as if the run had never stopped.
"""

import time

from absl import flags
from rich.console import Console

from osa_jax.training import Trainer, define_config, run, run_program, summary_table

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for config, metrics and checkpoints.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in the folder.")
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    """Train the config's model and print what came out."""
    start = time.monotonic()
    trainer = Trainer(_CONFIG.value)
    print(f"Training {trainer.num_parameters:,} parameters for {trainer.num_steps} steps.")
    rows = run(trainer, seed=trainer.config.seed, workdir=_WORKDIR.value, resume=_RESUME.value)
    Console().print(summary_table(rows, seconds=time.monotonic() - start, workdir=_WORKDIR.value))


if __name__ == "__main__":
    run_program(main)
