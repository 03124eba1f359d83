"""What every program needs: a config on the command line, and errors of one line."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator

from absl import app, flags, logging
from ml_collections import config_flags

from osa_jax.training.config import nearest, run_settings
from osa_jax.training.runs import Terminated


def define_config() -> flags.FlagHolder:
    """The flag `--config=file.py:argument` with overrides as `--config.section.key=value`.

    Keys that the file leaves out may be given too. Whether there is such a key, of that type, is for
    `check_config` to say.

    Returns:
      The holder of the `ConfigDict`.
    """
    return config_flags.DEFINE_config_file(
        "config", None, "The config file, with its argument.", lock_config=False, accept_new_attributes=True
    )


def run_program(main: Callable[..., None], *, takes_arguments: bool = False) -> None:
    """Parse the flags and call `main`; errors of the user are one line.

    Args:
      main: the program.
      takes_arguments: whether it is called with the list of arguments that are no flags.
    """

    def wrapped(arguments: list[str]) -> None:
        with one_line_errors():
            _leave_errors_to_this_thread()
            if takes_arguments:
                main(arguments[1:])
            elif arguments[1:]:
                raise ValueError(f"{arguments[1]!r} is no flag; a flag and its value are written --flag=value.")
            else:
                main()

    app.run(wrapped, flags_parser=_parse_flags)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End a program with one line: exit code 1 on a user's error, 130 on Ctrl-C, 0 on SIGTERM."""
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted: what was written so far is kept.", file=sys.stderr)
        raise SystemExit(130) from None
    except Terminated as stop:
        print(stop, file=sys.stderr)
        raise SystemExit(0) from None
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _leave_errors_to_this_thread() -> None:
    """No logs of libraries and no traces of other threads.

    What goes wrong while Orbax reads or writes is raised where it is waited for; before that, each of
    its threads and TensorStore's prints its own trace of it.
    """
    logging.set_verbosity(logging.FATAL)
    threading.excepthook = lambda _: None
    sys.unraisablehook = lambda _: None


def _parse_flags(arguments: list[str]) -> list[str]:
    with one_line_errors():
        try:
            rest = flags.FLAGS(arguments)
            if "config" in flags.FLAGS and flags.FLAGS.config is not None:
                flags.FLAGS.config.to_dict()
            return rest
        except KeyError as error:
            raise ValueError(_wrong_section(arguments)) from error
        except Exception as error:
            raise ValueError(_last_line(error)) from error


def _wrong_section(arguments: list[str]) -> str:
    """The line about an override in a section that the config does not have."""
    keys = inspect.signature(run_settings).parameters
    for argument in arguments:
        flag, *path = argument.lstrip("-").split("=")[0].split(".")
        if flag == "config" and len(path) > 1 and path[0] not in keys:
            return f"config.{path[0]} is not a known key; {nearest(path[0], keys)}"
    return "An override names a section that the config file does not have."


def _last_line(error: Exception) -> str:
    """What an error says, without the trace that some libraries put into it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ").split(". Currently supported")[0] if lines else type(error).__name__
