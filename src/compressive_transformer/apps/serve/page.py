"""The page that shows a memory at work: one file, which loads nothing from elsewhere."""

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
    """The page, and which scripts a browser may run in it: those that it holds itself, to the letter."""
    content, policy = _page()
    return HTMLResponse(content, headers={"Content-Security-Policy": policy})


@functools.cache
def _page() -> tuple[str, str]:
    content = (files(__package__) / "page.html").read_text(encoding="utf-8")
    own = {}
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", content, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        own[tag] = " ".join(f"'sha256-{digest}'" for digest in digests)
    return content, (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
