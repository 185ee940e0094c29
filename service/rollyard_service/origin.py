"""Where a request comes from: loopback addresses, and pages in somebody's browser."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True when only processes on this machine reach ``host`` (a name or an IP literal)."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # another name: resolvable to anything, so treated as public


def from_foreign_page(origin: str, host: str) -> bool:
    """True when a browser sent this for a page that this gateway did not serve.

    Protects a gateway without keys on loopback: a page anywhere can make its reader's browser
    POST to 127.0.0.1, and through DNS rebinding also read the answer. Browsers send ``Origin``
    with every POST, other clients do not; a rebound name shows itself in ``Host``.
    """
    try:
        authority = urlsplit(f"//{host}")
        return urlsplit(origin).netloc != host or not is_loopback(authority.hostname or "")
    except ValueError:
        return True
