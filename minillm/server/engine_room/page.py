"""Serve the page's files, with their headers.  Lesson 99.

The page is plain HTML, CSS and JavaScript and loads nothing from elsewhere; its content security policy makes sure.
Everyone may read the files. What they show comes from /engine/state, which needs the server's key if it has one.
"""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

HERE = Path(__file__).parent
FILES = {  # path: (file, media type)
    "/": ("index.html", "text/html; charset=utf-8"),
    "/engine/style.css": ("style.css", "text/css; charset=utf-8"),
    "/engine/script.js": ("script.js", "text/javascript; charset=utf-8"),
    "/engine/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/engine/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add a route for each of the page's files, which are read once, here."""
    for path, (name, kind) in FILES.items():
        _add(app, path, (HERE / name).read_bytes(), kind)


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)
