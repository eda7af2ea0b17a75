"""The style sheet of a report: one file for screen, phone and paper, light and dark."""

from __future__ import annotations

LIGHT = {
    "ground": "#fbfbf9", "raised": "#ffffff", "sunk": "#f1f1ec", "line": "#dcdcd4", "axis": "#8a8d94",
    "quiet": "#55585f", "ink": "#17191d", "a": "#1f4fd8", "b": "#b3440a", "warn": "#8a3b00", "wash": "#fdeadd",
    "c0": "#1f4fd8", "c1": "#b3440a", "c2": "#2a7a3b", "c3": "#7a3fb0", "c4": "#7a5c00", "c5": "#0f7474",
    "c6": "#a62a62", "c7": "#55585f",
    "up": "31 79 216", "down": "196 74 10", "dark": "23 25 29",
}  # fmt: skip
DARK = {
    "ground": "#14161a", "raised": "#1c1f25", "sunk": "#101216", "line": "#33373f", "axis": "#7d828c",
    "quiet": "#a9aeb8", "ink": "#eceef2", "a": "#8fb0ff", "b": "#ffa366", "warn": "#ffc08f", "wash": "#3d2817",
    "c0": "#8fb0ff", "c1": "#ffa366", "c2": "#7fd08f", "c3": "#cfa3ff", "c4": "#e0c060", "c5": "#62d0d0",
    "c6": "#ff95c0", "c7": "#a9aeb8",
    "up": "110 150 255", "down": "255 150 80", "dark": "236 238 242",
}  # fmt: skip
DASHES = ("", "6 4", "2 3", "8 3 2 3", "12 3", "1 4", "10 3 2 3 2 3", "4 2")

PLAIN = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; overflow-wrap: anywhere; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1, h2, h3, h4 { line-height: 1.2; letter-spacing: -0.012em; text-wrap: balance; }
h1 { font-size: 1.9rem; margin: 0 0 0.3rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 0.8rem; padding-top: 0.9rem;
  border-top: 1px solid var(--line); } h3 { font-size: 1.05rem; margin: 1.6rem 0 0.5rem; } h4 { font-size: 0.95rem; margin: 0 0 0.4rem; }
p { margin: 0 0 0.7rem; } a { color: var(--a); } .quiet { color: var(--quiet); font-size: 0.9rem; }
.where { color: var(--quiet); margin: 0 0 0.8rem; }
.status { display: inline-block; font-weight: 640; border: 1.5px solid currentColor; border-radius: 6px; padding: 0 0.5rem; margin-right: 0.4rem; }
.status.finished { color: var(--c2); } .status.running { color: var(--a); } .status.interrupted { color: var(--c4); }
.status.failed, .status.died, .status.unreadable { color: var(--b); }
.words { font-size: 1.08rem; border-left: 4px solid var(--a); padding: 0.1rem 0 0.1rem 0.9rem; list-style: none; margin: 1rem 0; }
.numbers { display: flex; flex-wrap: wrap; gap: 0.6rem 2.2rem; margin: 1rem 0 0; }
.numbers div { min-width: 6rem; } .numbers dt { font-size: 0.82rem; color: var(--quiet); }
.numbers dd { margin: 0; font-size: 1.5rem; font-weight: 660; line-height: 1.2; font-variant-numeric: tabular-nums; letter-spacing: -0.015em; }
.numbers small { font-size: 0.85rem; font-weight: 450; color: var(--quiet); letter-spacing: 0; }
.contents { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; padding: 0; margin: 1.4rem 0 0; font-size: 0.93rem; }
.problems { border: 1px solid var(--line); border-left: 4px solid var(--b); background: var(--wash); border-radius: 6px; padding: 0.6rem 1rem 0.6rem 2rem; }
.flag { border: 1px solid var(--line); border-left: 4px solid var(--b); border-radius: 8px; background: var(--raised); padding: 0.7rem 1rem 0.4rem; margin: 0 0 0.8rem; }
.flag h3 { margin: 0 0 0.3rem; } .flag h3::before { content: "⚑ "; color: var(--b); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(27rem, 100%), 1fr)); gap: 1.1rem; }
figure { margin: 0; background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: 0.8rem 0.9rem 0.5rem; min-width: 0; }
figcaption { font-weight: 640; font-size: 0.95rem; } figcaption span { font-weight: 450; color: var(--quiet); }
.chart { display: block; width: 100%; height: auto; margin-top: 0.3rem; font: 12.5px Inter, system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); fill: none; } .tick { fill: var(--quiet); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { stroke: none; opacity: 0.2; } .value { font-weight: 640; }
.bad { stroke: var(--b); stroke-width: 2; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; padding: 0; margin: 0.2rem 0 0; font-size: 0.84rem; color: var(--quiet); }
.swatch { width: 26px; height: 10px; margin-right: 0.35rem; }
details { font-size: 0.88rem; margin: 0.2rem 0; } summary { cursor: pointer; color: var(--quiet); padding: 0.25rem 0; }
.scroll { overflow-x: auto; max-height: 22rem; overflow-y: auto; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; line-height: 1.35; }
caption { text-align: left; color: var(--quiet); padding: 0.2rem 0; white-space: nowrap; }
.noted { white-space: pre-wrap; margin: 1rem 0 0.4rem; unicode-bidi: isolate; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 1.1rem 0.25rem 0; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
td { overflow-wrap: anywhere; min-width: 3rem; } thead th { color: var(--quiet); font-weight: 600; } tbody th { font-weight: 500; }
.small { font-size: 0.8rem; } .small th[scope="row"] { font-family: ui-monospace, monospace; white-space: pre; }
.settings { columns: 19rem; column-gap: 2rem; margin: 0; font-size: 0.88rem; }
.settings div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid var(--line); padding: 0.18rem 0; break-inside: avoid; }
.settings dt { color: var(--quiet); } .settings dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; min-width: 0; }
pre { margin: 0 0 0.6rem; } pre.formula { background: var(--sunk); border-radius: 8px; padding: 0.8rem 1rem; overflow-x: auto; font-size: 0.9rem; line-height: 1.5; }
.text { white-space: pre-wrap; font: 0.9rem/1.75 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; unicode-bidi: isolate; max-height: 26rem; overflow-y: auto; }
.prompt { background: var(--sunk); border-radius: 8px; padding: 0.5rem 0.8rem; line-height: 1.5; }
.group { background: var(--raised); border: 1px solid var(--line); border-radius: 10px; padding: 0.8rem 1rem 0.3rem; margin: 0 0 1rem; }
.response { border-top: 1px dashed var(--line); padding-top: 0.5rem; } .facts { font-size: 0.9rem; margin-bottom: 0.3rem; }
.tokens span { border-radius: 3px; text-underline-offset: 0.28em; text-decoration-skip-ink: none; }
.by { border: 1px solid var(--line); border-radius: 8px; padding: 0.3rem 0.9rem 0; margin: 0 0 1rem; display: flex; flex-wrap: wrap; gap: 0.1rem 1.1rem;
  position: sticky; top: 0; background: var(--ground); z-index: 1; min-width: 0; }
