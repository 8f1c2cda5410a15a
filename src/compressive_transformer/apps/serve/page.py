"""Page that shows a memory at work: one file, which loads nothing from other servers."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

page = APIRouter()


@page.get("/", response_class=HTMLResponse)
def show() -> HTMLResponse:
    """Return the page, with a policy that allows the browser exactly the scripts in it."""
    content, policy = _page()
    return HTMLResponse(content, headers={"Content-Security-Policy": policy})


@functools.cache
def _page() -> tuple[str, str]:
    content = (files(__package__) / "page.html").read_text(encoding="utf-8")
    hashes = {}
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", content, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        hashes[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return content, (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
