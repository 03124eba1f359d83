"""Packages that only some sources of data need."""

import importlib
from types import ModuleType


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Import a module that only an extra of this package installs.

    Args:
      module: the module's name.
      extra: the extra that installs it.

    Returns:
      The module.

    Raises:
      ValueError: naming the extra, if the module cannot be imported.

    Example:
      >>> import_extra("no_such_module", extra="tfds")
      Traceback (most recent call last):
      ValueError: no_such_module cannot be imported (No module named 'no_such_module'): run
          pip install 'osa_jax[tfds]'.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported ({error}): run pip install 'osa_jax[{extra}]'.") from error
