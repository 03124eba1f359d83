"""Prepare MNIST or Fashion-MNIST in a TensorFlow Datasets folder; TensorFlow itself is not needed.

    python experiments/prepare_data.py --name=mnist --data_dir=data
    python experiments/prepare_data.py --name=fashion_mnist --data_dir=data --idx_dir=folder/of/idx/files

The first form downloads the four IDX files and checks their sums; the second reads a folder that
holds them and uses no network. A set that is already there is never overwritten. The examples keep
the order of the files, so that training from the files and from the prepared folder is the same.
"""

import hashlib
import http.client
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from absl import app, flags, logging
from PIL import Image

from osa_jax.data import Split, mnist
from osa_jax.data.extras import import_extra
from osa_jax.data.prepared import SPLIT_NAMES, default_folder
from osa_jax.training import one_line_errors

_NAME = flags.DEFINE_enum("name", "mnist", ["mnist", "fashion_mnist"], "The data set.")
_DATA_DIR = flags.DEFINE_string("data_dir", default_folder(), "The folder to prepare it in.")
_IDX_DIR = flags.DEFINE_string("idx_dir", None, "A folder of IDX files to take it from, in place of a download.")


def make_builder(stock_builder: type, splits: Mapping[str, Split], data_dir: Path):
    """TFDS's own builder of a data set, except that it takes its examples from memory, in their order."""

    class Builder(stock_builder, skip_registration=True):
        """The stock builder would read its files with TensorFlow."""

        name = stock_builder.name

        def _info(self):
            info = super()._info()
            info.as_proto.disable_shuffling = True
            return info

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples(split) for name, split in splits.items()}

        def _generate_examples(self, split):
            for index, (image, label) in enumerate(zip(split.images[..., 0], split.labels, strict=True)):
                yield index, {"image": Image.fromarray(image), "label": int(label)}

    return Builder(data_dir=data_dir, file_format="array_record")


def download(url_infos: Mapping, folder: str) -> None:
    """Download every file into the folder and check it; TFDS's own downloader retries for minutes."""
    for url, info in url_infos.items():
        print(f"Downloading {url} ({info.size / 2**20:.1f} MiB)", flush=True)
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"{url} cannot be downloaded ({error}): get the IDX files and set --idx_dir.") from error
        if hashlib.sha256(content).hexdigest() != info.checksum:
            raise ValueError(f"{url} has not the content that TFDS knows: get the IDX files and set --idx_dir.")
        (Path(folder) / info.filename).write_bytes(content)


def main(_: list[str]) -> None:
    """Prepare the set and say where it is."""
    logging.set_verbosity(logging.ERROR)
    with one_line_errors(), tempfile.TemporaryDirectory() as downloads:
        stock_builder = import_extra("tensorflow_datasets", extra="tfds").builder_cls(_NAME.value)
        data_dir = Path(_DATA_DIR.value).expanduser()
        target = data_dir / _NAME.value / str(stock_builder.VERSION)
        if target.exists():
            raise ValueError(f"{target} is already there: use it, remove it or choose another --data_dir.")
        if _IDX_DIR.value is None:
            download(stock_builder.url_infos, downloads)
        splits = dict(zip(SPLIT_NAMES, mnist.read_files(_IDX_DIR.value or downloads), strict=True))
        try:
            make_builder(stock_builder, splits, data_dir).download_and_prepare()
        except OSError as error:
            raise ValueError(f"--data_dir {data_dir} cannot be written: {error.strerror or error}.") from error
        print(f"Use it with --config.data.name={_NAME.value} --config.data.dir={data_dir}")


if __name__ == "__main__":
    app.run(main)
