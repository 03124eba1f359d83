"""One self-contained page of a comparison: table, figures, configs, versions and machine."""

import base64
import html
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import osa_jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ccc; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto; }}
</style>
<h1>{title}</h1>
{table}
{figures}
<h2>Configs</h2>
{configs}
<h2>Versions and machine</h2>
{machine}
</html>
"""


def html_report(
    *, title: str, table: str, figures: Sequence[str | Path], configs: Mapping[str, Mapping[str, Any]]
) -> str:
    r"""One HTML page that needs no other file.

    Args:
      title: the page's heading.
      table: a Markdown table, as `results_table` writes it.
      figures: PNG files, which become part of the page.
      configs: a config for each system's label.

    Returns:
      The page.

    Example:
      >>> page = html_report(title="A < B", table="| a | b |\n|---|---|\n| 1 | 2 |", figures=[], configs={})
      >>> "<h1>A &lt; B</h1>" in page, "<td>2</td>" in page
      (True, True)
    """
    folded = (
        f"<details><summary>{html.escape(label)}</summary>"
        f"<pre>{html.escape(json.dumps(config, indent=2))}</pre></details>"
        for label, config in configs.items()
    )
    return _PAGE.format(
        title=html.escape(title),
        table=_table(table),
        figures="\n".join(_image(Path(path)) for path in figures),
        configs="\n".join(folded),
        machine=_table("\n".join(f"| {name} | {value} |" for name, value in environment().items())),
    )


def environment() -> dict[str, str]:
    """What the numbers depend on beside the code: versions, devices and machine."""
    devices = jax.devices()
    return {
        "Python": platform.python_version(),
        "osa_jax": osa_jax.__version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "CPU cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _table(markdown: str) -> str:
    """A Markdown table in HTML; a table without a heading has no rule of dashes."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in markdown.splitlines()]
    headed = len(lines) > 1 and not "".join(lines[1]).strip("-")
    heading, body = (lines[:1], lines[2:]) if headed else ([], lines)

    def rows(cells_of: list[list[str]], tag: str) -> str:
        return "\n".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>" for cells in cells_of
        )

    return f"<table>\n{rows(heading, 'th')}\n{rows(body, 'td')}\n</table>"


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'
