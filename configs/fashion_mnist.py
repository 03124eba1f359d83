"""Fashion-MNIST: clothes instead of digits, all else as in `configs/mnist.py`.

    python experiments/train.py --config=configs/fashion_mnist.py:osa --config.data.dir=DIR --workdir=runs/osa
    python experiments/compare.py --config=configs/fashion_mnist.py --config.data.dir=DIR --workdir=runs/fashion

`DIR` holds the four IDX files or a prepared TFDS data set, see `experiments/prepare_data.py`.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_MNIST = runpy.run_path(str(Path(__file__).with_name("mnist.py")))


def get_config(system: str | None = None) -> ConfigDict:
    """The config of one system, by default `osa`."""
    config = _MNIST["get_config"](system)
    config.data.name = "fashion_mnist"
    return config
