"""Health check of a container: `healthy.py URL` exits 0 when the URL answers 200 to 299, else 1 with the reason."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return 0
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