.by legend { font-size: 0.85rem; color: var(--quiet); float: left; padding: 0; } .by label { font-size: 0.92rem; white-space: nowrap; }
.by p { flex-basis: 100%; margin: 0 0 0.3rem; font-size: 0.85rem; min-height: 1.3em; } .by span { display: none; }
:focus-visible { outline: 2.5px solid var(--a); outline-offset: 2px; }
section section { scroll-margin-top: 6.5rem; } .flag { scroll-margin-top: 1rem; } section section:target > h3, .flag:target h3 { text-decoration: underline; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 0.8rem; color: var(--quiet); font-size: 0.85rem; }
@media (max-width: 560px) { main { padding: 1.2rem 0.9rem 3rem; } h1 { font-size: 1.45rem; } .numbers { gap: 0.5rem 1.4rem; } .chart { font-size: 15px; }
  .by { position: static; } figure { padding: 0.7rem 0.6rem 0.4rem; } }
@media print { body { font-size: 10.5pt; background: #fff; } main { max-width: none; padding: 0; } .contents, .by { display: none; }
  figure, .flag, .numbers, tr { break-inside: avoid; } h2, h3, h4 { break-after: avoid; } .charts { grid-template-columns: 1fr 1fr; }
  .scroll, .text { max-height: none; overflow: visible; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
@page { margin: 14mm; }
"""  # noqa: E501


def names(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


def shades() -> str:
    """What the classes of tokens mean under each choice."""
    rules = []
    sides: dict[str, tuple[tuple[str, str, str], ...]] = {
        "advantage": (("a", "up", "solid"), ("z", "down", "dotted")),
        "ratio": (("r", "up", "solid"), ("q", "down", "dotted")),
    }
    sides |= {"logp": (("l", "down", "solid"),), "entropy": (("e", "up", "solid"),)}
    for way, kinds in sides.items():
        here = f":root:has(#by-{way}:checked)"
        for letter, colour, dash in kinds:
            for i in range(1, 5):
                under = f"underline {dash} rgb(var(--{colour})) {0.5 + 0.75 * i:g}px"
                rules.append(
                    f"{here} .{letter}{i}{{background:rgb(var(--{colour})/{0.09 * i:g});text-decoration:{under}}}"
                )
    rules.append(
        ":root:has(#by-clipped:checked) .k{background:rgb(var(--down)/.3);outline:1.5px solid rgb(var(--down))}"
    )
    for way in (*sides, "clipped", "plain"):
        rules.append(f":root:has(#by-{way}:checked) .by .legend-{way}{{display:inline}}")
    return "\n".join(rules)


def style() -> str:
    """All of it."""
    lines = [
        f".c{i}{{stroke:var(--c{i});stroke-dasharray:{dash or 'none'}}}"
        f".band.c{i},.value.c{i},.dot.c{i}{{fill:var(--c{i});stroke:none}}"
        for i, dash in enumerate(DASHES)
    ]
    light, dark = names(LIGHT), names(DARK)
    return "\n".join(
        [
            f":root{{color-scheme:light dark;{light}}}",
            f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}",
            f"@media print{{:root{{color-scheme:light;{light}}}}}",
            PLAIN.strip(),
            *lines,
            shades(),
        ]
    )
