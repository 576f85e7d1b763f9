"""Explorer: bars that answer to knobs, live in Jupyter and in the page that is only a file.

`show(**settings)` computes, with the engine's own code, a `Picture`: one sentence and a bar for
each label. It is called once for every combination of the knobs' choices, so that the page needs
no Python: it holds all the answers, and its sliders look them up. In a live notebook ipywidgets'
sliders do the same. The text form is the picture at the start.

The id is a hash of the content, so the same figure is the same bytes on every machine and nbval can
compare it. `refresh` drops the widget before it saves.
"""

import hashlib
import html
import itertools
import json
from collections.abc import Callable
from typing import NamedTuple

from book.tools.stepper import _asset

MOST_PICTURES = 1000  # a page must stay light


class Bar(NamedTuple):
    """One row: a label, its share now and before (0 to 1), and whether it was cut off."""

    label: str
    share: float
    before: float
    cut: bool = False


class Picture(NamedTuple):
    """What `show` returns: one sentence, and a bar for each label, the same labels every time."""

    caption: str
    bars: list[Bar]


class Explorer:
    """A figure with a slider for each knob and a table of bars below.

    `knobs` maps the name of an argument of `show` to its choices; it stands at the first one unless
    `start` names another. Raises ValueError for a knob without a choice, a start that is no choice,
    too many combinations, and labels that change.
    """

    def __init__(
        self, title: str, knobs: dict[str, list], show: Callable[..., Picture], *, start=None
    ):
        self.title, self.knobs = title, {name: list(choices) for name, choices in knobs.items()}
        start = dict(start or {})
        for name, choices in self.knobs.items():
            if not choices:
                raise ValueError(f"knob {name!r} of explorer {title!r} has no choice")
            if start.setdefault(name, choices[0]) not in choices:
                raise ValueError(f"start of knob {name!r} must be a choice, got {start[name]!r}")
        self.start = [choices.index(start[name]) for name, choices in self.knobs.items()]
        combinations = list(itertools.product(*self.knobs.values()))
        if len(combinations) > MOST_PICTURES:
            raise ValueError(
                f"explorer {title!r} has {len(combinations)} combinations of choices; "
                f"at most {MOST_PICTURES} fit on a page"
            )
        self.pictures = [
            show(**dict(zip(self.knobs, settings, strict=True))) for settings in combinations
        ]
        self.labels = [bar.label for bar in self.pictures[0].bars]
        for settings, picture in zip(combinations, self.pictures, strict=True):
            if [bar.label for bar in picture.bars] != self.labels:
                raise ValueError(f"explorer {title!r} has other labels at {settings}")

    def _picture(self, choices: list[int]) -> Picture:
        """The picture at these positions of the knobs."""
        at = 0
        for position, options in zip(choices, self.knobs.values(), strict=True):
            at = at * len(options) + position
        return self.pictures[at]

    def _data(self) -> dict:
        """What the page looks up: a caption and (share, before) in tenths of a per cent, a cut-off
        bar's share as -1. Equal lists of `before` are written once."""
        befores, frames = [], []
        for picture in self.pictures:
            before = [tenths(bar.before) for bar in picture.bars]
            if before not in befores:
                befores.append(before)
            shares = [-1 if bar.cut else tenths(bar.share) for bar in picture.bars]
            frames.append([picture.caption, shares, befores.index(before)])
        return {
            "knobs": [[str(choice) for choice in choices] for choices in self.knobs.values()],
            "befores": befores,
            "frames": frames,
        }

    def _table(self, picture: Picture) -> str:
        """The bars as a table: it can be read without eyes, without colours and without scripts."""
        rows = "".join(
            f'<tr{" class=tv-cut" if bar.cut else ""}><th scope="row">{html.escape(bar.label)}</th>'
            f"<td>{percent(tenths(bar.before))}</td>"
            f"<td>{'cut' if bar.cut else percent(tenths(bar.share))}</td>"
            f'<td aria-hidden="true"><i style="width:{bar.before:.1%}"></i>'
            f'<b style="width:{0 if bar.cut else bar.share:.1%}"></b></td></tr>'
            for bar in picture.bars
        )
        return (
            '<table><thead><tr><th scope="col">token</th><th scope="col">before</th>'
            '<th scope="col">after</th><td aria-hidden="true"></td></tr></thead>'
            f"<tbody>{rows}</tbody></table>"
            f'<p aria-live="polite">{html.escape(picture.caption)}</p>'
        )

    def _repr_html_(self) -> str:
        data = json.dumps(self._data(), ensure_ascii=False, separators=(",", ":"))
        data = data.replace("<", "\\u003c")  # so that no text can close the script element
        uid = "tv-" + hashlib.sha256((self.title + data).encode()).hexdigest()[:12]
        title = html.escape(self.title, quote=True)
        knobs = "".join(
            f'<label><span>{html.escape(name)}</span><input type="range" min="0" step="1" '
            f'max="{len(choices) - 1}" value="{at}">'
            f"<output>{html.escape(str(choices[at]))}</output></label>"
            for (name, choices), at in zip(self.knobs.items(), self.start, strict=True)
        )
        return (
            f'<figure class="tv-explorer" id="{uid}" role="group" aria-label="{title}" '
            f'data-lm-suppress-shortcuts="true"><figcaption>{title}</figcaption>'
            f'<div class="tv-knobs" hidden>{knobs}</div>'
            f"{self._table(self._picture(self.start))}</figure>\n"
            f"<style>{_asset('explorer.css')}</style>\n"
            f'<script>({_asset("explorer.js")})("{uid}",{data})</script>'
        )

    def _widget(self):
        """The live figure: ipywidgets' sliders over the same pictures."""
        import ipywidgets

        sliders = [
            ipywidgets.SelectionSlider(options=choices, value=choices[at], description=name)
            for (name, choices), at in zip(self.knobs.items(), self.start, strict=True)
        ]
        view = ipywidgets.HTML()

        def draw(change=None):
            picture = self._picture([slider.index for slider in sliders])
            title = f"<figcaption>{html.escape(self.title)}</figcaption>"
            view.value = (
                f"<style>{_asset('explorer.css')}</style>"
                f'<figure class="tv-explorer">{title}{self._table(picture)}</figure>'
            )

        for slider in sliders:
            slider.observe(draw, "index")
        draw()
        return ipywidgets.VBox([*sliders, view])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": repr(self), "text/html": self._repr_html_()}
        try:
            widget = self._widget()
        except ImportError:  # no ipywidgets: the page's own sliders do
            return bundle
        return widget._repr_mimebundle_() | bundle

    def __repr__(self) -> str:
        knobs = zip(self.knobs.items(), self.start, strict=True)
        settings = ", ".join(f"{name}={choices[at]}" for (name, choices), at in knobs)
        picture = self._picture(self.start)
        width = max(len(bar.label) for bar in picture.bars)
        lines = [f"{self.title} ({len(self.pictures)} settings)", f"{settings}: {picture.caption}"]
        for bar in picture.bars:
            after = "cut" if bar.cut else percent(tenths(bar.share))
            lines.append(f"    {bar.label:<{width}} {percent(tenths(bar.before)):>7} -> {after:>7}")
        return "\n".join(lines)


def tenths(share: float) -> int:
    """A share of 1 in tenths of a per cent."""
    return round(1000 * share)


def percent(tenths_of_percent: int) -> str:
    return f"{tenths_of_percent / 10:.1f} %"
