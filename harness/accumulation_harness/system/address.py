"""Where the documentation is read: the one address that every report, line of the lint and page cites."""

from __future__ import annotations

import os

# Where the site of `make docs` is public. There is no such place yet: reports name the file of the package instead, and whoever
# serves the site gives its address in $ACCUMULATION_HARNESS_DOCS.
DOCUMENTATION = ""
REMEDIES = "accumulation_harness/remedies.md"


def documentation() -> str:
    """The address of the site; empty where it is served nowhere.

    Returns:
        A URL from ACCUMULATION_HARNESS_DOCS, or from the package; empty where the site is served nowhere.
    """
    return os.environ.get("ACCUMULATION_HARNESS_DOCS", DOCUMENTATION)


def page_of(cause: str) -> str:
    """Where a cause and its remedy are explained: the page of the site, or else the section of the package's own file.

    Args:
        cause: The name of a cause, `loss_not_divided` say.

    Returns:
        A URL where the documentation is served; else the path of `remedies.md` in the package, with the cause behind `#`.
    """
    site = documentation()
    return f"{site.rstrip('/')}/causes/{cause}.html" if site else f"{REMEDIES}#{cause}"
