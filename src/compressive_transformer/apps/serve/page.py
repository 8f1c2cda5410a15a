"""The page that shows the memory of a session: one file, which loads nothing else."""

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
    """Return the page, with a policy that allows only the scripts in it."""
    content, policy = _page()
    return HTMLResponse(content, headers={"Content-Security-Policy": policy})


@functools.cache
def _page() -> tuple[str, str]:
    content = (files(__package__) / "page.html").read_text(encoding="utf-8")
    return content, (
        f"default-src 'none'; script-src {_hashes(content, 'script')}; style-src {_hashes(content, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(content: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", content, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
