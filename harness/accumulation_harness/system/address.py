"""Where a cause is explained: the one address that every report, line of the lint and page cites."""

from __future__ import annotations

import os

# Where the site of `make docs` is public. There is no such place yet: reports name a command instead, and whoever serves the
# site gives its address in $ACCUMULATION_HARNESS_DOCS.
DOCUMENTATION = ""


def documentation() -> str:
    """The address of the site; empty where it is served nowhere.

    Returns:
        A URL from ACCUMULATION_HARNESS_DOCS, or from the package; empty where the site is served nowhere.
    """
    return os.environ.get("ACCUMULATION_HARNESS_DOCS", DOCUMENTATION)


def page_of(cause: str) -> str:
    """Where a cause and its remedy are explained: the page of the site, or else the command that prints them.

    Args:
        cause: The name of a cause, `loss_not_divided` say.

    Returns:
        A URL where the documentation is served; else a command.
    """
    site = documentation()
    return f"{site.rstrip('/')}/causes/{cause}.html" if site else f"accumulation-harness remedy {cause}"
