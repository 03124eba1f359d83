"""The page of a comparison, read back by the standard library's parser."""

import base64
import html.parser

import jax
import numpy as np

import osa_jax
from osa_jax.training import html_report


class Page(html.parser.HTMLParser):
    """Cells, images and preformatted text of a page, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.images, self.preformatted = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        into = {"td": self.cells, "th": self.cells, "pre": self.preformatted}.get(self.open[-1] if self.open else "")
        if into is not None:
            into.append(data)


def test_the_page_holds_table_figure_configs_versions_and_machine(tmp_path):
    (tmp_path / "curves.png").write_bytes(b"\x89PNG and more")
    table = "| system | accuracy |\n|---|---|\n| A & <B> | 90.0 |"
    text = html_report(title="t", table=table, figures=[tmp_path / "curves.png"], configs={"A": {"seed": 3}})
    page = Page(text)
    assert not page.open
    assert page.cells[:4] == ["system", "accuracy", "A & <B>", "90.0"]
    assert base64.b64decode(page.images[0].removeprefix("data:image/png;base64,")) == b"\x89PNG and more"
    assert page.preformatted == ['{\n  "seed": 3\n}']
    environment = dict(zip(page.cells[4::2], page.cells[5::2], strict=True))
    assert environment["osa_jax"] == osa_jax.__version__
    assert (environment["jax"], environment["numpy"]) == (jax.__version__, np.__version__)
    assert "cpu" in environment["devices"]
    assert "http" not in text and "src=" not in text.replace('src="data:', "")
