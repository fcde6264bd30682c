"""The style of all pictures of the documents: paper and ink, light or dark as the reader's page is, and text."""

from xml.sax.saxutils import escape

STYLE = (
    "<style>.paper{fill:#fcfcfb}.ink{fill:#0b0b0b}.faint{fill:#52514e}.grid{stroke:#e1e0d9}"
    "@media(prefers-color-scheme:dark){"
    ".paper{fill:#17171a}.ink{fill:#ececec}.faint{fill:#b4b4b4}.grid{stroke:#3a3a40}}</style>"
)


def svg_head(width: int, height: int, title: str) -> list[str]:
    """Return the first lines of a picture, up to its paper; `</svg>` ends it."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect width="{width}" height="{height}" class="paper"/>',
    ]


def svg_text(x: float, y: float, text: str, *, faint: bool = False, anchor: str = "start", size: int = 12) -> str:
    """Return one line of text; anchor: which of its ends is at x."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} class="{"faint" if faint else "ink"}">{escape(text)}</text>'
