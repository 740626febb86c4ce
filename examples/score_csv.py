"""Adds to a CSV file how likely the model finds each text. Needs nothing but Python.

    python3 examples/score_csv.py texts.csv scored.csv --column text

The new columns are `tokens`, `logprob` (natural logarithm, summed over the tokens) and `bits_per_byte`, by which
texts of different lengths can be compared: the lower, the likelier. They stay empty where a text is too short to be
scored.
A service that asks for keys takes one from the variable INKSTREAM_API_KEY.
"""

import argparse
import csv
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

COLUMNS = ("tokens", "logprob", "bits_per_byte")
BATCH = 16
"""Texts in one request: they are computed together."""


def scores(url: str, texts: list[str]) -> list[dict[str, Any]]:
    """The service's scores. Waits where the service says when to come back. Raises RuntimeError if it refuses."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("INKSTREAM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/score", json.dumps({"prompt": texts}).encode(), headers)
    while True:
        try:
            with urllib.request.urlopen(request) as response:
                return sorted(json.load(response)["scores"], key=lambda score: score["index"])
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):  # over the key's quota; starting, or too busy
                raise RuntimeError(json.load(error)["error"]["message"]) from None
            time.sleep(float(error.headers.get("retry-after", 1)))
        except OSError as error:
            raise RuntimeError(f"no service at {url}: {error}; start one with make serve") from None


def scored(url: str, rows: Iterator[dict[str, Any]], column: str) -> Iterator[dict[str, Any]]:
    """The rows with their new columns, in order."""
    while batch := list(islice(rows, BATCH)):
        texts = [row[column] for row in batch if row[column]]
        found = iter(scores(url, texts) if texts else [])
        for row in batch:
            score = next(found) if row[column] else {"n_scored": 0}
            if score["n_scored"]:
                values = (score["n_scored"], round(score["logprob"], 4), round(score["bits_per_byte"], 4))
                row |= dict(zip(COLUMNS, values, strict=True))
            yield row


def main() -> int:
    """Exit codes: 0 done, 1 no service or an error, 2 a file that cannot be used."""
    parser = argparse.ArgumentParser(description="Score the texts of a CSV file.")
    parser.add_argument("source", help="CSV file in UTF-8 with a header line")
    parser.add_argument("target", help="CSV file to write")
    parser.add_argument("--column", default="text", help="name of the column with the texts (%(default)s)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (%(default)s)")
    options = parser.parse_args()
    if Path(options.source).resolve() == Path(options.target).resolve():
        parser.error("the target must be another file than the source, which is read while the target is written")
    try:
        with Path(options.source).open(newline="", encoding="utf-8") as source:
            rows = csv.DictReader(source)
            names = list(rows.fieldnames or ())
            if options.column not in names:
                parser.error(f"{options.source} has no column {options.column!r}; its columns are {', '.join(names)}")
            with Path(options.target).open("w", newline="", encoding="utf-8") as target:
                writer = csv.DictWriter(target, [*names, *(name for name in COLUMNS if name not in names)])
                writer.writeheader()
                writer.writerows(scored(options.url.rstrip("/"), rows, options.column))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
