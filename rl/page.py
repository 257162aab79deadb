"""The page that run and consistency reports share: style, tables and a frame, self-contained and escaped."""

import html
import json
from typing import Any


def page(title: str, body: list[str]) -> str:
    """A whole HTML document; `title` is escaped here, `body` must be."""
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(part for part in body if part))


def table(title: str, cells: list[tuple[str, str]]) -> str:
    """A foldable table of keys and values; "" without cells."""
    if not cells:
        return ""
    body = "".join(f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in cells)
    opened = " open" if title == "Recipe" else ""
    return (
        f"<details{opened}><summary><h2>{html.escape(title)}</h2></summary><table class='kv'>{body}</table></details>"
    )


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and texts of a nested value."""
    if isinstance(value, dict):
        cells = []
        for key, child in value.items():
            cells += flatten(child, f"{prefix}.{key}" if prefix else str(key))
        return cells
    if isinstance(value, list):
        return [(prefix, ", ".join(str(item) for item in value) if value else "none")]
    return [(prefix, json.dumps(value) if value is None or isinstance(value, bool) else str(value))]


def number(value: float | None) -> str:
    """Three digits, or n/a."""
    return "n/a" if value is None else f"{value:.3g}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --bg:#fbfbfa; --card:#fff; --ink:#1c2024; --quiet:#667079; --line:#e3e5e8;
  --s0:#2563c9; --s1:#c2541b; --s2:#12805c; --s3:#8a4fbf; --good:#12805c; --bad:#bf2f38; --mid:#8a6a10; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171a; --card:#1c2024; --ink:#e8eaec; --quiet:#98a2ab;
  --line:#30363c; --s0:#7aa8f5; --s1:#f0a070; --s2:#5cc9a0; --s3:#c39aee; --good:#5cc9a0; --bad:#f0767e;
  --mid:#e0bd5a; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--bg); color:var(--ink); font:15px/1.5 system-ui, sans-serif; }
main { max-width:1120px; margin:0 auto; padding:24px 16px 64px; }
h1 { font-size:26px; margin:0; } h2 { font-size:17px; margin:0; display:inline; } h3 { font-size:15px; margin:0; }
p { margin:6px 0; } .quiet, .note { color:var(--quiet); font-size:13px; }
.reason { border-left:3px solid var(--bad); padding-left:10px; }
.badge { font-size:13px; font-weight:600; padding:1px 9px; border-radius:10px; border:1px solid currentColor;
  vertical-align:middle; color:var(--mid); }
.badge.done, .badge.pass { color:var(--good); } .badge.failed, .badge.fail { color:var(--bad); }
.tiles { display:grid; grid-template-columns:repeat(auto-fill, minmax(165px, 1fr)); gap:10px; margin:18px 0; }
.tiles div, figure, details, section:not(.plots):not(.tiles) { background:var(--card); border:1px solid var(--line);
  border-radius:8px; padding:10px 14px; }
.tiles b { display:block; font-size:16px; white-space:nowrap; } .tiles span { color:var(--quiet); font-size:13px; }
.plots { display:grid; grid-template-columns:repeat(auto-fit, minmax(330px, 1fr)); gap:12px; margin-bottom:12px; }
figure { margin:0; } figure svg { width:100%; height:auto; display:block; margin-top:6px; }
details, section:not(.plots):not(.tiles) { margin-bottom:12px; overflow-x:auto; } summary { cursor:pointer; }
table { border-collapse:collapse; font-size:13px; margin-top:8px; } th { text-align:left; color:var(--quiet); }
td, th { padding:3px 14px 3px 0; vertical-align:top; border-top:1px solid var(--line); }
.samples td { white-space:pre-wrap; overflow-wrap:anywhere; max-width:32em; }
.kv td { overflow-wrap:anywhere; } .kv td:first-child { color:var(--quiet); white-space:nowrap; }
svg text { fill:var(--quiet); font:11px system-ui, sans-serif; } svg .grid { stroke:var(--line); }
svg .rule { stroke:var(--quiet); stroke-dasharray:5 4; } svg .s { fill:none; stroke-width:1.8; }
svg .s0 { stroke:var(--s0); } svg .s1 { stroke:var(--s1); } svg .s2 { stroke:var(--s2); } svg .s3 { stroke:var(--s3); }
svg .d0 { fill:var(--s0); } svg .d1 { fill:var(--s1); } svg .d2 { fill:var(--s2); } svg .d3 { fill:var(--s3); }
.key { font-size:13px; margin-right:12px; color:var(--quiet); } .key i { display:inline-block; width:14px; height:3px;
  margin-right:5px; vertical-align:middle; }
"""
