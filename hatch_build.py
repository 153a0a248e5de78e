"""Metadata that hatchling makes when it builds the package: links of the project, and README.md for an index.

The address of the project stands once, in pyproject.toml, and is an option of this hook. On an index README.md has no
files beside it, so its relative links become absolute.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link or picture of Markdown that leads to a file of the repository, and not to an address or a heading.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute_links(text: str, address: str) -> str:
    """Return a page with absolute links, as code hosts have them: pictures ``raw``, other files ``blob``.

    >>> absolute_links("[MD](docs/md.md#watch) ![plot](a.png) [limits](#limits)", "https://my.org")
    '[MD](https://my.org/blob/main/docs/md.md#watch) ![plot](https://my.org/raw/main/a.png) [limits](#limits)'
    """

    def absolute(match: re.Match) -> str:
        picture, label, target = match.groups()
        return f"{picture}[{label}]({address}/{'raw' if picture else 'blob'}/main/{target})"

    return RELATIVE.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``, which pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        """Add both to the metadata of the project."""
        address = self.config["address"]
        page = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(page, address)}
        metadata["urls"] = {"Source": address, "Changelog": f"{address}/blob/main/CHANGELOG.md"}
