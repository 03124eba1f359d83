"""Rank collapse: how alike the tokens become on the way through every system, deep or trained.

    python experiments/rank_collapse.py --config=configs/digits.py --workdir=runs/collapse
    python experiments/rank_collapse.py --config=configs/mnist.py --config.data.dir=DIR --workdir=runs/collapse \
        --systems=vit_no_skip,osa --depths=6,48 --trained=runs/mnist/vit_no_skip/seed0,runs/mnist/osa/seed0

Measures the kernel's spectrum, the effective rank and the cosine similarity of the tokens, medians
over test images and seeds: at initialisation for every system and depth, and in the best
checkpoints of the runs that `--trained` names. Writes `rank_collapse.md` (a table),
`rank_collapse.png` (effective rank and cosine against the block) and `spectra.png`.

Theorem 2.2 of the paper is about one orthogonal A: A X X^T A^T has the spectrum of X X^T, so the
attention leaves the effective rank as it is. What the MLPs do to it is theirs, hence the table and
the figure also tell what attention alone keeps of it, the product over the blocks.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from absl import flags

from osa_jax.training import (
    SYSTEMS,
    Trainer,
    changed,
    define_config,
    load_run,
    median_signal,
    plot_signals,
    plot_spectra,
    prepare_workdir,
    run_program,
    signal_table,
    system_of,
    system_variant,
)

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder for table and figures.")
_SYSTEMS = flags.DEFINE_list("systems", list(SYSTEMS), "What to measure at initialisation.")
_DEPTHS = flags.DEFINE_list("depths", ["6", "12", "24", "48"], "Depths at initialisation; may be empty.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Models of each system and depth.", lower_bound=1)
_IMAGES = flags.DEFINE_integer("images", 64, "Test images.", lower_bound=1)
_TRAINED = flags.DEFINE_list("trained", [], "Folders of runs, whose models are measured too.")
flags.mark_flags_as_required(["config", "workdir"])
flags.register_validator("depths", lambda depths: all(map(str.isdecimal, depths)), "must be numbers, as 6,12")

Group = tuple[str, str, np.ndarray, Iterable[Callable]]  # Kind of models, system, images, models.


def main() -> None:
    """Measure everything, then write table and figures."""
    workdir = prepare_workdir(_WORKDIR.value)
    signals: dict = {}
    for kind, label, images, models in itertools.chain(untrained(), trained()):
        print(f"{kind}: {label}", file=sys.stderr)
        signals.setdefault(kind, {})[label] = median_signal(models, images[: _IMAGES.value])
    if not signals:
        raise ValueError("--depths and --trained are both empty: there is nothing to measure.")
    title = f"Medians over test images and seeds, {_CONFIG.value.data.name}"
    table = signal_table(signals)
    (workdir / "rank_collapse.md").write_text(table + "\n")
    plot_signals(signals, workdir / "rank_collapse.png", title=title)
    plot_spectra(signals, workdir / "spectra.png", title=title)
    print(f"{table}\n\nTable:   {workdir / 'rank_collapse.md'}")
    print(f"Figures: {workdir / 'rank_collapse.png'}, {workdir / 'spectra.png'}")


def untrained() -> Iterator[Group]:
    """Every depth of every system, from every seed."""
    config = _CONFIG.value
    for depth, name in itertools.product(map(int, _DEPTHS.value), _SYSTEMS.value):
        label, system = system_variant(changed(config, {"model": {"depth": depth}}), name)
        trainer = Trainer(system)
        states = (trainer.functions.init(jax.random.key(config.seed + i)) for i in range(_SEEDS.value))
        models = map(trainer.functions.model, states)
        yield f"depth {depth}", label, trainer.dataset.test.images, models


def trained() -> Iterator[Group]:
    """The runs of `--trained`, those of one system and depth together."""
    groups: dict = {}
    for folder in _TRAINED.value:
        trainer, snapshot = load_run(folder)
        model = trainer.config.model
        name = system_of(model)
        label = SYSTEMS[name].label if name else folder
        first, models = groups.setdefault((model.depth, label), (trainer, []))
        if first.config.model != model:
            raise ValueError(f"--trained has two models called {label!r}, the second in {folder!r}: measure one alone.")
        models.append(trainer.functions.model(snapshot.state))
    for (depth, label), (trainer, models) in groups.items():
        yield f"depth {depth}, trained", label, trainer.dataset.test.images, models


if __name__ == "__main__":
    run_program(main)
