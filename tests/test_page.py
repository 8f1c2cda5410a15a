"""The page of the server in a real browser: it reads, shows the memory as it is, writes, and outlives the server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra `serve`")
pytest.importorskip("httpx", reason="the tests of the server use httpx, of the extra `dev`")
pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright, of the extra `dev`")

from playwright import sync_api as playwright

from compressive_transformer.apps.serve.memory_view import slots_of
from compressive_transformer.data.tokenizers import ByteTokenizer
from runs import tiny_model
from serving import served

BOOK = (files("compressive_transformer.apps.demo") / "sample/test/356.txt").read_text(encoding="utf-8")
MARKUP = '<img src=x onerror="alert(1)"><script>alert(2)</script>& “quotes”'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test when it asks other servers, or when a script fails."""
    context = browser.new_context()
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda request: None if "//127.0.0.1:" in request.url else wrong.append(request.url))
    page.set_default_timeout(30_000)
    playwright.expect.set_options(timeout=30_000)
    yield page
    context.close()
    assert not [url for url in wrong if not url.startswith("data:")]


def says(page: Any, text: str) -> None:
    playwright.expect(page.get_by_role("status")).to_contain_text(text)


def read(page: Any, text: str, tokens: int) -> None:
    page.get_by_label("Text to read").fill(text)
    page.get_by_role("button", name="Read the text").click()
    says(page, f"The text was read. {tokens} tokens are in this session.")


def session_of(page: Any) -> str:
    id: str = page.evaluate("() => sessionStorage.getItem('session')")
    return id


def test_pasted_text_is_read_and_shown_slot_by_slot(page: Any) -> None:
    with served(tiny_model(seed=1)) as server:
        page.goto(server.url)
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        text = BOOK[:40] + MARKUP
        read(page, text, len(text.encode()))
        assert page.locator("#text").text_content() == text  # markup is text like any other
        assert page.locator("#text img, #text script").count() == 0
        page.get_by_label("Layer").select_option(label="2")
        playwright.expect(page.locator("#slot-title")).to_have_text("No slot selected")
        slots = slots_of(server.engine.model, ByteTokenizer(), server.engine.state(session_of(page)), 1)
        for tier, name in (("compressed", "Compressed memory"), ("recent", "Recent memory")):
            cells = page.get_by_role("listbox", name=name).get_by_role("option")
            length = slots[f"{tier}_length"]
            assert cells.count() == length
            for place in (-1, -len(slots[tier])):
                slot = slots[tier][place]
                cells.nth(length + place).hover()
                playwright.expect(page.locator("#slot-title")).to_have_text(f"{name}, slot {length + place + 1}")
                assert page.locator("#slot-text").text_content() == slot["text"]
                facts = page.locator("#slot-facts").inner_text()
                assert f"{slot['age']:g} tokens before the last one" in facts
                if slot["attention"] is None:
                    assert "the last token completed a segment" in facts
                else:
                    assert f"{100 * slot['attention']:.2f} % of the last token's" in facts
        # The keyboard alone leads through all slots of a tier.
        recent = page.get_by_role("listbox", name="Recent memory").get_by_role("option")
        recent.last.focus()
        for key, place in (("ArrowLeft", recent.count() - 1), ("Home", 1), ("ArrowRight", 2), ("End", recent.count())):
            page.keyboard.press(key)
            playwright.expect(page.locator("#slot-title")).to_have_text(f"Recent memory, slot {place}")
        assert recent.last.get_attribute("aria-selected") == "true"
        unnamed = page.evaluate(
            "() => [...document.querySelectorAll('button, input, select, textarea, [role=option]')].filter((one) =>"
            " !(one.labels && one.labels.length) && !one.textContent.trim() && !one.ariaLabel).map((one) => one.id)"
        )
        assert unnamed == []


def test_a_book_is_read_from_a_file_and_continued(page: Any, tmp_path: Path) -> None:
    text = BOOK[1000:2000]
    (tmp_path / "book.txt").write_bytes(text.replace("\n", "\r\n").encode())
    (tmp_path / "other.txt").write_bytes(b"\xff\xfe no text")
    with served(tiny_model(seed=1)) as server:
        page.goto(server.url)
        page.get_by_label("Pace").select_option(label="16 segments at a time")
        page.get_by_label("Open a book").set_input_files(tmp_path / "book.txt")
        says(page, f"book.txt was read. {len(text.encode()):,} tokens are in this session.")
        assert page.locator("#text").text_content() == text
        assert page.locator("#progress").evaluate("one => one.value") == 1
        page.get_by_label("Open a book").set_input_files(tmp_path / "other.txt")
        says(page, "This file is not UTF-8 text; convert it first.")
        page.get_by_label("Tokens", exact=True).fill("30")
        page.get_by_role("button", name="Generate").click()
        says(page, f"Done. {len(text.encode()) + 30:,} tokens are in this session.")
        assert page.locator("#text .written").count() > 0
        page.get_by_label("Tokens", exact=True).fill("4096")
        page.get_by_role("button", name="Generate").click()
        says(page, "Generating")
        page.get_by_role("button", name="Stop").click()
        says(page, "Stopped.")
        assert server.engine.state(session_of(page)).seen < 4096
        page.get_by_label("Tokens", exact=True).fill("0")
        page.get_by_role("button", name="Generate").click()
        says(page, "tokens (0) must be 1 to 4096")
        page.get_by_role("button", name="New document").click()
        says(page, "The next text starts a new document.")
        assert len(server.engine.sessions) == 0
        assert page.locator("#text").text_content() == ""


def test_a_session_resumes_after_a_restart_of_the_server(page: Any, tmp_path: Path) -> None:
    with served(tiny_model(seed=1), folder=tmp_path) as server:
        page.goto(server.url)
        read(page, "Call me Ishmael.", 16)
    page.get_by_label("Text to read").fill("Some years ago")
    page.get_by_role("button", name="Read the text").click()
    says(page, "The server is not reachable.")
    port = int(server.url.rpartition(":")[2])
    with served(tiny_model(seed=1), folder=tmp_path, port=port) as server:
        page.get_by_role("button", name="Read the text").click()  # the text is still there
        says(page, "The text was read. 30 tokens are in this session.")
        page.reload()
        says(page, "The session was resumed.")
        playwright.expect(page.locator("#slots-recent .filled")).to_have_count(9)
    with served(tiny_model(seed=1), port=port) as server:  # one that knows no session
        page.get_by_role("button", name="Generate").click()
        says(page, "The session no longer exists on the server")
        read(page, "Once.", 5)


def test_the_page_asks_for_the_token(page: Any) -> None:
    with served(tiny_model(seed=1), token=TOKEN) as server:
        page.goto(server.url)
        says(page, "This server requires a token.")
        page.get_by_label("Token of this server").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        playwright.expect(page.locator("#model")).to_have_text("tiny")
        read(page, "abc", 3)
