"""Let the search find options, settings, errors and metrics by name: the rows of the reference's tables.

Sphinx's search lists pages that contain a word by their titles. Rows are objects of a domain here, as functions are of
Python's, so a search for `startingOffsets` begins with the row that explains it, and leads to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType

#: Titles of the columns that have names, whose first word says what they name.
_KINDS = ("class", "condition", "metric", "option", "setting")
#: `commands.md` has many options of one name.
_PAGES = re.compile(r"reference/(?!generated/commands)")
_NAME = re.compile(r"(?<![\w.])[A-Za-z]\w*(?:\.\w+)*")


class NamedRows(Domain):
    """The rows, each (name, kind, page, anchor)."""

    name = "row"
    label = "rows of tables"
    object_types = {kind: ObjType(kind) for kind in _KINDS}
    initial_data = {"rows": []}
    data_version = 1

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        return ((name, name, kind, page, anchor, 1) for name, kind, page, anchor in self.data["rows"])

    def get_type_name(self, type: ObjType, primary: bool = False) -> str:
        """What stands beside a name that was found."""
        return type.lname

    def clear_doc(self, docname: str) -> None:
        self.data["rows"] = [row for row in self.data["rows"] if row[2] != docname]


def _note_rows(app: Sphinx, doctree: nodes.document) -> None:
    page = app.env.docname
    rows = app.env.domains["row"].data["rows"]
    tables = doctree.findall(nodes.table) if _PAGES.match(page) else ()
    for table in tables:
        head, *body = table.findall(nodes.row)
        kinds = [cell.astext().partition(",")[0] for cell in head.children]
        for row in body:
            for kind, cell in zip(kinds, row.children, strict=True):
                if kind in _KINDS:
                    for name in _NAME.findall(cell.astext()):
                        anchor = f"row-{nodes.make_id(name)}"
                        if anchor not in doctree.ids:
                            row["ids"].append(anchor)
                            doctree.ids[anchor] = row
                            rows.append((name, kind, page, anchor))


def setup(app: Sphinx) -> None:
    app.add_domain(NamedRows)
    app.connect("doctree-read", _note_rows)
