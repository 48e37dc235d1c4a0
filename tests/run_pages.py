"""Helpers of tests of `pmm3d report`: the configuration of a run, and the text of its page."""

import json
from html.parser import HTMLParser

CONFIG = """
[grid]
shape = "1x2x2"
data = 2
[data]
file = "{folder}/data.h5"
batch_size = 50
[network]
hidden = [16, 8]
norm = true
[optimizer]
clip = 1.0
[training]
folder = "{folder}/run"
epochs = {epochs}
log_every = 1
checkpoint_every = 4
"""


def record_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


class Text(HTMLParser):
    """The words and tags of a page, and the addresses that a browser would load."""

    def __init__(self, page):
        super().__init__()
        self.words, self.loaded, self.tags = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        loads = ("src", "href", "xlink:href", "srcset", "action", "data")
        self.loaded += [value for name, value in attributes if name in loads]

    def handle_data(self, data):
        self.words.append(data)


def words(page: str) -> str:
    return " ".join(" ".join(Text(page).words).split())
