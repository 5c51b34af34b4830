"""The page for a browser: files beside this one, which load nothing from elsewhere and run no script but their own."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
FILES = {  # by path: what lies in the folder, and its type
    "/": ("index.html", "text/html"),
    "/script.js": ("script.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def show(request: Request) -> Response:
    """Answer with one file of the web page."""
    name, kind = FILES[request.url.path]
    return Response((FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)
