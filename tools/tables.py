"""Read a table from a CSV file, as experiment trackers and spreadsheets export it."""

import csv
from pathlib import Path

from tools.flags import UserError


def parse_columns(text: str) -> dict[str, str]:
    """'val_loss=val/loss,lr=rate' -> {'val_loss': 'val/loss', 'lr': 'rate'}. Raises UserError."""
    columns = {}
    for part in text.split(",") if text else []:
        ours, equals, theirs = part.partition("=")
        if not (ours and equals and theirs):
            raise UserError(f"--columns {text}: needs OURS=THEIRS,..., as in lr=rate")
        columns[ours] = theirs
    return columns


def read_csv(
    path: Path, columns: dict, known: tuple, needed: tuple
) -> list[tuple[int, dict]]:
    """[(number of a row, {our name: text})]; the header is row 1.

    columns: our name -> the name in the header, or a number that all rows have. A column
    needs no mention if its name is one of the known ones. Raises UserError if a needed
    one is missing.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # a spreadsheet's mark
            table = list(csv.reader(file))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    header = table[0] if table else []
    names = {name.lower(): name for name in header}
    columns = {ours: names[ours] for ours in known if ours in names} | columns

    has = ", ".join(header[:20])
    for ours in needed:
        if ours not in columns:
            raise UserError(f"{path}: no column {ours}; name yours in --columns ({has})")
    for ours, theirs in columns.items():
        if theirs not in header and not theirs.replace(".", "").isdigit():
            raise UserError(f"--columns {ours}={theirs}: not in {path} ({has})")
    rows = []
    for i, line in enumerate(table[1:], 2):
        if not line:  # an empty line
            continue
        if len(line) != len(header):
            raise UserError(
                f"{path}: row {i} has {len(line)} fields, and the header {len(header)}; "
                "is there a comma inside a number?"
            )
        by_name = dict(zip(header, line))
        rows.append((i, {ours: by_name.get(x, x).strip() for ours, x in columns.items()}))
    return rows
