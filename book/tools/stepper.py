"""Stepper: a picture that the reader steps through, drawn from rows of labelled cells.

A frame is `{"caption": sentence, "rows": [...], "note": text}`. A row is `(label, cells)` or
`(label, cells, note)`; a bare string among the rows is a heading. A cell is `None` (a gap), a
string, `(text, kind)`, `(text, kind, note)` or `(text, kind, note, span)`. That is enough for a
scheduler's timeline, a block pool, a flat batch and one token's way, so there is nothing else.

Python checks the frames and writes them as JSON; `stepper.js` draws them. The id is a hash of the
content, so the same figure is the same bytes on every machine and nbval can compare it.
"""

import hashlib
import html
import json
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

# kind -> (fill, ink, pattern drawn in an 8x8 tile, border dashes). Fill and ink are never the only
# sign: each kind has its own pattern or border, and the legend names those that occur.
KINDS = {
    "prefill": ("#cfe2ff", "#2f6fc4", "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6", ""),
    "decode": ("#ffdcae", "#b86e00", "M1,2h2M5,6h2", ""),
    "cached": ("#c8eed4", "#26834a", "M4,2v4M2,4h4", ""),
    "used": ("#e2dbff", "#6a55c7", "M4,0v8", ""),
    "new": ("#fff2a0", "#937c00", "M2,2h3v3h-3z", ""),
    "finished": ("#cdeeee", "#227a7a", "M0,4h8", ""),
    "preempted": ("#f8d3ef", "#a83a92", "M-2,6 L2,10 M0,0 L8,8 M6,-2 L10,2", ""),
    "evicted": ("#ffd3d0", "#c43c3c", "M0,0 L8,8 M8,0 L0,8", ""),
    "waiting": ("#e4e6ea", "#5b6470", "", "5 3"),
    "free": ("none", "#7a828e", "", "1.5 2.5"),
    "null": ("#c9ccd2", "#4b5563", "M0,2h8M0,6h8M2,0v8M6,0v8", ""),
}


class Cell(NamedTuple):
    text: str
    kind: str = ""
    note: str = ""
    span: int = 1


class Row(NamedTuple):
    label: str
    cells: tuple[Cell | None, ...] | None  # None: the row is a heading
    note: str = ""


class Frame(NamedTuple):
    caption: str
    rows: tuple[Row, ...]
    note: str = ""


class Stepper:
    """A figure with previous/play/next, a slider, arrow keys and one spoken sentence a frame.

    `legend` renames kinds (`{"cached": "shared prefix"}`); `columns` is where a long row wraps.
    Raises ValueError, naming the frame, for a missing caption or an unknown kind.
    """

    def __init__(self, title: str, frames: list[dict], *, legend=None, columns: int = 32):
        if not frames:
            raise ValueError(f"frames of stepper {title!r} is empty: give at least one frame")
        self.title = title
        self.frames = [_frame(i, frame) for i, frame in enumerate(frames, start=1)]
        self.legend = dict(legend or {})
        self.columns = columns
        for kind in self.legend:
            _check_kind(kind, "legend")

    def _data(self) -> dict:
        """What the page draws: each distinct row once, frames as lists of row numbers."""
        numbers: dict[Row, int] = {}
        frames = [
            [f.caption, [numbers.setdefault(row, len(numbers)) for row in f.rows], f.note]
            for f in self.frames
        ]
        cells = [cell for row in numbers for cell in row.cells or () if cell]
        used = {cell.kind for cell in cells}
        kinds = {k: [self.legend.get(k, k), *style] for k, style in KINDS.items() if k in used}
        rows = [
            [row.label, row.cells and [_short(c) for c in row.cells], row.note] for row in numbers
        ]
        return {
            "title": self.title,
            "columns": self.columns,
            "kinds": kinds,
            "rows": rows,
            "frames": frames,
        }

    def _repr_html_(self) -> str:
        data = json.dumps(self._data(), ensure_ascii=False, separators=(",", ":"))
        data = data.replace("<", "\\u003c")  # so that no text can close the script element
        uid = "tv-" + hashlib.sha256(data.encode()).hexdigest()[:12]
        captions = "".join(f"<li>{html.escape(frame.caption)}</li>" for frame in self.frames)
        title = html.escape(self.title, quote=True)
        return (
            f'<figure class="tv-stepper" id="{uid}" role="group" aria-label="{title}" '
            f'data-lm-suppress-shortcuts="true"><figcaption>{title}</figcaption>'
            f"<noscript><ol>{captions}</ol></noscript></figure>\n"
            f"<style>{_asset('stepper.css')}</style>\n"
            f'<script>({_asset("stepper.js")})("{uid}",{data})</script>'
        )

    def __repr__(self) -> str:
        lines = [f"{self.title} ({len(self.frames)} steps)"]
        for i, frame in enumerate(self.frames, start=1):
            lines.append(f"{i:>2}. {frame.caption}")
            width = max((len(row.label) for row in frame.rows if row.cells is not None), default=0)
            for row in frame.rows:
                body = "" if row.cells is None else f"{row.label:<{width}} | {_spoken(row)}"
                lines.append(f"    {body or row.label + ':'}".rstrip())
            if frame.note:
                lines.append(f"    ({frame.note})")
        return "\n".join(lines)


def _frame(number: int, frame: dict) -> Frame:
    where = f"frame {number}"
    unknown = sorted(set(frame) - set(Frame._fields))
    if unknown or not frame.get("caption"):
        raise ValueError(f"{where} needs a caption and may have rows and note; unknown: {unknown}")
    rows = tuple(_row(where, row) for row in frame.get("rows", ()))
    return Frame(frame["caption"], rows, frame.get("note", ""))


def _row(where: str, row) -> Row:
    if isinstance(row, str):
        return Row(row, None)
    label, cells, *note = row
    cells = [Cell(cell) if isinstance(cell, str) else cell and Cell(*cell) for cell in cells]
    for cell in cells:
        if cell and cell.kind:
            _check_kind(cell.kind, where)
    return Row(label, tuple(cells), *note)


def _check_kind(kind: str, where: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} in {where} is unknown: use one of {', '.join(KINDS)}")


def _short(cell: Cell | None) -> list | int:
    """A cell as a JSON list without its trailing defaults; 0 is a gap."""
    if cell is None:
        return 0
    values = list(cell)
    while len(values) > 1 and values[-1] == Cell._field_defaults[Cell._fields[len(values) - 1]]:
        values.pop()
    return values


def _spoken(row: Row) -> str:
    """The row as text: neighbours of one kind share a bracket, `prefill[0 1 2] decode[3]`."""
    groups = []
    for kind, cells in groupby((cell for cell in row.cells if cell), key=lambda cell: cell.kind):
        words = " ".join(f"{c.text}({c.note})" if c.note else c.text for c in cells)
        groups.append(f"{kind}[{words}]" if kind else words)
    return " ".join(groups) + (f"  ({row.note})" if row.note else "")


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()
